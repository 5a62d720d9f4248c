"""Open cases: a situation, an answer in a few sentences, and a run behind it."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import data
from course_lib.experiments import pipeline_step, training_step
from course_lib.experiments.events import fill_and_drain, play
from course_lib.figures import Timing, attribute, gantt, held, lost_time, memory_by_part, speed_up
from course_lib.figures.axis import data_size, long_time, memory_size, percent
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import TinyGPT
from course_lib.planner import Cluster, ModelSpec, Plan, estimate
from course_lib.questions import memory
from course_lib.questions.forms import Form, FreeText
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.replicas import TINY
from course_lib.ranks import Link, Pace, launch
from course_lib.schedules import SCHEDULES
from course_lib.timeline import Timeline


def case(text: str, experiment: Callable[[], Outcome], answer: str, *checklist: str) -> Family[None]:
    """A question that is answered in words. checklist: what a good answer has in it."""

    def ask(_: None) -> tuple[str, Form]:
        return text, FreeText(experiment, answer, checklist)

    return Family(None, ask)


# Computational bottlenecks of a single machine

SEVEN = ModelSpec(layers=32, hidden=4096, heads=32, sequence=2048, vocab=50257, flash_attention=True)
TOKENS = 140e9  # twenty for each parameter
MACHINES = {
    "one H100": (Cluster("H100-80GB", 1, 1), Plan()),
    "one H200": (Cluster("H200-141GB", 1, 1), Plan()),
    "each of eight H100": (Cluster("H100-80GB", 1, 8), Plan(dp=8, zero=3)),
}


def _two_limits() -> Outcome:
    ((small, _),) = memory.train(1, 8, 4, False)
    planned = {name: estimate(SEVEN, cluster, plan, 256) for name, (cluster, plan) in MACHINES.items()}
    one, larger, eight = planned.values()
    lines = (
        f"{name}: {memory_size(e.memory.total)} of {memory_size(e.capacity)}, {'fits' if e.fits else 'does not fit'}; "
        f"{long_time(TOKENS / e.tokens_per_second)} of training"
        for name, e in planned.items()
    )
    said = (
        f"The planner says (modelled): {'; '.join(lines)}. "
        f"Run on this computer: a small model of 8 layers holds {data_size(small)} before any activation."
    )
    alone_or_shared = {name: e.memory for name, e in planned.items() if e is not larger}
    picture = memory_by_part(alone_or_shared, one.capacity, title="What an H100 holds, alone and with seven others")
    right = not one.fits and larger.fits and eight.fits and larger.tokens_per_second < eight.tokens_per_second / 4
    return Outcome(None, said, shown=right, pictures=(picture,))


ALONE = case(
    "A company has one H100 with 80 GB, and wants to train a language model of 6.7 billion parameters with Adam, in "
    "mixed precision, on 140 billion tokens. It runs out of memory in the first step. A colleague proposes an H200, "
    "which multiplies as fast and has 141 GB, and then all would be well. Which limits does a single machine have, in "
    "numbers? Is the colleague right?",
    _two_limits,
    "Memory: 16 bytes for each parameter (weights, gradients, and what Adam keeps in 32 bits) are 107 GB, more than "
    "80, before a single activation; so it stops at once. On the H200 it fits. Computing: 6 FLOPs for each parameter "
    "and token are 5.6e21. Either device does at most 9.9e14 in a second, so the training takes 65 days if every "
    "single one of these is used, and real trainings use about half: more than four months. So the colleague is right "
    "about the one limit and has not seen the other. Only more devices move both: each of eight holds an eighth, "
    "and they are done in about three weeks. The price is what travels between them.",
    "16 bytes for each parameter: 107 GB, more than 80.",
    "6 FLOPs for each parameter and token: months on one device, even with all the memory in the world.",
    "Memory stops the training at once, computing only makes it long.",
    "Several devices move both limits, and have to talk to each other.",
)


# Ideal speed-up


def _speed_up() -> Outcome:
    pace = Pace({"forward": 0.002, "backward": 0.004, "optimizer": 0.004}, Link(0.0005, 2e6))
    steps = [training_step(n, 64, pace, overlap=False) for n in (1, 2, 4, 8)]
    pictures = (
        speed_up([Timing.of(step) for step in steps], title="A run like it, on real ranks"),
        lost_time({f"N = {step.world_size}": attribute(step) for step in steps}, title="Where the time goes"),
    )
    return Outcome(
        None, "The run behind it is a smaller one of the same kind, with 1, 2, 4 and 8 workers.", pictures=pictures
    )


IDEAL = case(
    "A step takes 3.2 seconds on one worker. With data parallelism on 8 workers it takes 0.56 seconds. Your manager "
    "asks why it is not 8 times as fast, and whether a ninth worker should be bought. What do you answer?",
    _speed_up,
    "In the ideal case 8 workers would need 3.2 / 8 = 0.4 s. They need 0.56 s, which is 5.7 times as fast, 71% of the "
    "ideal. Each worker computes an eighth as long, but exchanging gradients takes as long as ever, and the slowest "
    "worker is waited for; that is the missing 0.16 s. A ninth worker shortens only the 0.4 s, to 0.36 s, and adds a "
    "little to the exchange: a gain of some 7% for 12% more hardware. First hide the exchange behind the backward "
    "pass, or give each worker more samples.",
    "The ideal is 0.4 s; the speed-up is 5.7, or 71% of the ideal.",
    "What does not shrink with more workers is named: the exchange of gradients, and waiting for the slowest.",
    "The ninth worker's gain is estimated from the part that shrinks.",
    "There is a remedy that costs less than hardware.",
)


# Analysing a data-parallel implementation


def _gradients(rank: int, takes_share: bool) -> tuple[Tensor, Tensor]:
    """This rank's gradient, and the mean of all, with or without the missing line."""
    torch.manual_seed(0)
    model = TinyGPT(TINY, dtype=torch.float64)
    problems, _ = data.train_test_split()
    inputs, targets = next(data.minibatches(problems, 64, seed=1))
    if takes_share:
        inputs, targets = batches.split((inputs, targets), dist.get_world_size())[rank]
    data.answer_loss(model(inputs), targets).backward()
    own = _vector(model)
    average_gradients(model)
    return own, _vector(model)


