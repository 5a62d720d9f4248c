"""The check for `split_batch(batch, rank, world_size)`: every sample on exactly one rank, and none with too many.

Which sample goes to which rank is free: the mean over the minibatch does not depend on it. So are the sizes, as long
as no share is empty and the largest, which all ranks wait for, is as small as it can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.examine import Exercise, Explanation, examine
from course_lib.checks.verdict import Cost, Verdict
from course_lib.instruments.watch import Watch
from course_lib.ranks import Run, RunError

WIDTH = 5  # numbers in one sample


def split_batch(fn: Callable[..., Any], seed: int = 0) -> Verdict:
    """Check a student's split_batch on 2, 3 and 4 ranks. seed: other sizes of minibatch."""
    return examine(SPLITTING, fn, seed)


@dataclass(frozen=True)
class SplitCase:
    world_size: int
    samples: int

    def __str__(self) -> str:
        return f"{self.world_size} ranks and {self.samples} samples"

    def inputs(self) -> Tensor:
        """[samples, WIDTH], each number different, so that a sample is known by its first one."""
        return torch.arange(self.samples * WIDTH, dtype=torch.float32).view(self.samples, WIDTH)

    def targets(self) -> Tensor:
        """[samples]: the number of the sample."""
        return torch.arange(self.samples)


def _cases(seed: int) -> list[SplitCase]:
    return [SplitCase(2, 8 + 2 * seed), SplitCase(3, 11 + 3 * seed), SplitCase(4, 9)]


# On a rank


@dataclass(frozen=True)
class Share:
    """What split_batch returned on one rank for inputs and targets: copies of tensors, else the type's name."""

    inputs: Tensor | str
    targets: Tensor | str
    batch_changed: bool
    memory: int


def _play(rank: int, fn: Callable[..., Any], case: SplitCase) -> Share:
    batch, targets = case.inputs(), case.targets()
    with Watch() as watch:
        share = fn(batch, rank, case.world_size)
    labels = fn(targets, rank, case.world_size)
    changed = not torch.equal(batch, case.inputs()) or not torch.equal(targets, case.targets())
    return Share(_portable(share), _portable(labels), changed, watch.peak)


def _portable(value: Any) -> Tensor | str:
    return value.detach().clone() if isinstance(value, Tensor) else type(value).__name__


# In the notebook


@dataclass(frozen=True)
class Split:
    """The shares of all ranks. inputs, targets: the samples on each rank, by number, -1 for what is not a sample."""

    case: SplitCase
    run: Run

    @property
    def shares(self) -> list[Share]:
        return self.run.results

    @property
    def inputs(self) -> list[list[int]]:
        return [_samples(share.inputs, self.case.inputs()) for share in self.shares]

    @property
    def targets(self) -> list[list[int]]:
        return [_samples(share.targets, self.case.targets()) for share in self.shares]

    @property
    def sizes(self) -> list[int]:
        return [len(samples) for samples in self.inputs]

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.case.samples)) - {sample for share in self.inputs for sample in share})

    @property
    def repeated(self) -> list[int]:
        counts = Counter(sample for share in self.inputs for sample in share)
        return sorted(sample for sample, count in counts.items() if count > 1)

    def holders(self, sample: int) -> list[int]:
        return [rank for rank, share in enumerate(self.inputs) if sample in share]


def _samples(share: Tensor | str, batch: Tensor) -> list[int]:
    """The rows of a share, each by its number in the batch, or -1."""
    if isinstance(share, str) or share.dim() == 0 or share.shape[1:] != batch.shape[1:]:
        return []
    numbers = {tuple(row.flatten().tolist()): number for number, row in enumerate(batch)}
    return [numbers.get(tuple(row.flatten().tolist()), -1) for row in share]


def _is_right(found: Split) -> bool:
    exactly_once = sorted(sample for share in found.inputs for sample in share) == list(range(found.case.samples))
    fair = min(found.sizes) > 0 and max(found.sizes) == max(_best_sizes(found.case))
    return exactly_once and fair and found.inputs == found.targets and not any(s.batch_changed for s in found.shares)


# What goes wrong


def nothing_returned(found: Split) -> Explanation:
    if any(share.inputs == "NoneType" for share in found.shares):
        return "Your function returns None, at least on one rank: its last line has to `return` the share."
    return None


