"""The explorer of data parallelism, moved without a browser. Its runs are real."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from course_lib.classroom.widgets.explorer import Runs
from lessons.L02_data_parallelism.explorer import CURVE, DataParallelExplorer, DataParallelSetting, curve, describe
from tests.classroom.widgets.hands import in_a_kernel, move
from tests.lessons.stand_ins import step_of

SETTING = DataParallelSetting(ranks=4, batch_size=32, link_speed=5, overlap=True)


@pytest.fixture
def explorer(called: list[Any]) -> DataParallelExplorer:
    """An explorer whose curve is complete, so that only later calls are recorded."""
    shown = DataParallelExplorer()
    called.clear()
    return shown


def test_a_move_runs_real_ranks_and_draws_what_they_did() -> None:
    explorer = DataParallelExplorer(ranks=2, batch_size=16)
    before = explorer.below.value
    move(explorer, "ranks", 3)
    assert len(set(re.findall(r">rank \d+<", explorer.below.value))) == 3
    assert explorer.below.value != before
    assert explorer.sentences.value.count("3 ranks, 16 samples, emulated: ") == 1


def test_the_curve_has_one_rank_the_ideal_and_every_number_of_ranks_to_be_compared(
    explorer: DataParallelExplorer,
) -> None:
    for ranks in CURVE:
        assert f"emulated: {ranks} rank" in explorer.beside.value
    assert ">ideal<" in explorer.beside.value


@pytest.mark.usefixtures("no_pause")
def test_a_move_waits_for_one_step_and_the_rest_of_the_curve_follows(
    explorer: DataParallelExplorer, called: list[Any]
) -> None:
    def move_the_speed() -> None:
        move(explorer, "link speed", 10)
        assert [setting.ranks for setting in called] == [4]

    in_a_kernel(move_the_speed)
    assert [setting.ranks for setting in called] == [4, 2, 8]
    assert "emulated: 8 rank" in explorer.beside.value


def test_a_new_move_puts_the_rest_of_the_curve_off(
    explorer: DataParallelExplorer, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("course_lib.classroom.widgets.explorer.PAUSE", 3600.0)
    timers: list[asyncio.TimerHandle | None] = []

    def move_twice() -> None:
        for speed in (10, 2):
            move(explorer, "link speed", speed)
            timers.append(explorer._timer)

    in_a_kernel(move_twice)
    assert timers[0] and timers[0].cancelled()
    assert [setting.link_speed for setting in called] == [10, 2]


def test_every_setting_is_run_once_and_one_rank_whatever_the_link(
    explorer: DataParallelExplorer, called: list[Any]
) -> None:
    for label, value in (("link speed", 10), ("link speed", 5), ("ranks", 1), ("overlap", False)):
        move(explorer, label, value)
    assert called == [SETTING._replace(link_speed=10)]


def test_a_batch_of_another_size_is_compared_with_one_rank_on_the_same(
    explorer: DataParallelExplorer, called: list[Any]
) -> None:
    move(explorer, "batch size", 64)
    assert [(setting.ranks, setting.batch_size) for setting in called] == [(1, 64), (4, 64)]
    assert "4.0 times as fast as 1 rank (ideal: 4)" in explorer.sentences.value


@pytest.mark.usefixtures("called")
def test_a_curve_holds_only_runs_with_the_same_batch_link_and_overlap() -> None:
    others = [SETTING._replace(**other) for other in ({"batch_size": 16}, {"link_speed": 10}, {"overlap": False})]
    runs = Runs()
    for setting in (SETTING, SETTING.with_ranks(2), SETTING.with_ranks(1), *others):
        assert runs[setting].world_size == setting.ranks
    assert [timing.ranks for timing in curve(SETTING, runs)] == [1, 2, 4]


def test_the_sentences_give_the_speed_up_and_the_largest_loss() -> None:
    text = describe(SETTING, step_of(4, 0.05), step_of(1, 0.16))
    assert "50 ms for a step, 3.2 times as fast as 1 rank (ideal: 4)" in text
    assert "computed for 90% of the time; the largest loss is communication not hidden, 10%" in text


def test_one_rank_is_not_compared_with_itself() -> None:
    assert "times as fast" not in describe(SETTING._replace(ranks=1), step_of(1, 0.1), step_of(1, 0.1))
