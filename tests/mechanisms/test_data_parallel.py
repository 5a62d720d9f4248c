"""Data parallelism, against one process that has the whole minibatch and against DistributedDataParallel.

Every rank builds its model from a seed of its own, so nothing here passes without the first synchronization.

Where the arithmetic is the same in the same order, bits have to be equal: with two ranks the only sum between them
is a + b = b + a. Elsewhere sums run in another order. A gradient is a sum over samples x positions, of products that
are themselves sums as long as the widest layer, and n numbers of rounding error eps make an error of at most n eps
relative to the sum of magnitudes. `close` allows that relative to the largest number in the tensor.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import RankFailed, Span, data, launch, timeline
from course_lib.mechanisms import batches, data_parallel
from course_lib.mechanisms.data_parallel import DataParallel, average_gradients
from course_lib.model import GPTConfig, TinyGPT
from tests.mechanisms.training import (
    DTYPES,
    State,
    differ_by_at_most,
    equal,
    make_optimizer,
    minibatch,
    snapshot,
    train_alone,
)

STEPS = 3
SAMPLES = 12
CONFIG = GPTConfig(layers=1, hidden=16, heads=2)
SUM_LENGTH = SAMPLES * CONFIG.sequence + CONFIG.ffn_width

Train = Callable[..., State]


def build(case: str, dtype: torch.dtype, seed: int = 0) -> TinyGPT:
    model = TinyGPT(replace(CONFIG, tied_embeddings="tied" in case), seed, dtype)
    if "frozen" in case:
        model.get_parameter("blocks.1.attention.query.weight").requires_grad_(False)
        model.get_parameter("blocks.0.token.weight").requires_grad_(False)
    return model


def samples_of(case: str, step: int) -> tuple[Tensor, Tensor]:
    return minibatch(step, SAMPLES - 1 if "uneven" in case else SAMPLES)


def close(state: State, reference: State) -> None:
    differ_by_at_most(state, reference, STEPS * SUM_LENGTH)


def alone(case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    model = build(case, dtype)
    train_alone(model, optimizer_name, [samples_of(case, step) for step in range(STEPS)])
    return snapshot(model)


def train_on_shares_in_turn(case: str, dtype: torch.dtype, optimizer_name: str, n: int) -> State:
    """The reference for bits: one process that computes the ranks' gradients one after the other and adds them up."""
    model = build(case, dtype)
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        batch = samples_of(case, step)
        total: State = {}
        for inputs, targets in batches.split(batch, n):
            optimizer.zero_grad()
            data.answer_loss(model(inputs), targets).backward()
            weight = len(inputs) * n / len(batch[0])
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad * weight
        for name, gradient in total.items():
            model.get_parameter(name).grad = gradient / n
        optimizer.step()
    return snapshot(model)


