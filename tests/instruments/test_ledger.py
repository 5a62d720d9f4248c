"""The memory ledger, against formulas and against sums calculated by hand.

Every expected number is an integer that the test derives from shapes and dtypes, so equality is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_lib import data, launch
from course_lib.instruments import ledger
from course_lib.instruments.ledger import Bytes, Ledger, Sample, count
from course_lib.mechanisms import batches
from course_lib.mechanisms.data_parallel import DataParallel
from course_lib.model import GPTConfig, TinyGPT

CONFIG = GPTConfig(layers=3, hidden=16, heads=2)


def numbers(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, samples: int = 4) -> None:
    inputs, targets = data.examples([(10 + 7 * sample, 99 - 5 * sample) for sample in range(samples)])
    data.answer_loss(model(inputs), targets).backward()
    if optimizer:
        optimizer.step()


def block_input(config: GPTConfig, b: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(b, config.sequence, config.hidden, dtype=dtype, requires_grad=True)


def saved_by_block(config: GPTConfig, b: int, dtype: torch.dtype) -> int:
    """Bytes by the formula of the ledger's docstring, for one Transformer block on the CPU."""
    s, h, a, f = config.sequence, config.hidden, config.heads, config.ffn_width
    e = dtype.itemsize
    return s * b * (e * (8 * h + 2 * f + 4) + max(e, 4) * a)


SHAPES = [
    (GPTConfig(hidden=16, heads=2, sequence=8), 3),
    (GPTConfig(hidden=32, heads=4, sequence=24), 1),
    (GPTConfig(hidden=48, heads=3, sequence=33, ffn_hidden=40), 2),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("config", "b"), SHAPES)
def test_a_block_saves_what_the_formula_counts(config: GPTConfig, b: int, dtype: torch.dtype) -> None:
    block = TinyGPT(config, dtype=dtype).blocks[1]
    with Ledger(block) as opened:
        output = block(block_input(config, b, dtype))
        assert opened.now.activations == saved_by_block(config, b, dtype)
        output.sum().backward()
        assert opened.now.activations == 0


@pytest.mark.parametrize(("config", "b"), [(GPTConfig(hidden=64, heads=4, sequence=s), 2) for s in (8, 64)])
def test_the_difference_from_korthikanti_is_dropout_and_the_scores_that_are_computed_anew(
    config: GPTConfig, b: int
) -> None:
    """Korthikanti's s b h (34 + 5 a s / h) bytes, at 16 bits, minus masks and scores, plus statistics omitted there."""
    s, h, a = config.sequence, config.hidden, config.heads
    published = s * b * (34 * h + 5 * a * s)
    dropout_masks = 2 * s * b * h + a * s * s * b
    scores_after_softmax_and_after_dropout = 2 * 2 * a * s * s * b
    norms_and_log_sum_exp = s * b * (2 * 2 * 2 + 4 * a)
    block = TinyGPT(config, dtype=torch.bfloat16).blocks[1]
    with Ledger(block) as opened:
        output = block(block_input(config, b, torch.bfloat16))
        measured = opened.now.activations
    expected = published - dropout_masks - scores_after_softmax_and_after_dropout + norms_and_log_sum_exp
    assert measured == expected
    del output


def test_attention_that_keeps_its_scores_saves_a_s_s_b_more() -> None:
    """A plain softmax saves 5 a s s b, which scaled_dot_product_attention recomputes: avoided, not uncounted."""
    query, key, value = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    with Ledger(nn.Identity()) as opened:
        output = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        assert opened.now.activations == (3 * 2 * 4 * 8 * 16 + 2 * 4 * 8 * 8) * 4
    del output


def saved_by_model(samples: int) -> int:
    tokens = samples * 9 * 8  # int64; the inputs are a view of whole texts
    head = samples * 8 * (2 * 16 + 2) * 4
    log_probabilities, targets, weight = samples * 8 * 12 * 4, samples * 8 * 8, 4
    return tokens + 3 * saved_by_block(CONFIG, samples, torch.float32) + head + log_probabilities + targets + weight


def test_activations_grow_turn_and_fall() -> None:
    model = TinyGPT(CONFIG)
    with Ledger(model) as opened:
        step(model, samples=4)
    events = [(sample.event, sample.held.activations) for sample in opened.samples]
    assert events == [("start", 0), ("turn", saved_by_model(4)), ("end", 0)]
    assert opened.samples[-1].held.gradients == 4 * numbers(model)
    assert opened.peak.held.total == max(sample.held.total for sample in opened.samples)


