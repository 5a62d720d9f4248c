"""The map of a mesh, read back from its SVG."""

from __future__ import annotations

import re

import pytest

from course_lib.figures.palette import INK
from course_lib.timeline import Span, Timeline
from lessons.L08_combining_mechanisms.figure import MACHINES, mesh_map
from lessons.L08_combining_mechanisms.runs import MeshStep
from tests.figures.drawn import SVG, boxes, parsed, texts
from tests.figures.test_palette import contrast

SENT = {
    "tp": {(rank, rank ^ 1): 5000 for rank in range(8)},
    "pp": {(rank, rank ^ 2): 500 for rank in range(8)},
    "dp": {(rank, rank ^ 4): 1000 for rank in range(8)},
    "all": {(rank, (rank + 1) % 8): 14 for rank in range(8)},
}
CUBE = MeshStep(Timeline([], 8), SENT, 0.0, {})
PREDICTED = {"tp": 40_000, "pp": 4000, "dp": 8000, "all": 112}


def lines(svg: str) -> dict[str, float]:
    """The width of each line between ranks, by its tooltip."""
    found = {}
    for path in parsed(svg).iter(f"{SVG}path"):
        tip = path.find(f"{SVG}title")
        if tip is not None:
            found[tip.text or ""] = float(path.attrib["stroke-width"])
    return found


def test_every_two_ranks_that_talk_have_a_line_with_their_bytes() -> None:
    drawn = lines(mesh_map((2, 2, 2), CUBE).svg)
    assert len(drawn) == 12
    assert "tensor (tp): 10,000 bytes between rank 0 and rank 1, both ways" in drawn
    assert "pipeline (pp): 1,000 bytes between rank 5 and rank 7, both ways" in drawn
    assert "data (dp): 2,000 bytes between rank 3 and rank 7, both ways" in drawn


def test_a_line_is_the_wider_the_more_is_sent() -> None:
    drawn = lines(mesh_map((2, 2, 2), CUBE).svg)
    widths = [
        next(width for tip, width in drawn.items() if tip.startswith(axis)) for axis in ("tensor", "data", "pipe")
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 3 * widths[1] > 3 * widths[2]


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (2, 1, 4), (2, 2, 2), (1, 4, 2)])
def test_ranks_lie_on_the_sheet_and_apart(mesh: tuple[int, int, int]) -> None:
    picture = mesh_map(mesh, CUBE._replace(sent={"tp": {}, "pp": {}, "dp": {}}), per_machine=4)
    ranks = [box for box in boxes(picture.svg) if box.tip.startswith("rank ")]
    assert [box.tip for box in ranks] == [f"rank {rank}, machine {rank // 4}" for rank in range(8)]
    for box in ranks:
        assert 0 <= box.x <= picture.sheet.width - box.width
        assert 0 <= box.y <= picture.sheet.height - box.height
    for number, one in enumerate(ranks):
        for other in ranks[:number]:
            assert abs(one.x - other.x) > one.width or abs(one.y - other.y) > one.height


def test_axes_differ_without_color_and_machines_can_be_written_on() -> None:
    drawn = parsed(mesh_map((2, 2, 2), CUBE).svg).iter(f"{SVG}path")
    assert len({path.attrib["stroke-dasharray"] for path in drawn if "stroke-width" in path.attrib}) == 3
    for machine in MACHINES:
        assert contrast(INK, machine.fill) >= 4.5


def test_what_was_predicted_stands_beside_what_was_sent() -> None:
    words = texts(mesh_map((2, 2, 2), CUBE, PREDICTED).svg)
    assert words.count("the same") == 4
    off = mesh_map((2, 2, 2), CUBE, {**PREDICTED, "dp": 10_000})
    assert "10 kB" in texts(off.svg)
    assert off.summary.endswith("; not what was predicted.")


def test_the_sentence_says_the_shape_and_the_bytes() -> None:
    assert mesh_map((2, 2, 2), CUBE._replace(timeline=Timeline([], 8, "emulated")), PREDICTED).summary == (
        "8 ranks as a grid of dp 2 x pp 2 x tp 2; sent in a step (emulated): tensor (tp) 40 kB, pipeline (pp) 4 kB, "
        "data (dp) 8 kB; to the byte what was predicted."
    )


def test_the_numbers_are_those_of_each_rank() -> None:
    rows = mesh_map((2, 2, 2), CUBE).rows
    assert len(rows) == 32
    assert rows[0] == {"axis": "tensor (tp)", "from rank": 0, "to rank": 1, "sent (bytes)": 5000}


def test_a_player_shows_lines_while_they_are_in_use_and_long_enough_to_be_seen() -> None:
    spans = [
        Span(0, "transfer", "all_reduce", 2.0, 3.0, bytes=8),
        Span(0, "transfer", "all_reduce", 7.0, 7.001, bytes=8),
    ]
    timeline = Timeline([Span(1, "other", "", 0.0, 10.0), *spans], 2)
    step = MeshStep(timeline, {"tp": {(1, 0): 16}}, 0.0, {"tp": {(1, 0): spans}})
    markup = mesh_map((1, 1, 2), step).inline()
    ((when, look),) = re.findall(r'<g data-when="([^"]+)"(.*?)>', markup)
    assert when == "0.2000 0.3000 0.7000 0.7200"
    assert "hidden" in look
    assert "data-when" not in mesh_map((1, 1, 2), step._replace(transfers={})).inline()
