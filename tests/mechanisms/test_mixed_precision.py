"""Mixed precision, against the same arithmetic written down by hand and against torch.amp.

By hand: float32 weights, cast to 16 bits inside the autograd graph, so that autograd itself carries the gradients
back into float32. Nothing else differs, so these comparisons demand equal bits. torch.amp casts in the same way, but
keeps some layers in float32; on a model of linear layers alone it has to give the same bits too.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from course_lib import data, launch
from course_lib.mechanisms import batches
from course_lib.mechanisms.collectives import all_reduce_in
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import TinyGPT
from tests.mechanisms.ring import contribution, ring_sum
from tests.mechanisms.training import CONFIG, DTYPES, State, build, equal, gradient_of, minibatch

STEPS = 8
SAMPLES = 12
SIXTEEN = [torch.float16, torch.bfloat16]
TOO_LARGE = 2.0**24  # a loss scale at which float16 overflows in the first steps
Case = tuple[tuple[int, ...], torch.dtype, torch.dtype | None]  # shape, dtype of the tensor and of the sums

dtypes = pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
wide_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return data.answer_loss(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](parameters)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}


def snapshot(model: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(model: TinyGPT, master: MasterWeights, scaler: LossScaler | None = None) -> list[bool]:
    """Which steps were taken and not skipped."""
    taken = []
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        loss = loss_of(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        taken.append(master.step())
    return taken


# Master weights


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", ["plain", "tied frozen"])
@wide_dtypes
def test_without_rounding_it_is_plain_training_bit_for_bit(dtype: torch.dtype, case: str, optimizer: str) -> None:
    model, reference = build(case, dtype), build(case, dtype)
    assert all(train(model, MasterWeights(model.parameters(), OPTIMIZERS[optimizer])))
    plain = make_optimizer(optimizer, reference.parameters())
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        plain.zero_grad()
        loss_of(reference(inputs), targets).backward()
        plain.step()
    equal(snapshot(model), snapshot(reference))


def cast_by_hand(model: nn.Module, dtype: torch.dtype, inputs: Tensor) -> Tensor:
    """What a model with float32 weights computes from their casts; gradients go through the cast."""
    cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, cast, (inputs,))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", ["plain", "tied frozen"])
@dtypes
def test_training_in_16_bits_is_that_of_float32_weights_cast_by_hand(
    dtype: torch.dtype, case: str, optimizer: str
) -> None:
    model = build(case, dtype)
    master = MasterWeights(model.parameters(), OPTIMIZERS[optimizer])
    train(model, master)
    reference = build(case, dtype).float()
    by_hand = make_optimizer(optimizer, [p for p in reference.parameters() if p.requires_grad])
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        by_hand.zero_grad()
        loss_of(cast_by_hand(reference, dtype, inputs), targets).backward()
        by_hand.step()
    trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(master.master_parameters, trained, strict=True))
    equal(snapshot(model), snapshot(reference.to(dtype)))


def test_clipping_sees_complete_and_unscaled_gradients() -> None:
    norms = []
    model = build("plain", torch.bfloat16)
    scaler = LossScaler(2.0**10)
    master = MasterWeights(model.parameters(), OPTIMIZERS["SGD"], scaler=scaler)
    inputs, targets = minibatch(0, SAMPLES)
    scaler.scale(loss_of(model(inputs), targets)).backward()
    master.step(clip=lambda parameters: norms.append(nn.utils.clip_grad_norm_(parameters, 0.5)))
    reference = build("plain", torch.bfloat16).float()
    loss_of(cast_by_hand(reference, torch.bfloat16, inputs), targets).backward()
    assert norms == [nn.utils.clip_grad_norm_(reference.parameters(), 0.5)]
    make_optimizer("SGD", reference.parameters()).step()
    equal(snapshot(model), snapshot(reference.to(torch.bfloat16)))


def test_unscaling_by_hand_before_the_step_is_refused_as_it_would_divide_twice() -> None:
    weight, scaler = nn.Parameter(torch.ones(1)), LossScaler()
    master = MasterWeights([weight], torch.optim.SGD, scaler, lr=1)
    scaler.scale(weight.sum()).backward()
    master.accumulate()
    scaler.unscale_and_update(master.master_parameters)
    with pytest.raises(RuntimeError, match=r"no loss was scaled since .* step\(clip=\.\.\.\)"):
        master.step()


def test_a_closure_is_no_argument_of_step() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        MasterWeights([nn.Parameter(torch.ones(1))], torch.optim.SGD).step(lambda: None)  # type: ignore[arg-type, misc]


# Parameters that are set from outside, and a training that goes on


@dtypes
def test_masters_follow_a_model_that_has_loaded_other_weights(dtype: torch.dtype) -> None:
    model, loaded = build("tied frozen", dtype), build("tied frozen", dtype, seed=5)
    master = MasterWeights(model.parameters(), OPTIMIZERS["SGD"])
    model.load_state_dict(loaded.state_dict())
    train(model, master)
    reference = MasterWeights(loaded.parameters(), OPTIMIZERS["SGD"])
    train(loaded, reference)
    equal(snapshot(model), snapshot(loaded))
    assert all(map(torch.equal, master.master_parameters, reference.master_parameters))


@pytest.mark.parametrize("model_is_loaded", ["before", "after", "never"])
def test_a_training_that_is_resumed_has_the_bits_of_one_that_was_not_interrupted(model_is_loaded: str) -> None:
    def begin(seed: int) -> tuple[TinyGPT, MasterWeights, LossScaler]:
        model, scaler = build("plain", torch.float16, seed), LossScaler(2.0**10, growth_interval=5)
        return model, MasterWeights(model.parameters(), OPTIMIZERS["AdamW"], scaler), scaler

    model, master, scaler = begin(seed=0)
    assert all(train(model, master, scaler))
    assert scaler.state_dict() == {"scale_factor": 2.0**11, "finite_in_a_row": 3}
    on_disk = io.BytesIO()
    torch.save([model.state_dict(), master.state_dict()], on_disk)
    resumed, its_master, its_scaler = begin(seed=7)
    own, state = torch.load(io.BytesIO(on_disk.getvalue()))
    if model_is_loaded == "before":
        resumed.load_state_dict(own)
    its_master.load_state_dict(state)
    if model_is_loaded == "after":
        resumed.load_state_dict(own)
    equal(snapshot(resumed), own)
    assert train(model, master, scaler) == train(resumed, its_master, its_scaler)
    equal(snapshot(resumed), snapshot(model))
    assert all(map(torch.equal, its_master.master_parameters, master.master_parameters))
    assert its_scaler.state_dict() == scaler.state_dict()


# Adding up micro-batches


@pytest.mark.parametrize(("dtype", "stalls_at"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_micro_batches_stall_in_16_bits_and_add_up_in_32(dtype: torch.dtype, stalls_at: int) -> None:
    def gradient(in_32_bits: bool) -> float:
        weight = nn.Parameter(torch.zeros(1, dtype=dtype))
        master = MasterWeights([weight], torch.optim.SGD, lr=1)
        for _ in range(2 * stalls_at):
            weight.sum().backward()
            if in_32_bits:
                master.accumulate()
        master.step()
        return -master.master_parameters[0].item()

    assert gradient(in_32_bits=False) == stalls_at
    assert gradient(in_32_bits=True) == 2 * stalls_at


def test_what_was_accumulated_stays_when_a_bucket_of_gradients_is_filled_again() -> None:
    weight, bucket = nn.Parameter(torch.zeros(1)), torch.ones(1)
    master = MasterWeights([weight], torch.optim.SGD, lr=1)
    for number in (1.0, 2.0):
        weight.grad = bucket.fill_(number)
        master.accumulate()
    assert master.master_parameters[0].grad.tolist() == [3.0]


# Scaling the loss

# A step's gradient, to be scaled; or what makes the scaled one overflow whatever the scale.
STEP = st.one_of(st.floats(-4, 4, width=32), st.sampled_from([2.0**100, 2.0**120, float("inf"), float("nan")]))


@given(
    steps=st.lists(STEP, min_size=1, max_size=30),
    scale=st.sampled_from([1.0, 1000.0, 2.0**16, 2.0**30]),
    interval=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_scales_skips_and_parameters_agree_with_grad_scaler_step_for_step(
    steps: list[float], scale: float, interval: int
) -> None:
    mine, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours = LossScaler(scale, True, interval)
    amp = torch.amp.GradScaler("cpu", scale, growth_interval=interval)
    my_optimizer, their_optimizer = make_optimizer("SGD", [mine]), make_optimizer("SGD", [theirs])
    for gradient in steps:
        for parameter, optimizer, scaled in ((mine, my_optimizer, ours.scale), (theirs, their_optimizer, amp.scale)):
            optimizer.zero_grad()
            scaled(parameter.sum()).backward()
            parameter.grad = gradient_of(parameter) * gradient
        if ours.unscale_and_update([mine]):
            my_optimizer.step()
        amp.step(their_optimizer)
        amp.update()
        assert ours.scale_factor == amp.get_scale()
        assert torch.equal(mine, theirs)


class Layers(nn.Sequential):
    """Linear layers alone, which torch.amp computes in 16 bits from end to end."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            super().__init__(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
        self.to(dtype)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@dtypes
