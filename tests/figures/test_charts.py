"""The charts about scaling, read back from their SVG."""

from __future__ import annotations

import pytest

from course_lib.figures import Timing, lost_time, speed_up
from course_lib.figures.breakdown import CAUSES
from tests.figures.drawn import boxes, places, texts, written
from tests.figures.synthetic import gpipe, spent

SLOWER = [Timing(1, 8.0), Timing(2, 4.0), Timing(4, 2.5), Timing(8, 2.0)]


def test_the_speed_up_is_the_time_of_one_rank_by_the_time_of_many() -> None:
    rows = speed_up(SLOWER).rows
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    assert [row["speed-up"] for row in rows] == [1, 2, 3.2, 4]
    assert [row["of the ideal"] for row in rows] == ["100%", "100%", "80%", "50%"]


def test_more_work_in_the_same_time_is_as_good_as_less_time() -> None:
    weak = speed_up([Timing(ranks, 1.0, work=ranks) for ranks in (1, 2, 4)])
    assert [row["speed-up"] for row in weak.rows] == [1, 2, 4]


def test_what_was_timed_more_than_once_counts_with_its_median() -> None:
    rows = speed_up([Timing(1, 4.0), Timing(2, 100.0), Timing(2, 2.0), Timing(2, 1.9)]).rows
    assert [row["speed-up"] for row in rows] == [1, 2]


def test_the_fewest_ranks_count_as_ideal() -> None:
    rows = speed_up([Timing(4, 1.0), Timing(8, 0.625)]).rows
    assert [row["speed-up"] for row in rows] == [4, 6.4]


def test_each_label_and_origin_is_a_line_relative_to_itself() -> None:
    timings = [*SLOWER, *(Timing(t.ranks, 3 / t.ranks, "modelled", label="overlap") for t in SLOWER)]
    picture = speed_up(timings)
    assert [row["line"] for row in picture.rows] == ["measured"] * 4 + ["overlap (modelled)"] * 4
    assert [row["speed-up"] for row in picture.rows][4:] == [1, 2, 4, 8]
    assert {"measured", "overlap (modelled)", "ideal"} <= set(texts(picture.svg))
    assert {"measured (in a real run)", "modelled (calculated, not run)"} <= set(texts(picture.svg))
    assert picture.summary == (
        "Speed-up over the number of ranks: measured, 8 ranks are 4 times as fast as 1, 50% of the ideal; "
        "overlap (modelled), 8 ranks are 8 times as fast as 1, 100% of the ideal."
    )


def test_points_stand_where_the_axes_say() -> None:
    svg = speed_up(SLOWER).svg
    numbers = [(int(text), x, y) for text, x, y in written(svg) if text.isdigit()]
    below = max(y for _, _, y in numbers)
    across = {number: x for number, x, y in numbers if y == below}
    # The numbers beside the axis are centered on their line by eye, 4 pixels down.
    up = {number: y - 4 for number, _, y in numbers if y != below}
    points = {int(box.tip.split(": ")[1].split()[0]): (box.x + 8, box.y + 8) for box in boxes(svg)}
    assert {ranks: x for ranks, (x, _) in points.items()} == pytest.approx(across, abs=0.02)
    for ranks, speed in ((2, 2), (8, 4)):
        assert points[ranks][1] == pytest.approx(up[speed], abs=0.02)
    assert up[0] - points[4][1] == pytest.approx((up[0] - up[8]) * 3.2 / 8, abs=0.02)


def test_a_timing_comes_from_a_timeline() -> None:
    timing = Timing.of(gpipe(4, 4), work=16, label="GPipe")
    assert timing == Timing(4, gpipe(4, 4).makespan, "modelled", 16, "GPipe")


SECONDS = {
    "4 ranks": {"compute": 60, "wait": 25, "transfer": 10, "rest": 5},
    "8 ranks": {"compute": 40, "wait": 20, "transfer": 30, "rest": 10},
}
RUNS = {name: spent(**seconds) for name, seconds in SECONDS.items()}
FOUR, EIGHT = RUNS.values()


def test_a_bar_is_cut_in_proportion_and_fills_the_axis() -> None:
    svg = lost_time(RUNS).svg
    where = places(svg)
    whole = where["100%"][0] - where["0%"][0]
    widths = {box.tip: box.width for box in boxes(svg)}
    for name, seconds in SECONDS.items():
        for cause, style in CAUSES.items():
            (width,) = [width for tip, width in widths.items() if tip.startswith(f"{name}: {style.label}")]
            assert width == pytest.approx(whole * seconds[cause] / 100, abs=0.02)
    for bar in (boxes(svg)[:4], boxes(svg)[4:]):
        ends = [where["0%"][0], *(part.x + part.width for part in bar)]
        assert [*(part.x for part in bar), where["100%"][0]] == pytest.approx(ends, abs=0.03)


def test_a_wait_looks_as_it_does_in_a_timeline() -> None:
    assert {box.fill for box in boxes(lost_time({"4 ranks": FOUR}).svg) if "waiting" in box.tip} == {"wait"}


def test_the_sentence_names_the_worst_bar_and_its_largest_loss() -> None:
    assert lost_time(RUNS).summary == (
        "8 ranks (measured): 60% of the time is not spent computing, the most of all these runs, "
        "and the largest part of that is communication not hidden, 30%."
    )
    assert lost_time({"4 ranks": FOUR}).summary.startswith("4 ranks (measured): 40% of the time")
