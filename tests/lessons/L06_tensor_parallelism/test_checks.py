"""The exercise on tensor parallelism: its right solutions beside one process with whole layers, and its prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case
from lessons.L06_tensor_parallelism import checks
from tests.classroom.checks.prices import costs, verdict_on
from tests.lessons.L06_tensor_parallelism import solutions as s

N = 4


def left(exercise: Exercise, case: Case) -> list[dict[str, Any]]:
    """The results of the right solution, by rank."""
    values = [programs[0].values for programs in exercise.run_right(case).results]
    return [{name[11:-1]: value for name, value in one.items() if "result[" in name} for one in values]


def whole(exercise: Exercise, case: Case, dims: dict[str, int]) -> dict[str, Tensor]:
    """Whole results: shards side by side, and for replicated ones the value on which ranks agree."""
    by_rank = left(exercise, case)
    joined = {name: torch.cat([one[name] for one in by_rank], dim) for name, dim in dims.items()}
    equal = [name for name in by_rank[0] if name not in dims]
    assert all(torch.equal(one[name], by_rank[0][name]) for one in by_rank for name in equal)
    return {name: by_rank[0][name] for name in equal} | joined


@pytest.mark.parametrize(
    ("exercise", "cut", "dims"),
    [
        (checks.column_parallel, "outputs", {"y": 1, "weight.grad": 0, "bias.grad": 0}),
        (checks.row_parallel, "inputs", {"x.grad": 1, "weight.grad": 1}),
    ],
    ids=["columns", "rows"],
)
def test_a_layer_in_shares_is_the_layer(exercise: Exercise, cut: str, dims: dict[str, int]) -> None:
    found = whole(exercise, checks._linear(cut, N, (3,), 6, 7), dims)
    x, weight, bias, dy = checks._linear_arguments("outputs", 1, (3,), 6, 7, 0)
    layer = nn.Linear(6, 7, dtype=torch.float64)
    layer.weight.data, layer.bias.data = weight, bias
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    expected = {"y": y.detach(), "x.grad": x.grad, "weight.grad": layer.weight.grad, "bias.grad": layer.bias.grad}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("heads", "width"), [(8, 4), (5, 3)])
def test_heads_of_all_ranks_add_up_to_the_attention_of_pytorch(heads: int, width: int) -> None:
    case = checks._heads(N, heads, width)
    found = left(checks.cut_heads, case)
    x, qkv, bias, out, _ = case.arguments(0)
    attention = nn.MultiheadAttention(heads * width, heads, batch_first=True, dtype=torch.float64)
    attention.in_proj_weight.data, attention.in_proj_bias.data = qkv, bias
    attention.out_proj.weight.data = out
    nn.init.zeros_(attention.out_proj.bias)
    unseen = torch.ones(3, 3, dtype=torch.bool).triu(1)
    expected, _ = attention(x, x, x, attn_mask=unseen, need_weights=False)
    torch.testing.assert_close(sum(one["partial sum"] for one in found), expected.detach(), rtol=1e-12, atol=1e-12)
    assert max(int(one["heads"]) for one in found) == -(-heads // N)


@pytest.mark.parametrize("size", [1.0, 1e3])
def test_the_loss_from_shares_is_that_of_pytorch(size: float) -> None:
    case = checks._tokens(N, 6, 9, size)
    found = whole(checks.cross_entropy, case, {"gradient": 1})
    shares = [case.arguments(rank) for rank in range(N)]
    logits = torch.cat([share for share, _, _ in shares], 1).requires_grad_()
    loss = F.cross_entropy(logits, shares[0][1])
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(found["gradient"], logits.grad, rtol=1e-13, atol=1e-13)


def in_a_ring(numbers: int) -> str:
    """Bytes that a rank sends in an all-reduce of float64 numbers on 4 ranks."""
    return f"{2 * 3 * numbers * 8 // 4:,}"


@pytest.mark.parametrize(
    ("exercise", "numbers", "operations"),
    [
        (checks.column_parallel, 16 * 32, "1"),
        (checks.row_parallel, 16 * 32, "1"),
        (checks.cross_entropy, 3 * 16, "2"),
    ],
    ids=["the gradient of x", "y", "three numbers a target"],
)
def test_the_best_price(exercise: Exercise, numbers: int, operations: str) -> None:
    price = costs(exercise, exercise.right)
    assert price["bytes a rank sends"] == (in_a_ring(numbers),) * 2
    assert price["operations they take"] == (operations,) * 2


def test_heads_are_cut_without_a_word() -> None:
    assert "bytes a rank sends" not in costs(checks.cut_heads, s.cut_like_cards)


def test_three_operations_where_two_would_do_get_a_remark() -> None:
    assert "3 times where 2 would do" in verdict_on(checks.cross_entropy, s.loss_in_three_operations).remarks[0]


def test_all_logits_are_a_price_and_told_as_the_idea_that_they_are() -> None:
    (gathered,) = (one for one in checks.cross_entropy.mistakes if one.program.__name__ == "logits_gathered")
    verdict = checks.cross_entropy(gathered.program)
    assert (verdict.outcome, verdict.idea) == ("price", "logits_gathered")


def test_one_all_gather_is_enough_for_the_loss_and_sends_more() -> None:
    price = costs(checks.cross_entropy, s.loss_by_logsumexp)
    assert price["operations they take"] == ("1", "1")
    sent, best = (int(one.replace(",", "")) for one in price["bytes a rank sends"])
    assert sent == (N - 1) * 2 * 16 * 8 > best


def test_a_forgotten_transpose_is_not_called_an_idea() -> None:
    verdict = checks.column_parallel(lambda x, weight, bias: x @ weight + bias)
    assert (verdict.outcome, verdict.idea) == ("error", "")
