"""The explorer of data parallelism, moved without a browser. Its runs are real."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from course_lib import Span, Timeline
from course_lib.ranks import Deadlock
from course_lib.widgets.data_parallel import CURVE, DataParallelExplorer, DataParallelSetting, curve, describe
from course_lib.widgets.explorer import Runs
from tests.widgets.hands import move

SETTING = DataParallelSetting(ranks=4, batch_size=32, link_speed=5, overlap=True)


def step_of(ranks: int, seconds: float) -> Timeline:
    """Every rank computes for all but a tenth of the time, in which it sends."""
    end = 0.9 * seconds
    spans = [Span(rank, "forward", "", 0.0, end) for rank in range(ranks)]
    spans += [Span(rank, "transfer", "all_reduce", end, seconds) for rank in range(ranks)]
    return Timeline(spans, ranks, "emulated")


def instead_of_running(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[DataParallelSetting], Timeline]
) -> list[DataParallelSetting]:
    """Replace the runs by `run`; the list returned fills with the settings it was called with."""
    called: list[DataParallelSetting] = []

    def replacement(setting: DataParallelSetting) -> Timeline:
        called.append(setting)
        return run(setting)

    monkeypatch.setattr(DataParallelSetting, "run", replacement)
    return called


def perfect(setting: DataParallelSetting) -> Timeline:
    return step_of(setting.ranks, setting.batch_size * 0.006 / setting.ranks)


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> DataParallelExplorer:
    instead_of_running(monkeypatch, perfect)
    return DataParallelExplorer()


def rows(explorer: DataParallelExplorer) -> int:
    return len(set(re.findall(r">rank \d+<", explorer.below.value)))


def test_a_move_runs_real_ranks_and_draws_what_they_did() -> None:
    explorer = DataParallelExplorer(ranks=2, batch_size=16)
    before = explorer.below.value
    move(explorer, "ranks", 3)
    assert rows(explorer) == 3
    assert explorer.below.value != before
    assert explorer.sentences.value.count("3 ranks, 16 samples, emulated: ") == 1


@pytest.mark.parametrize(
    ("control", "value"), [("ranks", 6), ("batch size", 64), ("link speed", 100), ("overlap", False)]
)
def test_each_control_changes_its_part_of_the_run(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch, control: str, value: Any
) -> None:
    called = instead_of_running(monkeypatch, perfect)
    move(explorer, control, value)
    assert called[-1] == SETTING._replace(**{control.replace(" ", "_"): value})


def test_controls_and_pictures_say_what_they_are(explorer: DataParallelExplorer) -> None:
    assert [control.label for control in explorer.controls] == ["ranks", "batch size", "link speed", "overlap"]
    for picture in (explorer.beside, explorer.below):
        assert "emulated" in picture.value
        assert "aria-label" in picture.value


def test_the_curve_has_one_rank_the_ideal_and_every_number_of_ranks_to_be_compared(
    explorer: DataParallelExplorer,
) -> None:
    for ranks in CURVE:
        assert f"emulated: {ranks} rank" in explorer.beside.value
    assert ">ideal<" in explorer.beside.value


def test_a_move_waits_for_one_step_and_the_rest_of_the_curve_follows(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead_of_running(monkeypatch, perfect)
    monkeypatch.setattr("course_lib.widgets.explorer.PAUSE", 0.0)
    monkeypatch.setattr("course_lib.widgets.explorer.BREATH", 0.0)

    async def move_and_wait() -> None:
        move(explorer, "link speed", 10)
        assert [setting.ranks for setting in called] == [4]
        for _ in range(100):  # far more turns of the loop than there are points to measure
            await asyncio.sleep(0)

    asyncio.run(move_and_wait())
    assert [setting.ranks for setting in called] == [4, 2, 8]
    assert "emulated: 8 rank" in explorer.beside.value


def test_a_new_move_puts_the_rest_of_the_curve_off(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead_of_running(monkeypatch, perfect)
    monkeypatch.setattr("course_lib.widgets.explorer.PAUSE", 3600.0)

    async def move_and_wait() -> asyncio.TimerHandle:
        move(explorer, "link speed", 10)
        first = explorer._timer
        move(explorer, "link speed", 2)
        assert first is not None
        return first

    assert asyncio.run(move_and_wait()).cancelled()
    assert [setting.link_speed for setting in called] == [10, 2]


def test_what_goes_wrong_is_said_in_place_and_the_next_move_works(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(setting: DataParallelSetting) -> Timeline:
        raise Deadlock("Nobody can move: 0 waits for <1>.")

    instead_of_running(monkeypatch, fail)
    move(explorer, "overlap", False)
    assert "role='alert'" in explorer.sentences.value
    assert "Nobody can move: 0 waits for &lt;1&gt;." in explorer.sentences.value
    instead_of_running(monkeypatch, perfect)
    move(explorer, "overlap", True)
    assert "4 ranks, 32 samples, emulated" in explorer.sentences.value


@pytest.mark.parametrize(
    ("error", "words"), [(ValueError("a bug"), "ValueError: a bug"), (KeyboardInterrupt(), "Stopped. Move a control")]
)
def test_nothing_kills_it(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
) -> None:
    def fail(setting: DataParallelSetting) -> Timeline:
        raise error

    instead_of_running(monkeypatch, fail)
    move(explorer, "ranks", 5)
    assert words in explorer.sentences.value


def test_it_can_even_begin_with_a_run_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(setting: DataParallelSetting) -> Timeline:
        raise Deadlock("Nobody can move.")

    instead_of_running(monkeypatch, fail)
    assert "Nobody can move." in DataParallelExplorer()._repr_mimebundle_()["text/html"]


def test_where_no_widget_runs_there_are_pictures_and_the_sentences(explorer: DataParallelExplorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"].count('<img src="data:image/svg+xml;base64,') == 2
    assert "<script" not in bundle["text/html"]
    assert "<svg" not in bundle["text/html"]
    assert bundle["text/plain"] in bundle["text/html"]


def test_a_picture_that_stays_the_same_is_not_sent_again(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []
    explorer.below.observe(lambda change: changed.append(change.name), "value")
    explorer.complete()
    assert changed == []


def test_every_setting_is_run_once_and_one_rank_whatever_the_link(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead_of_running(monkeypatch, perfect)
    move(explorer, "link speed", 10)
    move(explorer, "link speed", 5)
    move(explorer, "ranks", 1)
    move(explorer, "overlap", False)
    assert called == [SETTING._replace(link_speed=10)]


def test_a_batch_of_another_size_is_compared_with_one_rank_on_the_same(
    explorer: DataParallelExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = instead_of_running(monkeypatch, perfect)
    move(explorer, "batch size", 64)
    assert [(setting.ranks, setting.batch_size) for setting in called] == [(1, 64), (4, 64)]
    assert "4.0 times as fast as 1 rank (ideal: 4)" in explorer.sentences.value


def test_a_curve_holds_only_runs_with_the_same_batch_link_and_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    instead_of_running(monkeypatch, perfect)
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