def train_by_averaging(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    model = build(case, dtype, seed=rank)
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        inputs, targets = batches.split(samples_of(case, step), dist.get_world_size())[rank]
        optimizer.zero_grad()
        data.answer_loss(model(inputs), targets).backward()
        average_gradients(model, samples=len(inputs) if "uneven" in case else None)
        optimizer.step()
    return snapshot(model)


def train_replica(
    rank: int, case: str, dtype: torch.dtype, optimizer_name: str, bucket_mb: float = 25, overlap: bool = True
) -> State:
    replica = DataParallel(build(case, dtype, seed=rank), bucket_mb=bucket_mb, overlap=overlap)
    optimizer = make_optimizer(optimizer_name, replica)
    for step in range(STEPS):
        inputs, targets = batches.split(samples_of(case, step), dist.get_world_size())[rank]
        optimizer.zero_grad()
        data.answer_loss(replica(inputs), targets).backward()
        replica.finish()
        optimizer.step()
    return snapshot(replica.module)


def train_with_torch(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    """DistributedDataParallel. It takes all shares to be equal, so the loss has to carry the weight of this one."""
    replica = nn.parallel.DistributedDataParallel(build(case, dtype, seed=rank))
    optimizer = make_optimizer(optimizer_name, replica)
    n = dist.get_world_size()
    for step in range(STEPS):
        batch = samples_of(case, step)
        inputs, targets = batches.split(batch, n)[rank]
        optimizer.zero_grad()
        (data.answer_loss(replica(inputs), targets) * (len(inputs) * n / len(batch[0]))).backward()
        optimizer.step()
    return snapshot(replica.module)


def on_ranks(train: Train, n: int, *args: Any) -> list[State]:
    return launch(train, n, args, device="cpu").results


def gradient(model: nn.Module, name: str = "weight") -> Tensor:
    found = model.get_parameter(name).grad
    assert found is not None
    return found


TRAINS = (train_by_averaging, train_replica)
WAYS = [pytest.param(train, id=name) for train, name in zip(TRAINS, ("average_gradients", "DataParallel"), strict=True)]
EVERYTHING = "tied frozen uneven"


F32, F64 = DTYPES
AGAINST_ONE_PROCESS: list[tuple[Train, str, torch.dtype, int, str]] = [
    (train_by_averaging, "plain", F32, 2, "SGD"),
    (train_replica, "plain", F64, 4, "Adam"),
    (train_replica, "tied", F32, 4, "SGD"),
    (train_by_averaging, "tied", F64, 2, "Adam"),
    (train_replica, "frozen", F32, 2, "Adam"),
    (train_by_averaging, "frozen", F64, 4, "SGD"),
    (train_by_averaging, "uneven", F32, 4, "Adam"),
    (train_replica, "uneven", F64, 2, "SGD"),
    (train_by_averaging, EVERYTHING, F32, 4, "SGD"),
    (train_replica, EVERYTHING, F64, 2, "Adam"),
]
AGAINST_TORCH: list[tuple[str, torch.dtype, int, str]] = [
    ("plain", F32, 2, "SGD"),
    ("plain", F64, 2, "Adam"),
    ("plain", F64, 4, "SGD"),
    (EVERYTHING, F32, 4, "Adam"),
    (EVERYTHING, F64, 2, "SGD"),
]


@pytest.mark.parametrize("rows", [AGAINST_ONE_PROCESS, AGAINST_TORCH], ids=["one process", "torch"])
def test_every_two_settings_meet(rows: list[tuple[Any, ...]]) -> None:
    """Most mistakes show where two settings meet, and a tenth of all combinations is enough for each two to do so."""
    columns = list(zip(*rows, strict=True))
    for first, second in itertools.combinations(range(len(columns)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(itertools.product(columns[first], columns[second]))


@pytest.mark.parametrize(("train", "case", "dtype", "n", "optimizer_name"), AGAINST_ONE_PROCESS)
def test_training_is_that_of_one_process_with_the_whole_minibatch(
    train: Train, case: str, dtype: torch.dtype, n: int, optimizer_name: str
) -> None:
    reference = alone(case, dtype, optimizer_name)
    for state in on_ranks(train, n, case, dtype, optimizer_name):
        close(state, reference)


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize("case", ["plain", "tied frozen"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_ranks_get_the_bits_of_one_process_that_does_their_shares_in_turn(
    train: Train, case: str, dtype: torch.dtype
) -> None:
    for optimizer_name in ("SGD", "Adam"):
        reference = train_on_shares_in_turn(case, dtype, optimizer_name, 2)
        for state in on_ranks(train, 2, case, dtype, optimizer_name):
            equal(state, reference)


@pytest.mark.parametrize("case", ["plain", EVERYTHING])
def test_averaging_in_place_and_in_buckets_gives_two_ranks_the_same_bits(case: str) -> None:
    averaged, in_buckets = (on_ranks(train, 2, case, torch.float32, "Adam")[1] for train in TRAINS)
    equal(averaged, in_buckets)


@pytest.mark.parametrize(("case", "dtype", "n", "optimizer_name"), AGAINST_TORCH)
def test_training_is_that_of_distributed_data_parallel(
    case: str, dtype: torch.dtype, n: int, optimizer_name: str
) -> None:
    has_same_order = n == 2 and case == "plain"
    theirs = on_ranks(train_with_torch, n, case, dtype, optimizer_name)[0]
    for train in TRAINS:
        for state in on_ranks(train, n, case, dtype, optimizer_name):
            (equal if has_same_order else close)(state, theirs)


@pytest.mark.parametrize("case", ["plain", EVERYTHING])
def test_overlap_changes_when_gradients_travel_and_not_a_bit_of_them(case: str) -> None:
    with_overlap, without = (
        on_ranks(train_replica, 4, case, torch.float32, "Adam", 0.004, overlap)[0] for overlap in (True, False)
    )
    equal(with_overlap, without)


@pytest.mark.parametrize("bucket_mb", [1e-9, 0.004, 0.02])
def test_the_size_of_buckets_does_not_change_what_is_learned(bucket_mb: float) -> None:
    reference = alone(EVERYTHING, torch.float64, "SGD")
    for state in on_ranks(train_replica, 4, EVERYTHING, torch.float64, "SGD", bucket_mb):
        close(state, reference)


def one_step(rank: int, bucket_mb: float, overlap: bool = True, case: str = "plain") -> None:
    """A second step of training: the first one also exchanges the sizes of the shares."""
    replica = DataParallel(build(case, torch.float32, seed=rank), bucket_mb=bucket_mb, overlap=overlap)
    inputs, targets = batches.split(samples_of(case, 0), dist.get_world_size())[rank]
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


@pytest.mark.parametrize("case", ["plain", "tied", "frozen"])
def test_each_gradient_travels_once_with_one_number_more_in_each_bucket(case: str) -> None:
    n_bytes = sum(p.nbytes for p in build(case, torch.float32).parameters() if p.requires_grad)
    for bucket_mb in (25, 0.004):
        spans = launch(one_step, 2, (bucket_mb, True, case), device="cpu").timeline.of(0)
        buckets = all_reduces(spans)
        assert sum(span.bytes for span in buckets) == n_bytes + 4 * len(buckets)  # 2 (n - 1) / n = 1 for two ranks
        assert (len(buckets) == 1) == (bucket_mb == 25)


def test_buckets_hold_no_more_than_their_size_unless_one_parameter_is_larger() -> None:
    spans = launch(one_step, 2, (0.004,), device="cpu").timeline.of(0)
    largest = 16 * 64 * 4
    assert all(span.bytes - 4 <= max(0.004 * 2**20, largest) for span in all_reduces(spans))


def test_with_overlap_buckets_leave_during_the_backward_pass_and_without_it_after() -> None:
    def posted(rank: int, overlap: bool) -> tuple[int, int]:
        """Buckets that have left at the end of the backward pass, and at the end of the step."""
        replica = DataParallel(build("plain", torch.float32), bucket_mb=0.004, overlap=overlap)
        inputs, targets = batches.split(samples_of("plain", 0), 2)[rank]
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
        for early, all_in_all in launch(posted, 2, (overlap,), device="cpu").results:
            assert all_in_all > 4
            assert early == (all_in_all if overlap else 0)


def test_a_bucket_leaves_when_its_share_of_the_backward_pass_is_done() -> None:
    def fractions(rank: int) -> list[float]:
        reached: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data_parallel, "progress", reached.append)
            model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False))
            replica = DataParallel(model, bucket_mb=1e-9)
            replica(torch.ones(2, 4)).sum().backward()
            replica.finish()
        return reached

    for reached in launch(fractions, 2, device="cpu").results:
        assert reached == pytest.approx([2 / 20, 8 / 20, 1.0])


def test_construction_gives_every_rank_the_parameters_and_buffers_of_the_first() -> None:
    def states(rank: int) -> tuple[State, State]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        nn.init.normal_(model.get_buffer("1.running_mean"))
        model.get_parameter("0.bias").requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return before, DataParallel(model).module.state_dict()

    results = launch(states, 3, device="cpu").results
    assert not torch.equal(results[0][0]["0.weight"], results[1][0]["0.weight"])
    for _, after in results:
        equal(after, results[0][0])


def test_frozen_parameters_neither_travel_nor_change() -> None:
    state = launch(train_replica, 2, ("frozen", torch.float32, "Adam"), device="cpu").results[1]
    start = build("frozen", torch.float32)
    for name, parameter in start.named_parameters():
        assert (f"{name} grad" in state) == parameter.requires_grad
        assert torch.equal(state[name], parameter) != parameter.requires_grad


@pytest.mark.parametrize("overlap", [True, False])
def test_accumulating_without_sync_gives_the_whole_minibatch_and_sends_it_once(overlap: bool) -> None:
    """Both ranks cut their unequal shares (4 and 3 samples) into 2 micro-batches that weigh by their size."""
    inputs, targets = (tensor[:7] for tensor in samples_of("plain", 0))

    def accumulated(rank: int) -> State:
        replica = DataParallel(build("plain", torch.float64, seed=rank), overlap=overlap)
        share = batches.split((inputs, targets), 2)[rank]
        first, last = batches.micro_batches(share, 2)
        with replica.no_sync():
            (data.answer_loss(replica(first[0]), first[1]) * len(first[0]) / len(share[0])).backward()
        (data.answer_loss(replica(last[0]), last[1]) * len(last[0]) / len(share[0])).backward()
        replica.finish()
        return snapshot(replica.module)

    reference = build("plain", torch.float64)
    data.answer_loss(reference(inputs), targets).backward()
    run = launch(accumulated, 2, device="cpu")
    for state in run.results:
        close(state, snapshot(reference))
    sent = [span for span in run.timeline.of(0) if span.name == "all_reduce" and span.bytes]
    assert len(sent) == 2  # the sizes of the shares, and the one bucket


def test_gradients_accumulated_entirely_without_sync_are_sent_by_finish() -> None:
    def accumulated(rank: int) -> list[float]:
        replica = DataParallel(nn.Linear(1, 1, bias=False))
        with replica.no_sync():
            for _ in range(3):
                replica(torch.full((1, 1), float(rank))).sum().backward()
        replica.finish()
        return gradient(replica.module).flatten().tolist()

    assert launch(accumulated, 2, device="cpu").results == [[1.5], [1.5]]


def test_shares_may_change_from_step_to_step() -> None:
    sizes = [(3, 5), (1, 6), (4, 4), (7, 1), (0, 3)]

    def gradients(rank: int) -> list[float]:
        replica = DataParallel(nn.Linear(1, 1, bias=False).double())
        means = []
        for step in range(len(sizes)):
            replica.zero_grad()
            before = sum(sizes[step][:rank])
            share = torch.arange(before, before + sizes[step][rank], dtype=torch.float64)[:, None]
            replica(share).mean().backward()
            replica.finish()
            means.append(float(gradient(replica.module)))
        return means

    expected = [(a + b - 1) / 2 for a, b in sizes]  # the mean of 0, 1, ..., a + b - 1
    for means in launch(gradients, 2, device="cpu").results:
        assert means == pytest.approx(expected, rel=16 * torch.finfo(torch.float64).eps)


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

    for seen in launch(gradients, 2, device="cpu").results:
        assert seen == [[1.5, 1.0], [1.0, 1.5]] * 2


@pytest.mark.parametrize("tiny", [-0.0, -1e-45])  # half of the smallest number rounds to -0.0
def test_a_gradient_of_minus_zero_is_one_and_none_is_none(tiny: float) -> None:
    def gradients(rank: int) -> list[bool]:
        replica = DataParallel(TwoWays())
        replica(torch.full((3,), tiny), ("left", "right")[rank]).backward()
        replica.finish()
        return [parameter.grad is None for parameter in replica.parameters()]

    assert launch(gradients, 2, device="cpu").results == [[False, False, True]] * 2


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x * parameter.to(x.dtype)).sum() for parameter in (self.a, self.b, self.c)]).sum()


