"""What data parallelism sends and when, and what it does at its edges. What it learns: `test_replicas_and_shards`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import RankFailed, Span, data, launch, timeline
from course_lib.mechanisms import batches, tensor_parallel
from course_lib.mechanisms.data_parallel import DataParallel, average_gradients
from tests.mechanisms.training import F32, State, build, equal, minibatch

SAMPLES = 12
REPLICATE = ["average_gradients", "DataParallel"]


def gradient(model: nn.Module, name: str = "weight") -> Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


def one_step(rank: int, bucket_mb: float, overlap: bool = True, case: str = "plain") -> None:
    """A second step of training: the first one also exchanges the sizes of the shares."""
    replica = DataParallel(build(case, F32, seed=rank), bucket_mb=bucket_mb, overlap=overlap)
    inputs, targets = batches.split(minibatch(0, SAMPLES), dist.get_world_size())[rank]
    for kind in ("other", "backward"):
        loss = data.answer_loss(replica(inputs), targets)
        with timeline.compute(kind, "the step"):
            loss.backward()
        with timeline.compute(kind, "finish"):
            replica.finish()
        replica.zero_grad()


def all_reduces(spans: list[Span]) -> list[Span]:
    """The all-reduces of the second step."""
    begin = next(span.start for span in spans if span.kind == "backward")
    return [span for span in spans if span.name == "all_reduce" and span.bytes and span.end > begin]


@pytest.mark.parametrize("case", ["plain", "tied frozen"])
def test_each_gradient_travels_once_with_a_count_and_each_bucket_with_a_weight(case: str) -> None:
    n_bytes = sum(p.nbytes + 4 for p in build(case).parameters() if p.requires_grad)
    for bucket_mb in (25, 0.004):
        spans = launch(one_step, 2, (bucket_mb, True, case)).timeline.of(0)
        buckets = all_reduces(spans)
        assert sum(span.bytes for span in buckets) == n_bytes + 4 * len(buckets)  # 2 (n - 1) / n = 1 for two ranks
        assert (len(buckets) == 1) == (bucket_mb == 25)


def test_buckets_hold_no_more_than_their_size_unless_one_parameter_is_larger() -> None:
    spans = launch(one_step, 2, (0.004,)).timeline.of(0)
    largest = 16 * 64 * 4
    numbers = 4 * (1 + len(list(build("plain").parameters())))  # counts and a weight
    assert all(span.bytes - numbers <= max(0.004 * 2**20, largest) for span in all_reduces(spans))


def test_with_overlap_buckets_leave_during_the_backward_pass_and_without_it_after() -> None:
    def posted(rank: int, overlap: bool) -> tuple[int, int]:
        """Buckets that have left at the end of the backward pass, and at the end of the step."""
        replica = DataParallel(build("plain"), bucket_mb=0.004, overlap=overlap)
        inputs, targets = batches.split(minibatch(0, SAMPLES), 2)[rank]
        left: list[Tensor] = []
        send = dist.all_reduce

        def note(tensor: Tensor, **how: Any) -> Any:
            left.extend([tensor] if how.get("async_op") else [])
            return send(tensor, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", note)
            data.answer_loss(replica(inputs), targets).backward()
            early = len(left)
            replica.finish()
        return early, len(left)

    for overlap in (True, False):
        for early, all_in_all in launch(posted, 2, (overlap,)).results:
            assert all_in_all > 4
            assert early == (all_in_all if overlap else 0)


def test_construction_gives_every_rank_the_parameters_and_buffers_of_the_first() -> None:
    def states(rank: int) -> tuple[State, State]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        nn.init.normal_(model.get_buffer("1.running_mean"))
        model.get_parameter("0.bias").requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return before, DataParallel(model).module.state_dict()

    results = launch(states, 3).results
    assert not torch.equal(results[0][0]["0.weight"], results[1][0]["0.weight"])
    for _, after in results:
        equal(after, results[0][0])


class TwoWays(nn.Module):
    """A model that uses only the parameter it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.ones(3))
        self.right = nn.Parameter(torch.ones(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, way: str) -> Tensor:
        return (x * getattr(self, way)).sum()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_parameter_that_a_rank_does_not_use_counts_as_zeros_there(overlap: bool) -> None:
    def gradients(rank: int) -> list[list[float]]:
        replica = DataParallel(TwoWays(), bucket_mb=1e-9, overlap=overlap)
        seen = []
        for step in range(4):  # the ranks take different ways, and change them
            replica.zero_grad()
            replica(torch.full((3,), 2.0 + rank), "left" if (rank + step) % 2 else "right").backward()
            replica.finish()
            assert replica.module.never.grad is None
            seen.append([float(gradient(replica.module, name)[0]) for name in ("left", "right")])
        return seen

    for seen in launch(gradients, 2).results:
        assert seen == [[1.5, 1.0], [1.0, 1.5]] * 2


def test_an_empty_share_counts_for_nothing_and_leaves_no_gradient_of_its_own() -> None:
    def gradients(rank: int) -> list[list[float] | None]:
        replica = DataParallel(TwoWays())
        replica(torch.full((3 if rank else 0, 3), 2.0), "left" if rank else "right").mean().backward()
        replica.finish()
        return [None if p.grad is None else p.grad.tolist() for p in replica.parameters()]

    assert launch(gradients, 2).results == [[[6.0] * 3, None, None]] * 2


@pytest.mark.parametrize(
    ("way", "dtype", "size"),
    [*((way, torch.float16, 40_000.0) for way in REPLICATE), ("DataParallel", torch.bfloat16, 2.0**127)],
)
def test_a_mean_in_16_bits_is_there_although_the_sum_would_overflow(way: str, dtype: torch.dtype, size: float) -> None:
    def mean(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False, dtype=dtype)
        replica = DataParallel(model) if way == "DataParallel" else model
        replica(torch.full((1 + rank, 1), size, dtype=dtype)).float().mean().backward()
        replica.finish() if isinstance(replica, DataParallel) else average_gradients(model, samples=1 + rank)
        return float(gradient(model))

    assert launch(mean, 3).results == pytest.approx([size] * 3, rel=torch.finfo(dtype).eps)


@pytest.mark.parametrize("tiny", [-0.0, -1e-45])  # half of the smallest number rounds to -0.0
def test_a_gradient_of_minus_zero_is_one_and_none_is_none(tiny: float) -> None:
    def gradients(rank: int) -> list[bool]:
        replica = DataParallel(TwoWays())
        replica(torch.full((3,), tiny), ("left", "right")[rank]).backward()
        replica.finish()
        return [parameter.grad is None for parameter in replica.parameters()]

    assert launch(gradients, 2).results == [[False, False, True]] * 2


@pytest.mark.parametrize("way", REPLICATE)
def test_a_group_of_some_ranks_averages_among_itself(way: str) -> None:
    def mean(rank: int) -> float:
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        group = groups[rank in (1, 2)]
        model = nn.Linear(1, 1, bias=False)
        if way == "DataParallel":
            replica = DataParallel(model, group)
            replica(torch.full((1, 1), float(rank))).sum().backward()
            replica.finish()
        else:
            model(torch.full((1, 1), float(rank))).sum().backward()
            average_gradients(model, group)
        return float(gradient(model))

    assert launch(mean, 4).results == [1.5] * 4


def test_a_replica_that_is_replaced_frees_its_buckets() -> None:
    def is_gone(rank: int) -> bool:
        model = nn.Linear(1, 1, bias=False)
        first = DataParallel(model)
        watched = weakref.ref(first)
        first = DataParallel(model)  # as if the cell that makes the replica were run again
        return watched() is None

    assert launch(is_gone, 2).results == [True, True]


class Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1, bias=False)

    def forward(self, batch: Any) -> Tensor:
        return self.weight(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


@pytest.mark.parametrize("pack", [lambda x: (x, x[:1]), lambda x: {"inputs": x}], ids=["tuple", "dict"])
def test_a_share_is_counted_within_tuples_and_dicts_too(pack: Callable[[Tensor], Any]) -> None:
    def mean(rank: int) -> float:
        replica = DataParallel(Unpacks())
        replica(pack(torch.full((1 + 2 * rank, 1), float(rank)))).mean().backward()
        replica.finish()
        return float(gradient(replica.module, "weight.weight"))

    assert launch(mean, 2).results == [0.75, 0.75]


def test_an_evaluation_without_gradients_needs_no_finish() -> None:
    def mean(rank: int) -> float:
        replica = DataParallel(nn.Linear(1, 1, bias=False))
        replica(torch.full((1, 1), float(rank))).sum().backward()
        with torch.no_grad():
            replica(torch.ones(99, 1))
        replica.finish()
        return float(gradient(replica.module))

    assert launch(mean, 2).results == [0.5, 0.5]


def test_a_second_backward_before_finish_is_named() -> None:
    def go_back_twice(rank: int) -> None:
        replica = DataParallel(nn.Linear(2, 2))
        loss = replica(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.raises(RankFailed, match=r"a second backward\(\) before finish\(\)"):
        launch(go_back_twice, 2)


def refusals(rank: int, attempt: Callable[[int], Any]) -> tuple[str, float]:
    """What the ValueError on this rank says, and a sum over ranks that only works if nobody is left behind."""
    try:
        attempt(rank)
        text = ""
    except ValueError as refusal:
        text = str(refusal)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return text, float(ones)


def different_models(rank: int) -> None:
    DataParallel(nn.Linear(3, 2 + (rank == 1)))


def a_tensor_share_of_a_model(rank: int) -> None:
    """Whose other shares are on the other ranks."""
    DataParallel(tensor_parallel.ColumnParallelLinear(nn.Linear(3, 3)))


def a_stage_of_a_pipeline(rank: int) -> None:
    """Of two pipelines, rank 0 alone and ranks 1 and 2; one replica of a stage is not another one's."""
    dist.new_group([0])
    dist.new_group([1, 2])
    DataParallel(nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (different_models, "weight [3, 3] torch.float32 on rank 1"),
        (a_tensor_share_of_a_model, "give group=, the ranks that hold the same part"),
        (a_stage_of_a_pipeline, "give group=, the ranks that hold the same part"),
    ],
)
def test_ranks_that_disagree_are_all_told_so_and_none_is_left_waiting(
    attempt: Callable[[int], Any], words: str
) -> None:
    for text, total in launch(refusals, 3, (attempt,)).results:
        assert words in text
        assert total == 3


def test_parameters_without_a_gradient_on_any_rank_are_left_alone() -> None:
    def gradients(rank: int) -> list[float | None]:
        model = TwoWays()
        model(torch.full((3,), float(rank)), "left").backward()
        if rank == 1:
            model(torch.full((3,), 4.0), "right").backward()  # which counts as zeros on the other rank
        average_gradients(model)
        return [None if p.grad is None else float(p.grad[0]) for p in model.parameters()]

    assert launch(gradients, 2).results == [[0.5, 2.0, None]] * 2


def test_a_rank_outside_of_the_group_is_told() -> None:
    def attempt(rank: int) -> str:
        group = dist.new_group([0])
        if rank == 0:
            return ""
        with pytest.raises(ValueError) as refusal:
            DataParallel(nn.Linear(1, 1), group)
        return str(refusal.value)

    assert "group does not contain rank 1" in launch(attempt, 2).results[1]


def test_average_gradients_sends_each_parameter_once_and_nothing_else() -> None:
    def average(rank: int) -> None:
        model = TwoWays()
        model(torch.ones(3), "left").backward()
        average_gradients(model)

    spans = launch(average, 2).timeline.of(0)
    assert [(span.name, span.bytes) for span in spans if span.bytes] == [("all_reduce", 4 * (3 + 2))] * 3
