"""The player of a timeline, as the kernel sees it; tests/browser plays it with the mouse and with keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.classroom.widgets import play
from course_lib.classroom.widgets.player import BESIDE, WIDTH, places
from course_lib.figures import gantt
from course_lib.timeline import Span, Timeline
from tests.figures.drawn import boxes
from tests.figures.synthetic import every_kind, gpipe

ROOT = Path(__file__).parents[3]


def test_bars_lie_where_the_picture_draws_them() -> None:
    timeline = gpipe(3, 4, transfer=0.003)
    picture = gantt(timeline)
    ours = sorted((bar["x"], bar["y"], bar["width"], bar["height"]) for bar in places(picture)["bars"])
    drawn = sorted((box.x, box.y, box.width, box.height) for box in boxes(picture.svg) if box.tip)
    assert len(ours) >= len(timeline.spans)
    for place, box in zip(ours, drawn, strict=True):
        assert place == pytest.approx(box, abs=0.01)


def test_the_cursor_goes_from_the_first_start_to_the_last_end() -> None:
    late = [span._replace(start=span.start + 5, end=span.end + 5) for span in gpipe(2, 2).spans]
    where = places(gantt(Timeline(late, 2)))
    assert where["left"] == min(bar["x"] for bar in where["bars"])
    assert where["left"] + where["width"] == pytest.approx(max(bar["x"] + bar["width"] for bar in where["bars"]))
    assert (where["length"], where["unit"]) == (pytest.approx(100), "ms")


def test_each_message_flies_once_from_its_sender_to_its_receiver() -> None:
    spans = [
        Span(0, "transfer", "isend", 1.0, 1.5, bytes=8, peer=1, background=True),
        Span(1, "transfer", "recv", 1.0, 2.0, bytes=8, peer=0),
        Span(1, "wait", "recv", 0.0, 1.0, peer=0),
        Span(0, "transfer", "all_reduce", 2.0, 3.0, bytes=8),
    ]
    where = places(gantt(Timeline(spans, 2)))
    (message,) = (bar for bar in where["bars"] if bar["isMessage"])
    assert (message["peer"], message["rank"], message["bytes"]) == (0, 1, 8)
    assert message["x"] == pytest.approx(where["left"] + where["width"] / 3)
    assert message["width"] == pytest.approx(where["width"] / 3)


def test_what_a_rank_holds_changes_where_its_first_forward_begins_and_its_last_backward_ends() -> None:
    where = places(gantt(gpipe(2, 3)))
    of_rank_1 = [bar for bar in where["bars"] if bar["rank"] == 1 and bar["microBatch"] is not None]
    steps = where["held"][1]
    assert [count for _, count in steps] == [0, 1, 2, 3, 2, 1, 0]
    assert steps[1][0] == pytest.approx(of_rank_1[0]["x"])
    assert steps[-1][0] == pytest.approx(of_rank_1[-1]["x"] + of_rank_1[-1]["width"])


def test_there_is_room_beside_the_picture_only_where_something_is_held() -> None:
    without = replace(every_kind(), spans=[span._replace(micro_batch=None) for span in every_kind().spans])
    assert play(every_kind()).still.sheet.width < play(without).still.sheet.width == WIDTH


def test_a_stored_notebook_shows_the_still_picture() -> None:
    data, _ = play(gpipe(2, 2), title="Two ranks")._repr_mimebundle_()
    still = gantt(gpipe(2, 2), width=WIDTH - BESIDE, title="Two ranks")._repr_mimebundle_()
    assert data["text/html"].endswith(still["text/html"])
    assert data["text/html"].startswith("<p><i>Run this cell to play it.")
    assert data["text/plain"] == still["text/plain"]
    assert "application/vnd.jupyter.widget-view+json" in data


def test_an_empty_timeline_can_be_shown() -> None:
    where = play(Timeline([], 2)).places
    assert (where["width"], where["bars"], len(where["rows"])) == (0, [], 2)