def test_parameters_of_several_dtypes_travel_in_buckets_of_their_own() -> None:
    def gradients(rank: int) -> list[tuple[torch.dtype, list[float]]]:
        replica = DataParallel(Mixed())
        replica(torch.full((2,), 1.0 + rank)).backward()
        replica.finish()
        found = [gradient(replica.module, name) for name in ("a", "b", "c")]
        return [(tensor.dtype, tensor.tolist()) for tensor in found]

    expected = [(dtype, [2.0, 2.0]) for dtype in (torch.float64, torch.bfloat16, torch.float32)]
    assert launch(gradients, 3, device="cpu").results == [expected] * 3


@pytest.mark.parametrize("train", WAYS)
def test_a_group_of_some_ranks_averages_among_itself(train: Train) -> None:
    def mean(rank: int) -> float:
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        group = groups[rank in (1, 2)]
        model = nn.Linear(1, 1, bias=False)
        if train is train_replica:
            replica = DataParallel(model, group)
            replica(torch.full((1, 1), float(rank))).sum().backward()
            replica.finish()
        else:
            model(torch.full((1, 1), float(rank))).sum().backward()
            average_gradients(model, group)
        return float(gradient(model))

    assert launch(mean, 4, device="cpu").results == [1.5] * 4


def test_two_replicas_of_the_same_model_do_not_disturb_each_other() -> None:
    def gradients(rank: int) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        seen = []
        for replica in 2 * [DataParallel(model), DataParallel(model)]:
            replica.zero_grad()
            replica(torch.full((1, 1), float(rank))).sum().backward()
            replica.finish()
            seen.append(float(gradient(model)))
        return seen

    run = launch(gradients, 2, device="cpu")
    assert run.results == [[0.5] * 4] * 2
    sent = [span for span in run.timeline.of(0) if span.name == "all_reduce" and span.bytes]
    assert len(sent) == 2 + 4  # the sizes of the shares for each replica, and a bucket for each step


