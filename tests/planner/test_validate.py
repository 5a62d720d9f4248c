"""Every published figure within its tolerance, and the goals for the errors as a whole."""

from __future__ import annotations

from functools import cache

import pytest

from course_lib.planner import DEVICES, validate
from course_lib.planner.validate import Comparison, Row, compare, predicted_steps, published, summary

ROWS = published()["rows"]


@cache
def comparisons() -> list[Comparison]:
    return compare()


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_a_published_figure_is_met_within_its_tolerance(row: Row) -> None:
    found = comparisons()[ROWS.index(row)]
    assert found.is_within_tolerance, (
        f"{found.predicted:.6g} for {found.published:.6g} {row['unit']}: {found.error:+.2%}"
    )


def test_every_figure_has_a_source_a_place_and_a_tolerance() -> None:
    for row in ROWS:
        assert row["source"] and row["where"] and row["unit"] and row["tolerance"] >= 0
    assert len({row["id"] for row in ROWS}) == len(ROWS)


def test_step_times_are_met_to_eight_percent_in_the_mean_and_twenty_at_worst() -> None:
    found = summary([one.error for one in predicted_steps(comparisons())])
    assert found.n >= 20
    assert found.mean < 0.08
    assert found.worst < 0.20


def test_memory_is_met_to_five_percent_in_the_mean() -> None:
    found = summary([one.error for one in comparisons() if one.row["quantity"] in validate.MEMORY])
    assert found.n >= 50
    assert found.mean < 0.05


def test_the_naive_baseline_is_beaten() -> None:
    steps = predicted_steps(comparisons())
    naive = summary([one.naive / one.published - 1 for one in steps if one.naive is not None])
    ours = summary([one.error for one in steps])
    assert (ours.mean, ours.worst) < (naive.mean / 2, naive.worst)


def test_faster_plans_are_told_from_slower_ones() -> None:
    steps = predicted_steps(comparisons())
    measured = [validate.utilization(one, one.published) for one in steps]
    predicted = [validate.utilization(one, one.predicted) for one in steps]
    assert validate.rank_correlation(measured, predicted) > 0.8


def test_each_device_is_calibrated_on_one_row_only() -> None:
    rows = [row["cluster"]["device"] for row in ROWS if row["quantity"] == "step time" and row.get("calibrates")]
    assert len(rows) == len(set(rows)) == 3


@pytest.mark.parametrize("device", ["V100-32GB", "A100-80GB", "H100-80GB"])
def test_the_catalogue_has_the_calibrated_fraction(device: str) -> None:
    assert DEVICES[device].matmul == pytest.approx(validate.calibrated(device), abs=0.001)


def test_rank_correlation_by_hand() -> None:
    assert validate.rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == 1
    assert validate.rank_correlation([1.0, 2.0, 3.0], [30.0, 20.0, 10.0]) == -1
    assert validate.rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(0.8)


def test_the_printed_table_has_every_row_and_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "compare", comparisons)
    validate.main()
    printed = capsys.readouterr().out
    assert all(row["id"] in printed for row in ROWS)
    assert "OUTSIDE" not in printed
    for words in ("step time, planner", "step time, naive", "signed", "worst", "rank correlation", "memory"):
        assert words in printed
