"""Pictures of collectives, read back from their SVG."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from course_lib.figures.exchange import Sum, exchange
from course_lib.figures.ways_around import ways_around
from course_lib.timeline import Span, Timeline
from tests.figures.drawn import texts

# Rank 0 sends its only piece, a partial sum, from 5 s to 6 s.
TIMELINE = Timeline([Span(1, "transfer", "recv", 5.0, 6.0, peer=0), Span(0, "other", "", 5.0, 9.0)], 2, "emulated")
SUMS = [
    Sum(0, 0, 0, (0,), 0.0, math.inf),
    Sum(1, 1, 0, (1,), 0.0, 6.0),
    Sum(1, 1, 0, (0, 1), 6.0, math.inf),
    Sum(0, 1, 0, (0,), 5.0, 6.0),
]


def groups(html: str) -> list[tuple[str, str, str]]:
    """The times, other attributes and content of each group that comes and goes."""
    return re.findall(r'<g data-when="([^"]+)"(.*?)>(.*?)</g>', html, re.DOTALL)


def test_each_sum_is_seen_while_it_is_there_and_moves_while_it_is_sent() -> None:
    pies = [one for one in groups(exchange(TIMELINE, SUMS).inline()) if "<circle" in one[2]]
    shown = {(when.split()[1], inside.count("<path")): look for when, look, inside in pies if "data-fly" not in look}
    assert set(shown) == {("2.0000", 1), ("0.2500", 1), ("2.0000", 2)}
    assert [size for (_, size), look in shown.items() if "hidden" not in look] == [1, 2]  # half way
    ((when, look, _),) = [one for one in pies if "data-fly" in one[1]]
    assert when == "0.0000 0.2500"
    right, down = map(float, re.findall(r'data-fly="([^ ]+) ([^ ]+)"', look)[0])
    assert right < 0 and down == 0  # from the device on the right to the one on the left


def test_a_device_counts_the_bytes_that_have_left_it() -> None:
    sent = replace(TIMELINE, spans=[span._replace(bytes=8) for span in TIMELINE.spans])
    counts = [(when, texts(f"<svg xmlns='http://www.w3.org/2000/svg'>{inside}</svg>"))
              for when, _, inside in groups(exchange(sent, SUMS).inline()) if "sent" in inside]  # fmt: skip
    assert counts == [("0.0000 0.2500", ["sent 0 B"]), ("0.2500 2.0000", ["sent 8 B"]), ("0.0000 2.0000", ["sent 0 B"])]


def test_an_image_has_what_is_there_half_way_and_nothing_that_only_a_player_shows() -> None:
    picture = exchange(TIMELINE, SUMS, title="Who has what?")
    assert "hidden" not in picture.svg
    assert texts(picture.svg)[-4:] == ["rank 0", "rank 1", "sent 0 B", "sent 0 B"]
    assert picture.summary == "2 ranks, emulated: in the end each has 0 pieces complete, the sum over 2 ranks."
    row = {"received (ms)": 1000.0, "from rank": 0, "to rank": 1, "piece": 0, "ranks in the sum": "0"}
    assert picture.rows == [row]
    assert picture.clock is not None
    assert list(picture.clock.says)[1][1] == "1 piece on the way; 0 complete, on all ranks together."


def test_the_slower_a_way_between_nodes_the_thicker_it_is() -> None:
    drawn = ways_around([1.0, 4.0, 100.0], ["fast", "slow", "no answer"]).svg
    assert re.findall(r'<path[^>]*stroke-width="([^"]+)"', drawn) == ["2", "8", "20"]
    assert {"fast", "slow", "no answer", "node 2"} <= set(texts(drawn))
