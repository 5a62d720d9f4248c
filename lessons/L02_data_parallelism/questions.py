"""Questions about data parallelism: what a replica gets, does and sends (Q4, Q1, Q2), and the gain of more (Q3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.classroom.questions.asking import choice, each, number, open_case, ordering
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.questions.units import BYTES
from course_lib.classroom.runs.steps import training_step
from course_lib.classroom.runs.training import TINY, flat, gradients_of, shares, train, train_layers
from course_lib.figures import Picture, Timing, gantt, lost_time, speed_up
from course_lib.figures.axis import DATA, counted, data_size
from course_lib.figures.bars import bars_panel
from course_lib.figures.chart import Axis, Chart
from course_lib.figures.palette import STYLES
from course_lib.mechanisms import batches
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import TinyGPT
from course_lib.ranks import Link, Pace, RankFailed, launch
from course_lib.timeline import Timeline, compute
from lessons.L02_data_parallelism.step_order import SOLUTION, follow

STEPS = 5
SAME = 1e-9  # far above the effect of 64-bit rounding on two trainings
OTHER_WORKERS = (2, 3, 4, 6)
ORDINALS = {2: "half", 3: "a third", 4: "a quarter", 6: "a sixth", 8: "an eighth"}


def distance(replicas: list[Tensor], other: Tensor) -> float:
    """The largest difference of any replica's weights from the other's."""
    return max((replica - other).abs().max().item() for replica in replicas)


# Q4. What does each worker get?


class Sharing(NamedTuple):
    """A minibatch, and the workers that share it."""

    samples: int
    workers: int


# option: (are the samples split, is the model split)
SPLITS = {
    "parts_of_all": (False, True),
    "replicas_of_shares": (True, False),
    "replicas_of_all": (False, False),
    "parts_of_shares": (True, True),
}


def _share_out(option: str, case: Sharing) -> Outcome:
    splits_samples, splits_model = SPLITS[option]
    pace = Pace({"forward": 0.4 / case.samples})  # so one worker needs 0.4 s for the whole minibatch
    try:
        run = launch(_worker, case.workers, (case, splits_samples, splits_model), pace=pace)
    except RankFailed:  # on several ranks at once, any of which may be the first to say so
        return Outcome(False, shown=splits_model)
    times = sum(run.results) // case.samples
    found = {"own": run.results[0], "once": times == 1, "times": times}
    passes = [span for span in run.timeline.spans if span.kind == "forward"]
    picture = gantt(replace(run.timeline, spans=passes), title="The forward passes of this answer", usual=0.4)
    return Outcome(times == 1, found=found, shown=not splits_model, pictures=(picture,))


def _worker(rank: int, case: Sharing, splits_samples: bool, splits_model: bool) -> int:
    """Compute the loss on what this worker was given. Returns its number of samples."""
    minibatch = data.fixed_examples(case.samples)
    inputs, targets = batches.split(minibatch, case.workers)[rank] if splits_samples else minibatch
    blocks = TinyGPT(replace(TINY, layers=case.workers - 2 or 1)).blocks
    part = blocks[rank : rank + 1] if splits_model else blocks
    dist.barrier()
    with compute("forward", work=len(inputs)):
        data.answer_loss(part(inputs), targets)
    return len(inputs)


# Q1. What must happen after the gradients are there?


def _nothing(model: nn.Module) -> None:
    pass


def _send_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def _average_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.detach())
        parameter.detach().div_(dist.get_world_size())


# option: (communication before an update, after it, the expected fate of the replicas)
UPDATES = {
    "own": (_nothing, _nothing, "drift"),
    "first_rank": (_nothing, _send_weights, "wrong"),
    "mean_gradient": (average_gradients, _nothing, "right"),
    "mean_weights": (_nothing, _average_weights, "wrong"),
}


def _train(rank: int, option: str, workers: int) -> Tensor:
    """Train a few steps on this rank's share of minibatches for `workers`; a single rank takes all of them."""
    before, after, _ = UPDATES[option]
    model = TinyGPT(TINY, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer.register_step_post_hook(lambda *_: after(model))
    train(model, shares(rank, 8 * workers, STEPS), data.answer_loss, optimizer, combine=partial(before, model))
    return flat(model.parameters())


def _compare_trainings(option: str, workers: int) -> Outcome:
    replicas = launch(_train, workers, (option, workers)).results
    (alone,) = launch(_train, 1, ("own", workers)).results
    apart, off = distance(replicas, replicas[0]), distance(replicas, alone)
    found = "drift" if apart else "wrong" if off > SAME else "right"
    numbers = {"steps": STEPS, "workers": workers, "apart": apart, "off": off, "is_another": off > SAME}
    return Outcome(found == "right", found=numbers, shown=found == UPDATES[option][-1])


# Q2. The events of one step, in order

STEPS_IN_ORDER = 6
FEW_SECONDS = Pace({"forward": 0.02, "backward": 0.04, "optimizer": 0.01}, Link(latency=0.0002))


def _run_in(workers: int, order: tuple[str, ...]) -> Outcome:
    try:
        replicas = launch(follow, workers, (order, workers, STEPS_IN_ORDER)).results
    except RankFailed as error:
        return Outcome(False, why="needs", found={"error": error.__cause__})
    wrong = _what_is_wrong(order, replicas, _alone(workers))
    shown = (1, STEPS_IN_ORDER // 2, STEPS_IN_ORDER)
    drift = {n: distance([history[n - 1] for history in replicas], replicas[0][n - 1]) for n in shown}
    apart = ", ".join(f"{far:.2g} after step {n}" for n, far in drift.items())
    emulated = launch(follow, workers, (order, workers, 2), pace=FEW_SECONDS)
    picture = gantt(emulated.timeline, title="Two steps in this order")
    return Outcome(not wrong, why=wrong, found={"apart": apart}, pictures=(picture,))


@cache
def _alone(workers: int) -> Tensor:
    """The weights after every step of one process with the whole minibatch."""
    return launch(follow, 1, (SOLUTION, workers, STEPS_IN_ORDER)).results[0]


def _what_is_wrong(order: tuple[str, ...], replicas: list[Tensor], alone: Tensor) -> str:
    """The mistake in an order, by its name in the prose; "" if there is none."""
    if distance(replicas, alone) < SAME:
        return ""
    if all(torch.equal(history[0], history[-1]) for history in replicas):
        return "cleared"
    is_equal = distance(replicas, replicas[0]) == 0
    if is_equal and distance([history[1:] for history in replicas], alone[:-1]) < SAME:
        return "one_behind"
    return "no_gradient" if order.index("all_reduce") < order.index("backward") else "alone"


# How many bytes does each rank send?

PIECES = {
    "has": STYLES["backward"]._replace(label="gradients"),
    "once": STYLES["transfer"]._replace(label="once around, to be added up"),
    "twice": STYLES["weight_grad"]._replace(label="once more, to hand out the sums"),
}


class Gradients(NamedTuple):
    """Gradients of `parameters` numbers of 4 bytes, on `ranks` ranks."""

    parameters: int
    ranks: int

    @property
    def bytes(self) -> int:
        return 4 * self.parameters


def _slips(case: Gradients) -> dict[str, float]:
    n, true = case.ranks, 2 * (case.ranks - 1) / case.ranks  # as a multiple of the gradients' bytes
    return {
        "together": n,
        "once_around": 1 / 2,
        "all_of_it": 1 / true,
        "one_more": 2 / true,
        "to_all": (n - 1) / true,
        "piece": 1 / true / n,
        "parameters": 1 / 4,
    }


def _count_bytes(case: Gradients) -> Outcome:
    run = launch(_ring, case.ranks, (case.parameters,), pace=Pace(link=Link(0.004, 20e6)))
    sent, messages = run.timeline.bytes_sent(0), [span.bytes for span in run.timeline.of(0) if span.background]
    found = {"sent": sent, "times": sent / case.bytes}
    return Outcome(None, found=found, pictures=(_pieces(case, messages),), measured=sent)


def _pieces(case: Gradients, sent: list[int]) -> Picture:
    """Draw what a rank has and what it sends, in pieces. sent: the bytes of its messages."""
    once, twice = sum(sent[: len(sent) // 2]), sum(sent[len(sent) // 2 :])
    rows = {"a rank has": dict(zip(PIECES, (case.bytes, 0, 0), strict=True))}
    rows["it sends"] = dict(zip(PIECES, (0, once, twice), strict=True))
    axis, unit = Axis.in_unit("bytes", 2 * case.bytes, DATA, 8, room=1.04)

    def write(size: float) -> str:
        return f"{counted(round(size / sent[0]), 'piece')} of {data_size(sent[0])}"

    panel = bars_panel(rows, PIECES, axis, 800, write, unit, (2 * case.bytes, "twice its gradients"))
    title = "A rank sends all pieces but one, twice"
    summary = (
        f"Of {data_size(case.bytes)}, a rank sends {data_size(once)} to add up and {data_size(twice)} to hand out."
    )
    return Picture.of(Chart([panel], {"emulated"}, title, 800, PIECES), summary, [])


def _ring(rank: int, parameters: int) -> None:
    ring_all_reduce(torch.ones(parameters))


# Q3. Eight are fine, sixteen are not

INSIDE = 50e6  # bytes per second between the devices of a machine


@dataclass(frozen=True)
class Machines:
    """Two machines with `devices_per_node` devices each.

    between_nodes: bytes per second.  gained: the speed-up with two machines, as the team reports it.
    seconds, update: a device's time for one sample, and for an update.
    """

    devices_per_node: int = 8
    batch_size: int = 128
    between_nodes: float = 2.2e6
    gained: int = 10
    seconds: float = 0.012
    update: float = 0.004

    @property
    def workers(self) -> int:
        return 2 * self.devices_per_node

    def pace(self) -> Pace:
        kinds = {"forward": self.seconds / 3, "backward": 2 * self.seconds / 3, "optimizer": self.update}
        return Pace(kinds, Link(0.0002, INSIDE), Link(0.0002, self.between_nodes), self.devices_per_node)

    def step(self, workers: int, pace: Pace) -> Timeline:
        return training_step(workers, self.batch_size, pace, overlap=False)


REMEDIES: dict[str, dict[str, Any]] = {
    "devices": {"seconds": Machines.seconds / 2, "update": Machines.update / 2},
    "links": {"between_nodes": INSIDE},
    "update": {"update": 0.0},
}


def _without(suspect: str, case: Machines) -> Outcome:
    """Take one suspect away: does the speed-up come back?"""
    before = [case.step(workers, case.pace()) for workers in (1, case.devices_per_node, case.workers)]
    changed = replace(case, **REMEDIES[suspect])
    after = [changed.step(workers, changed.pace()) for workers in (1, case.workers)]
    was, now = before[0].makespan / before[-1].makespan, after[0].makespan / after[-1].makespan
    lost, won = case.workers - was, now - was
    right = won > lost / 2
    effect = "most of what was lost comes back" if right else "the speed-up gets worse" if won < 0 else "little changes"
    found = {"workers": case.workers, "effect": effect, "was": was, "now": now}
    shown = {"devices": won < 0, "links": right, "update": not right}[suspect]
    largest = {"as it is": before[-1], "without the suspect": after[-1]}
    gained = speed_up([Timing.of(step) for step in before], title="The speed-up of the team")
    times = lost_time(largest, title=f"Where the time of {case.workers} workers goes")
    return Outcome(right, found=found, shown=shown, pictures=(gained, times))


def _held(case: Machines) -> Outcome:
    """Compare the bytes of every worker with few workers and with many."""
    few, many = (train_layers(workers, 1, 1, False) for workers in (case.devices_per_node, case.workers))
    same = {held.states for held in few} == {held.states for held in many}
    return Outcome(not same, found={"case": case, "few": few[0], "many": many[0], "same": same}, shown=same)


# Ideal speed-up

ALONE, TOGETHER, WORKERS = 3.2, 0.56, 8  # seconds of a step, on one worker and on all
DEVICES, SAMPLES, GAINED = 16, 128, 10


def _speed_up() -> Outcome:
    pace = Pace({"forward": 0.002, "backward": 0.004, "optimizer": 0.004}, Link(0.0005, 2e6))
    steps = [training_step(n, 64, pace, overlap=False) for n in (1, 2, 4, 8)]
    gained = speed_up([Timing.of(step) for step in steps], title="A run like it, on real ranks")
    goes = lost_time({f"N = {step.world_size}": step for step in steps}, title="Where the time goes")
    times = ", ".join(f"{steps[0].makespan / step.makespan:.1f}" for step in steps[1:])
    early = training_step(8, 64, pace, overlap=True).makespan
    found = {"times": times, "late": steps[-1].makespan, "early": early}
    return Outcome(None, found=found, pictures=(gained, goes))


# Analysing a data-parallel implementation


def _gradients(
    rank: int, minibatch: tuple[Tensor, Tensor], takes_share: bool = True, is_weighted: bool = True
) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and the mean over all ranks."""
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

LEFT_OVER = Sharing(10, 4)
SHARES = [len(share) for share in batches.split(torch.ones(LEFT_OVER.samples), LEFT_OVER.workers)]


def _shares() -> Outcome:
    minibatch = data.examples([(10 + sample, 90 - sample) for sample in range(LEFT_OVER.samples)])
    ((_, whole),) = launch(_gradients, 1, (minibatch,)).results
    ways = [(minibatch, True, is_weighted) for is_weighted in (False, True)]
    means = [launch(_gradients, LEFT_OVER.workers, way).results[0][1] for way in ways]
    plain, weighted = (((mean - whole).abs().max() / whole.abs().max()).item() for mean in means)
    return Outcome(None, found={"plain": plain, "weighted": weighted}, shown=weighted < 1e-9 < plain)


QUESTIONS: dict[str, Seeded] = {
    "Q4": Seeded(
        Sharing(512, 8),
        choice(each(_share_out, SPLITS)),
        [Sharing(each * workers, workers) for workers in (3, 4, 6, 8) for each in (16, 32, 48, 64)],
        lambda case: {**case._asdict(), "share": case.samples // case.workers, "part": ORDINALS[case.workers]},
    ),
    "Q1": Seeded(8, choice(each(_compare_trainings, UPDATES)), OTHER_WORKERS, lambda workers: {"workers": workers}),
    "Q2": Seeded(4, ordering(_run_in), OTHER_WORKERS, lambda workers: {"workers": workers}),
    "bytes_sent": Seeded(
        Gradients(100_000, 8),
        number(BYTES, _count_bytes, _slips),
        [Gradients(ranks * piece, ranks) for ranks in (4, 5, 10) for piece in (5_000, 10_000, 20_000)],
        lambda case: {**case._asdict(), "others": case.ranks - 1, "size": data_size(case.bytes)},
    ),
    "Q3": Seeded(
        Machines(),
        choice({**each(_without, REMEDIES), "memory": _held}),
        [Machines(4, 96, 1e6, 5), Machines(4, 96, 1.5e6, 5), Machines(6, 144, 1e6, 7), Machines(6, 144, 1.5e6, 8)],
        lambda case: {"few": case.devices_per_node, "many": case.workers, "gained": case.gained},
    ),
    "data_distribution": Seeded(None, open_case(_shares)),
    "ideal_speed_up": Seeded(None, open_case(_speed_up)),
    "find_the_flaw": Seeded(None, open_case(_flaw)),
    "evaluate_replicas": Seeded(None, open_case(_speed_up)),
}