def test_a_replica_that_is_replaced_frees_its_buckets() -> None:
    def is_gone(rank: int) -> bool:
        model = nn.Linear(1, 1, bias=False)
        first = DataParallel(model)
        watched = weakref.ref(first)
        first = DataParallel(model)  # as if the cell that makes the replica were run again
        return watched() is None

    assert launch(is_gone, 2, device="cpu").results == [True, True]


class Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(1, 1, bias=False)

    def forward(self, batch: Any) -> Tensor:
        return self.weight(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


@pytest.mark.parametrize(
    "pack", [lambda x: (x,), lambda x: [x, x[:1]], lambda x: {"inputs": x}], ids=["tuple", "list", "dict"]
)
def test_a_share_is_counted_within_tuples_lists_and_dicts_too(pack: Callable[[Tensor], Any]) -> None:
    def mean(rank: int) -> float:
        replica = DataParallel(Unpacks())
        replica(pack(torch.full((1 + 2 * rank, 1), float(rank)))).mean().backward()
        replica.finish()
        return float(gradient(replica.module, "weight.weight"))

    assert launch(mean, 2, device="cpu").results == [0.75, 0.75]


def test_after_a_refused_forward_pass_the_next_one_begins_anew() -> None:
    def mean(rank: int) -> float:
        replica = DataParallel(nn.Linear(1, 1, bias=False))
        replica(torch.ones(2, 1))  # and then something goes wrong with the loss
        with pytest.raises(RuntimeError, match="a forward pass with 2 samples and one with 3"):
            replica(torch.ones(3, 1))
        replica(torch.full((3, 1), float(rank))).mean().backward()
        replica.finish()
        return float(gradient(replica.module))

    assert launch(mean, 2, device="cpu").results == [0.5, 0.5]


def test_a_rank_with_an_empty_share_may_leave_out_the_backward_pass() -> None:
    def mean(rank: int) -> float:
        replica = DataParallel(nn.Linear(1, 1, bias=False))
        loss = replica(torch.full((2 * rank, 1), 3.0)).mean()
        if rank:
            loss.backward()
        replica.finish()
        return float(gradient(replica.module))

    assert launch(mean, 2, device="cpu").results == [3.0, 3.0]


def test_an_evaluation_without_gradients_needs_no_finish() -> None:
    def mean(rank: int) -> float:
        replica = DataParallel(nn.Linear(1, 1, bias=False))
        replica(torch.full((1, 1), float(rank))).sum().backward()
        with torch.no_grad():
            replica(torch.ones(99, 1))
        replica.finish()
        return float(gradient(replica.module))

    assert launch(mean, 2, device="cpu").results == [0.5, 0.5]


def forget_finish(replica: DataParallel, x: Tensor) -> None:
    replica(x).sum().backward()
    replica(x)


def finish_twice(replica: DataParallel, x: Tensor) -> None:
    replica(x).sum().backward()
    replica.finish()
    replica.finish()


def finish_too_early(replica: DataParallel, x: Tensor) -> None:
    replica(x)
    replica.finish()


def step_too_early(replica: DataParallel, x: Tensor) -> None:
    replica(x).sum().backward()
    torch.optim.SGD(replica.parameters()).step()


def go_back_twice(replica: DataParallel, x: Tensor) -> None:
    loss = replica(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (forget_finish, r"finish\(\) was not called after the last backward\(\)"),
        (finish_twice, r"finish\(\) has nothing to finish"),
        (finish_too_early, r"finish\(\) was called before backward\(\)"),
        (step_too_early, r"step\(\) came before finish\(\)"),
        (go_back_twice, r"a second backward\(\) before finish\(\)"),
    ],
)
def test_a_mistake_in_the_order_of_calls_is_named(
    mistake: Callable[[DataParallel, Tensor], None], words: str, overlap: bool
) -> None:
    def on_a_rank(rank: int) -> None:
        mistake(DataParallel(nn.Linear(2, 2), overlap=overlap), torch.ones(1, 2))

    with pytest.raises(RankFailed, match=words):
        launch(on_a_rank, 2, device="cpu")