def _vector(model: TinyGPT) -> Tensor:
    return torch.cat(
        [parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None]
    )


def _flaw() -> Outcome:
    as_it_is, mended = launch(_gradients, 4, (False,)).results, launch(_gradients, 4, (True,)).results
    same = all(torch.equal(own, as_it_is[0][0]) for own, _ in as_it_is)
    differ = any(not torch.equal(own, mended[0][0]) for own, _ in mended)
    said = (
        f"Run on 4 ranks: before the all-reduce, all gradients are {'equal to the last bit' if same else 'different'}. "
        f"With one more line that takes a share, they are {'different' if differ else 'equal'}."
    )
    return Outcome(None, said, shown=same and differ)


FLAW = case(
    "A colleague has written this for 8 workers. The loss falls, the replicas are equal to the last bit, and there is "
    "no error. Still, it is no better than one worker. What is wrong, how do you prove it, and what do you change?\n\n"
    "```\n"
    "torch.manual_seed(0)\n"
    "model = TinyGPT()\n"
    "for inputs, targets in data.minibatches(problems, 64, seed=1):\n"
    "    loss = data.answer_loss(model(inputs), targets)\n"
    "    loss.backward()\n"
    "    average_gradients(model)\n"
    "    optimizer.step()\n"
    "    optimizer.zero_grad()\n"
    "```",
    _flaw,
    "Every worker draws the same minibatch, because all of them have the same seed, and none takes a share of it. "
    "Eight equal gradients are averaged, and their mean is what each had already: the work of one, done eight times. "
    "The proof is to compare the workers' gradients before the all-reduce: they are equal, where they should differ. "
    "The remedy is one line, `inputs, targets = batches.split((inputs, targets), 8)[rank]`. (Equal replicas prove "
    "nothing here: they are equal whatever the data.)",
    "All workers compute on the same samples.",
    "The averaging is right, and useless.",
    "The proof looks at gradients or samples before the all-reduce, not at the replicas.",
    "Each worker takes its own share, by rank.",
)


# Data distribution


def _shares() -> Outcome:
    inputs_and_targets = data.examples([(10 + sample, 90 - sample) for sample in range(10)])
    whole = _mean_gradient(0, inputs_and_targets, None, 1)
    off = {}
    for name, is_weighted in (("plain mean", False), ("mean weighted by shares", True)):
        mean = launch(_mean_gradient, 4, (inputs_and_targets, is_weighted, 4)).results[0]
        off[name] = ((mean - whole).abs().max() / whole.abs().max()).item()
    right = off["mean weighted by shares"] < 1e-9 < off["plain mean"]
    said = (
        "Run on 4 ranks with 10 samples: the plain mean of the gradients is not the minibatch's, the weighted one is. "
        + ", ".join(f"{name}: off by {percent(share)}" for name, share in off.items())
    )
    return Outcome(None, f"{said}.", shown=right)