def test_micro_batches_in_flight_each_hold_their_activations() -> None:
    model = TinyGPT(CONFIG).blocks[1:-1]
    one = saved_by_block(CONFIG, 2, torch.float32)
    with Ledger(model) as opened:
        outputs: list[Tensor] = []
        for m in range(1, 5):
            outputs.append(model(block_input(CONFIG, 2, torch.float32)))
            assert opened.now.activations == m * 3 * one
        for m in (3, 2, 1, 0):
            outputs.pop(0).sum().backward()
            assert opened.now.activations == m * 3 * one
    assert [sample.event for sample in opened.samples].count("turn") == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_hold_their_inputs_only(reentrant: bool) -> None:
    """One block at a time is recomputed, which reentrant checkpointing shows."""
    stage = TinyGPT(CONFIG).blocks[1:-1]
    inputs = block_input(CONFIG, 2, torch.float32)

    def checkpointed() -> Tensor:
        x = inputs
        for block in stage.children():
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    with Ledger(stage) as opened:
        output = checkpointed()
        held = opened.now.activations
        assert held == 3 * inputs.nbytes
        output.sum().backward()
        assert opened.now.activations == 0
    # The input of the recomputed block is held already; checkpointing detaches it, with the same storage.
    most = held + saved_by_block(CONFIG, 2, torch.float32) - inputs.nbytes if reentrant else held
    assert max(sample.held.activations for sample in opened.samples) == most


