"""Every right way to split a minibatch is accepted, and every wrong one is told what is wrong about it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from course_lib import checks
from course_lib.checks import splitting

Split = Callable[[Any, int, int], Any]

verdict_on = functools.cache(checks.split_batch)  # several tests look at one verdict


def one_slice(batch: Any, rank: int, world_size: int) -> Any:
    start = len(batch) * rank // world_size
    return batch[start : len(batch) * (rank + 1) // world_size]


def a_piece_of_tensor_split(batch: Any, rank: int, world_size: int) -> Any:
    return torch.tensor_split(batch, world_size)[rank]


def dealt_like_cards(batch: Any, rank: int, world_size: int) -> Any:
    return batch[rank::world_size]


def copied_by_index(batch: Any, rank: int, world_size: int) -> Any:
    return batch[torch.arange(rank, len(batch), world_size)]


def shuffled_with_a_common_seed(batch: Any, rank: int, world_size: int) -> Any:
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    return batch[order[rank::world_size]]


@pytest.mark.parametrize(
    "fn",
    [one_slice, a_piece_of_tensor_split, dealt_like_cards, copied_by_index, shuffled_with_a_common_seed],
)
def test_a_right_split_passes(fn: Split) -> None:
    verdict = verdict_on(fn)
    assert verdict.passed, verdict
    assert checks.split_batch(fn, seed=1).passed


def test_a_view_costs_nothing_and_a_copy_its_bytes() -> None:
    memory = {fn: verdict_on(fn).costs[1] for fn in (one_slice, copied_by_index)}
    assert memory[one_slice] == checks.Cost("bytes of extra memory on a rank", "0", "0")
    row = splitting.WIDTH * 4
    assert int(memory[copied_by_index].yours) >= 3 * row  # and the index itself
    assert "copy" in verdict_on(copied_by_index).remarks[0]


def test_another_order_is_right_and_gets_a_remark() -> None:
    verdict = verdict_on(dealt_like_cards)
    assert verdict.passed
    assert "DistributedSampler" in verdict.remarks[0]
    assert verdict_on(one_slice).remarks == ()


def test_idle_is_what_the_largest_share_makes_of_it() -> None:
    idle = verdict_on(one_slice).costs[2]
    assert idle.yours == idle.best == f"{1 - 10 / (4 * 3):.0%}"


# Wrong ones, named after what the check calls them


def nothing_returned(batch: Any, rank: int, world_size: int) -> None:
    one_slice(batch, rank, world_size)


def all_shares_returned(batch: Any, rank: int, world_size: int) -> Any:
    return batch.tensor_split(world_size)


def batch_changed(batch: Any, rank: int, world_size: int) -> Any:
    share = one_slice(batch, rank, world_size)
    share *= 0
    return share


def features_split(batch: Any, rank: int, world_size: int) -> Any:
    return batch.tensor_split(world_size, dim=-1)[rank]


def not_samples(batch: Any, rank: int, world_size: int) -> Any:
    return one_slice(batch, rank, world_size).flatten()


def labels_mixed_up(batch: Any, rank: int, world_size: int) -> Any:
    return one_slice(batch[torch.randperm(len(batch))], rank, world_size)


def whole_batch_everywhere(batch: Any, rank: int, world_size: int) -> Any:
    return batch


def same_share_everywhere(batch: Any, rank: int, world_size: int) -> Any:
    return batch[: len(batch) // world_size]


def each_rank_shuffled(batch: Any, rank: int, world_size: int) -> Any:
    torch.manual_seed(rank)
    return one_slice(batch[torch.randperm(len(batch))], rank, world_size)


def remainder_dropped(batch: Any, rank: int, world_size: int) -> Any:
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size]


def padded(batch: Any, rank: int, world_size: int) -> Any:
    size = -(-len(batch) // world_size)
    return batch[(torch.arange(size) + rank * size) % len(batch)]


def borders_overlap(batch: Any, rank: int, world_size: int) -> Any:
    size = len(batch) // world_size
    return batch[rank * size : (rank + 1) * size + 1]


def samples_lost(batch: Any, rank: int, world_size: int) -> Any:
    return one_slice(batch, rank, world_size)[:-1]


def empty_share(batch: Any, rank: int, world_size: int) -> Any:
    size = -(-len(batch) // world_size)
    return batch[rank * size : (rank + 1) * size]


def lopsided(batch: Any, rank: int, world_size: int) -> Any:
    size = len(batch) // world_size
    return batch[rank * size :] if rank == world_size - 1 else batch[rank * size : (rank + 1) * size]


WRONG = {
    nothing_returned: "`return`",
    all_shares_returned: "returns a tuple",
    batch_changed: "changes the batch",
    features_split: "along dimension 1",
    not_samples: "not made of rows",
    labels_mixed_up: "no longer belong together",
    whole_batch_everywhere: "nothing would become faster",
    same_share_everywhere: "has to depend on `rank`",
    each_rank_shuffled: "in an order of its own",
    remainder_dropped: "leave out samples 9 and 10",
    padded: "sample 0 more than once",
    borders_overlap: "is on ranks 0 and 1",
    samples_lost: "Nobody has samples 3 and 7",
    empty_share: "have 3, 3, 3, 0 samples",
    lopsided: "have 3, 3, 5 samples: all ranks wait for the largest, so 27% of their time is idle, where 8% would do",
}


@pytest.mark.parametrize(("fn", "words"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_split_is_told_why(fn: Split, words: str) -> None:
    verdict = verdict_on(fn)
    assert verdict.outcome == "idea"
    assert verdict.idea == fn.__name__
    assert words in verdict.message


def pieces_of_torch_chunk(batch: Any, rank: int, world_size: int) -> Any:
    return batch.chunk(world_size)[rank]


def test_a_piece_that_is_missing_is_explained() -> None:
    verdict = verdict_on(pieces_of_torch_chunk)
    assert (verdict.outcome, verdict.idea) == ("idea", "too_few_pieces")
    assert verdict.situation == "4 ranks and 9 samples"
    assert "test_splitting.py, line" in dict(verdict.facts)["What happened"]


def test_every_misconception_is_tried() -> None:
    assert {fn.__name__ for fn in WRONG} == {idea.__name__ for idea in splitting.SPLITTING.ideas}
