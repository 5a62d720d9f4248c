"""The charts about pipelines, read back from their SVG."""

from __future__ import annotations

import pytest

from course_lib.figures import held_activations
from course_lib.figures.chart import Curve
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES, peak_in_flight
from course_lib.timeline import Span, Timeline
from lessons.L05_pipeline_parallelism.figure import SizedStep, micro_batch_sizes
from lessons.L05_pipeline_parallelism.in_flight import in_flight
from tests.figures.drawn import boxes, places, texts

STEPS = [
    SizedStep(1, 0.1, 0.2, 0.02, 4, measured=0.325),
    SizedStep(2, 0.1, 0.1, 0.05, 8),
    SizedStep(4, 0.1, 0.05, 0.09, 16, fits=False, measured=0.24),
]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_what_is_held_comes_to_the_count_of_the_schedule(name: str) -> None:
    schedule = SCHEDULES[name](4, 8)
    assert [one.most for one in held_activations(simulate(schedule, 0.01, 0.01, 0.01))] == peak_in_flight(schedule)


def test_two_stages_on_a_rank_count_half_each() -> None:
    schedule = SCHEDULES["interleaved_1f1b"](8, 8)
    most = [one.most for one in held_activations(simulate(schedule, 0.01, 0.01, 0.01))]
    assert most == [count / 2 for count in peak_in_flight(schedule)]


def test_it_begins_and_ends_with_nothing_held() -> None:
    for one in held_activations(simulate(SCHEDULES["1f1b"](3, 5), 0.01, 0.02)):
        assert one.steps[0] == (0.0, 0.0)
        assert one.steps[-1][1] == 0


def test_what_is_held_is_read_from_the_spans() -> None:
    spans = [
        Span(0, "forward", "F", 1.0, 2.0, 0, 0),
        Span(0, "forward", "F", 2.0, 3.0, 1, 0),
        Span(0, "wait", "recv", 3.0, 4.0),
        Span(0, "backward", "B", 4.0, 5.0, 0, 0),
        Span(0, "backward", "B", 5.0, 6.0, 1, 0),
    ]
    (one,) = held_activations(Timeline(spans, 1))
    assert one.steps == [(0.0, 0.0), (0.0, 1.0), (1.0, 2.0), (4.0, 1.0), (5.0, 0.0)]


def test_the_picture_of_what_is_held_has_a_row_and_a_number_for_each_rank() -> None:
    picture = in_flight(simulate(SCHEDULES["1f1b"](4, 8), 0.01, 0.02), title="Held")
    assert {"Held", "rank 0", "at most 4", "rank 3", "at most 1", "modelled (calculated, not run)"} <= set(
        texts(picture.svg)
    )
    assert picture.summary == (
        "Activations on 4 ranks, modelled: rank 0 holds those of up to 4 micro-batches, rank 3 of up to 1."
    )
    assert [row["held at most (micro-batches)"] for row in picture.rows] == [4, 3, 2, 1]
    assert picture.chart is not None
    stairs = [mark for panel in picture.chart.panels for mark in panel.marks if isinstance(mark, Curve)]
    assert [max(point.y for point in one.points) for one in stairs] == [4, 3, 2, 1]


def test_a_column_is_as_high_as_its_parts() -> None:
    bars = [box for box in boxes(micro_batch_sizes(STEPS).svg) if "sample" in box.tip and box.fill != "none"]
    heights = {box.tip.split(":")[0]: 0.0 for box in bars}
    for box in bars:
        heights[box.tip.split(":")[0]] += box.height
    first = heights["1 sample"]
    assert heights["2 samples"] / first == pytest.approx(0.25 / 0.32, rel=0.01)
    assert heights["4 samples"] / first == pytest.approx(0.24 / 0.32, rel=0.01)


def test_what_was_run_is_told_from_what_was_modelled() -> None:
    picture = micro_batch_sizes(STEPS)
    assert {
        "emulated (real processes and messages, emulated clock)",
        "modelled (calculated, not run)",
        "all of it, emulated",
    } <= set(texts(picture.svg))
    assert [row["run (ms)"] for row in picture.rows] == [325, "not yet", 240]
    assert "all of it, emulated" not in texts(micro_batch_sizes([STEPS[1]]).svg)


def test_sizes_that_do_not_fit_are_marked() -> None:
    picture = micro_batch_sizes(STEPS, chosen=2)
    assert "16 ✗" in places(picture.svg)
    assert picture.summary.endswith("The shortest that fits into memory has 2 samples.")
    assert [row["fits"] for row in picture.rows] == ["yes", "yes", "no"]
    none = micro_batch_sizes([STEPS[2]])
    assert none.summary.endswith("None of them fits into memory.")
