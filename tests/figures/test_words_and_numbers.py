"""The numbers on axes and the sentences under pictures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.figures import time_breakdown
from course_lib.figures.axis import TIMES, data_size, duration, number, percent, ticks, unit_of
from course_lib.figures.words import span_in_words, summary
from course_lib.timeline import Span, Timeline
from tests.figures.synthetic import every_kind, gpipe


@given(st.floats(1e-9, 1e6), st.integers(3, 12))
def test_ticks_are_round_evenly_spaced_and_end_within_one_step_of_the_limit(limit: float, count: int) -> None:
    marks = ticks(limit, count)
    step = marks[1]
    assert f"{step:.0e}"[0] in "125"
    assert marks == [pytest.approx(i * step) for i in range(len(marks))]
    assert limit - step < marks[-1] <= limit * (1 + 1e-6)
    assert len(marks) <= count + 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1234, "1234 s"),
        (1.5, "1.5 s"),
        (0.048, "48 ms"),
        (0.0123456, "12.3 ms"),
        (2.5e-5, "25 µs"),
        (1e-9, "0.001 µs"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(1e-6, 1e4))
def test_a_duration_reads_as_the_number_it_was(seconds: float) -> None:
    value, unit = duration(seconds).split()
    assert float(value) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=5.1e-3)
    assert unit_of(seconds, TIMES)[1] == unit


def test_sizes_and_plain_numbers() -> None:
    assert [data_size(n) for n in (12, 4096, 8_000_000, 3_200_000_000)] == ["12 B", "4.1 kB", "8 MB", "3.2 GB"]
    assert [number(x) for x in (0, 7.0, 0.5, 12.34, 1000.4)] == ["0", "7", "0.5", "12.3", "1000"]


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (0.001, "under 1%"), (0.626, "63%"), (0.996, "over 99%"), (1, "100%"), (1 - 1e-16, "100%")],
)
def test_percent_never_calls_something_nothing(share: float, text: str) -> None:
    assert percent(share) == text


def test_the_shares_of_a_hand_made_timeline() -> None:
    # Rank 0 computes 31 - 6 blocked ms of 35 (forward, backward, optimizer), waits 4 and moves data for 2.
    # Rank 1 computes 29 ms and moves data for 2; it is done 4 ms before rank 0, and waits.
    shares = time_breakdown(every_kind())
    expected = {"compute": (29 + 29) / 70, "wait": (4 + 4) / 70, "transfer": (2 + 2) / 70, "rest": 0.0}
    assert shares == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_waits_of_gpipe_are_its_textbook_bubble(ranks: int) -> None:
    # At its beginning ranks wait for the first micro-batch, at its end for the last.
    # The optimizer runs after the bubble on each rank; without it nothing else is in the picture.
    pipeline = gpipe(ranks, micro_batches=4)
    pipeline = Timeline([s for s in pipeline.spans if s.kind != "optimizer"], ranks, "modelled")
    shares = time_breakdown(pipeline)
    assert shares["wait"] == pytest.approx((ranks - 1) / (4 + ranks - 1))
    assert shares["transfer"] == 0


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.003]))
def test_shares_add_up_to_one(ranks: int, micro_batches: int, transfer: float) -> None:
    shares = time_breakdown(gpipe(ranks, micro_batches, transfer=transfer))
    assert sum(shares.values()) == pytest.approx(1)


def test_the_sentence_says_how_many_how_long_what_kind_of_clock_and_where_the_time_went() -> None:
    spans = [
        Span(0, "forward", "", 0.0, 0.040),
        Span(1, "forward", "", 0.0, 0.020),
        Span(1, "wait", "recv", 0.020, 0.030, peer=0),
        Span(1, "wait", "all_reduce", 0.030, 0.034),
        Span(1, "transfer", "all_reduce", 0.034, 0.040),
    ]
    assert summary(Timeline(spans, 2, "emulated")) == (
        "2 ranks, 40 ms, emulated: on average a rank computed 75% of the time, moved data for 7% and waited 18%; "
        "rank 1 waited longest, 35%."
    )


@pytest.mark.parametrize(
    ("seconds", "difference"),
    [(0.9, "10% shorter"), (1.25, "25% longer"), (1.001, "under 1% longer"), (1 + 1e-12, "exactly as long")],
)
def test_the_sentence_compares(seconds: float, difference: str) -> None:
    measured = Timeline([Span(0, "forward", "", 0.0, 1.0)], 1)
    modelled = Timeline([Span(0, "forward", "", 0.0, seconds)], 1, "modelled")
    assert summary(measured, modelled).endswith(f"; below it modelled, {duration(seconds)}, {difference}.")


def test_a_span_in_words_has_all_that_is_known_counted_from_where_the_picture_begins() -> None:
    span = Span(2, "transfer", "irecv", 1.012, 1.019, 3, 0, bytes=4096, peer=0, background=True, number=2)
    assert span_in_words(span, zero=1.0) == (
        "rank 2: transfer, irecv, micro-batch 3, stage 0, message 2, with rank 0, 4.1 kB, in the background; "
        "7 ms, from 12 ms to 19 ms"
    )
