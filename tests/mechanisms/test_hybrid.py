"""All mechanisms on one mesh, against one process with plain PyTorch: one model, the whole minibatch, clip_grad_norm_.

Every rank builds its model from a seed of its own, so nothing here passes without the first synchronization. Tensor
ranks do not divide the vocabulary nor the hidden units, stages not the layers, replicas not the samples, and
micro-batches not the shares.

Cut or not, a gradient is a sum over samples x positions, of products that are themselves sums as long as the widest
layer, and n numbers of rounding error eps make an error of at most n eps relative to the sum of magnitudes. `close`
allows that, for each step, relative to the largest number in the tensor. Copies of a parameter have to have equal bits.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_lib import data, launch
from course_lib.mechanisms import mesh, tensor_parallel
from course_lib.mechanisms.hybrid import Mesh, ModelPart, make_optimizer, train_step
from course_lib.mechanisms.mixed_precision import LossScaler
from course_lib.mechanisms.pipeline import run_schedule
from course_lib.mechanisms.tensor_parallel import placements
from course_lib.model import GPTConfig, TinyGPT
from course_lib.schedules import SCHEDULES
from tests.mechanisms.training import OPTIMIZERS, State, differ_by_at_most, equal, minibatch

pytestmark = pytest.mark.long

STEPS = 2
SAMPLES = 11
CONFIG = GPTConfig(vocab=13, layers=3, hidden=16, heads=4, ffn_hidden=51)
SUM_LENGTH = SAMPLES * CONFIG.sequence + CONFIG.ffn_width
TWO_STAGES_PER_RANK = ("interleaved_1f1b", "zbv", "dualpipev")
F32, F64 = torch.float32, torch.float64

Sizes = tuple[int, int, int]
Case = tuple[Sizes, str, torch.dtype, str]  # mesh, schedule, dtype, what is special

EIGHT_RANKS: list[Case] = [
    ((2, 2, 2), "1f1b", F64, "tied clip zero sequence"),
    ((2, 2, 2), "gpipe", F32, "tied clip frozen padded"),
    ((2, 2, 2), "zbv", F32, "loose zero"),
    ((2, 2, 2), "dualpipev", F64, "tied clip zero sequence frozen"),
]
FOUR_RANKS: list[Case] = [
    ((1, 1, 4), "gpipe", F64, "tied clip sequence zero"),
    ((1, 4, 1), "zb_h2", F64, "tied clip zero frozen"),
    ((4, 1, 1), "1f1b", F32, "tied clip zero"),
    ((2, 2, 1), "zb_h1", F64, "tied clip zero Adam padded"),
    ((1, 2, 2), "interleaved_1f1b", F64, "clip sequence tied frozen"),
    ((2, 1, 2), "naive", F32, "frozen clip zero"),
]


def build(special: str, dtype: torch.dtype, seed: int = 0) -> TinyGPT:
    model = TinyGPT(replace(CONFIG, tied_embeddings="tied" in special), seed, dtype)
    if "frozen" in special:
        for name in ("blocks.1.attention.query.weight", "blocks.2.mlp_norm.weight", "blocks.0.token.weight"):
            model.get_parameter(name).requires_grad_(False)
    return model


def optimizer_of(special: str) -> tuple[Any, dict[str, Any]]:
    """SGD's updates are as long as the clipped gradients, so that a wrong norm is seen; Adam's are not."""
    return OPTIMIZERS["Adam"] if "Adam" in special else (torch.optim.SGD, {"lr": 0.1})


def max_norm_of(special: str) -> float | None:
    return 0.1 if "clip" in special else 100.0 if "loose" in special else None


@functools.lru_cache
def alone(special: str, dtype: torch.dtype, steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """The reference."""
    model, (kind, settings) = build(special, dtype), optimizer_of(special)
    optimizer, losses = kind(model.parameters(), **settings), []
    for step in range(steps):
        inputs, targets = padded(special, step)
        optimizer.zero_grad()
        loss = data.answer_loss(model(inputs), targets)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), max_norm_of(special) or math.inf))
        assert 0.2 < norm < 50  # so clipping is active with the one norm, and not with the other
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def make_part(mesh: Mesh, schedule: str, dtype: torch.dtype, special: str, seed: int = 0) -> ModelPart:
    n_stages = mesh.size("pp") * (2 if schedule in TWO_STAGES_PER_RANK else 1)
    m = max(1, min(4, SAMPLES // mesh.size("dp")))
    return ModelPart(build(special, dtype, seed), mesh, SCHEDULES[schedule](n_stages, m), "sequence" in special)


def optimize(part: ModelPart, special: str) -> Any:
    kind, settings = optimizer_of(special)
    return make_optimizer(part, kind, zero="zero" in special, **settings)


def train_all(rank: int, cases: list[Case], steps: int) -> list[Any]:
    """Of each case: the losses, the whole state, and what this rank has of it, by place on the tensor axis if cut."""
    meshes = {sizes: Mesh(*sizes) for sizes, *_ in cases}
    outcomes = []
    for sizes, schedule, dtype, special in cases:
        mesh = meshes[sizes]
        part = make_part(mesh, schedule, dtype, special, seed=rank)
        optimizer = optimize(part, special)
        losses = [train_step(part, optimizer, *padded(special, s), max_norm=max_norm_of(special)) for s in range(steps)]
        where = placements(part)
        places = {name: mesh.rank("tp") if where[name].is_sharded else None for name in where}
        outcomes.append((losses, full_state(part), {(name, places[name]): t for name, t in part.state_dict().items()}))
    return outcomes


def full_state(part: ModelPart) -> State:
    """The state_dict of the whole model."""
    return of_all_stages(part, tensor_parallel.full_state(part, part.mesh.group("tp")))


def of_all_stages(part: ModelPart, own: State) -> State:
    held: list[Any] = [None] * part.mesh.size("pp")
    dist.all_gather_object(held, own, group=part.mesh.group("pp"))
    return {name: tensor for state in held for name, tensor in state.items()}


def padded(special: str, step: int) -> tuple[Tensor, Tensor]:
    """A minibatch, in which every third sample may have one target less than the others."""
    inputs, targets = minibatch(step, SAMPLES)
    if "padded" in special:
        targets[::3, -1] = -100
    return inputs, targets


def close(state: State, reference: State, steps: int = STEPS) -> None:
    differ_by_at_most(state, reference, steps * SUM_LENGTH)


def copies_are_equal(held_by_rank: Sequence[dict[Any, Tensor]], is_tied: bool) -> None:
    found: dict[Any, Tensor] = {}
    for held in held_by_rank:
        for (name, place), tensor in held.items():
            if is_tied and name == f"blocks.{CONFIG.layers + 1}.output.weight":
                name = "blocks.0.token.weight"
            assert torch.equal(tensor, found.setdefault((name, place), tensor)), name


@pytest.mark.parametrize(("cases", "steps"), [(EIGHT_RANKS, 1), (FOUR_RANKS, STEPS)], ids=["8", "4"])
def test_training_is_that_of_one_process(cases: list[Case], steps: int) -> None:
    """What a step leaves behind for the next one does not depend on how many axes there are: four ranks tell."""
    n = math.prod(cases[0][0])
    results = launch(train_all, n, (cases, steps)).results
    for case, *by_rank in zip(cases, *results, strict=True):
        _, _, dtype, special = case
        model, _, expected = alone(special, dtype, steps)
        losses, states, held = zip(*by_rank, strict=True)
        assert all(own == losses[0] for own in losses)
        assert losses[0] == pytest.approx(expected, rel=steps * SUM_LENGTH * torch.finfo(dtype).eps)
        close(states[0], model.state_dict(), steps)
        for state in states[1:]:
            equal(state, states[0])
        copies_are_equal(held, "tied" in special)


# State


def go_on_and_begin_anew(rank: int) -> list[State]:
    """A step; then the second one with the same part and optimizer, and with others that have loaded their states."""
    special = "tied Adam frozen clip zero"
    first = make_part(Mesh(2, 2, 2), "1f1b", F64, special)
    optimizer = optimize(first, special)
    train_step(first, optimizer, *minibatch(0, SAMPLES), max_norm=max_norm_of(special))
    anew = make_part(first.mesh, "1f1b", F64, special, seed=rank + 9)
    anew_optimizer = optimize(anew, special)
    anew.load_state_dict(first.state_dict())
    anew_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for part, its_optimizer in ((first, optimizer), (anew, anew_optimizer)):
        train_step(part, its_optimizer, *minibatch(1, SAMPLES), max_norm=max_norm_of(special))
    return [full_state(first), full_state(anew)]


def test_who_begins_anew_with_a_state_goes_on_bit_for_bit() -> None:
    model, *_ = alone("tied Adam frozen clip", F64)
    for gone_on, anew in launch(go_on_and_begin_anew, 8).results:
        equal(anew, gone_on)
        close(gone_on, model.state_dict())


# Mixed precision


SCALES = {torch.bfloat16: 1.0, torch.float16: 2.0**10}


def in_sixteen_bits(model: TinyGPT, scale: float) -> State:
    """Plain PyTorch with float32 masters; the whole minibatch at once."""
    masters = [p.detach().to(F32) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        (scale * data.answer_loss(model(inputs).float(), targets)).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float() / scale, None
        nn.utils.clip_grad_norm_(masters, 0.1)
        optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.data.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, masters, strict=True))


def train_in_sixteen_bits(rank: int) -> list[State]:
    mesh = Mesh(2, 2, 2)
    return [train_in(mesh, dtype, scale) for dtype, scale in SCALES.items()]


def train_in(mesh: Mesh, dtype: torch.dtype, scale: float) -> State:
    scaler = LossScaler(scale) if dtype == torch.float16 else None
    part = make_part(mesh, "1f1b", dtype, "tied sequence")
    optimizer = optimize(part, "zero")
    for step in range(STEPS):
        train_step(part, optimizer, *minibatch(step, SAMPLES), scaler=scaler, max_norm=0.1)
    where, group, state, masters = placements(part), mesh.group("tp"), {}, dict[Tensor, Tensor]()
    for bucket in optimizer._buckets:
        masters |= zip(bucket.parameters, bucket.gather(), strict=True)
    for name, parameter in part.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, masters[parameter].to(dtype))
        state[name] = where[name].gather(masters[parameter], group)
    whole = of_all_stages(part, state)
    return {name: whole[name] for name, _ in build("tied", dtype).named_parameters()}


def distance(state: State, reference: State) -> float:
    return math.sqrt(sum(float((state[name].double() - reference[name]).square().sum()) for name in state))


def exactly(dtype: torch.dtype) -> tuple[State, State]:
    """Before and after training in float64, from where a model of this dtype starts."""
    model = build("tied", dtype).double()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs, targets = minibatch(step, SAMPLES)
        optimizer.zero_grad()
        data.answer_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return start, {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_sixteen_bits_are_as_near_to_the_truth_as_in_one_process() -> None:
    """In 16 bits rounding is all there is to see, so the yardstick is how far it takes plain PyTorch from float64."""
    found = launch(train_in_sixteen_bits, 8).results[0]
    for (dtype, scale), state in zip(SCALES.items(), found, strict=True):
        start, exact = exactly(dtype)
        theirs = distance(in_sixteen_bits(build("tied", dtype), scale), exact)
        assert 0 < theirs < 0.1 * distance(start, exact)
        assert distance(state, exact) < 2 * theirs


def one_layer() -> TinyGPT:
    return TinyGPT(replace(CONFIG, layers=1), 0, torch.bfloat16)


def many_micro_batches(rank: int, m: int) -> State:
    """The gradients of m times the same sample, in as many micro-batches."""
    part = ModelPart(one_layer(), Mesh(1, 1, 1), SCHEDULES["gpipe"](1, m))
    inputs, targets = (tokens[:1].repeat(m, 1) for tokens in minibatch(0, SAMPLES))
    run_schedule(part.schedule, part.stages, inputs, targets, part.loss_fn(1.0))
    return {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}


def test_micro_batches_are_added_up_in_32_bits() -> None:
    """A running sum in bfloat16 would stop at 256 micro-batches. One bit is allowed for a logit that rounds up here and
    down there."""
    m = 300
    model = one_layer()
    inputs, targets = (tokens[:1] for tokens in minibatch(0, SAMPLES))
    (data.answer_loss(model(inputs).float(), targets) / m).backward()
    gradients = launch(many_micro_batches, 1, (m,), timeout=300).results[0]
    for name, parameter in model.named_parameters():
        expected = m * parameter.grad.float()
        assert float((gradients[name] - expected).abs().max()) <= 2**-7 * float(expected.abs().max()), name


def overflow_on_one(rank: int) -> list[tuple[float, bool]]:
    """In the second of three steps a gradient on rank 5 is infinite: the scale, and whether there was an update."""
    part = make_part(Mesh(2, 2, 2), "1f1b", torch.float16, "tied")
    optimizer, scaler = optimize(part, "zero"), LossScaler(2.0**10)
    step = -1
    if rank == 5:
        parameter = next(p for name, p in part.named_parameters() if name.endswith("mlp.up.weight"))
        parameter.register_hook(lambda gradient: gradient * math.inf if step == 1 else gradient)
    outcome = []
    for step in range(3):
        before = full_state(part)
        train_step(part, optimizer, *minibatch(step, SAMPLES), scaler=scaler, max_norm=0.1)
        after = full_state(part)
        outcome.append((scaler.scale_factor, any(not torch.equal(after[name], before[name]) for name in after)))
    return outcome


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for outcome in launch(overflow_on_one, 8).results:
        assert outcome == [(1024.0, True), (512.0, False), (512.0, True)]


# GPUs


def one_mesh_after_another(rank: int) -> list[float]:
    """With the second group that a pipeline has on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "init_device_mesh", lambda _, *sizes, **names: init_device_mesh("cpu", *sizes, **names))
        found = []
        for _ in range(2):
            one = Mesh(1, 2, 2, device="cuda")
            numbers = torch.tensor(float(rank))
            dist.all_reduce(numbers, group=one.way_back)
            found.append(float(numbers))
            one.close()
    return found


def test_meshes_can_be_made_one_after_another_with_a_way_back() -> None:
    assert launch(one_mesh_after_another, 4).results == [[2.0, 2.0], [4.0, 4.0], [2.0, 2.0], [4.0, 4.0]]


# Bad input


def test_sizes_that_do_not_make_all_ranks_and_a_loss_that_is_no_number_are_named_on_all_ranks() -> None:
    def refusals(rank: int) -> tuple[str, str]:
        with pytest.raises(ValueError) as wrong_sizes:
            Mesh(3, 1, 1)
        part = make_part(Mesh(2, 2, 1), "1f1b", F32, "")
        optimizer = optimize(part, "")
        next(part.parameters()).data.fill_(math.nan)
        with pytest.raises(ValueError) as no_number:
            train_step(part, optimizer, *minibatch(0, SAMPLES))
        return str(wrong_sizes.value), str(no_number.value)

    for sizes, loss in launch(refusals, 4).results:
        assert "dp=3 x pp=1 x tp=1 makes 3 ranks, and there are 4; choose sizes that make 4" in sizes
        assert "loss=nan, so nothing was updated" in loss