def all_shares_returned(found: Split) -> Explanation:
    """A list of all shares instead of the one of this rank."""
    kinds = {share.inputs for share in found.shares if isinstance(share.inputs, str)}
    if not kinds:
        return None
    if kinds <= {"list", "tuple"}:
        return (
            f"Your function returns a {kinds.pop()}. Every rank runs the same code and asks only for its own share: "
            "return one tensor, the share of `rank`."
        )
    return f"Your function returns a {kinds.pop()}; it has to return a tensor, the share of this rank."


def batch_changed(found: Split) -> Explanation:
    if any(share.batch_changed for share in found.shares):
        return "Your function changes the batch itself. Take a part of it and leave the original as it was."
    return None


def features_split(found: Split) -> Explanation:
    """The cut went through the samples, along dimension 1."""
    shapes = [share.inputs.shape for share in found.shares if isinstance(share.inputs, Tensor)]
    if all(len(shape) == 2 and shape[0] == found.case.samples and shape[1] < WIDTH for shape in shapes):
        return (
            "Every rank has all samples, and of each only a piece: you cut along dimension 1. That is a way to split "
            "a model's work, but here whole samples are dealt out: cut along dimension 0."
        )
    return None


def not_samples(found: Split) -> Explanation:
    for rank, (samples, share) in enumerate(zip(found.inputs, found.shares, strict=True)):
        if isinstance(share.inputs, Tensor) and (-1 in samples or (not samples and share.inputs.numel())):
            return (
                f"What rank {rank} returns, of shape {list(share.inputs.shape)}, is not made of rows of the batch. "
                "A share holds whole rows, unchanged: something like `batch[start:stop]`."
            )
    return None


def labels_mixed_up(found: Split) -> Explanation:
    """A new random order in each call: the answers no longer belong to the questions."""
    for rank, (inputs, targets) in enumerate(zip(found.inputs, found.targets, strict=True)):
        if inputs != targets:
            return (
                f"Inputs and targets no longer belong together: called for the inputs, rank {rank} returns samples "
                f"{_listing(inputs)}; called for the targets, {_listing(targets)}. Which samples a rank gets may "
                "depend on `rank`, `world_size` and the length of the batch, on nothing else, chance included."
            )
    return None


def whole_batch_everywhere(found: Split) -> Explanation:
    if all(size == found.case.samples for size in found.sizes):
        return (
            "Every rank returns the whole batch. The gradients would even be right, but all ranks would do all the "
            "work, and nothing would become faster."
        )
    return None


def same_share_everywhere(found: Split) -> Explanation:
    if all(share == found.inputs[0] for share in found.inputs):
        return (
            f"All ranks return the same samples, {_listing(found.inputs[0])}; nobody works on the others. "
            "The share has to depend on `rank`."
        )
    return None


def each_rank_shuffled(found: Split) -> Explanation:
    """A random permutation drawn on each rank; ranks have different seeds."""
    disordered = any(share != sorted(share) for share in found.inputs)
    if disordered and (found.repeated or found.missing):
        return (
            "Each rank shuffled the batch in an order of its own, because the ranks' random generators are seeded "
            f"differently: sample {(found.missing or found.repeated)[0]} is on "
            f"{_ranks(found.holders((found.missing or found.repeated)[0]))}. All ranks have to agree on one order "
            "before they cut; without shuffling, they do."
        )
    return None


