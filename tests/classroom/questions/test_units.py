"""Numbers with units, as people type them, and the slips that are recognized."""

from __future__ import annotations

import pytest

from course_lib.classroom.questions.units import (
    BYTES,
    SAMPLES,
    SECONDS,
    SHARE,
    TIMES,
    Quantity,
    Slip,
    explain,
    is_close,
    parse,
)


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("12 MB", BYTES, 12e6),
        ("12MB", BYTES, 12e6),
        ("1,200 kB", BYTES, 1.2e6),
        ("1_200.5 B", BYTES, 1200.5),
        ("1.5 MiB", BYTES, 1.5 * 2**20),
        ("8 Mbit", BYTES, 1e6),
        ("7e5 bytes", BYTES, 7e5),
        ("700,000 bytes", BYTES, 7e5),
        ("6.5", TIMES, 6.5),
        (" 6.5 x ", TIMES, 6.5),
        ("64 samples", SAMPLES, 64),
        ("250 ms", SECONDS, 0.25),
        ("8.8 sec", SECONDS, 8.8),
        ("25%", SHARE, 0.25),
        ("49 per cent", SHARE, 0.49),
    ],
)
def test_numbers_are_read(text: str, quantity: Quantity, value: float) -> None:
    assert parse(text, quantity) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "quantity", "complaint"),
    [
        ("12", BYTES, "'12' has no unit; write for instance '12 MB'"),
        ("12 Mb", BYTES, "'Mb' is not a unit of a number of bytes"),
        ("many", BYTES, "'many' is not a number of bytes; write for instance '12 MB'"),
        ("", TIMES, "'' is not a factor"),
        ("-3", TIMES, "'-3' is not a factor"),
        ("1e400", TIMES, "'e400' is not a unit of a factor"),
        ("1,5 MB", BYTES, "'1,5 MB' has a comma among its digits; write 1.5 with a point"),
        ("8.8 secs", SECONDS, "'secs' is not a unit of a time; write for instance '1.5 s'"),
        ("12 MB", TIMES, "'MB' is not a unit of a factor"),
    ],
)
def test_what_is_no_answer_is_refused_with_an_example(text: str, quantity: Quantity, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse(text, quantity)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("5.6 MB", "factor of 8"),
        ("87.5 kB", "factor of 8"),
        ("700 kiB".replace("k", "K"), "1 MiB is 1,048,576"),
        ("700 MB", "factor of a thousand"),
        ("1400 kB", "twice, says this question"),
        ("123 kB", ""),
    ],
)
def test_slips_are_told_apart(given: str, words: str) -> None:
    own = (Slip(2, "twice, says this question"),)
    found = explain(parse(given, BYTES), 700_000, BYTES, own, 0.01)
    assert (words in found) if words else not found


def test_close_is_a_share_of_the_true_value() -> None:
    assert is_close(101, 100, 0.01)
    assert not is_close(102, 100, 0.01)
    assert not is_close(0, 100, 0.5)
