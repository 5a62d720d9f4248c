"""The explorers of pipelines and of micro-batch sizes, moved without a browser."""

from __future__ import annotations

from typing import Any

import pytest

from course_lib.classroom.widgets.explorer import Runs, compared
from course_lib.schedules import SCHEDULES, peak_in_flight
from lessons.L05_pipeline_parallelism import explorer_micro_batches as micro_batches
from lessons.L05_pipeline_parallelism.explorer import CUTS, LAYERS, NAMES, STAGES, PipelineExplorer, PipelineSetting
from lessons.L05_pipeline_parallelism.explorer_micro_batches import MINIBATCH, SIZES, MicroBatchExplorer
from tests.classroom.widgets.hands import in_a_kernel, move
from tests.lessons.stand_ins import STAND_INS, sized

SETTING = PipelineSetting(ranks=4, micro_batches=8, name="gpipe", moved=0)


def sentences(shown: Any) -> str:
    return shown.sentences.value


def test_a_move_runs_real_ranks_beside_what_was_predicted() -> None:
    shown = PipelineExplorer(stages=2, micro_batches=4, schedule="gpipe")
    before = shown.below.value
    move(shown, "schedule", "1f1b")
    move(shown, "micro-batches", 2)
    assert shown.below.value != before
    assert "2 stages, 2 micro-batches, 1f1b, emulated: " in sentences(shown)
    assert "emulated (real processes and messages, emulated clock)" in shown.below.value
    assert "exactly as predicted" in sentences(shown)


@pytest.mark.parametrize(
    "setting",
    [
        *(PipelineSetting(ranks=2, micro_batches=4, name=name, moved=2) for name in NAMES),
        micro_batches.MicroBatchSetting(size=8, stages=3, overhead=0.008, memory=32),
    ],
)
def test_real_ranks_take_as_long_as_simulated(setting: Any) -> None:
    step, expected = setting.run(), STAND_INS[type(setting)](setting)
    assert step.makespan == pytest.approx(expected.makespan, rel=1e-9)
    assert step.idle_fraction() == pytest.approx(expected.idle_fraction(), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moved", range(len(CUTS)))
def test_all_numbers_of_stages_schedules_and_cuts_have_the_same_work(name: str, moved: int) -> None:
    for ranks in STAGES:
        setting = PipelineSetting(ranks, 4, name, moved)
        timeline = setting.predict()
        assert sum(map(timeline.busy, range(ranks))) == pytest.approx(4 * 8 * 6 * 3 * 0.003)  # of the same model
        assert min(setting.layers) >= LAYERS // len(setting.layers) // 3 and sum(setting.layers) == LAYERS


def test_the_slowest_stage_sets_the_pace() -> None:
    even, uneven = SETTING.predict(), SETTING._replace(moved=2).predict()
    assert uneven.makespan > 1.2 * even.makespan


def test_the_bubble_and_what_is_held_are_said(called: list[Any]) -> None:
    assert "idle for 27% of the time, the bubble; predicted 27%" in sentences(PipelineExplorer())
    assert "held the activations of 8 of 8 micro-batches" in sentences(PipelineExplorer())
    assert "held the activations of 4 of 8 micro-batches" in sentences(PipelineExplorer(schedule="1f1b"))


@pytest.mark.usefixtures("no_pause")
def test_a_size_is_run_once_and_the_whole_curve_follows(called: list[Any]) -> None:
    shown = MicroBatchExplorer()
    assert sorted(setting.size for setting in called) == sorted(SIZES)
    called.clear()
    move(shown, "micro-batch", 8)
    move(shown, "memory", 8)
    assert called == []

    def move_the_stages() -> None:
        move(shown, "stages", 3)
        assert [setting.size for setting in called] == [8]

    in_a_kernel(move_the_stages)
    assert sorted(setting.size for setting in called) == sorted(SIZES)


def test_the_size_of_micro_batches_has_a_best_value_where_the_formula_says(called: list[Any]) -> None:
    setting, runs = micro_batches.MicroBatchSetting(4, 4, 0.008, 32), Runs()
    assert [view.left for view in micro_batches.look(setting, runs)] == [5, 4, 3, 2, 1, 0]
    curve = micro_batches.curve(setting, runs)
    times = [step.modelled for step in curve]
    b = (MINIBATCH * 0.008 / (3 * 0.003)) ** 0.5  # 5.3
    assert SIZES[times.index(min(times))] == min(SIZES, key=lambda size: abs(size - b))
    assert times[0] > min(times) < times[-1]
    for step in curve:
        expected = (MINIBATCH / step.size + 3) * (0.008 + 0.003 * step.size)
        assert step.modelled == pytest.approx(expected)
        assert step.measured == pytest.approx(expected)


@pytest.mark.parametrize("stages", micro_batches.STAGES)
@pytest.mark.parametrize("size", SIZES)
def test_the_formula_says_what_the_simulator_and_the_schedule_say(size: int, stages: int) -> None:
    setting = micro_batches.MicroBatchSetting(size, stages, 0.008, 32)
    predicted, played = setting.predict(), sized(setting)
    assert predicted.modelled == pytest.approx(played.makespan, rel=1e-12)
    assert predicted.computing + predicted.overhead == pytest.approx(played.busy(0), rel=1e-12)
    assert predicted.held == size * max(peak_in_flight(SCHEDULES["1f1b"](stages, setting.micro_batches)))


def test_with_more_stages_the_model_is_the_same() -> None:
    without = [micro_batches.MicroBatchSetting(4, stages, 0.0, 32) for stages in micro_batches.STAGES]
    work = [setting.stages * sum(setting.seconds.values()) for setting in without]
    assert work == pytest.approx([4 * 0.012] * len(work))


def test_memory_rules_sizes_out(called: list[Any]) -> None:
    shown = MicroBatchExplorer(size=8, memory=8)
    assert "would have no room: 32 samples held, memory for 8. The best size that fits is 2 samples" in sentences(shown)
    move(shown, "memory", 4)
    assert "The best size that fits is 1 sample" in sentences(shown)
    move(shown, "stages", 8)
    assert "No size fits into memory" in sentences(shown)


def test_without_overhead_smaller_is_always_faster(called: list[Any]) -> None:
    shown = MicroBatchExplorer(overhead=0.0)
    assert "The best size that fits is 1 sample; without overhead, smaller is always faster" in sentences(shown)


def test_the_difference_is_said_in_words() -> None:
    assert compared(0.1 + 0.2, 0.3) == "exactly as predicted"  # sums in another order
    assert compared(1.004, 1.0) == "4 ms longer than predicted"
    assert compared(0.97, 1.0) == "3% shorter than predicted"
    assert compared(1.5, 1.0) == "50% longer than predicted"