def _mean_gradient(rank: int, minibatch: tuple[Tensor, Tensor], is_weighted: bool | None, n: int) -> Tensor:
    """The gradient of the minibatch as n ranks find it; is_weighted=None for one process with all of it."""
    model = TinyGPT(TINY, dtype=torch.float64)
    inputs, targets = batches.split(minibatch, n)[rank]
    data.answer_loss(model(inputs), targets).backward()
    if is_weighted is not None:
        average_gradients(model, samples=len(inputs) if is_weighted else None)
    return _vector(model)


DISTRIBUTION = case(
    "10 samples are left at the end of the data, and 4 workers train with data parallelism. How do you distribute the "
    "samples, what does each worker do with its share, and what has to be different from a minibatch of 12?",
    _shares,
    "Shares of 3, 3, 2 and 2: every sample exactly once, no share more than one larger than another. All workers "
    "compute at the same time, each on the whole model. Then the gradients are averaged, and each has to count by the "
    "size of its share, or a sample from a share of two counts one and a half times as much as one from a share of "
    "three. With 12 samples the shares are equal, and so is every weight. (Leaving out two samples, or filling up, "
    "would work as well, and changes what is learned.)",
    "Every sample goes to exactly one worker, and the shares are as equal as they can be.",
    "Every worker has the whole model, and all work at the same time.",
    "Gradients of unequal shares are weighted by their sizes.",
)


# Rationale for model partitioning


def _partition() -> Outcome:
    ((alone, _),) = memory.train(1, 8, 4, False)
    lines = [f"{n} devices: {data_size(max(held.states for held in memory.train(n, 8, 4, True)))}" for n in (2, 4, 8)]
    said = (
        "A small model was trained with its layers on 1, 2, 4 and 8 devices. "
        f"Parameters, gradients and optimizer state on each device: alone {data_size(alone)}; {'; '.join(lines)}."
    )
    return Outcome(None, said)


PARTITION = case(
    "A model of 20 billion parameters is to be trained with Adam in 32-bit numbers. You have 32 devices with 80 GB "
    "each. A colleague proposes data parallelism on all of them. Why can that not work, what else does, and what does "
    "it cost?",
    _partition,
    "Each parameter takes 16 bytes with its gradient and Adam's two numbers: 320 GB, and data parallelism puts all of "
    "it on every device, however many there are. So the model itself has to be cut. Its layers on 8 devices make 40 GB "
    "each, which leaves room for activations; the 32 devices are then 4 such groups, and data parallelism works "
    "between the groups. The price: activations travel between the devices of a group, and without micro-batches only "
    "one of them works at a time.",
    "16 bytes for each parameter, 320 GB in all, which is more than 80 GB.",
    "More replicas do not make a replica smaller.",
    "A cut into enough parts, with room left for activations.",
    "The price is named: communication inside the model, and idle devices.",
)


# Pipeline efficiency


def _pipelines() -> Outcome:
    few, many = play(fill_and_drain(4, 2), 4, 0.5), play(fill_and_drain(4, 8), 4, 0.25)
    idle = [timeline.idle_fraction() for timeline in (few, many)]
    said = f"Run on 4 ranks: idle for {percent(idle[0])} with 2 micro-batches, for {percent(idle[1])} with 8."
    right = all(map(isclose, idle, [3 / (2 + 3), 3 / (8 + 3)]))
    pictures = (gantt(few, title="4 stages, 2 micro-batches"), gantt(many, title="4 stages, 8 micro-batches"))
    return Outcome(None, said, shown=right, pictures=pictures)


EFFICIENCY = case(
    "A pipeline of 4 stages runs with 2 micro-batches, and a monitor shows the devices busy for 40% of the time. "
    "Explain the 40%, say what 8 micro-batches would make of it, and why nobody takes 1,000.",
    _pipelines,
    "With p stages and m micro-batches, a device has something to do for m of m + p - 1 turns: 2 of 5, 40%. The other "
    "3 turns are the bubble, the time in which the pipeline fills and drains. With 8 micro-batches it is 8 of 11, 73%. "
    "With 1,000 nearly nothing would be idle, but each micro-batch would be so small that a device computes it badly, "
    "every message and every start of a kernel costs its fixed time a thousand times, and in a schedule that does all "
    "forward passes first, the activations of all of them have to be kept.",
    "m / (m + p - 1): 2 of 5 turns.",
    "The idle time is filling and draining, not communication.",
    "8 of 11 turns, 73%, with 8 micro-batches.",
    "Very small micro-batches cost: fixed overhead, poor use of the device, or activations in memory.",
)

