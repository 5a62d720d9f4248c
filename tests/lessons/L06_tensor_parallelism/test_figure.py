"""The picture of a cut MLP, read back from its SVG."""

from __future__ import annotations

from itertools import pairwise

import pytest

from course_lib.figures.palette import INK, RANKS
from course_lib.timeline import Timeline
from lessons.L06_tensor_parallelism.figure import who_holds_what
from lessons.L06_tensor_parallelism.runs import CutRun, LayerOperation
from tests.figures.drawn import boxes, texts
from tests.figures.test_palette import contrast


def operations(*named: tuple[str, str, str, str, float]) -> list[LayerOperation]:
    return [
        LayerOperation(name, abs, leaves, forward, backward, work) for name, leaves, forward, backward, work in named
    ]


FITTING = operations(
    ("f", "whole", "", "all-reduce", 0),
    ("A", "columns", "", "", 1),
    ("gelu", "columns", "", "", 0),
    ("B", "partial sums", "", "", 1),
    ("g", "whole", "all-reduce", "", 0),
)
SENT = [(0, 1500), (0, 0), (0, 0), (0, 0), (1200, 0)]


def run_on(ranks: int, traffic: list[tuple[int, int]] = SENT, origin: str = "measured") -> CutRun:
    return CutRun(FITTING, traffic, {}, Timeline([], ranks, origin))


def held(name: str) -> list[str]:
    """The tooltips of the shares of a matrix or an activation."""
    return [box.tip for box in boxes(who_holds_what(run_on(4)).svg) if box.tip.startswith(f"{name}: ")]


def test_matrices_are_cut_and_what_goes_through_lies_as_the_pieces_say() -> None:
    assert held("A") == [f"A: rank {rank} holds its columns" for rank in range(4)]
    assert held("B") == [f"B: rank {rank} holds its rows" for rank in range(4)]
    assert held("gelu(u)") == [f"gelu(u): rank {rank} holds its columns" for rank in range(4)]
    assert held("x") == ["x: every rank holds all of it"]
    assert held("y") == [f"y: rank {rank} holds a partial sum of all of it" for rank in range(4)] + [
        "y: every rank holds all of it"
    ]


def test_shares_fill_a_matrix_and_have_the_looks_of_their_ranks() -> None:
    shares = [box for box in boxes(who_holds_what(run_on(4)).svg) if box.tip.startswith("A: ")]
    assert len({box.fill for box in shares}) == 4
    for left, right in pairwise(shares):
        assert left.x + left.width == pytest.approx(right.x, abs=0.02)


def test_collectives_stand_on_their_lane_with_their_bytes() -> None:
    picture = who_holds_what(run_on(4))
    stations = [box for box in boxes(picture.svg) if "sends" in box.tip]
    assert {box.tip for box in stations} == {
        "f: all-reduce, each rank sends 1,500 bytes",
        "g: all-reduce, each rank sends 1,200 bytes",
    }
    backward, forward = sorted(stations, key=lambda box: -box.y)
    assert backward.x < forward.x
    assert {"1.5 kB", "1.2 kB", "nothing", "measured (in a real run)"} <= set(texts(picture.svg))


def test_the_sentence_says_cut_and_traffic() -> None:
    picture = who_holds_what(run_on(4, origin="emulated"))
    assert "emulated (real processes and messages, emulated clock)" in texts(picture.svg)
    assert picture.summary == (
        "4 ranks hold A by columns and B by rows; what travels (emulated) is forward 1 all-reduce, "
        "backward 1 all-reduce; each rank sends 2.7 kB."
    )


def test_ranks_differ_without_color_and_can_be_written_on() -> None:
    assert len({style.path for style in RANKS}) == len(RANKS)
    for style in RANKS:
        assert contrast(INK, style.fill) >= 4.5
        assert not style.path or contrast(style.fill, style.shade) >= 1.35
