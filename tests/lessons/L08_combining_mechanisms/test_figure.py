"""The map of a mesh, read back from its SVG."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from course_lib.timeline import Span, Timeline
from lessons.L08_combining_mechanisms.figure import mesh_map
from lessons.L08_combining_mechanisms.runs import MeshStep
from tests.figures.drawn import SVG, parsed, texts, written

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


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 1, 8), (4, 2, 1), (2, 1, 4), (2, 2, 2), (1, 4, 2), (2, 4, 1)])
def test_ranks_lie_apart_and_in_their_machines(mesh: tuple[int, int, int]) -> None:
    svg = mesh_map(mesh, CUBE._replace(sent={"tp": {}, "pp": {}, "dp": {}}), per_machine=4).svg
    ranks = {int(text): (x, y) for text, x, y in written(svg) if text.isdigit()}
    assert set(ranks) == set(range(8))
    for one, other in combinations(ranks.values(), 2):
        assert abs(one[0] - other[0]) >= 25 or abs(one[1] - other[1]) >= 25
    found = [box.attrib for box in parsed(svg).iter(f"{SVG}rect") if box.attrib.get("rx") == "10"]
    machines = [[float(box[name]) for name in ("x", "y", "width", "height")] for box in found]
    assert all(x >= 1 and x + width <= 420 - 1 for x, _, width, _ in machines)
    for rank, (x, y) in ranks.items():
        inside = [left < x < left + width and top < y < top + height for left, top, width, height in machines]
        assert inside == [rank < 4, rank >= 4]


def test_a_rank_lights_up_its_own_lines_with_their_bytes() -> None:
    markup = mesh_map((2, 2, 2), CUBE).inline()
    (own,) = re.findall(r'<g data-light="rank 5" visibility="hidden">(.*?)</g>', markup, re.DOTALL)
    assert re.findall(r"between rank (\d) and rank (\d)", own) == [("4", "5"), ("5", "7"), ("1", "5")]
    assert re.findall(r">([\d.]+ k?B)</text>", own) == ["10 kB", "1 kB", "2 kB"]
    assert markup.count("data-name=") == 8


def test_axes_differ_without_color() -> None:
    drawn = parsed(mesh_map((2, 2, 2), CUBE).svg).iter(f"{SVG}path")
    assert len({path.attrib["stroke-dasharray"] for path in drawn if "stroke-width" in path.attrib}) == 3


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
    picture = mesh_map((1, 1, 2), step)
    markup = picture.inline()
    ((when, look),) = re.findall(r'<g data-when="([^"]+)"(.*?)>', markup)
    assert when == "0.2000 0.3000 0.7000 0.7200"
    assert "hidden" in look
    assert picture.clock is not None
    assert [words for _, words in picture.clock.says][:2] == ["tensor ranks on the line.", "nobody on the line."]
    assert "data-when" not in mesh_map((1, 1, 2), step._replace(transfers={})).inline()
