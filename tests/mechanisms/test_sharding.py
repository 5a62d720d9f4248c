"""Sharding, against one process that has the whole minibatch and against PyTorch's own ZeRO.

Every rank builds its model from a seed of its own, so nothing here passes without the first synchronization.

The ranks' gradients are added up in the order of the ranks, and optimizers work element by element, so one process that
computes the ranks' shares in turn has to arrive at the same numbers. Optimizers on flat tensors may group elements
into vector instructions differently, with a multiply-add fused here and not there: one rounding more or less in each of
a handful of operations per step. `nearly_equal` allows that, `close` also another order of the sums inside a gradient.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import re
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

from course_lib import Link, Pace, data, launch, timeline
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel, average_gradients
from course_lib.mechanisms.sharding import FullySharded, ShardedOptimizer, clip_grad_norm
from course_lib.model import GPTConfig, TinyGPT
from tests.mechanisms.training import (
    DTYPES,
    OPTIMIZERS,
    State,
    differ_by_at_most,
    equal,
    make_optimizer,
    minibatch,
    train_alone,
)

STEPS = 3
SAMPLES = 12
CONFIG = GPTConfig(layers=2, hidden=16, heads=2)
SUM_LENGTH = SAMPLES * CONFIG.sequence + CONFIG.ffn_width
ROUNDINGS = 16  # in one element's update with Adam, generously
EVERYTHING = "tied frozen uneven"
F32, F64 = DTYPES

Train = Callable[..., State]


def build(case: str, dtype: torch.dtype, seed: int = 0) -> TinyGPT:
    model = TinyGPT(replace(CONFIG, tied_embeddings="tied" in case), seed, dtype)
    if "frozen" in case:
        model.get_parameter("blocks.1.attention.query.weight").requires_grad_(False)
        model.get_parameter("blocks.0.token.weight").requires_grad_(False)
    return model


def samples_of(case: str, step: int) -> tuple[Tensor, Tensor]:
    return minibatch(step, SAMPLES - 1 if "uneven" in case else SAMPLES)


def shares(step: int, case: str) -> list[tuple[Tensor, Tensor]]:
    return batches.split(samples_of(case, step), dist.get_world_size())


def weighted_loss(model: nn.Module, share: tuple[Tensor, Tensor], case: str) -> Tensor:
    """What an average over ranks that takes all shares to be equal needs where they are not."""
    n_samples = len(samples_of(case, 0)[0])
    return data.answer_loss(model(share[0]), share[1]) * (len(share[0]) * dist.get_world_size() / n_samples)


def snapshot(model: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def close(state: State, reference: State) -> None:
    """n numbers of rounding error eps make an error of at most n eps relative to the sum of magnitudes."""
    differ_by_at_most(state, reference, STEPS * SUM_LENGTH)


def nearly_equal(state: State, reference: State) -> None:
    differ_by_at_most(state, reference, STEPS * ROUNDINGS)


def alone(case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    model = build(case, dtype)
    train_alone(model, optimizer_name, [samples_of(case, step) for step in range(STEPS)])
    return snapshot(model)


def train_on_shares_in_turn(case: str, dtype: torch.dtype, optimizer_name: str, n: int) -> State:
    """One process that computes the ranks' gradients one after the other and adds them up in this order."""
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


