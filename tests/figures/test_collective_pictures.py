"""Pictures of collectives, read back from their SVG."""

from __future__ import annotations

import math
import re

from course_lib.figures import collective_times
from course_lib.figures.chunk_table import Sum, chunk_table
from course_lib.timeline import Span, Timeline
from tests.figures.drawn import texts, zoomable

TIMES = {"1 kB": {"ring": {2: 0.001, 8: 0.02}, "tree": {2: 0.002, 8: 0.004}}}


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
    assert len(zoomable(picture).data) >= 4


# Rank 0 sends its only piece, a partial sum, from 5 s to 6 s.
TIMELINE = Timeline([Span(1, "transfer", "recv", 5.0, 6.0, peer=0), Span(0, "other", "", 5.0, 9.0)], 2, "emulated")
SUMS = [
    Sum(0, 0, 0, (0,), 0.0, math.inf),
    Sum(1, 1, 0, (1,), 0.0, 6.0),
    Sum(1, 1, 0, (0, 1), 6.0, math.inf),
    Sum(0, 1, 0, (0,), 5.0, 6.0),
]


def test_each_sum_is_seen_while_it_is_there_and_moves_while_it_is_sent() -> None:
    groups = re.findall(r'<g data-when="([^"]+)"(.*?)>(.*?)</g>', chunk_table(TIMELINE, SUMS).inline(), re.DOTALL)
    shown = {
        (when.split()[1][:6], "".join(re.findall(r"<text[^>]*>(\d)", inside))): look for when, look, inside in groups
    }
    assert set(shown) == {("2.0000", "0"), ("0.2500", "1"), ("2.0000", "01"), ("0.2500", "0")}
    assert [members for (_, members), look in shown.items() if "hidden" not in look] == ["0", "01"]  # half way
    assert "data-fly" in shown["0.2500", "0"]


def test_an_image_has_what_is_there_half_way_and_nothing_that_only_a_player_shows() -> None:
    picture = chunk_table(TIMELINE, SUMS, title="Who has what?")
    assert "hidden" not in picture.svg
    written = texts(picture.svg)
    assert written.count("0") == 2 and written.count("1") == 1 + 1  # a piece has that number, too
    assert "Half way, after 2 s:" in written
    assert picture.summary == "2 ranks, emulated: in the end each has 0 pieces complete, the sum over 2 ranks."
    row = {"received (ms)": 1000.0, "from rank": 0, "to rank": 1, "piece": 0, "ranks in the sum": "0"}
    assert picture.rows == [row]
