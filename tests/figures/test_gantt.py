"""The picture of a timeline, read back from its SVG and compared with the timeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from course_lib.figures import gantt
from course_lib.figures.breakdown import with_final_waits
from course_lib.figures.lanes import GHOST
from course_lib.figures.palette import STYLES
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES
from course_lib.timeline import Span, Timeline
from tests.figures.drawn import Box, boxes, ids, parsed, places, references, strips, texts
from tests.figures.synthetic import dense, every_kind, gpipe

FORWARD = STYLES["forward"].fill


def bar(svg: str, start_of_tip: str) -> Box:
    (found,) = [box for box in boxes(svg) if box.tip.startswith(start_of_tip)]
    return found


def seconds_at(svg: str, x: float) -> float:
    """The time that the axis shows at x, from the numbers written under it."""
    where = places(svg)
    unit = {"time (s)": 1.0, "time (ms)": 1e-3, "time (µs)": 1e-6}[next(t for t in where if t.startswith("time ("))]
    marks = [
        (float(text) * unit, x) for text, (x, y) in where.items() if y == where["time (ms)"][1] and text[0].isdigit()
    ]
    (first, left), (last, right) = marks[0], marks[-1]
    return first + (last - first) * (x - left) / (right - left)


def test_each_bar_begins_and_ends_where_the_axis_says() -> None:
    svg = gantt(every_kind()).svg
    for box in boxes(svg):
        times = box.tip.split("; ")[-1].split(" from ")[1].split(" to ")
        start, end = (float(text.split()[0]) * {"s": 1, "ms": 1e-3}[text.split()[1]] for text in times)
        assert seconds_at(svg, box.x) == pytest.approx(start, abs=1e-5)
        assert seconds_at(svg, box.x + box.width) == pytest.approx(end, abs=1e-5)


def test_time_zero_is_when_the_first_span_began() -> None:
    spans = [Span(0, "forward", "", 5.0, 5.02), Span(1, "forward", "", 5.01, 5.03)]
    svg = gantt(Timeline(spans, 2)).svg
    assert bar(svg, "rank 0: forward").x == places(svg)["0"][0]
    assert bar(svg, "rank 1: forward").tip.endswith("from 10 ms to 30 ms")


def test_who_is_done_early_waits_until_all_are_done() -> None:
    spans = [Span(0, "forward", "", 0.0, 0.01), Span(1, "forward", "", 0.0, 0.03), Span(2, "forward", "", 0.0, 0.03)]
    picture = gantt(Timeline(spans, 4))
    (wait,) = (box for box in boxes(picture.svg) if box.fill == "wait")
    assert wait.tip == "rank 0: wait, until all are done; 20 ms, from 10 ms to 30 ms"
    assert picture.summary.endswith("rank 0 waited longest, 67%.")


def test_no_rank_is_named_where_all_waited_equally_long() -> None:
    assert gantt(simulate(SCHEDULES["gpipe"](4, 4), 1, 2)).summary.endswith("; all waited equally long.")


def test_what_is_no_timeline_is_refused_with_what_would_work() -> None:
    with pytest.raises(TypeError, match=r"gantt\(run.timeline\)"):
        gantt([1.0, 2.0])  # type: ignore[arg-type]


def test_there_is_a_row_for_each_rank_also_for_one_that_did_nothing() -> None:
    svg = gantt(Timeline([Span(2, "forward", "", 0.0, 1.0)], 4)).svg
    rows = [places(svg)[f"rank {rank}"][1] for rank in range(4)]
    assert rows == sorted(rows)
    assert bar(svg, "rank 2").y < rows[2] < bar(svg, "rank 2").y + bar(svg, "rank 2").height
    assert "rank 4" not in texts(svg)


@pytest.mark.parametrize("ranks", [1, 8, 9, 16, 17, 32])
def test_rows_do_not_overlap(ranks: int) -> None:
    bars = boxes(gantt(gpipe(ranks, 4)).svg)
    rows = sorted({(box.y, box.y + box.height) for box in bars})
    assert len(rows) == ranks
    assert all(below[0] > above[1] for above, below in pairwise(rows))


def test_a_background_transfer_lies_in_a_thin_lane_under_the_bars_of_its_rank() -> None:
    svg = gantt(every_kind()).svg
    background = bar(svg, "rank 0: transfer, all_reduce, 8.19 kB, in the background")
    above, below = bar(svg, "rank 0: forward"), bar(svg, "rank 1: forward")
    assert above.y + above.height < background.y
    assert background.y + background.height < below.y
    assert background.height < above.height / 3


def test_the_legend_names_the_kinds_that_occur_and_no_others() -> None:
    labels = {style.label for style in STYLES.values()}
    assert labels & set(texts(gantt(every_kind()).svg)) == labels
    played = gpipe(2, 2)
    assert labels & set(texts(gantt(played).svg)) == {"forward", "backward", "optimizer", "wait"}
    at_once = Timeline([*played.spans, Span(0, "other", "", 0.0, 0.0)], 2, "modelled")
    assert set(texts(gantt(at_once).svg)) == set(texts(gantt(played).svg))


@pytest.mark.parametrize(
    ("origin", "words"), [("measured", "in a real run"), ("emulated", "emulated"), ("modelled", "not run")]
)
def test_the_picture_says_where_its_times_come_from(origin: str, words: str) -> None:
    picture = gantt(gpipe(2, 2, origin=origin))
    (heading,) = [text for text in texts(picture.svg) if text.startswith(origin)]
    assert words in heading
    assert f", {origin}: " in picture.summary
    assert picture.rows[0]["origin"] == origin


def test_micro_batches_stand_on_their_bars() -> None:
    svg = gantt(gpipe(1, 3)).svg
    x, y = places(svg)["2"]
    on = [box for box in boxes(svg) if box.x <= x <= box.x + box.width and box.y <= y <= box.y + box.height]
    assert ["micro-batch 2" in box.tip for box in on] == [True]


def test_many_short_spans_keep_their_shares_of_the_row() -> None:
    timeline = dense(ranks=1, spans_per_rank=20_000)
    svg = gantt(timeline).svg
    assert boxes(svg) == []
    pieces = strips(svg)
    assert len(pieces) < 4 * 714 + 4
    for kind, fill in (("forward", FORWARD), ("backward", "backward"), ("transfer", "transfer"), ("wait", "wait")):
        length = sum(span.duration for span in timeline.spans if span.kind == kind)
        drawn = sum(box.width for box in pieces if box.fill == fill)
        assert drawn / 714 == pytest.approx(length / timeline.makespan, abs=0.02)


def test_narrow_spans_are_drawn_together_and_none_is_lost() -> None:
    timeline = dense(ranks=32, spans_per_rank=128)
    svg = gantt(timeline).svg
    alone, together = boxes(svg), strips(svg)
    assert len(alone) + len(together) == len(with_final_waits(timeline).spans)
    assert min(box.width for box in alone) > max(box.width for box in together)


def test_two_timelines_share_one_axis() -> None:
    picture = gantt(gpipe(2, 2, forward=0.01, origin="measured"), compare=gpipe(2, 2, forward=0.005))
    bars = [box for box in boxes(picture.svg) if "rank 0: forward, micro-batch 0" in box.tip]
    assert len(bars) == 2
    assert bars[0].x == bars[1].x
    assert bars[0].width == pytest.approx(2 * bars[1].width, abs=0.02)
    assert bars[0].y < bars[1].y
    headings = [text for text in texts(picture.svg) if "2 ranks" in text]
    assert [heading.split()[0] for heading in headings] == ["measured", "modelled"]
    named = gantt(gpipe(2, 2), compare=gpipe(2, 2), names=("early", "late"))
    assert [text.split()[:2] for text in texts(named.svg) if "2 ranks" in text] == [
        ["early,", "modelled"],
        ["late,", "modelled"],
    ]
    assert [row["origin"] for row in picture.rows] == ["measured", "measured", "modelled", "modelled"]


def test_markup_in_names_and_titles_stays_text() -> None:
    svg = gantt(every_kind(), title='a < b & "c" \x00').svg
    assert 'a < b & "c" \ufffd' in texts(svg)
    assert any('load <data> & "sort"' in box.tip for box in boxes(svg))


def test_ids_of_two_pictures_in_one_page_do_not_clash() -> None:
    pictures = [gantt(every_kind()).svg, gantt(gpipe(2, 2)).svg, gantt(every_kind(), width=500).svg]
    together = [one for svg in pictures for one in ids(svg)]
    assert len(together) == len(set(together)) > 6
    for svg in pictures:
        assert references(svg) == set(ids(svg))


def test_an_empty_timeline_is_a_picture_too() -> None:
    picture = gantt(Timeline([], 3))
    assert parsed(picture.svg).attrib["width"] == "800"
    assert boxes(picture.svg) == []
    assert any("nothing was recorded" in text for text in texts(picture.svg))


def test_everything_stays_on_the_sheet() -> None:
    for width in (400, 415, 800, 1200):
        svg = gantt(gpipe(32, 16), compare=gpipe(2, 2), width=width, title="A title that goes on " * 5).svg
        height = float(parsed(svg).attrib["height"])
        assert all(box.x >= 0 and box.x + box.width <= width for box in boxes(svg))
        assert all(0 <= y <= height for _, y in places(svg).values())
        assert all(0 <= x <= width for x, _ in places(svg).values())


def test_the_table_has_each_rank_in_milliseconds() -> None:
    of_first, of_second = gantt(every_kind()).rows
    assert of_first == pytest.approx({**of_second, "rank": 0, "waiting (ms)": 4, "sent (bytes)": 4096 + 8192})
    times = [of_second[name] for name in of_second if "(ms)" in name]
    assert times == pytest.approx([29, 4, 2, 35])  # computing, waiting, communication not hidden, all
    assert (of_second["origin"], of_second["rank"], of_second["sent (bytes)"]) == ("measured", 1, 4096)


def test_the_run_before_lies_thin_under_the_same_ranks_on_one_axis_with_its_end() -> None:
    still = gantt(gpipe(2, 4), usual=1.0)
    assert still.over
    picture = still.over(ghost=gpipe(4, 8))
    (panel,) = picture.timelines
    thin = [strip for strip in strips(picture.svg) if strip.height == GHOST - 1]
    assert {strip.y for strip in thin} == {panel.row(rank) + panel.lanes.bar + 1 for rank in range(2)}
    assert max(strip.x + strip.width for strip in thin) <= panel.scale.left + panel.scale.pixels(0.34)
    assert "before (thin bars): 340 ms" in texts(picture.svg)
    assert {row["rank"] for row in picture.rows} == {0, 1}


def test_an_axis_stays_until_a_run_is_longer_and_then_says_that_it_is_doubled() -> None:
    short, longer, longest = (gantt(gpipe(2, m), usual=0.2) for m in (2, 4, 16))
    (one,), (two,), (four,) = (picture.timelines for picture in (short, longer, longest))
    assert (one.scale.seconds, two.scale.seconds, four.scale.seconds) == (0.2, 0.2, 0.8)
    assert not any("as usual" in text for text in texts(longer.svg))
    assert "axis 4 times as long as usual" in texts(longest.svg)


def test_a_pipeline_says_its_bubble_and_one_stage_has_none() -> None:
    timeline = simulate(SCHEDULES["gpipe"](4, 8), 1.0, 1.0)
    assert not any("bubble" in text for text in texts(gantt(simulate(SCHEDULES["gpipe"](1, 8), 1.0, 1.0)).svg))
    assert any(text.endswith(", bubble 27%") for text in texts(gantt(timeline).svg))  # 3 / (8 + 3)
    assert not any("bubble" in text for text in texts(gantt(replace(gpipe(4, 8), spans=[])).svg))
