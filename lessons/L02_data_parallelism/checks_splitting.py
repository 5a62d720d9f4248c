"""The check for `split_batch(batch, rank, world_size)`: every sample on exactly one rank, no rank with too many.

Which sample goes to which rank is free: the mean over the minibatch does not depend on it. Sizes differ by at most one,
so that a plain mean over ranks is as close to that mean as it can be; and nobody waits for a larger share.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case, Observed, Value, Values
from course_lib.ranks import Pace
from course_lib.timeline import compute

NAMES = ("inputs", "targets")


def right(batch: Tensor, rank: int, world_size: int) -> Tensor:
    start, stop = (len(batch) * end // world_size for end in (rank, rank + 1))
    return batch[start:stop]


def _case(world_size: int, samples: int, new: str = "") -> Case:
    return Case(f"{world_size} ranks and {samples} samples", world_size, partial(_arguments, samples, world_size), new)


def _arguments(samples: int, world_size: int, rank: int) -> tuple[Tensor, Tensor, int, int]:
    """Inputs and targets in random order, the rank and the number of ranks."""
    random = torch.Generator().manual_seed(samples)
    return torch.rand(samples, 5, generator=random), torch.randperm(samples, generator=random), rank, world_size


def _cases(seed: int) -> list[Case]:
    uneven = "the ranks do not divide the samples"
    even = [_case(2, 6 + 2 * seed), _case(2, 7 + 2 * seed, uneven), _case(3, 9 + 3 * seed)]
    return [*even, _case(3, 11 + 3 * seed, uneven), _case(4, 4, "one sample for each rank"), _case(4, 9, uneven)]


def _play(fn: Any, inputs: Tensor, targets: Tensor, rank: int, world_size: int) -> Any:
    share = fn(inputs, rank, world_size)
    with compute("forward", work=len(share) if isinstance(share, Tensor) and share.dim() else 0):
        return {"inputs": share, "targets": fn(targets, rank, world_size)}


def _samples(observed: list[Observed], name: str) -> list[list[int]]:
    """The samples in each rank's share, by their place in the batch; -1 for a row that is not in the batch."""
    batch, shares = observed[0].before[name], [seen.values.get(f"the result[{name}]", "") for seen in observed]
    numbers = {str(row): number for number, row in enumerate(_rows(batch))}
    return [[numbers.get(str(row), -1) for row in _rows(share)] for share in shares]


def _rows(share: Value) -> list[Any]:
    return share.double().tolist() if isinstance(share, Tensor) and share.dim() else []


def _kind_of_row(share: Value) -> Value:
    return share.new_zeros(share.shape[1:]) if isinstance(share, Tensor) and share.dim() else share


def _compared(observed: list[Observed]) -> list[Values]:
    """The values to compare: sizes of shares, how often each sample is used, kinds of rows, and the arguments."""
    inputs, targets = (_samples(observed, name) for name in NAMES)
    used = Counter(sample for share in inputs for sample in share)
    of_all: Values = {
        "how often each sample is used": torch.tensor([used[n] for n in range(len(observed[0].before["inputs"]))]),
        "the sizes of the shares": torch.tensor(sorted(map(len, inputs))),
        "inputs and targets": "belong together" if inputs == targets else "are of different samples",
    }
    of_rank: list[Values] = []
    for seen in observed:
        shares = {name: value for name, value in seen.values.items() if name not in seen.before}
        rows = {f"a row of {name}": _kind_of_row(share) for name, share in shares.items()}
        of_rank.append({name: seen.values[name] for name in seen.before} | rows | of_all)
    return of_rank


def _rule(observed: list[Observed]) -> str:
    shares = _samples(observed, "inputs")
    if min(min(share, default=0) for share in shares) < 0 or not any(shares):
        return ""
    where = "; ".join(f"rank {rank}: {', '.join(map(str, share)) or 'none'}" for rank, share in enumerate(shares))
    text = f"These samples go to your ranks, by their place in the batch. {where}."
    apart = "A second call of your function, with the targets in place of the inputs, gives others."
    return f"{text} {apart}" if shares != _samples(observed, "targets") else text


price_case, pace = _case(4, 10), Pace({"forward": 0.01})
split_batch = Exercise("split_batch", right, _play, _cases, price_case, pace, compared=_compared, rule=_rule)
own_code = "batch[start:stop]"


@split_batch.mistake
def padded(batch: Tensor, rank: int, world_size: int) -> Tensor:
    size = -(-len(batch) // world_size)
    return batch[(torch.arange(size) + rank * size) % len(batch)]
