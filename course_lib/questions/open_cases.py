"""Open cases: a situation, an answer in a few sentences, and a run behind it."""

from __future__ import annotations

from math import isclose

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.experiments import pipeline_step, training_step
from course_lib.experiments.events import fill_and_drain, run_events
from course_lib.experiments.training import TINY, flat, gradients_of, train_layers
from course_lib.figures import Timing, gantt, held, lost_time, memory_by_part, speed_up
from course_lib.figures.axis import data_size, long_time, memory_size, percent
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import TinyGPT
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from course_lib.questions.asking import open_case
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Link, Pace, launch
from course_lib.schedules import SCHEDULES
from course_lib.timeline import Timeline

# Computational bottlenecks of a single machine

SEVEN = ModelSpec(layers=32, hidden=4096, heads=32, sequence=2048, vocab=50257, flash_attention=True)
TOKENS = 140e9  # twenty for each parameter
MACHINES = {
    "one H100": (Cluster("H100-80GB", 1, 1), Plan()),
    "one H200": (Cluster("H200-141GB", 1, 1), Plan()),
    "each of eight H100": (Cluster("H100-80GB", 1, 8), Plan(dp=8, zero=3)),
}


def _two_limits() -> Outcome:
    ((small, _),) = train_layers(1, 8, 4, False)
    planned = {name: estimate(SEVEN, cluster, plan, 256) for name, (cluster, plan) in MACHINES.items()}
    one, larger, eight = planned.values()
    lines = (
        f"{name}: {memory_size(e.memory.total)} of {memory_size(e.capacity)}, {'fits' if e.fits else 'does not fit'}; "
        f"{long_time(TOKENS / e.tokens_per_second)} of training"
        for name, e in planned.items()
    )
    alone_or_shared = {name: e.memory for name, e in planned.items() if e is not larger}
    picture = memory_by_part(alone_or_shared, one.capacity, title="What an H100 holds, alone and with seven others")
    right = not one.fits and larger.fits and eight.fits and larger.tokens_per_second < eight.tokens_per_second / 4
    return Outcome(None, found={"lines": "; ".join(lines), "small": small}, shown=right, pictures=(picture,))


# Ideal speed-up


def _speed_up() -> Outcome:
    pace = Pace({"forward": 0.002, "backward": 0.004, "optimizer": 0.004}, Link(0.0005, 2e6))
    steps = [training_step(n, 64, pace, overlap=False) for n in (1, 2, 4, 8)]
    pictures = (
        speed_up([Timing.of(step) for step in steps], title="A run like it, on real ranks"),
        lost_time({f"N = {step.world_size}": step for step in steps}, title="Where the time goes"),
    )
    return Outcome(None, pictures=pictures)


# Analysing a data-parallel implementation


