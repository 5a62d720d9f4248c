"""Questions about data parallelism, and the programs that answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from random import Random

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import data
from course_lib.experiments import SMALL, training_step
from course_lib.figures import Timing, attribute, gantt, lost_time, speed_up
from course_lib.figures.axis import data_size
from course_lib.mechanisms import batches
from course_lib.mechanisms.collectives import ring_all_reduce
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.forms import Choice, Form, Number, Option, Ordering, Reading
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import BYTES, Slip
from course_lib.ranks import Link, Pace, RankFailed, launch
from course_lib.timeline import Timeline, compute

TINY = GPTConfig(layers=1, hidden=8, heads=2)
STEPS = 5
SAME = 1e-9  # how far two trainings in 64-bit numbers drift apart by rounding alone, with much to spare
ORDINALS = {2: "half", 3: "a third", 4: "a quarter", 6: "a sixth", 8: "an eighth"}


def weights_of(model: nn.Module) -> Tensor:
    """All weights in one vector, a copy."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def distance(replicas: list[Tensor], other: Tensor) -> float:
    """The largest difference of any weight of any replica."""
    return max((replica - other).abs().max().item() for replica in replicas)


# Q4. What does each worker get?


@dataclass(frozen=True)
class Sharing:
    """A minibatch of so many samples, on so many workers."""

    samples: int
    workers: int


def _draw_sharing(random: Random) -> Sharing:
    workers = random.choice([3, 4, 6, 8])
    return Sharing(workers * random.choice([16, 32, 48, 64]), workers)


def _ask_sharing(case: Sharing) -> tuple[str, Form]:
    share, part = case.samples // case.workers, ORDINALS[case.workers]
    text = (
        f"A minibatch has {case.samples} samples, and {case.workers} workers train with data parallelism. "
        "What does each worker get?"
    )
    not_text = (
        "A piece from the middle of the model is given text, where it expects what the piece before it has computed. "
        "A model can be split, but then workers have to hand on what they compute halfway through it: that is another "
        "mechanism, and no longer data parallelism."
    )
    everything = (
        "It works, but every worker does all of the work, and so takes as long as one worker alone. Nothing is gained."
    )
    data_parallel = (
        "That is data parallelism: every worker has a replica of the model and a share of the samples, all work at the "
        "same time, and together they have seen every sample once."
    )
    return text, Choice(
        (
            Option(f"all {case.samples} samples, and {part} of the model", _try(case, False, True), not_text),
            Option(f"{share} samples, and the whole model", _try(case, True, False), data_parallel),
            Option(f"all {case.samples} samples, and the whole model", _try(case, False, False), everything),
            Option(f"{share} samples, and {part} of the model", _try(case, True, True), not_text),
        )
    )


def _try(case: Sharing, splits_samples: bool, splits_model: bool) -> Callable[[], Outcome]:
    return partial(_share_out, case, splits_samples, splits_model)


def _share_out(case: Sharing, splits_samples: bool, splits_model: bool) -> Outcome:
    pace = Pace({"forward": 0.4 / case.samples})  # what one worker needs for the whole minibatch, in seconds
    try:
        run = launch(_worker, case.workers, (case, splits_samples, splits_model), pace=pace)
    except RankFailed as error:
        said = "It cannot be run: workers whose piece is not the whole model cannot compute a loss from their samples."
        return Outcome(False, said, shown=splits_model, measured=(error.message,))
    total = sum(run.results)
    once = "every sample once" if total == case.samples else f"every sample {total // case.samples} times"
    said = f"It runs: each worker computes {run.results[0]} samples, and together they compute {once}."
    picture = gantt(run.timeline, title="The forward passes of this answer")
    return Outcome(total == case.samples, said, shown=not splits_model, pictures=(picture,))


def _worker(rank: int, case: Sharing, splits_samples: bool, splits_model: bool) -> int:
    """Compute the loss of what this worker has been given. Returns its number of samples."""
    problems = [(10 + sample % 90, 99 - sample % 90) for sample in range(case.samples)]
    minibatch = data.examples(problems)
    inputs, targets = batches.split(minibatch, case.workers)[rank] if splits_samples else minibatch
    blocks = TinyGPT(replace(TINY, layers=case.workers - 2 or 1)).blocks
    part = blocks[rank : rank + 1] if splits_model else blocks
    with compute("forward", work=len(inputs)):
        data.answer_loss(part(inputs), targets)
    return len(inputs)


# Q1. What must happen after the gradients are there?


def _own_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _first_ranks_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def _average_then_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average_gradients(model)
    optimizer.step()