def test_a_whole_training_agrees_with_torch_amp_bit_for_bit(dtype: torch.dtype, optimizer: str) -> None:
    """Autocast, GradScaler and float32 weights; with overflows, as the scale begins high and grows every third step."""
    inputs = torch.randn(20, 12, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(20) % 5

    reference, amp = Layers(dtype).float(), torch.amp.GradScaler("cpu", TOO_LARGE, growth_interval=3)
    theirs = make_optimizer(optimizer, reference.parameters())
    model, scaler = Layers(dtype), LossScaler(TOO_LARGE, growth_interval=3)
    master = MasterWeights(model.parameters(), OPTIMIZERS[optimizer], scaler=scaler)
    taken = []
    for _ in range(20):
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(reference(inputs), targets)
        theirs.zero_grad()
        amp.scale(loss).backward()
        amp.step(theirs)
        amp.update()
        our_loss = nn.functional.cross_entropy(model(inputs.to(dtype)).float(), targets)
        scaler.scale(our_loss).backward()
        taken.append(master.step())
        assert torch.equal(our_loss, loss)
        assert scaler.scale_factor == amp.get_scale()
    assert 5 < sum(taken) < 20 if dtype == torch.float16 else all(taken)
    assert all(torch.equal(a, b) for a, b in zip(master.master_parameters, reference.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *DTYPES], ids=str)
@pytest.mark.parametrize("scale", [2.0**-10, 2.0**20])
def test_a_power_of_two_changes_no_bit_where_nothing_under_or_overflows(scale: float, dtype: torch.dtype) -> None:
    states = []
    for scaler in (None, LossScaler(scale, dynamic=False)):
        model = build("tied frozen", dtype)
        train(model, MasterWeights(model.parameters(), OPTIMIZERS["SGD"], scaler=scaler), scaler)
        states.append(snapshot(model))
    equal(*states)


def test_a_static_scale_stays_and_its_overflows_are_skipped() -> None:
    model, scaler = build("plain", torch.float16), LossScaler(2.0**30, dynamic=False)
    master = MasterWeights(model.parameters(), OPTIMIZERS["AdamW"], scaler=scaler)
    before = snapshot(model)
    assert not any(train(model, master, scaler))
    assert scaler.scale_factor == 2.0**30
    equal(snapshot(model), before)
    assert not master.optimizer.state


def test_a_scale_saves_a_small_gradient_from_float16() -> None:
    def step(scaler: LossScaler | None) -> float:
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
        master = MasterWeights([weight], torch.optim.SGD, scaler=scaler, lr=1)
        loss = (weight.float() * 2.0**-30).sum()
        (loss if scaler is None else scaler.scale(loss)).backward()
        master.step()
        return -master.master_parameters[0].item()

    assert step(None) == 0
    assert step(LossScaler(2.0**16)) == 2.0**-30


# On ranks


def overflow_on_the_last(rank: int) -> dict[str, tuple[bool, float, float]]:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = {}
    for name, group in {"everyone": None, "row": rows[rank // 2]}.items():
        scaler = LossScaler(group=group)
        weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
        master = MasterWeights([weight], torch.optim.SGD, scaler=scaler, lr=1)
        scaler.scale(weight.float().sum() * (2.0**16 if rank == 3 else 0.25)).backward()
        found[name] = master.step(), scaler.scale_factor, weight.item()
    return found


def test_an_overflow_on_one_rank_is_skipped_on_all_ranks_of_the_group() -> None:
    skipping = {"everyone": {0, 1, 2, 3}, "row": {2, 3}}
    for rank, found in enumerate(launch(overflow_on_the_last, 4).results):
        for group, result in found.items():
            assert result == ((False, 2.0**15, 1.0) if rank in skipping[group] else (True, 2.0**16, 0.75))


def train_replica(rank: int, case: str, dtype: torch.dtype, optimizer: str, sharded: bool) -> tuple[State, list[bool]]:
    n = dist.get_world_size()
    replica = DataParallel(build(case, dtype, seed=rank))
    scaler = LossScaler(TOO_LARGE, growth_interval=3)
    make: Any = OPTIMIZERS[optimizer]
    if sharded:  # an optimizer that updates some of the copies on each rank and sends them to the others
        make = partial(ZeroRedundancyOptimizer, optimizer_class=make)
    master = MasterWeights(replica.parameters(), make, scaler=scaler)
    taken = []
    for step in range(STEPS):
        inputs, targets = (batches.split(part, n)[rank] for part in minibatch(step, SAMPLES))
        scaler.scale(loss_of(replica(inputs), targets)).backward()
        replica.finish()
        taken.append(master.step())
    return snapshot(replica.module), taken


def train_on_shares_in_turn(case: str, dtype: torch.dtype, optimizer: str, n: int) -> tuple[State, list[bool]]:
    """The reference: one process, weights cast by hand, GradScaler; each share's gradient rounded as on its rank."""
    wide = torch.promote_types(dtype, torch.float32)
    model = build(case, dtype).to(wide)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    theirs, amp = make_optimizer(optimizer, trained), torch.amp.GradScaler("cpu", TOO_LARGE, growth_interval=3)
    taken = []
    for step in range(STEPS):
        total = [torch.zeros_like(parameter, dtype=dtype) for parameter in trained]
        for inputs, targets in zip(*(batches.split(part, n) for part in minibatch(step, SAMPLES)), strict=True):
            loss = amp.scale(loss_of(cast_by_hand(model, dtype, inputs), targets))
            for sum_, gradient in zip(total, torch.autograd.grad(loss, trained), strict=True):
                sum_ += gradient.to(dtype)
        for parameter, sum_ in zip(trained, total, strict=True):
            parameter.grad = (sum_ / n).to(wide)
        before = amp.get_scale()
        amp.step(theirs)
        amp.update()
        taken.append(amp.get_scale() >= before)
    return snapshot(model.to(dtype)), taken


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_two_replicas_get_the_bits_of_one_process(dtype: torch.dtype, sharded: bool) -> None:
    """With two ranks the one sum between them is a + b = b + a. float16 overflows on the way."""
    for case, optimizer in (("plain", "SGD"), ("tied frozen", "AdamW")):
        reference, expected = train_on_shares_in_turn(case, dtype, optimizer, 2)
        assert all(expected) == (dtype != torch.float16)
        for state, taken in launch(train_replica, 2, (case, dtype, optimizer, sharded)).results:
            assert taken == expected
            equal(state, reference)


@wide_dtypes
def test_four_replicas_train_as_one_process_up_to_rounding(dtype: torch.dtype) -> None:
    """A gradient is a sum over samples x positions of products, sums themselves; n terms make an error of n eps."""
    reference, _ = train_on_shares_in_turn("tied frozen", dtype, "SGD", 4)
    allowed = STEPS * (SAMPLES * CONFIG.sequence + CONFIG.ffn_width) * torch.finfo(dtype).eps
    for state, _ in launch(train_replica, 4, ("tied frozen", dtype, "SGD", False)).results:
        for name, tensor in state.items():
            assert (tensor - reference[name]).abs().max() <= allowed * max(1, float(reference[name].abs().max()))


@dtypes
def test_four_replicas_in_16_bits_stay_equal_and_skip_together(dtype: torch.dtype) -> None:
    results = launch(train_replica, 4, ("tied frozen", dtype, "AdamW", False)).results
    for state, taken in results:
        assert taken == results[0][1]
        equal(state, results[0][0])
    assert all(results[0][1]) == (dtype == torch.bfloat16)


# All-reduce in low precision


def wide_sum(tensors: list[Tensor], accumulate: torch.dtype) -> Tensor:
    """Added up in rank order in a wider dtype, rounded once."""
    total = torch.zeros_like(tensors[0], dtype=accumulate)
    for tensor in tensors:
        total = total + tensor
    return total.to(tensors[0].dtype)


def all_reduced(rank: int, dtype: torch.dtype, cases: list[Case]) -> list[Tensor]:
    found = []
    for shape, own, accumulate in cases:
        tensor = contribution(rank, shape, own)
        assert all_reduce_in(dtype, accumulate)(tensor) is tensor
        found.append(tensor)
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@dtypes
def test_the_sum_is_rounded_at_each_hop_or_once_and_equal_on_all_ranks(dtype: torch.dtype, n: int) -> None:
    shapes: list[tuple[int, ...]] = [(7, 5), (2,), (0, 3), ()]
    cases = list(itertools.product(shapes, (dtype, torch.float32), (None, torch.float32, torch.float64)))
    results = launch(all_reduced, n, (dtype, cases)).results
    for case, (shape, own, accumulate) in enumerate(cases):
        rounded = [contribution(rank, shape, own).to(dtype) for rank in range(n)]
        expected = wide_sum(rounded, accumulate) if accumulate else ring_sum(rounded)
        for on_this_rank in results:
            assert on_this_rank[case].dtype == own
            assert torch.equal(on_this_rank[case], expected.to(own))


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_both_ways_send_half_of_what_float32_would(accumulate: torch.dtype | None) -> None:
    n, elements = 4, 240
    case = (elements,), torch.float32, accumulate
    timeline = launch(all_reduced, n, (torch.bfloat16, [case])).timeline
    assert [timeline.bytes_sent(rank) for rank in range(n)] == [2 * (n - 1) * elements * 2 // n] * n


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_a_group_sums_views_in_place_among_itself(accumulate: torch.dtype | None) -> None:
    def in_groups(rank: int) -> Tensor:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        whole = torch.full((4, 6), float(rank + 1))
        all_reduce_in(torch.float16, accumulate)(whole.T[::2], groups[rank % 2])
        return whole

    for rank, whole in enumerate(launch(in_groups, 3).results):
        expected = torch.full((4, 6), float(rank + 1))
        expected[:, ::2] = 2 if rank == 1 else 4
        assert torch.equal(whole, expected)