def _gradients(
    rank: int, minibatch: tuple[Tensor, Tensor], takes_share: bool = True, is_weighted: bool = True
) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and the mean of all."""
    model = TinyGPT(TINY, dtype=torch.float64)
    inputs, targets = batches.split(minibatch, dist.get_world_size())[rank] if takes_share else minibatch
    data.answer_loss(model(inputs), targets).backward()
    own = flat(gradients_of(model))
    average_gradients(model, samples=len(inputs) if is_weighted else None)
    return own, flat(gradients_of(model))


def _flaw() -> Outcome:
    minibatch = data.fixed_examples(64)
    as_it_is, mended = (launch(_gradients, 4, (minibatch, takes_share)).results for takes_share in (False, True))
    same = all(torch.equal(own, as_it_is[0][0]) for own, _ in as_it_is)
    differ = any(not torch.equal(own, mended[0][0]) for own, _ in mended)
    return Outcome(None, found={"same": same, "differ": differ}, shown=same and differ)


# Data distribution


def _shares() -> Outcome:
    minibatch = data.examples([(10 + sample, 90 - sample) for sample in range(10)])
    ((_, whole),) = launch(_gradients, 1, (minibatch,)).results
    means = [launch(_gradients, 4, (minibatch, True, is_weighted)).results[0][1] for is_weighted in (False, True)]
    plain, weighted = (((mean - whole).abs().max() / whole.abs().max()).item() for mean in means)
    return Outcome(None, found={"plain": plain, "weighted": weighted}, shown=weighted < 1e-9 < plain)


# Rationale for model partitioning

TWENTY = ModelSpec(layers=44, hidden=6144, heads=48, sequence=2048, vocab=50257, flash_attention=True)
CUT, SHARDED = Plan(4, pp=8, schedule="naive", precision="fp32"), Plan(32, zero=3, precision="fp32")


def _partition() -> Outcome:
    ((alone, _),) = train_layers(1, 8, 4, False)
    lines = [f"{n} devices: {data_size(max(held.states for held in train_layers(n, 8, 4, True)))}" for n in (2, 4, 8)]
    cut, sharded = (estimate(TWENTY, Cluster(nodes=4), plan, 128) for plan in (CUT, SHARDED))
    found = {"alone": alone, "lines": "; ".join(lines), "cut": cut, "sharded": sharded}
    return Outcome(None, found=found, shown=cut.fits and sharded.fits)


# Pipeline efficiency


def _pipelines() -> Outcome:
    few, many = run_events(fill_and_drain(4, 2), 4, 0.5), run_events(fill_and_drain(4, 8), 4, 0.25)
    idle = [timeline.idle_fraction() for timeline in (few, many)]
    right = all(map(isclose, idle, [3 / (2 + 3), 3 / (8 + 3)]))
    pictures = (gantt(few, title="4 stages, 2 micro-batches"), gantt(many, title="4 stages, 8 micro-batches"))
    return Outcome(None, found={"idle": idle}, shown=right, pictures=pictures)


# How pipelining improves utilization

DEVICE = {"forward": 0.16, "backward": 0.32}  # seconds for the whole batch on one device


def flow(name: str, devices: int, micro_batches: int, stages_each: int = 1) -> Timeline:
    """The same batch, in so many micro-batches, through the same layers."""
    pace = Pace({kind: seconds / micro_batches / stages_each for kind, seconds in DEVICE.items()})
    return pipeline_step(SCHEDULES[name](devices * stages_each, micro_batches), pace)


def _gain() -> Outcome:
    whole, cut = flow("naive", 4, 1), flow("gpipe", 4, 8)
    busy = [1 - timeline.idle_fraction() for timeline in (whole, cut)]
    found = {"busy": busy, "times": whole.makespan / cut.makespan}
    picture = gantt(cut, whole, title="In 8 micro-batches, and below it the whole batch")
    return Outcome(None, found=found, shown=all(map(isclose, busy, [1 / 4, 8 / 11])), pictures=(picture,))


# Optimizing a large model's training pipeline


def _tuned() -> Outcome:
    steps = [flow("gpipe", 4, 4), flow("1f1b", 4, 16), flow("interleaved_1f1b", 4, 16, 2)]
    names = ("gpipe, 4 micro-batches", "1f1b, 16 micro-batches", "interleaved_1f1b, 16 micro-batches")
    # A micro-batch is smaller where there are more of them, and so is what it leaves to be held.
    most = [max(one.most for one in held(step)) / m for step, m in zip(steps, (4, 16, 16), strict=True)]
    lines = (
        f"{name}: idle {percent(step.idle_fraction())}, holds at most {percent(share)} of the batch's activations"
        for name, step, share in zip(names, steps, most, strict=True)
    )
    picture = gantt(steps[-1], steps[0], title="Interleaved with 16 micro-batches, and below it gpipe with 4")
    return Outcome(None, found={"lines": "; ".join(lines)}, pictures=(picture,))


QUESTIONS: dict[str, Family] = {
    "one_machine": Family(None, open_case(_two_limits)),
    "ideal_speed_up": Family(None, open_case(_speed_up)),
    "evaluate_replicas": Family(None, open_case(_speed_up)),
    "find_the_flaw": Family(None, open_case(_flaw)),
    "data_distribution": Family(None, open_case(_shares)),
    "why_partition": Family(None, open_case(_partition)),
    "pipeline_efficiency": Family(None, open_case(_pipelines)),
    "pipelining_gain": Family(None, open_case(_gain)),
    "optimize_stages": Family(None, open_case(_gain)),
    "tune_a_pipeline": Family(None, open_case(_tuned)),
}
