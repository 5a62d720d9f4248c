"""Questions about more and more ranks: what they send (bytes_sent), and why they are not as fast as hoped (Q3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from course_lib import data
from course_lib.experiments.steps import SMALL, training_step
from course_lib.figures import Timing, attribute, gantt, lost_time, speed_up
from course_lib.figures.axis import data_size
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.model import TinyGPT
from course_lib.questions.forms import Choice, Form, Number, Option, Reading
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import BYTES, Slip
from course_lib.ranks import Link, Pace, launch
from course_lib.timeline import Timeline

# How many bytes does each rank send?


@dataclass(frozen=True)
class Gradients:
    """So many numbers of 4 bytes on so many ranks."""

    parameters: int
    ranks: int

    @property
    def bytes(self) -> int:
        return 4 * self.parameters


def _draw_gradients(random: Random) -> Gradients:
    ranks = random.choice([4, 5, 10])
    return Gradients(ranks * random.choice([5_000, 10_000, 20_000]), ranks)


def _ask_bytes(case: Gradients) -> tuple[str, Form]:
    n, size = case.ranks, case.bytes
    text = (
        f"A model has {case.parameters:,} parameters, its gradients are numbers of 4 bytes. {n} ranks average them in "
        f"every step with a ring all-reduce: pieces of the gradients go from neighbor to neighbor, once around to be "
        "added up and once more to hand out the sums. How much does each rank send in one step?"
    )
    why = (
        f"The gradients have {data_size(size)}. Each rank cuts them into {n} pieces and sends one piece {n - 1} times "
        f"to add up and {n - 1} times to hand out: 2 × {n - 1} / {n} of {data_size(size)}, less than twice the "
        "gradients however many ranks there are."
    )
    true = 2 * (n - 1) / n
    slips = (
        Slip(n, f"That is what all {n} ranks send together; asked was one rank."),
        Slip(1 / 2, "That is once around the ring. The sums still have to be handed out, which takes as much again."),
        Slip(1 / true, "That is the size of the gradients. It would be right if each rank sent all of its own once."),
        Slip(2 / true, "Nearly: one piece fewer in each round, since the last one is already where it belongs."),
        Slip((n - 1) / true, f"That is what it costs to send all gradients to {n - 1} others. A ring does with less."),
        Slip(1 / true / n, "That is one piece. A rank sends many of them."),
        Slip(1 / 4, "A parameter is not a byte: each number takes 4."),
    )
    return text, Number(BYTES, partial(_count_bytes, case), why, slips)


def _count_bytes(case: Gradients) -> Reading:
    run = launch(_ring, case.ranks, (case.parameters,), pace=Pace(link=Link(0.004, 20e6)))
    sent = run.timeline.bytes_sent(0)
    said = f"Each rank sent {sent:,} bytes, {sent / case.bytes:.3f} times the gradients."
    return Reading(sent, said, pictures=(gantt(run.timeline, title="Once around the ring, and once more"),))


def _ring(rank: int, parameters: int) -> None:
    ring_all_reduce(torch.ones(parameters))


# Q3. Eight are fine, sixteen are not


@dataclass(frozen=True)
class Cluster:
    """Machines of so many devices each, and the devices' time for one sample, in seconds."""

    devices_per_node: int = 8
    batch_size: int = 128
    seconds: float = 0.012
    between_nodes: float = 2e6  # bytes per second

    @property
    def workers(self) -> int:
        return 2 * self.devices_per_node

    def pace(self, devices: float = 1.0, update: float = 1.0, fast_links: bool = False) -> Pace:
        """devices, update: how fast compared with how it is."""
        sample = self.seconds / devices
        kinds = {"forward": sample / 3, "backward": 2 * sample / 3, "optimizer": 0.004 / devices / update}
        inside = Link(0.0002, 50e6)
        between = inside if fast_links else Link(0.0002, self.between_nodes)
        return Pace(kinds, inside, between, self.devices_per_node)

    def step(self, workers: int, pace: Pace) -> Timeline:
        return training_step(workers, self.batch_size, pace, overlap=False)


def _draw_cluster(random: Random) -> Cluster:
    per_node = random.choice([4, 6])
    return Cluster(per_node, batch_size=12 * per_node * 2, between_nodes=random.choice([1e6, 1.5e6]))