# How pipelining improves utilization

DEVICE = {"forward": 0.16, "backward": 0.32}  # seconds for the whole batch on one device


def flow(name: str, devices: int, micro_batches: int, stages_each: int = 1) -> Timeline:
    """The same batch, in so many micro-batches, through the same layers."""
    pace = Pace({kind: seconds / micro_batches / stages_each for kind, seconds in DEVICE.items()})
    return pipeline_step(SCHEDULES[name](devices * stages_each, micro_batches), pace)


def _gain() -> Outcome:
    whole, cut = flow("naive", 4, 1), flow("gpipe", 4, 8)
    busy = [1 - timeline.idle_fraction() for timeline in (whole, cut)]
    said = (
        "Run on 4 ranks, the batch as a whole and in 8 micro-batches: busy for "
        f"{percent(busy[0])} of the time before, for {percent(busy[1])} with micro-batches, which is "
        f"{whole.makespan / cut.makespan:.1f} times as fast."
    )
    picture = gantt(cut, whole, title="In 8 micro-batches, and below it the whole batch")
    return Outcome(None, said, shown=all(map(isclose, busy, [1 / 4, 8 / 11])), pictures=(picture,))


GAIN = case(
    "Four devices hold the layers of a model, in order. A whole batch passes through them, and each device computes "
    "for 1 second of a step that takes 4. You propose 8 micro-batches. A colleague objects: each device will have "
    "exactly as much to compute as before, so nothing can be gained. What do you answer, and how long will a step be?",
    _gain,
    "The colleague is right about the work and wrong about the time. Each device still computes for 1 second, but now "
    "devices compute at the same time: while the second works on micro-batch 0, the first is at number 1. A "
    "micro-batch takes 1/8 second on a device, and a step has 8 + 4 - 1 = 11 such turns: 1.375 s, 2.9 times as fast. "
    "Devices are busy for 73% of it, where it was 25%. What is left is the bubble, while the pipeline fills and "
    "drains; more micro-batches make it smaller, up to 4 times as fast as before. The gradients stay the same.",
    "The work stays the same; what changes is that devices do it at the same time.",
    "11 turns of 1/8 second: 1.375 s for a step, 2.9 times as fast.",
    "Devices are busy for 73% of the time, before for 25%.",
    "Filling and draining leave a bubble, and four times as fast is the limit.",
)


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
    said = f"The same changes, run on a smaller pipeline of 4 ranks: {'; '.join(lines)}."
    return Outcome(None, said, pictures=(picture,))


TUNED = case(
    "A model of 48 layers is trained on 8 devices, 6 layers on each, with GPipe and 8 micro-batches of 8 samples. The "
    "devices are idle for more than half of the time, the last device computes longer than the others, as it "
    "also holds the output layer, and memory is nearly full, so nobody dares to change anything. What do you change, "
    "in which order, and what do you expect of it?",
    _tuned,
    "First 1F1B in place of GPipe: the same bubble, but a device holds no more than 8 micro-batches however many there "
    "are. That makes room for smaller and more: with 32 micro-batches of 2 samples, the fullest device holds 16 "
    "samples where it held 64, and the bubble falls from 7/15, 47%, to 7/39, 18%. Next the cut: all wait for the "
    "slowest stage in every turn, so move a layer or two from the last device to the others, by measured cost. Then "
    "two smaller stages on each device, interleaved: the bubble halves again, to about 10%, for twice as many "
    "messages. After each change measure again: micro-batches of 2 samples may be so small that their overhead eats "
    "the gain, and then 4 is the better size.",
    "1F1B first, because it frees memory and costs nothing.",
    "More and smaller micro-batches: from 47% idle to 18% with 32 of them.",
    "Stages are cut by their cost, as the slowest sets the pace.",
    "Interleaving or another schedule comes last, and its price is named.",
    "There is a limit to small micro-batches, and it is measured.",
)

QUESTIONS: dict[str, Family] = {
    "one_machine": ALONE,
    "ideal_speed_up": IDEAL,
    "find_the_flaw": FLAW,
    "data_distribution": DISTRIBUTION,
    "why_partition": PARTITION,
    "pipeline_efficiency": EFFICIENCY,
    "pipelining_gain": GAIN,
    "tune_a_pipeline": TUNED,
}