@pytest.mark.parametrize("bucket_mb", [0, -1, float("nan")])
def test_a_bucket_that_holds_nothing_is_refused(bucket_mb: float) -> None:
    with pytest.raises(ValueError, match=rf"bucket_mb={bucket_mb}"):
        DataParallel(nn.Linear(1, 1), bucket_mb=bucket_mb)


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


def some_gradients(rank: int) -> None:
    model = TwoWays()
    model(torch.ones(3), "left").backward()
    if rank == 1:
        model(torch.ones(3), "right").backward()
    average_gradients(model)


def no_gradient_on_one_rank(rank: int) -> None:
    model = TwoWays()
    if rank != 2:
        model(torch.ones(3), "left").backward()
    average_gradients(model)


def different_models(rank: int) -> None:
    DataParallel(nn.Linear(3, 2 + (rank == 1)))


def gradients_of_another_dtype(rank: int) -> None:
    model = TwoWays().to(torch.float64 if rank == 1 else torch.float32)
    model(torch.ones(3), "left").backward()
    average_gradients(model)


def samples_on_one_rank_only(rank: int) -> None:
    model = TwoWays()
    model(torch.ones(3), "left").backward()
    average_gradients(model, samples=5 if rank == 0 else None)


def no_samples_on_one_rank(rank: int) -> None:
    model = TwoWays()
    model(torch.ones(3), "left").backward()
    average_gradients(model, samples=2 - rank)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (some_gradients, r"right [3] is listed only on rank 1 of 3"),
        (no_gradient_on_one_rank, r"left [3] is listed only on rank 0, 1 of 3"),
        (different_models, r"weight [2, 3] is listed only on rank 0, 2 of 3"),
        (gradients_of_another_dtype, "left [3] is listed only on rank 0, 2 of 3 as torch.float32"),
        (samples_on_one_rank_only, "samples is 5, None, None on the ranks"),
        (no_samples_on_one_rank, "samples is 2, 1, 0 on the ranks"),
    ],
)
def test_ranks_that_disagree_are_all_told_so_and_none_is_left_waiting(
    attempt: Callable[[int], Any], words: str
) -> None:
    for text, total in launch(refusals, 3, (attempt,), device="cpu").results:
        assert words in text
        assert total == 3


def test_parameters_without_a_gradient_on_any_rank_are_left_alone() -> None:
    def gradients(rank: int) -> list[float | None]:
        model = TwoWays()
        model(torch.full((3,), float(rank)), "left").backward()
        average_gradients(model)
        return [None if p.grad is None else float(p.grad[0]) for p in model.parameters()]

    assert launch(gradients, 2, device="cpu").results == [[0.5, None, None]] * 2


def test_an_optimizer_of_something_else_steps_while_gradients_travel() -> None:
    def other(rank: int) -> float:
        replica, weight = DataParallel(nn.Linear(1, 1)), nn.Parameter(torch.zeros(1))
        replica(torch.ones(1, 1)).sum().backward()
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight], lr=1.0).step()
        replica.finish()
        return float(weight)

    assert launch(other, 2, device="cpu").results == [-1.0, -1.0]
