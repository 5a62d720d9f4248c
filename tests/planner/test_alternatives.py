"""A search's answer: a plan of each shape that could be the fastest, and the measurement that tells them apart."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from course_lib.planner import Cluster, Estimate, Found, ModelSpec, estimate, search
from course_lib.planner.alternatives import LINES, deciding, few, shape
from course_lib.planner.models import MIXTURES

MODEL = ModelSpec(32, 4096, 32, 8192, 128256, 8, 14336, gated_mlp=True, tied_embeddings=False, flash_attention=True)
CLUSTER = Cluster("H100-80GB", nodes=2, between="InfiniBand NDR")


@pytest.fixture(scope="module")
def found() -> Found:
    return search(MODEL, CLUSTER, 256)


def lines(found: Found) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in str(found).splitlines()]


def test_a_search_shows_the_fastest_of_each_shape_and_no_shape_twice(found: Found) -> None:
    assert found.shapes[0] is found.best
    shapes = [shape(one.plan) for one in found.shapes]
    assert len(set(shapes)) == len(shapes) > 3
    for one in found.tied:
        alike = found.shapes[shapes.index(shape(one.plan))]
        assert alike.step_time.total <= one.step_time.total
    assert str(found).startswith(f"The fastest plan that fits cannot be told apart from {len(found.tied) - 1} more.")


def test_plain_fsdp_is_there_where_it_cannot_be_told_apart(found: Found) -> None:
    """8 billion parameters on two nodes are what everybody trains that way."""
    rows = lines(found)
    assert any(row[-1] == "FSDP" and row[4:8] == ["16", "1", "1", "3"] for row in rows)
    plain = next(one for one in found.shapes if one.plan.zero == 3 and one.plan.dp == 16)
    late = [one for one in found.shapes if one is not plain] * 3 + [plain]
    assert few(late)[-1] is plain
    assert len(few(late)) == LINES
    assert few(late[:-1])[-1] is not plain


def test_a_row_says_what_distinguishes_a_plan(found: Found) -> None:
    _, head, first, *_ = lines(found)
    said, best = dict(zip(["n", *head], first, strict=False)), found.best
    assert said["step"] == f"{best.step_time.total:.3g} s"
    assert said["InfiniBand NDR"] == f"{best.traffic['InfiniBand NDR'] / 1e9:.0f} GB"
    assert said["micro-batches"] == f"{256 // (best.plan.dp * best.plan.micro_batch)} of {best.plan.micro_batch}"
    room = [(best.capacity - need) / 2**30 for need in (best.memory.high, best.memory.low)]
    assert said["GiB left"] == f"{room[0]:.0f} to {room[1]:.0f}"
    assert not {"cp", "ep"} & set(head)


def test_expert_ranks_have_a_column_where_there_are_some() -> None:
    mixture = search(MIXTURES["Mixtral 8x7B"], Cluster("H100-80GB", nodes=8, between="InfiniBand NDR"), 256)
    assert "ep" in lines(mixture)[1]


def test_what_is_kept_free_is_not_left(found: Found) -> None:
    careful = search(MODEL, CLUSTER, 256, within=0.9)
    least = float(lines(careful)[2][2].split(" ")[0])
    assert 0 <= least == pytest.approx((0.9 * careful.best.capacity - careful.best.memory.high) / 2**30, abs=0.5)


def test_the_measurement_is_of_the_part_whose_smallest_error_would_swap_two_plans(found: Found) -> None:
    one, other = found.shapes[:2]
    said = deciding([one, other]).replace("\n", " ")
    (number,) = re.findall(r"this takes ([\d.]+) times", said)
    factor = float(number)

    def with_factor(of: Estimate, part: str) -> float:
        return of.step_time._replace(**{part: factor * getattr(of.step_time, part)}).total

    equal = [
        part
        for part in one.step_time.parts
        if with_factor(one, part) == pytest.approx(with_factor(other, part), rel=0.01)
    ]
    assert len(equal) == 1
    for part, seconds in one.step_time.parts.items():
        more = seconds - getattr(other.step_time, part)
        needed = 1 + (other.step_time.total - one.step_time.total) / more if more else 0
        assert needed <= 0 or abs(math.log(needed)) >= 0.95 * abs(math.log(factor))


def test_alone_a_plan_is_measured_itself(found: Found) -> None:
    assert deciding([found.best]) == "No other shape comes near: measure this one."
    near = estimate(MODEL, CLUSTER, replace(found.best.plan), 256)
    assert deciding([found.best, near]) == "No other shape comes near: measure this one."
    alone = Found([found.best])
    assert str(alone).startswith("One plan is the fastest:")


def test_a_plan_that_may_fit_is_called_so() -> None:
    small = search(ModelSpec(12, 1536, 12, 1024, 50304), Cluster("A100-40GB", 2, 4), 16, within=0.06)
    assert str(small).startswith("The fastest plan that may fit")