def train_sharded(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    sharded = FullySharded(build(case, dtype, seed=rank))
    optimizer = make_optimizer(optimizer_name, sharded)
    for step in range(STEPS):
        inputs, targets = shares(step, case)[rank]
        optimizer.zero_grad()
        data.answer_loss(sharded(inputs), targets).backward()
        optimizer.step()
    return sharded.state_dict()


def train_with_sharded_optimizer(
    rank: int,
    case: str,
    dtype: torch.dtype,
    optimizer_name: str,
    bucket_mb: float = 0.004,
    gradients: Any = None,
    is_averaged: bool = False,
) -> State:
    model = build(case, dtype, seed=rank)
    kind, options = OPTIMIZERS[optimizer_name]
    optimizer = ShardedOptimizer(model.parameters(), kind, gradients=gradients, bucket_mb=bucket_mb, **options)
    for step in range(STEPS):
        share = shares(step, case)[rank]
        optimizer.zero_grad()
        if is_averaged:
            data.answer_loss(model(share[0]), share[1]).backward()
            average_gradients(model, samples=len(share[0]))
        else:
            weighted_loss(model, share, case).backward()
        optimizer.step()
    return snapshot(model)


def train_local(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    return train_with_sharded_optimizer(rank, case, dtype, optimizer_name, gradients="local")


def train_averaged(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    return train_with_sharded_optimizer(rank, case, dtype, optimizer_name, gradients="local", is_averaged=True)


def train_sharded_gradients(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    return train_with_sharded_optimizer(rank, case, dtype, optimizer_name, gradients="sharded")


def train_with_fully_shard(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    warnings.simplefilter("ignore")
    model = build(case, dtype)  # it does not synchronize: every rank needs the same seed
    for block in list(model.blocks)[1:-1]:  # the ends may be tied, and belong to the root then
        fully_shard(block)
    fully_shard(model)
    optimizer = make_optimizer(optimizer_name, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        weighted_loss(model, shares(step, case)[rank], case).backward()
        optimizer.step()
    return {name: tensor.full_tensor().detach() for name, tensor in model.state_dict().items()}


def train_with_zero_redundancy(rank: int, case: str, dtype: torch.dtype, optimizer_name: str) -> State:
    warnings.simplefilter("ignore")
    replica = nn.parallel.DistributedDataParallel(build(case, dtype, seed=rank))
    kind, options = OPTIMIZERS[optimizer_name]
    trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    optimizer: Any = ZeroRedundancyOptimizer(trained, kind, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        weighted_loss(replica, shares(step, case)[rank], case).backward()
        optimizer.step()
    return snapshot(replica.module)


@functools.cache
def on_ranks(train: Train, n: int, *args: Any) -> list[State]:
    """Run once, however many tests look at it."""
    return launch(train, n, args, device="cpu").results


def possible(train: Train, case: str) -> str:
    """FullySharded wants equal shares."""
    return case.replace(" uneven", "") if train is train_sharded else case


WAYS = [
    pytest.param(train_local, id="ZeRO-1"),
    pytest.param(train_averaged, id="ZeRO-1 averaged"),
    pytest.param(train_sharded_gradients, id="ZeRO-2"),
    pytest.param(train_sharded, id="ZeRO-3"),
]


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize(
    ("case", "dtype", "n", "optimizer_name"),
    [  # dtypes, numbers of ranks and optimizers in pairs
        (EVERYTHING, F32, 2, "SGD"),
        (EVERYTHING, F64, 2, "Adam"),
        (EVERYTHING, F32, 4, "Adam"),
        (EVERYTHING, F64, 4, "SGD"),
    ],
    ids=str,
)
def test_training_is_that_of_one_process_with_the_whole_minibatch(
    train: Train, case: str, dtype: torch.dtype, n: int, optimizer_name: str
) -> None:
    case = possible(train, case)
    reference = alone(case, dtype, optimizer_name)
    for state in on_ranks(train, n, case, dtype, optimizer_name):
        close(state, reference)


@pytest.mark.parametrize("train", WAYS)
@pytest.mark.parametrize(("case", "dtype"), [("plain", F64), ("tied frozen", F32)], ids=str)
def test_two_ranks_follow_one_process_that_does_their_shares_in_turn(
    train: Train, case: str, dtype: torch.dtype
) -> None:
    optimizer_name = "SGD" if case == "plain" else "Adam"
    reference = train_on_shares_in_turn(case, dtype, optimizer_name, 2)
    for state in on_ranks(train, 2, case, dtype, optimizer_name):
        nearly_equal(state, reference)


@pytest.mark.parametrize(("n", "optimizer_name"), [(2, "Adam"), (4, "SGD")])
def test_training_is_that_of_fully_shard(n: int, optimizer_name: str) -> None:
    case = possible(train_sharded, EVERYTHING)
    theirs = on_ranks(train_with_fully_shard, n, case, F64, optimizer_name)[0]
    close(on_ranks(train_sharded, n, case, F64, optimizer_name)[0], theirs)


@pytest.mark.parametrize(("n", "optimizer_name"), [(2, "Adam"), (4, "SGD")])
def test_training_is_that_of_zero_redundancy_optimizer(n: int, optimizer_name: str) -> None:
    theirs = on_ranks(train_with_zero_redundancy, n, EVERYTHING, F64, optimizer_name)[0]
    for train in (train_local, train_sharded_gradients):
        close(on_ranks(train, n, EVERYTHING, F64, optimizer_name)[0], theirs)


def test_ranks_hold_the_same_bits_after_training() -> None:
    for train in (train_local, train_averaged, train_sharded_gradients, train_sharded):
        first, *others = on_ranks(train, 4, possible(train, EVERYTHING), torch.float32, "Adam")
        for state in others:
            equal(state, first)


@pytest.mark.parametrize("bucket_mb", [1e-9, 25])
def test_the_size_of_buckets_does_not_change_what_is_learned(bucket_mb: float) -> None:
    reference = alone(EVERYTHING, torch.float64, "SGD")
    for gradients in ("local", "sharded"):
        args = (EVERYTHING, torch.float64, "SGD", bucket_mb, gradients)
        for state in on_ranks(train_with_sharded_optimizer, 3, *args):
            close(state, reference)


# What a rank holds


def alive() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors of this process, by its address."""
    gc.collect()
    tensors: list[Tensor] = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage for storage in storages}


def added(before: dict[int, torch.UntypedStorage]) -> int:
    """Bytes that came since. Who holds `before` keeps that memory: gloo lets go of an earlier run's a moment late."""
    return sum(storage.nbytes() for address, storage in alive().items() if address not in before)


def settled(before: dict[int, torch.UntypedStorage]) -> int:
    """The same, after gloo's threads have let go of what they sent: once all of them sleep, look after look."""
    looks = 0
    while looks < 3:
        time.sleep(0.005)
        looks = 0 if is_gloo_awake() else looks + 1
    return added(before)


def is_gloo_awake() -> bool:
    """Whether one of its threads has something to do, be it that it waits for a core."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            if "gloo_runloop) R" in (task / "stat").read_text():
                return True
    return False


class Batch:
    """One share that is there before anything is counted."""

    def __init__(self, rank: int) -> None:
        self.inputs, self.targets = shares(0, "plain")[rank]

    def loss(self, model: nn.Module) -> Tensor:
        return data.answer_loss(model(self.inputs), self.targets)


def held_by_sharded_optimizer(rank: int, gradients: Any, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes on this rank: of parameters, of gradients after backward(), of the optimizer's state after a step."""
    batch = Batch(rank)
    before = alive()
    model = build("plain", dtype)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, gradients=gradients)
    parameters = settled(before)
    batch.loss(model).backward()
    if gradients == "sharded":
        optimizer.finish()
    with_gradients = settled(before)
    optimizer.step()
    optimizer.zero_grad()
    return parameters, with_gradients - parameters, settled(before) - parameters


def held_by_fully_sharded(rank: int, compute_dtype: torch.dtype | None) -> tuple[int, int, int]:
    batch = Batch(rank)
    before = alive()
    sharded = FullySharded(build("plain", torch.float32), compute_dtype=compute_dtype)
    optimizer = torch.optim.Adam(sharded.parameters())
    parameters = settled(before)
    batch.loss(sharded).backward()
    with_gradients = settled(before)
    optimizer.step()
    optimizer.zero_grad()
    return parameters, with_gradients - parameters, settled(before) - parameters


@pytest.mark.parametrize(
    ("n", "way", "args", "parts"),
    [  # Rajbhandari et al. 2020, section 5: bytes for each parameter on every rank, and bytes divided by N
        (4, held_by_sharded_optimizer, ("local", torch.float32), ((4, 0), (4, 0), (0, 8))),
        (4, held_by_sharded_optimizer, ("sharded", torch.float32), ((4, 0), (0, 4), (0, 8))),
        (2, held_by_fully_sharded, (None,), ((0, 4), (0, 4), (0, 8))),
        # In mixed precision with Adam, K = 12: the two averages and the master, which is there from the start.
        (2, held_by_sharded_optimizer, ("local", torch.bfloat16), ((2, 4), (2, 0), (0, 8))),
        # Gradients add up in float32, but no 16-bit shard is kept next to the master: 16 bytes as in the paper.
        (4, held_by_fully_sharded, (torch.bfloat16,), ((0, 4), (0, 4), (0, 8))),
    ],
    ids=["ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-1 bfloat16", "ZeRO-3 bfloat16"],
)
def test_a_rank_holds_what_the_zero_paper_says(n: int, way: Any, args: tuple, parts: tuple) -> None:
    sizes = [parameter.numel() for parameter in build("plain", torch.float32).parameters()]
    psi, blocks = sum(sizes), CONFIG.layers + 2
    for held in launch(way, n, args, device="cpu").results:
        for measured, (everywhere, sharded) in zip(held, parts, strict=True):
            padding = blocks * n * (everywhere + sharded)
            small = 8 * len(sizes)  # Adam counts its steps, for each parameter
            assert 0 <= measured - (everywhere + sharded / n) * psi <= padding + small


def test_a_block_is_whole_only_while_it_or_the_one_before_it_computes() -> None:
    """Eight blocks of equal size. Counted inside every block, forward and at the end of its backward pass."""
    config = GPTConfig(layers=8, hidden=32, heads=2)

    def most(rank: int) -> tuple[int, int, int, int]:
        before = alive()
        model = TinyGPT(config, seed=rank)
        psi = sum(parameter.numel() for parameter in model.parameters())
        block = sum(parameter.numel() for parameter in model.blocks[1].parameters())
        forward, backward = [0], [0]
        for name, parameter in model.named_parameters():  # a block's last gradient comes when it holds most
            if name.endswith("attention_norm.weight"):
                parameter.register_post_accumulate_grad_hook(lambda _: backward.append(settled(before)))
        sharded = FullySharded(model)
        for name, module in model.named_modules():
            if name.endswith("mlp.up"):
                module.register_forward_hook(lambda module, inputs, output: forward.append(settled(before)))
        sharded(one_token).sum().backward()
        return max(forward), max(backward), psi * 4, block * 4

    one_token = torch.zeros(1, 1, dtype=torch.int64)
    for n in (2, 4):
        for forward, backward, psi, block in launch(most, n, device="cpu").results:
            assert block < forward - psi / n < 2.5 * block  # two blocks, and the activations of one token
            assert block < backward - 2 * psi / n < 5 * block  # and a block's gradients, to be sent and arriving


def test_outside_of_its_computation_a_block_has_no_memory_but_its_shard() -> None:
    def storages(rank: int) -> list[tuple[bool, int]]:
        model, plain = build("tied frozen", torch.float32, rank), build("tied frozen", torch.float32)
        sharded = FullySharded(model)
        seen = []
        for is_trained in (False, True, False):
            with torch.set_grad_enabled(is_trained):
                loss = Batch(rank).loss(sharded)
                if is_trained:
                    loss.backward()
            storages = [parameter.untyped_storage() for parameter in model.parameters()]
            held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
            whole = [parameter for parameter in model.parameters() if parameter.dim() > 1]
            seen.append((held - 4 * sum(tensor.numel() for tensor in plain.parameters()) // 2 < 100, len(whole)))
        return seen

    assert launch(storages, 2, device="cpu").results == [[(True, 0)] * 3] * 2


# What a rank sends, and when


def train_steps(rank: int, way: str, steps: int) -> None:
    model: nn.Module = build("plain", torch.float32, rank)
    optimizer: torch.optim.Optimizer
    if way == "DataParallel":
        model = DataParallel(model)
    if way == "FullySharded":
        model = FullySharded(model)
    if way in ("local", "sharded"):
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, gradients=way)  # type: ignore[arg-type]
    else:
        optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        Batch(rank).loss(model).backward()
        if isinstance(model, DataParallel):
            model.finish()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("way", "halves"), [("DataParallel", 2), ("local", 2), ("sharded", 2), ("FullySharded", 3)])
def test_a_step_sends_as_much_as_the_zero_paper_says(way: str, halves: int) -> None:
    n, psi = 4, sum(parameter.numel() for parameter in build("plain", torch.float32).parameters())
    sent = [launch(train_steps, n, (way, steps), device="cpu").timeline.bytes_sent(0) for steps in (1, 2)]
    formula = halves * (n - 1) / n * 4 * psi
    blocks = CONFIG.layers + 2
    assert 0 <= sent[1] - sent[0] - formula <= halves * 4 * blocks * n + 16  # padding, and the number of samples


def test_each_block_is_gathered_while_the_one_before_it_computes() -> None:
    """Forward, and in the reverse order backward; with names for the sizes of the blocks' parameters."""

    def events(rank: int) -> list[str]:
        model = nn.Sequential(*(nn.Linear(width, width + 1, bias=False) for width in (1, 2, 3)))
        names = {2: "first", 6: "second", 12: "third"}
        seen: list[str] = []
        gather = dist.all_gather_single

        def logged(output: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert kwargs["async_op"]
            seen.append(f"gather {names[len(output)]}")
            return gather(output, *args, **kwargs)

        for layer, name in zip(model, names.values(), strict=True):
            layer.get_parameter("weight").register_post_accumulate_grad_hook(
                lambda _, name=name: seen.append(f"gradient {name}")
            )
        sharded = FullySharded(model)
        for layer, name in zip(model, names.values(), strict=True):
            layer.register_forward_pre_hook(lambda module, inputs, name=name: seen.append(f"compute {name}"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_single", logged)
            sharded(torch.ones(1, 1)).sum().backward()
        return seen

    assert launch(events, 2, device="cpu").results[1] == [
        *("gather first", "gather second", "compute first", "gather third", "compute second", "compute third"),
        *("gather third", "gather second", "gradient third", "gather first", "gradient second", "gradient first"),
    ]


def test_a_frozen_block_is_freed_as_soon_as_its_backward_pass_is_done() -> None:
    def sizes(rank: int) -> list[int]:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        model[2].requires_grad_(False)
        seen: list[int] = []
        for layer in (model[1], model[0]):
            layer.get_parameter("weight").register_post_accumulate_grad_hook(
                lambda _: seen.append(model[2].get_parameter("weight").dim())
            )
        FullySharded(model)(torch.ones(1, 2)).sum().backward()
        return seen

    assert launch(sizes, 2, device="cpu").results == [[1, 1]] * 2  # flat: this rank's part of it


def test_gathers_and_reductions_are_hidden_behind_the_computation() -> None:
    def one_step(rank: int) -> None:
        sharded = FullySharded(build("plain", torch.float32, rank))
        with timeline.compute("forward"):
            loss = Batch(rank).loss(sharded)
        with timeline.compute("backward"):
            loss.backward()

    pace = Pace({"forward": 1.0, "backward": 2.0}, Link(bandwidth=1e6))
    run = launch(one_step, 2, pace=pace, device="cpu")
    embedding, head = (4 * sum(p.numel() for p in TinyGPT(CONFIG).blocks[end].parameters()) for end in (0, -1))
    # Of two ranks each sends half of a block. Not hidden are the first gather of each pass, which in the forward pass
    # stands behind a number of 8 bytes, how many samples there are, and the last reduction.
    exposed = (8 + embedding / 2 + head / 2 + embedding / 2) / 1e6
    for rank in range(2):
        spans = run.timeline.of(rank)
        (forward,), (backward,) = ([span for span in spans if span.kind == kind] for kind in ("forward", "backward"))
        assert backward.end - forward.start == pytest.approx(1.0 + 2.0 + exposed, rel=1e-9)


def test_updates_are_marked_as_the_optimizers_time() -> None:
    run = launch(train_steps, 2, ("local", 3), device="cpu")
    assert [sum(span.kind == "optimizer" for span in run.timeline.of(rank)) for rank in range(2)] == [3, 3]


# FullySharded


def train_in(rank: int, dtype: torch.dtype, way: str) -> State:
    warnings.simplefilter("ignore")
    model: nn.Module = build("plain", torch.float32)
    if way == "ours":
        model = FullySharded(model, compute_dtype=dtype)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)  # ours adds up in float32, too
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = make_optimizer("Adam", model)
    for step in range(STEPS):
        inputs, targets = shares(step, "plain")[rank]
        optimizer.zero_grad()
        data.answer_loss(model(inputs).float(), targets).backward()
        optimizer.step()
    state = model.state_dict()
    return state if way == "ours" else {name: tensor.full_tensor() for name, tensor in state.items()}


def test_a_compute_dtype_leaves_the_masters_in_float32_and_agrees_with_fully_shard() -> None:
    ours, theirs, exact = (
        launch(train_in, 2, (dtype, way), device="cpu").results[0]
        for dtype, way in ((torch.bfloat16, "ours"), (torch.bfloat16, "theirs"), (torch.float32, "ours"))
    )
    nearly_equal(ours, theirs)
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    with pytest.raises(AssertionError):
        close(ours, exact)


def test_a_compute_dtype_halves_what_is_sent_and_converts_floating_point_inputs() -> None:
    def outputs(rank: int, compute_dtype: torch.dtype | None) -> torch.dtype:
        sharded = FullySharded(nn.Sequential(nn.Linear(40, 40, bias=False)), compute_dtype=compute_dtype)
        output = sharded(torch.ones(2, 40))
        output.sum().backward()
        assert all(shard.grad.dtype == torch.float32 for shard in sharded.parameters())
        return output.dtype

    half, full = (launch(outputs, 2, (dtype,), device="cpu") for dtype in (torch.bfloat16, None))
    assert half.results == [torch.bfloat16] * 2
    sent = {
        name: [sum(s.bytes for s in run.timeline.of(0) if s.name == name and s.bytes > 100) for run in (half, full)]
        for name in ("all_gather", "all_to_all")
    }
    assert all(of_half * 2 == of_full for of_half, of_full in sent.values())


def test_the_state_of_a_sharded_model_is_that_of_the_plain_one() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
            self.scale = nn.Parameter(torch.full((), 2.0))

    def states(rank: int) -> tuple[State, State]:
        model = Normed()
        nn.init.normal_(model.get_buffer("layers.1.running_mean"))
        before = snapshot(model)
        return before, FullySharded(model).state_dict()

    results = launch(states, 3, device="cpu").results
    first = results[0][0]
    for _, state in results:
        assert list(state) == list(first)
        equal(state, first)


def test_gradients_of_several_backward_passes_add_up() -> None:
    def gradients(rank: int) -> list[float]:
        sharded = FullySharded(nn.Linear(1, 1, bias=False))
        model = nn.Linear(1, 1, bias=False)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, gradients="sharded", lr=1.0)
        for micro_batch in range(3):
            x = torch.full((1, 1), float(rank + micro_batch))
            sharded(x).sum().backward()
            model(x).sum().backward()
        optimizer.finish()
        shards = [*sharded.parameters(), *optimizer.shards]
        return [float(shard.grad.sum()) for shard in shards if shard.grad is not None and rank == 0]

    assert launch(gradients, 2, device="cpu").results[0] == [0.5 + 1.5 + 2.5] * 2


def test_gradients_that_are_thrown_away_leave_nothing_behind() -> None:
    def weights(rank: int) -> list[float]:
        a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        optimizer = ShardedOptimizer([a, b], torch.optim.SGD, gradients="sharded", lr=1.0)
        (2 * a).backward()  # half of a bucket
        optimizer.zero_grad()
        (b * (2 * a)).backward()  # b's gradient comes first
        optimizer.step()
        return [float(a), float(b)]

    assert launch(weights, 2, device="cpu").results == [[-1.0, -1.0]] * 2


class TwoWays(nn.Module):
    """Layers of which it uses only the one it is told to, inside a tuple that also holds something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2, bias=False), Pair(), nn.Linear(2, 2, bias=False)])

    def forward(self, x: Tensor, way: int) -> dict[str, Any]:
        used, pair, _ = self.layers
        first, (second, _) = used(x), pair(x)
        return {"loss": (first, second)[way].sum()}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x @ self.weight, "and a word"


def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    def gradients(rank: int) -> list[list[float | None]]:
        sharded = FullySharded(TwoWays())
        seen = []
        for step in range(4):
            sharded.zero_grad()
            sharded(torch.full((1, 2), 2.0 + rank), way=step % 2)["loss"].backward()
            seen.append([None if shard.grad is None else float(shard.grad[0]) for shard in sharded.parameters()])
        return seen

    assert launch(gradients, 2, device="cpu").results == [[[2.5, None, None], [None, 2.5, None]] * 2] * 2


class Recomputed(nn.Module):
    def __init__(self, model: TinyGPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return tokens


def test_activations_may_be_recomputed() -> None:
    def gradients(rank: int, is_recomputed: bool) -> list[Any]:
        model = build("tied", torch.float64)
        sharded = FullySharded(Recomputed(model) if is_recomputed else model)
        Batch(rank).loss(sharded).backward()
        assert all(parameter.dim() == 1 for parameter in model.parameters())
        return [shard.grad for shard in sharded.parameters()]

    plain, recomputed = (launch(gradients, 2, (way,), device="cpu").results for way in (False, True))
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain[rank], recomputed[rank], strict=True))


def test_a_model_that_is_dropped_frees_its_shards() -> None:
    def is_gone(rank: int) -> list[bool]:
        gc.disable()
        sharded = FullySharded(build("plain", torch.float32))
        Batch(rank).loss(sharded).backward()
        model = build("plain", torch.float32)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, gradients="sharded")
        watched: list[weakref.ref[Any]] = [weakref.ref(sharded), weakref.ref(optimizer)]
        del sharded, optimizer
        gc.enable()
        return [reference() is None for reference in watched]

    assert launch(is_gone, 2, device="cpu").results == [[True, True]] * 2


# ShardedOptimizer is an optimizer


def test_schedulers_and_parameter_groups_work_as_with_the_plain_optimizer() -> None:
    def train(make: Callable[..., torch.optim.Optimizer], group: Any = None) -> State:
        model = build("plain", torch.float64)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        optimizer = make([{"params": matrices, "weight_decay": 0.3}, {"params": others}], torch.optim.AdamW, lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        for step in range(4):
            inputs, targets = samples_of("plain", step)
            optimizer.zero_grad()
            data.answer_loss(model(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(matrices), len(others)]
        return snapshot(model)

    def on_a_rank(rank: int) -> State:
        return train(ShardedOptimizer)

    reference = train(lambda groups, kind, **options: kind(groups, eps=1e-3, **options))
    state = launch(lambda rank: train(lambda g, kind, **o: ShardedOptimizer(g, kind, eps=1e-3, **o)), 2).results[0]
    nearly_equal(state, reference)


def test_the_state_of_a_sharded_optimizer_is_that_of_the_plain_one_and_goes_on_at_another_world_size() -> None:
    def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
        for step in steps:
            inputs, targets = samples_of("tied", step)
            optimizer.zero_grad()
            data.answer_loss(model(inputs), targets).backward()
            optimizer.step()

    def go_on(rank: int, steps: range, start: Any = None) -> tuple[State, dict[str, Any]]:
        model = build("tied frozen", torch.float64, rank)
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, bucket_mb=0.01, lr=0.01, eps=1e-3)
        if start:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(start[1])
        train(optimizer, model, steps)
        return snapshot(model), optimizer.state_dict()

    model = build("tied frozen", torch.float64)
    optimizer = make_optimizer("Adam", model)
    train(optimizer, model, range(2))
    halfway = launch(go_on, 3, (range(2),), device="cpu").results[2]
    plain, sharded = copy.deepcopy(optimizer.state_dict()), halfway[1]
    assert sharded["param_groups"] == plain["param_groups"]
    assert sharded["state"].keys() == plain["state"].keys()
    for number, state in plain["state"].items():
        nearly_equal(sharded["state"][number], state)
    train(optimizer, model, range(2, 4))
    for start in (halfway, (halfway[0], plain)):
        nearly_equal(launch(go_on, 2, (range(2, 4), start), device="cpu").results[1][0], snapshot(model))


def test_parameters_in_bfloat16_get_a_master_in_float32_that_survives_small_updates() -> None:
    """256 is followed by 258 in bfloat16. Updates of 0.25 are lost one by one, but not in a master."""

    def weights(rank: int) -> tuple[float, dict[str, Any], float]:
        weight = nn.Parameter(torch.full((3,), 256.0 + rank).bfloat16())
        optimizer = ShardedOptimizer([weight], torch.optim.SGD, lr=0.25, momentum=0.0)
        for _ in range(10):
            weight.grad = -torch.ones_like(weight)
            optimizer.step()
        state = optimizer.state_dict()["state"]
        again = nn.Parameter(torch.zeros(3).bfloat16())
        other = ShardedOptimizer([again], torch.optim.SGD, lr=0.25)
        other.load_state_dict(optimizer.state_dict())
        again.grad = -4 * torch.ones_like(weight)
        other.step()
        return float(weight[2]), state, float(again[2])

    for weight, state, again in launch(weights, 2, device="cpu").results:
        assert weight == 258.0  # 258.5 rounded to what bfloat16 has
        assert state[0]["master"].tolist() == [258.5] * 3
        assert again == 260.0  # 259.5, rounded


def test_the_gradients_norm_is_that_of_the_whole_model_and_can_be_clipped() -> None:
    def on_a_rank(rank: int, way: str, max_norm: float) -> tuple[float, State]:
        model: nn.Module = build("tied frozen", torch.float64)
        shards: list[nn.Parameter]
        if way == "FullySharded":
            model = FullySharded(model)
            shards = list(model.parameters())
            optimizer: torch.optim.Optimizer = make_optimizer("SGD", model)
        else:
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, gradients="sharded", lr=0.1, momentum=0.9)
            shards = optimizer.shards
        Batch(rank).loss(model).backward()
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.finish()
        norm = clip_grad_norm(shards, max_norm)
        optimizer.step()
        return float(norm), snapshot(model)

    for max_norm in (0.1, 100.0):
        model = build("tied frozen", torch.float64)
        optimizer = make_optimizer("SGD", model)
        inputs, targets = samples_of("plain", 0)
        data.answer_loss(model(inputs), targets).backward()
        expected = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        for way in ("FullySharded", "ShardedOptimizer"):
            for norm, state in launch(on_a_rank, 2, (way, max_norm), device="cpu").results:
                assert norm == pytest.approx(float(expected), rel=1e-12)
                differ_by_at_most(state, snapshot(model), SUM_LENGTH)


def test_a_group_of_some_ranks_shards_among_itself() -> None:
    def mean(rank: int) -> list[float]:
        groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
        group = groups[rank in (1, 2)]
        weight = nn.Parameter(torch.zeros(3))
        optimizer = ShardedOptimizer([weight], torch.optim.SGD, group, lr=1.0)
        (weight.sum() * rank).backward()
        optimizer.step()
        layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(layer.weight)
        sharded = FullySharded(layer, group)
        sharded(torch.full((1, 1), float(rank))).sum().backward()
        torch.optim.SGD(sharded.parameters(), lr=1.0).step()
        return [*weight.tolist(), *sharded.state_dict()["weight"].flatten().tolist()]

    assert launch(mean, 4, device="cpu").results == [[-1.5] * 4] * 4


# Bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"params": []}, "optimizer got an empty parameter list"),
        ({"params": [torch.zeros(2)]}, "params holds only frozen parameters"),
        ({"optimizer_cls": "Adam"}, "optimizer_cls='Adam' is no optimizer class"),
        ({"optimizer_cls": nn.Linear}, "is no optimizer class; give one such as torch.optim.Adam"),
        ({"optimizer_cls": torch.optim.LBFGS}, "optimizer_cls=LBFGS needs whole tensors"),
        ({"gradients": "some"}, "gradients='some' is unknown; choose one of local, sharded"),
        ({"bucket_mb": 0}, "bucket_mb=0 holds nothing"),
    ],
)
def test_arguments_of_a_sharded_optimizer_that_cannot_work_are_refused(arguments: dict[str, Any], words: str) -> None:
    usual = {"params": [nn.Parameter(torch.ones(2))], "optimizer_cls": torch.optim.Adam}
    with pytest.raises(ValueError, match=re.escape(words)):
        ShardedOptimizer(**{**usual, **arguments})


@pytest.mark.parametrize(
    ("model", "compute_dtype", "words"),
    [
        (nn.ReLU(), None, "model=ReLU has no parameters"),
        (nn.Linear(2, 2), torch.int8, "compute_dtype=torch.int8 cannot hold gradients"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused(model: nn.Module, compute_dtype: Any, words: str) -> None:
    with warnings.catch_warnings(), pytest.raises(ValueError, match=words):
        warnings.simplefilter("ignore")
        FullySharded(model, compute_dtype=compute_dtype)


def different_models(rank: int) -> None:
    FullySharded(nn.Linear(3, 2 + (rank == 1)))


def different_frozen(rank: int) -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(rank == 2)
    FullySharded(model)


def different_parameters(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in ((3,), (4 + rank // 2,))]
    ShardedOptimizer(parameters, torch.optim.SGD)


def twice(rank: int) -> None:
    FullySharded(FullySharded(nn.Linear(3, 2)).module)


def erase_gradients(rank: int) -> None:
    clip_grad_norm([], 0.0)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (different_models, "weight [2, 3] is listed only on rank 0, 2 of 3"),
        (different_frozen, "parameters the model has: bias (frozen) [2] is listed only on rank 0, 1 of 3"),
        (different_parameters, "params[1] [4] is listed only on rank 0, 1 of 3"),
        (twice, "model=Linear is sharded already; build it anew"),
        (erase_gradients, "max_norm=0.0 would erase or flip all gradients"),
    ],
)
def test_what_cannot_work_is_refused_on_all_ranks_and_none_is_left_waiting(
    attempt: Callable[[int], None], words: str
) -> None:
    def on_a_rank(rank: int) -> tuple[str, float]:
        with pytest.raises(ValueError) as refusal:
            attempt(rank)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return str(refusal.value), float(ones)

    for text, total in launch(on_a_rank, 3, device="cpu").results:
        assert words in text
        assert total == 3
