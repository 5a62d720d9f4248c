"""Questions about replicas: what each of them gets (Q4), and how they all learn the same (Q1)."""

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
from course_lib.figures import gantt
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import average_gradients
from course_lib.model import GPTConfig, TinyGPT
from course_lib.questions.forms import Choice, Form, Option
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.ranks import Pace, RankFailed, launch
from course_lib.timeline import compute

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
        "A piece from the middle of the model is given text, where it expects what the piece before it has computed. A "
        "model can be split, but then workers have to hand on what they compute halfway through it: that is another "
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
        return Outcome(False, f"{said} {error.message}", shown=splits_model)
    total = sum(run.results)
    once = "every sample once" if total == case.samples else f"every sample {total // case.samples} times"
    said = f"It runs: each worker computes {run.results[0]} samples, and together they compute {once}."
    passes = [span for span in run.timeline.spans if span.kind == "forward"]
    picture = gantt(replace(run.timeline, spans=passes), title="The forward passes of this answer")
    return Outcome(total == case.samples, said, shown=not splits_model, pictures=(picture,))


def _worker(rank: int, case: Sharing, splits_samples: bool, splits_model: bool) -> int:
    """Compute the loss of what this worker has been given. Returns its number of samples."""
    problems = [(10 + sample % 90, 99 - sample % 90) for sample in range(case.samples)]
    minibatch = data.examples(problems)
    inputs, targets = batches.split(minibatch, case.workers)[rank] if splits_samples else minibatch
    blocks = TinyGPT(replace(TINY, layers=case.workers - 2 or 1)).blocks
    part = blocks[rank : rank + 1] if splits_model else blocks
    dist.barrier()
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


def minibatches_for(workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    problems, _ = data.train_test_split()
    return data.minibatches(problems, 8 * workers)


def _train(rank: int, update: Update, workers: int) -> Tensor:
    """A few steps on this rank's share of minibatches for `workers`; on one rank, that is all of them."""
    model = TinyGPT(TINY, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in islice(minibatches_for(workers), STEPS):
        inputs, targets = batches.split(batch, dist.get_world_size())[rank]
        optimizer.zero_grad()
        data.answer_loss(model(inputs), targets).backward()
        update(model, optimizer)
    return weights_of(model)


def draw_workers(random: Random) -> int:
    return random.choice([2, 3, 4, 6])


ALONE = (
    "Each replica has learned from its own share alone. From the first step on they are different models, and nothing "
    "ever brings them together again: they drift."
)
THROWN_AWAY = (
    "The replicas agree to the last bit, and are still wrong: the gradients of all other shares were thrown away. That "
    "ranks agree with each other proves nothing."
)
MEAN = (
    "The mean of the gradients is the gradient of the whole minibatch, so every replica takes the step that one "
    "process would have taken. No weights need to be sent: they were equal, and all have done the same to them."
)
TOO_LATE = (
    "It comes close. With plain gradient descent it would even be the same, because there a step is proportional to "
    "its gradient. But AdamW scales each gradient before it takes a step, and the mean of scaled steps is not the "
    "scaled step of the mean."
)


def _ask_update(workers: int) -> tuple[str, Form]:
    text = (
        f"{workers} replicas of a model have each computed the gradient of their own share of the minibatch. What must "
        "happen next, so that every one of them learns from the whole minibatch?"
    )
    own = "each updates its weights with its own gradient"
    first = "rank 0 updates its weights with its own gradient, and sends them to all others"
    mean = "the gradients are averaged over the ranks, and each updates its weights with the average"
    late = "each updates its weights with its own gradient, and then the weights are averaged over the ranks"
    return text, Choice(
        (
            Option(own, _learn(_own_update, workers, "drift"), ALONE),
            Option(first, _learn(_first_ranks_update, workers, "wrong"), THROWN_AWAY),
            Option(mean, _learn(_average_then_update, workers, "right"), MEAN),
            Option(late, _learn(_update_then_average, workers, "wrong"), TOO_LATE),
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
    said = (
        f"After {STEPS} steps the {workers} replicas are {equal}. Compared with one process on all shares: {same}. "
        f"Largest difference between two replicas: {apart:.2g}; to one process: {off:.2g}."
    )
    return Outcome(found == "right", said, shown=found == claim)


QUESTIONS: dict[str, Family] = {
    "Q4": Family(Sharing(512, 8), _ask_sharing, _draw_sharing),
    "Q1": Family(8, _ask_update, draw_workers),
}