def test_checkpointing_gives_the_same_gradients_under_a_ledger() -> None:
    def gradient(watched: bool, reentrant: bool) -> Tensor:
        block = TinyGPT(CONFIG).blocks[1]
        x = torch.linspace(-1, 1, 2 * 8 * 16).view(2, 8, 16).requires_grad_()
        if watched:
            with Ledger(block):
                checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
        else:
            block(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    for reentrant in (False, True):
        assert torch.equal(gradient(True, reentrant), gradient(False, reentrant))


def optimizers() -> list[tuple[str, Callable[[Any], torch.optim.Optimizer], int, int]]:
    """Optimizers, each with its name, state numbers per parameter, and bytes per parameter tensor (Adam's step)."""
    return [
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
        ("Adam", lambda p: torch.optim.Adam(p), 2, 4),
        ("AdamW amsgrad", lambda p: torch.optim.AdamW(p, amsgrad=True), 3, 4),
    ]


@pytest.mark.parametrize(("name", "make", "state", "extra"), optimizers(), ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_is_exact(
    name: str, make: Callable[[Any], torch.optim.Optimizer], state: int, extra: int, dtype: torch.dtype
) -> None:
    model = TinyGPT(CONFIG, dtype=dtype)
    optimizer = make(model.parameters())
    bytes_of_parameters = dtype.itemsize * numbers(model)
    assert count(model, optimizer) == Bytes(parameters=bytes_of_parameters)
    step(model)
    assert count(model, optimizer) == Bytes(bytes_of_parameters, gradients=bytes_of_parameters)
    optimizer.step()
    expected = state * bytes_of_parameters + extra * len(list(model.parameters()))
    assert count(model, optimizer) == Bytes(bytes_of_parameters, bytes_of_parameters, expected)
    optimizer.zero_grad()
    assert count(model, optimizer) == Bytes(bytes_of_parameters, 0, expected)
    optimizer.zero_grad(set_to_none=False)
    assert count(model) == Bytes(bytes_of_parameters)


def test_gradients_count_where_there_are_some() -> None:
    model = TinyGPT(CONFIG)
    model.get_parameter("blocks.1.mlp.up.weight").requires_grad_(False)
    step(model)
    assert count(model).gradients == 4 * (numbers(model) - 16 * 64)
    model.get_parameter("blocks.2.mlp.up.weight").grad = None
    assert count(model).gradients == 4 * (numbers(model) - 2 * 16 * 64)


def test_tied_parameters_and_buffers_count_once() -> None:
    untied, tied = TinyGPT(CONFIG), TinyGPT(replace(CONFIG, tied_embeddings=True))
    assert count(tied).parameters == 4 * (numbers(untied) - 12 * 16)
    step(tied)
    assert count(tied).gradients == count(tied).parameters
    assert count(nn.BatchNorm1d(5)).parameters == 4 * 4 * 5 + 8  # weight, bias, mean, variance; int64 counter


def test_views_of_a_flat_buffer_count_as_the_one_buffer() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    flat = torch.zeros(100)
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    assert count(model).parameters == 400


def test_master_weights_and_shards_of_the_optimizer_are_its_state() -> None:
    model = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.Adam([master])
    master.grad = torch.zeros_like(master)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert count(model, optimizer) == Bytes(2 * 32, (2 + 4) * 32, (4 + 4 + 4) * 32 + 4)


def test_a_model_on_meta_counts_what_it_would_hold() -> None:
    layers = [nn.Linear(65_536, 262_144, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    assert count(nn.Sequential(*layers)).parameters == 3 * 2 * 65_536 * 262_144


def test_a_tensor_saved_twice_and_its_views_count_once() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    with Ledger(nn.Identity()) as opened:
        y = x.exp()
        total = (y * y).sum() + (y[2:4] * y[5:7]).sum()
        assert opened.now.activations == y.nbytes
        total.backward()
        assert opened.now.activations == 0


def test_parameters_and_buffers_saved_for_backward_are_not_activations() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 6))
            self.register_buffer("mask", torch.ones(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            mask = self.get_buffer("mask")
            return x * self.weight.T * mask[:3].sum() * mask

    x = torch.ones(6, 6)
    model = Scaled()
    with Ledger(model) as opened:
        output = model(x)
        factor = 4
        assert opened.now.activations == x.nbytes + factor
    del output


def test_dropping_a_graph_without_backward_frees_its_activations() -> None:
    model = TinyGPT(CONFIG)
    inputs, _ = data.examples([(10, 20)])
    with Ledger(model) as opened:
        logits = model(inputs)
        assert opened.now.activations > 0
        del logits
        assert opened.now.activations == 0
        with torch.no_grad():
            model(inputs)
        assert opened.now.activations == 0


def test_a_training_run_is_bit_for_bit_the_same_under_a_ledger() -> None:
    def trained(watched: bool) -> TinyGPT:
        model = TinyGPT(CONFIG)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            if watched:
                with Ledger(model, optimizer):
                    step(model, optimizer)
            else:
                step(model, optimizer)
        return model

    for parameter, reference in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        assert torch.equal(parameter, reference)


def test_nothing_is_left_on_the_module_or_the_optimizer() -> None:
    model = TinyGPT(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Ledger(model, optimizer) as opened:
        step(model, optimizer)
    n_samples = len(opened.samples)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    step(model, optimizer)
    assert len(opened.samples) == n_samples


def test_a_backward_pass_after_the_end_is_right_and_adds_no_samples() -> None:
    model, reference = TinyGPT(CONFIG), TinyGPT(CONFIG)
    inputs, targets = data.examples([(10, 20)])
    with Ledger(model) as opened:
        loss = data.answer_loss(model(inputs), targets)
    loss.backward()
    assert opened.samples[-1].event == "end"
    data.answer_loss(reference(inputs), targets).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected.grad is not None
        assert torch.equal(parameter.grad, expected.grad)


def test_steps_are_sampled_before_and_after() -> None:
    model = TinyGPT(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Ledger(model, optimizer) as opened:
        step(model, optimizer)
    before, after = opened.samples[-3:-1]
    assert (before.event, after.event) == ("step", "stepped")
    assert (before.held.optimizer, after.held.optimizer) == (0, 4 * numbers(model))


def measured_on_a_rank(rank: int) -> tuple[list[Sample], int]:
    """Use a ledger as in a cell, in three lines: open, train, look."""
    replica = DataParallel(TinyGPT(CONFIG, seed=rank))
    optimizer = torch.optim.Adam(replica.parameters())
    inputs, targets = batches.split(data.examples([(10 + n, 50) for n in range(5)]), dist.get_world_size())[rank]
    with ledger.Ledger(replica, optimizer) as opened:
        data.answer_loss(replica(inputs), targets).backward()
        replica.finish()
        optimizer.step()
    return opened.samples, len(inputs)


def test_every_rank_has_a_ledger_of_its_own() -> None:
    """Activations follow the rank's share (3 and 2 samples); everything else is replicated."""
    results = launch(measured_on_a_rank, 2).results
    size = 4 * numbers(TinyGPT(CONFIG))
    for samples, share in results:
        others = (5 - share) * (9 + 8) * 8  # inputs and targets are views of those of all five samples
        assert samples[1].held.activations == saved_by_model(share) + others
        assert samples[-1].held.parameters == size
        counts = 4 * len(list(TinyGPT(CONFIG).parameters()))
        assert samples[-1].held.gradients == size + counts + 4  # the bucket, which carries the share's weight, too
        assert samples[-1].held.optimizer == 2 * size + 4 * len(list(TinyGPT(CONFIG).parameters()))
    assert [share for _, share in results] == [3, 2]