def _update_then_average(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    for parameter in model.parameters():
        dist.all_reduce(parameter.detach())
        parameter.detach().div_(dist.get_world_size())


Update = Callable[[nn.Module, torch.optim.Optimizer], None]


def _minibatches(workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    problems, _ = data.train_test_split()
    return data.minibatches(problems, 8 * workers)


def _train(rank: int, update: Update, workers: int) -> Tensor:
    """A few steps on this rank's share of minibatches for `workers`; on one rank, that is all of them."""
    model = TinyGPT(TINY, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in islice(_minibatches(workers), STEPS):
        inputs, targets = batches.split(batch, dist.get_world_size())[rank]
        optimizer.zero_grad()
        data.answer_loss(model(inputs), targets).backward()
        update(model, optimizer)
    return weights_of(model)


def _draw_workers(random: Random) -> int:
    return random.choice([2, 3, 4, 6])


def _ask_update(workers: int) -> tuple[str, Form]:
    text = (
        f"{workers} replicas of a model have each computed the gradient of their own share of the minibatch. What must "
        "happen next, so that every one of them learns from the whole minibatch?"
    )
    alone = (
        "Each replica has learned from its own share alone. From the first step on they are different models, and "
        "nothing ever brings them together again: they drift."
    )
    thrown_away = (
        "The replicas agree to the last bit, and are still wrong: the gradients of all other shares were thrown away. "
        "That ranks agree with each other proves nothing."
    )
    mean = (
        "The mean of the gradients is the gradient of the whole minibatch, so every replica takes the step that one "
        "process would have taken. No weights need to be sent: they were equal, and all have done the same to them."
    )
    too_late = (
        "It comes close. With plain gradient descent it would even be the same, because there a step is proportional "
        "to its gradient. But AdamW scales each gradient before it takes a step, and the mean of scaled steps is not "
        "the scaled step of the mean."
    )
    return text, Choice(
        (
            Option("each updates its weights with its own gradient", _learn(_own_update, workers, "drift"), alone),
            Option(
                "rank 0 updates its weights with its own gradient, and sends them to all others",
                _learn(_first_ranks_update, workers, "wrong"),
                thrown_away,
            ),
            Option(
                "the gradients are averaged over the ranks, and each updates its weights with the average",
                _learn(_average_then_update, workers, "right"),
                mean,
            ),
            Option(
                "each updates its weights with its own gradient, and then the weights are averaged over the ranks",
                _learn(_update_then_average, workers, "wrong"),
                too_late,
            ),
        )
    )


def _learn(update: Update, workers: int, claim: str) -> Callable[[], Outcome]:
    return partial(_compare_trainings, update, workers, claim)


def _compare_trainings(update: Update, workers: int, claim: str) -> Outcome:
    replicas = launch(_train, workers, (update, workers)).results
    (alone,) = launch(_train, 1, (_own_update, workers)).results
    apart, off = distance(replicas, replicas[0]), distance(replicas, alone)
    found = "drift" if apart else "wrong" if off > SAME else "right"
    equal = "different from each other" if apart else "equal to the last bit"
    same = "another training" if off > SAME else "the same training, up to rounding"
    said = f"After {STEPS} steps the {workers} replicas are {equal}. Compared with one process that has all shares: {same}."
    measured = f"Largest difference between two replicas: {apart:.2g}; to one process: {off:.2g}."
    return Outcome(found == "right", said, shown=found == claim, measured=(measured,))


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
    run = launch(_ring, case.ranks, (case.parameters,))
    sent = run.timeline.bytes_sent(0)
    said = f"Each rank sent {sent:,} bytes, {sent / case.bytes:.3f} times the gradients."
    return Reading(sent, said, pictures=(gantt(run.timeline, title="Once around the ring, and once more"),))


def _ring(rank: int, parameters: int) -> None:
    ring_all_reduce(torch.ones(parameters))


# Q2. The events of one step, in order


EVENTS = {
    "update": "update: the optimizer changes the weights",
    "backward": "backward: compute the gradients of this rank's share",
    "all_reduce": "all_reduce: average the gradients over all ranks",
    "split": "split: take this rank's share of the next minibatch",
    "clear": "clear: set the gradients back to nothing",
    "forward": "forward: compute the loss of this rank's share",
}
SOLUTION = ("split", "forward", "backward", "all_reduce", "update", "clear")
FEW_SECONDS = Pace({"forward": 0.02, "backward": 0.04, "optimizer": 0.01}, Link(latency=0.0002))


class Worker:
    """One rank, with a method for each event."""

    def __init__(self, rank: int, workers: int) -> None:
        self.rank, self.model = rank, TinyGPT(TINY, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.minibatches = _minibatches(workers)
        self.share: tuple[Tensor, Tensor] | None = None
        self.loss: Tensor | None = None

    def split(self) -> None:
        self.share = batches.split(next(self.minibatches), dist.get_world_size())[self.rank]

    def forward(self) -> None:
        if self.share is None:
            raise LookupError("forward has nothing to compute on, because no share has been taken yet")
        with compute("forward"):
            self.loss = data.answer_loss(self.model(self.share[0]), self.share[1])

    def backward(self) -> None:
        if self.loss is None:
            raise LookupError("backward has no loss to begin with, because there was no forward pass yet")
        with compute("backward"):
            self.loss.backward()

    def all_reduce(self) -> None:
        average_gradients(self.model)

    def update(self) -> None:
        with compute("optimizer"):
            self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


def follow(rank: int, order: tuple[str, ...], workers: int, steps: int) -> Tensor:
    """Do the events of each step in this order; the weights after every step, [steps, weights]."""
    worker = Worker(rank, workers)
    history = []
    for _ in range(steps):
        for event in order:
            getattr(worker, event)()
        history.append(weights_of(worker.model))
    return torch.stack(history)


def _ask_order(workers: int) -> tuple[str, Form]:
    text = (
        f"{workers} replicas train with data parallelism. Put the events of one step in order. Your order becomes a "
        "program, and the ranks run it step after step."
    )
    return text, Ordering(EVENTS, partial(_follow, workers))


def _follow(workers: int, order: tuple[str, ...]) -> Outcome:
    try:
        replicas = launch(follow, workers, (order, workers, 2 * STEPS)).results
    except RankFailed as error:
        said = f"It cannot be run: {error.__cause__}."
        return Outcome(False, said, "Each event needs what another one has made. Ask of each: what does it work on?")
    (alone,) = launch(follow, 1, (SOLUTION, workers, 2 * STEPS)).results
    right, said, why = _judge(order, replicas, alone)
    drift = [(replicas_at - replicas[0][n]).abs().max().item() for n, replicas_at in _by_step(replicas)]
    measured = ", ".join(f"{drift[n - 1]:.2g} after step {n}" for n in (1, STEPS, 2 * STEPS))
    paced = launch(follow, workers, (order, workers, 2), pace=FEW_SECONDS)
    picture = gantt(paced.timeline, title="Two steps in this order")
    return Outcome(right, said, why, measured=(f"How far the replicas are apart: {measured}.",), pictures=(picture,))


def _by_step(replicas: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """For every step, the weights of all replicas [replicas, weights]."""
    return enumerate(torch.stack(replicas, dim=1))


def _judge(order: tuple[str, ...], replicas: list[Tensor], alone: Tensor) -> tuple[bool, str, str]:
    """Right or not, what the run showed, and why."""
    same, equal = distance(replicas, alone) < SAME, distance(replicas, replicas[0]) == 0
    if same:
        said = "The replicas stay equal to the last bit, and it is the training of one process with all shares."
        why = (
            "Every event comes after what it needs. (Where to clear is up to you, as long as it is between an update "
            "and the next backward pass; everything else leaves no choice.)"
        )
        return True, said, why
    if all(torch.equal(history[0], history[-1]) for history in replicas):
        said = "The replicas stay equal, because none of them ever changes: nobody learns anything."
        return False, said, "When the update came, the gradients had just been cleared, and there was nothing to do."
    if equal and distance([history[1:] for history in replicas], alone[:-1]) < SAME:
        said = "The replicas stay equal, but they are always one step behind one process."
        why = "It is the right circle, begun in the middle: the update of each step is done at the start of the next."
        return False, said, why
    said = "The replicas drift apart, and nothing ever brings them together again."
    if order.index("all_reduce") < order.index("backward"):
        return False, said, "When the all-reduce came, there was no new gradient to average yet."
    return False, said, "Each replica takes its own step, before the mean is there."


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
        return training_step(workers, self.batch_size, pace, overlap=False, repeat=1 if workers == 1 else 3)


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
    said = f"Tried on {case.workers} workers with {name}: {effect}."
    measured = f"{case.workers} workers were {was:.1f} times as fast as one; with {name} {now:.1f} times."
    shown = {"devices": won < 0, "links": right, "update": not right}[suspect]
    shares = {"as it is": attribute(before[-1]), "without the suspect": attribute(after[-1])}
    pictures = (
        speed_up([Timing.of(step) for step in before], title="The speed-up of the team"),
        lost_time(shares, title=f"Where the time of {case.workers} workers goes"),
    )
    return Outcome(right, said, shown=shown, measured=(measured,), pictures=pictures)


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
    return sum(
        parameter.nbytes + parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None
    )


QUESTIONS: dict[str, Family] = {
    "Q4": Family(Sharing(512, 8), _draw_sharing, _ask_sharing),
    "Q1": Family(8, _draw_workers, _ask_update),
    "bytes_sent": Family(Gradients(100_000, 8), _draw_gradients, _ask_bytes),
    "Q2": Family(4, _draw_workers, _ask_order),
    "Q3": Family(Cluster(), _draw_cluster, _ask_cluster),
}
