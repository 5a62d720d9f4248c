"""The exercise on combining mechanisms: its right solutions beside PyTorch and one process, and its prices."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear, mse_loss

from course_lib import launch
from lessons.L08_combining_mechanisms import checks
from tests.classroom.checks.prices import costs, verdict_on
from tests.lessons.L08_combining_mechanisms import solutions as s

MESHES = [(2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 3, 1), (1, 1, 4)]


def groups_of_pytorch(rank: int, sizes: checks.Sizes) -> checks.Groups:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "pp", "tp"))
    return {axis: dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("dp", "pp", "tp")}


@pytest.mark.parametrize("sizes", [*MESHES, (2, 2, 2)])
def test_groups_are_those_of_a_device_mesh(sizes: checks.Sizes) -> None:
    for rank, groups in enumerate(launch(groups_of_pytorch, math.prod(sizes), args=(sizes,)).results):
        assert checks.grouped(rank, *sizes) == groups


def test_the_example_of_the_notebook() -> None:
    assert checks.grouped(4, 2, 2, 3) == {"pp": [1, 4], "tp": [3, 4, 5], "dp": [4, 10]}
    numbers = [members.index(10) for members in checks.grouped(10, 2, 2, 3).values()]
    assert numbers == [1, 1, 1]


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_norm_is_that_of_all_different_gradients(sizes: checks.Sizes, is_frozen: bool) -> None:
    """Gradients that are equal to the bit are copies; each counts once."""
    case = checks._on_mesh(checks._held, sizes, 3, frozen=is_frozen)
    held = [one for rank in range(case.world_size) for one in case.arguments(rank)[0] if one is not None]
    different = {tuple(one.flatten().tolist()): one for one in held}
    assert len(different) < len(held) or (sizes == (1, 1, 4) and is_frozen)
    exact = nn.utils.get_total_norm(list(different.values()))
    for programs in checks.gradient_norm.run_right(case).results:
        torch.testing.assert_close(programs[0].values["the result"], exact.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sizes", MESHES)
def test_a_combined_step_is_that_of_one_process_with_the_whole_minibatch(sizes: checks.Sizes) -> None:
    dp, pp, tp = sizes
    up, down, scale, bias = (one.requires_grad_() for one in checks.weights(pp, 3))
    x, y = (torch.cat(shares) for shares in zip(*(checks.samples(d, 3) for d in range(dp)), strict=True))
    for stage in range(pp):
        x = x + linear(linear(x * scale, up[stage]).relu(), down[stage], bias)
    mse_loss(x, y).backward()
    case = checks._on_mesh(checks._arisen, sizes, 3)
    for rank, programs in enumerate(checks.complete_gradients.run_right(case).results):
        p, t = rank // tp % pp, rank % tp
        cut = up.grad[p].chunk(tp)[t], down.grad[p].chunk(tp, 1)[t]
        for i, exact in enumerate((*cut, scale.grad, bias.grad)):
            torch.testing.assert_close(programs[0].values[f"gradients[{i}]"], exact, rtol=1e-12, atol=1e-14)


# The price


def test_the_norm_is_one_number() -> None:
    price = costs(checks.gradient_norm, s.norm_by_vector_norm)
    assert price["operations they take"] == ("1", "1")
    assert price["bytes a rank sends"] == (f"{2 * 3 * 4 // 4}",) * 2


def test_gradients_go_together() -> None:
    assert costs(checks.complete_gradients, checks.completed)["operations they take"] == ("3", "3")
    (often,) = verdict_on(checks.complete_gradients, s.complete_one_by_one).remarks
    assert "7 times where 3 would do" in often
