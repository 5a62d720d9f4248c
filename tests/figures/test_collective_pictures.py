"""Pictures of collectives, read back from their SVG."""

from __future__ import annotations

from itertools import pairwise

import pytest

from course_lib.figures import before_and_after, collective_times
from tests.figures.drawn import boxes, kind_of, parsed, texts

OWN = [[1, 1], [2, 2]]
SUMS = [[3, 0], [0, 3]]
ALL = [[3, 3], [3, 3]]
TIMES = {"1 kB": {"ring": {2: 0.001, 8: 0.02}, "tree": {2: 0.002, 8: 0.004}}}


def test_each_piece_says_whose_numbers_are_in_it() -> None:
    tips = [box.tip for box in boxes(before_and_after([[OWN, "reduce-scatter", SUMS]]).svg)]
    before, after = tips[:4], tips[4:]
    assert before == [f"rank {rank}, piece {piece}: of rank {rank}" for rank in (0, 1) for piece in (0, 1)]
    assert after == [
        "rank 0, piece 0: of ranks 0 and 1",
        "rank 0, piece 1: nothing",
        "rank 1, piece 0: nothing",
        "rank 1, piece 1: of ranks 0 and 1",
    ]


def test_a_sum_has_a_stripe_for_each_rank_and_fills_its_piece() -> None:
    svg = before_and_after([[OWN, "all-reduce", ALL]]).svg
    places = {(box.x, box.y): box for box in boxes(svg)}
    stripes: dict[tuple[float, float], list[tuple[str, float]]] = {place: [] for place in places}
    for element in parsed(svg).iter("{http://www.w3.org/2000/svg}rect"):
        fill = element.attrib["fill"]
        if "url" not in fill and not fill.startswith("#8bcbf1"):
            continue
        x, y, width, height = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
        for (left, top), box in places.items():
            if x == left and top <= y < top + box.height and width == box.width:
                stripes[left, top].append((kind_of(fill), height))
    for place, box in places.items():
        assert sum(height for _, height in stripes[place]) == pytest.approx(box.height)
        assert len(stripes[place]) == (2 if "and" in box.tip else 1)


def test_what_does_not_fit_in_a_line_goes_to_the_next_one_and_nothing_leaves_the_sheet() -> None:
    picture = before_and_after([[OWN, "all-reduce", ALL]] * 5, width=600)
    tops = sorted({box.y for box in boxes(picture.svg)})
    assert len(tops) == 2 * 3
    assert all(box.x >= 0 and box.x + box.width <= 600 for box in boxes(picture.svg))
    assert all(box.y + box.height <= picture.sheet.height for box in boxes(picture.svg))
    for one, other in pairwise(tops):
        assert other - one >= 24


def test_the_sentence_says_what_each_collective_leaves() -> None:
    picture = before_and_after([[OWN, "reduce-scatter", SUMS, "all-gather", ALL]])
    assert picture.summary == (
        "after the reduce-scatter each rank has 1 piece, a sum over 2 ranks; "
        "after the all-gather each rank has 2 pieces, a sum over 2 ranks."
    )
    assert {"reduce-scatter", "all-gather", "measured (in a real run)"} <= set(texts(picture.svg))


def test_more_ranks_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="9 ranks cannot be drawn"):
        before_and_after([[[[1]] * 9]])


def test_a_line_for_each_algorithm_and_a_panel_for_each_size() -> None:
    picture = collective_times({**TIMES, "1 MB": TIMES["1 kB"]})
    assert picture.summary == ("1 kB over 8 ranks: ring 20 ms, tree 4 ms; 1 MB over 8 ranks: ring 20 ms, tree 4 ms.")
    assert picture.chart is not None
    assert [panel.x.title for panel in picture.chart.panels] == [
        "number of ranks, for 1 kB",
        "number of ranks, for 1 MB",
    ]
    ring = picture.chart.panels[0].marks[0]
    assert [(point.x, point.y) for point in ring.points] == [(2, 1.0), (8, 20.0)]
    assert picture.rows[1] == {"what": "1 kB", "ranks": 8, "ring": "20 ms", "tree": "4 ms"}
    assert len(picture.to_plotly().data) >= 4