def _ask_cluster(case: Cluster) -> tuple[str, Form]:
    few, many = case.devices_per_node, case.workers
    text = (
        f"A team trains with data parallelism on machines of {few} devices. {few} workers gave nearly {few} times the "
        f"speed of one. {many} workers gave far less than {many} times. What is the likeliest bottleneck?"
    )
    slower = (
        "With devices of twice the speed each step is shorter, but the speed-up is worse: there is less to compute, "
        "and just as much to send. Slow devices would make a better speed-up, not a worse one."
    )
    exchange = (
        "From one machine to two, every share is halved, while the gradients stay as large as they were and now cross "
        "the slow link between two machines. Take that link away, and the speed-up is back."
    )
    update = (
        "Every worker does the whole update, that is true, and it does not shrink with more workers. But it is a small "
        "part of a step: without it, the speed-up hardly changes."
    )
    memory = (
        "Every worker holds the same replica, whether there are few or many. A model that is too large for a worker "
        "would not train at all, on any number of them."
    )
    return text, Choice(
        (
            Option("each worker's device has become slower", partial(_without, case, "devices"), slower),
            Option(
                "exchanging the gradients takes a growing part of each step",
                partial(_without, case, "links"),
                exchange,
            ),
            Option("the update, which every worker does in full", partial(_without, case, "update"), update),
            Option("the model has become too large for one worker", partial(_held, case), memory),
        )
    )


REMEDIES = {
    "devices": ("devices of twice the speed", {"devices": 2.0}),
    "links": ("a link between the machines as fast as those inside", {"fast_links": True}),
    "update": ("an update that takes no time", {"update": 1e6}),
}


def _without(case: Cluster, suspect: str) -> Outcome:
    """Take one suspect away: is the speed-up there again?"""
    name, change = REMEDIES[suspect]
    before = [case.step(workers, case.pace()) for workers in (1, case.devices_per_node, case.workers)]
    pace = case.pace(**change)  # type: ignore[arg-type]
    after = [case.step(workers, pace) for workers in (1, case.workers)]
    was, now = before[0].makespan / before[-1].makespan, after[0].makespan / after[-1].makespan
    lost, won = case.workers - was, now - was
    right = won > lost / 2
    effect = "most of what was lost comes back" if right else "the speed-up gets worse" if won < 0 else "little changes"
    said = (
        f"Tried on {case.workers} workers with {name}: {effect}. Before, {case.workers} workers were {was:.1f} times "
        f"as fast as one, now {now:.1f} times."
    )
    shown = {"devices": won < 0, "links": right, "update": not right}[suspect]
    shares = {"as it is": attribute(before[-1]), "without the suspect": attribute(after[-1])}
    pictures = (
        speed_up([Timing.of(step) for step in before], title="The speed-up of the team"),
        lost_time(shares, title=f"Where the time of {case.workers} workers goes"),
    )
    return Outcome(right, said, shown=shown, pictures=pictures)


def _held(case: Cluster) -> Outcome:
    """What every worker holds, with few workers and with many."""
    few, many = (launch(_replica_bytes, n).results for n in (case.devices_per_node, case.workers))
    same = set(few) == set(many)
    said = (
        f"Weights and gradients of each of {len(few)} workers: {data_size(max(few))}; of each of {len(many)}: "
        f"{data_size(max(many))}. " + ("It is the same, and it fitted before." if same else "It has grown.")
    )
    return Outcome(not same, said, shown=same)


def _replica_bytes(rank: int) -> int:
    model = TinyGPT(SMALL)
    data.answer_loss(model(torch.zeros(1, 8, dtype=torch.int64)), torch.zeros(1, 8, dtype=torch.int64)).backward()
    weights = list(model.parameters())
    return sum(tensor.nbytes for tensor in [*weights, *(weight.grad for weight in weights)] if tensor is not None)


QUESTIONS: dict[str, Family] = {
    "bytes_sent": Family(Gradients(100_000, 8), _ask_bytes, _draw_gradients),
    "Q3": Family(Cluster(), _ask_cluster, _draw_cluster),
}