def remainder_dropped(found: Split) -> Explanation:
    """Shares of samples // world_size; what is left over goes to nobody."""
    samples, ranks = found.case.samples, found.case.world_size
    if found.missing and not found.repeated and set(found.sizes) == {samples // ranks}:
        return (
            f"{ranks} does not divide {samples}, and shares of {samples // ranks} leave out {_named(found.missing)}: "
            f"nobody would ever learn from the rest. {_SIZES}"
        )
    return None


def padded(found: Split) -> Explanation:
    """Every share rounded up to the same size, some samples used twice for it."""
    samples, ranks = found.case.samples, found.case.world_size
    if found.repeated and not found.missing and set(found.sizes) == {-(-samples // ranks)}:
        return (
            f"To make all shares equal you use {_named(found.repeated)} more than once. What is used twice counts "
            "twice, and the gradient is no longer that of the minibatch. Shares may differ by one sample."
        )
    return None


def borders_overlap(found: Split) -> Explanation:
    if not found.repeated:
        return None
    holders = found.holders(found.repeated[0])
    where = _ranks(holders) if len(holders) > 1 else f"rank {holders[0]} twice"
    return (
        f"Sample {found.repeated[0]} is on {where}. Each sample has to be on exactly one rank: one rank's share starts "
        "where the share before it stops, and a slice leaves its stop out."
    )


def samples_lost(found: Split) -> Explanation:
    if not found.missing:
        return None
    return (
        f"Nobody has {_named(found.missing)}. Each sample has to be on exactly one rank: one rank's share "
        "starts where the share before it stops, and the last one stops at the end of the batch."
    )


def empty_share(found: Split) -> Explanation:
    """The size of a share rounded up, until nothing is left for the last rank."""
    if min(found.sizes) > 0:
        return None
    return (
        f"The shares have {_listing(found.sizes)} samples. Rounded up, they use up the batch before the last rank has "
        f"its turn, and a mean over no samples is not a number. {_SIZES}"
    )


def lopsided(found: Split) -> Explanation:
    """All samples are there, but one rank has more than it must, and the others wait for it."""
    return (
        f"Every sample is there once, but the shares have {_listing(found.sizes)} samples: all ranks wait for the "
        f"largest, so {_idle(found.sizes):.0%} of their time is idle, where {_idle(_best_sizes(found.case)):.0%} "
        f"would do. {_SIZES}"
    )


_SIZES = (
    "Give each rank `samples // world_size`, and one more to the first `samples % world_size` ranks; "
    "`torch.tensor_split` does it so."
)


def too_few_pieces(error: RunError) -> Explanation:
    """torch.chunk(9 samples, 4) makes three pieces of three."""
    if not isinstance(error.__cause__, IndexError):
        return None
    return (
        "There is no share with this number. `torch.chunk` rounds the size up, so the samples may be used up early: "
        f"9 samples for 4 ranks become 3 + 3 + 3, and nothing is left for the last. {_SIZES}"
    )


def _best_sizes(case: SplitCase) -> list[int]:
    least, left_over = divmod(case.samples, case.world_size)
    return [least + 1] * left_over + [least] * (case.world_size - left_over)


def _idle(sizes: list[int]) -> float:
    """Share of the ranks' time spent waiting for the largest share, if every sample takes the same time."""
    return 1 - sum(sizes) / (len(sizes) * max(sizes))


def _listing(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _named(samples: list[int]) -> str:
    if len(samples) == 1:
        return f"sample {samples[0]}"
    return f"samples {_listing(samples[:-1])} and {samples[-1]}"


def _ranks(ranks: list[int]) -> str:
    return f"ranks {' and '.join(map(str, ranks))}" if len(ranks) != 1 else f"rank {ranks[0]} alone"


# The price


def _weigh(found: Split, verdict: Verdict) -> Verdict:
    case, timeline = found.case, found.run.timeline
    memory = max(share.memory for share in found.shares)
    costs = (
        Cost("bytes a rank sends", f"{max(map(timeline.bytes_sent, range(case.world_size))):,}", "0"),
        Cost("bytes of extra memory on a rank", f"{memory:,}", "0"),
        Cost(f"idle with {case} (modelled)", f"{_idle(found.sizes):.0%}", f"{_idle(_best_sizes(case)):.0%}"),
    )
    return replace(verdict, costs=costs, remarks=tuple(filter(None, [_copied(memory), _order(found)])))


def _copied(memory: int) -> Explanation:
    if not memory:
        return None
    return (
        "Your share is a copy. A slice such as `batch[start:stop]` is a view: it takes no memory and no time, "
        "whatever the size of the batch."
    )


def _order(found: Split) -> Explanation:
    if all(share == list(range(share[0], share[-1] + 1)) for share in found.inputs):
        return None
    return (
        f"You deal the samples out in another order than the batch has (rank 0 gets {_listing(found.inputs[0])}). "
        "That is just as right: a mean does not depend on the order. PyTorch's DistributedSampler deals them out one "
        "by one, like cards."
    )


SPLITTING = Exercise(
    name="split_batch",
    arguments=("batch", "rank", "world_size"),
    cases=_cases,
    priced=SplitCase(4, 10),
    play=_play,
    gather=Split,
    is_right=_is_right,
    ideas=(
        nothing_returned,
        all_shares_returned,
        batch_changed,
        features_split,
        not_samples,
        labels_mixed_up,
        whole_batch_everywhere,
        same_share_everywhere,
        padded,
        each_rank_shuffled,
        remainder_dropped,
        borders_overlap,
        samples_lost,
        empty_share,
        lopsided,
    ),
    accidents=(too_few_pieces,),
    weigh=_weigh,
)
