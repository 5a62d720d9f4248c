"""The explorer of layer-wise model parallelism, moved without a browser. Its runs are real."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from course_lib import Span, Timeline
from course_lib.experiments.steps import LayerWiseStep, layerwise_step
from course_lib.instruments.ledger import Bytes
from course_lib.model import GPTConfig
from course_lib.ranks import Pace
from course_lib.widgets import layerwise
from course_lib.widgets.layerwise import LayerWiseExplorer, LayerWiseSetting, describe
from tests.widgets.hands import move

SETTING = LayerWiseSetting(units=4, samples=32, vocabulary=1000, cut="number")
SMALL = GPTConfig(layers=6, hidden=16, heads=2)
PACE = Pace({"forward": 1.0, "backward": 2.0})


def step_of(setting: LayerWiseSetting) -> LayerWiseStep:
    """One rank at a time, and the last one a fifth fuller than an equal share."""
    spans = [Span(rank, "forward", "", 0.01 * rank, 0.01 * (rank + 1)) for rank in range(setting.units)]
    share = 1_000_000 // setting.units
    held = [Bytes(parameters=share) for _ in range(setting.units - 1)]
    return LayerWiseStep(Timeline(spans, setting.units), [*held, Bytes(parameters=share + share // 5)])


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[LayerWiseSetting]:
    settings: list[LayerWiseSetting] = []

    def replacement(setting: LayerWiseSetting) -> LayerWiseStep:
        settings.append(setting)
        return step_of(setting)

    monkeypatch.setattr(layerwise.LayerWiseSetting, "run", replacement)
    return settings


def test_a_step_of_four_ranks_holds_what_one_holds_and_each_a_part() -> None:
    (one,), four = layerwise_step(1, 8, PACE, SMALL).held, layerwise_step(4, 8, PACE, SMALL).held
    for kind in ("parameters", "optimizer"):
        assert sum(getattr(own, kind) for own in four) == pytest.approx(getattr(one, kind), rel=1e-3)
        assert max(getattr(own, kind) for own in four) < getattr(one, kind) / 2


def test_one_rank_computes_at_a_time() -> None:
    timeline = layerwise_step(4, 8, PACE, SMALL).timeline
    passes = sorted(
        (span.start, span.end, span.rank) for span in timeline.spans if span.kind in ("forward", "backward")
    )
    assert [rank for _, _, rank in passes] == [0, 1, 2, 3, 3, 2, 1, 0]
    for (_, end, _), (start, _, _) in itertools.pairwise(passes):
        assert end == start  # messages take no time here
    # Eight blocks, two on each rank: 2 units forward and 4 backward.
    assert [end - start for start, end, _ in passes] == pytest.approx([2] * 4 + [4] * 4, rel=1e-9)
    assert timeline.makespan == pytest.approx(layerwise.predict(timeline).makespan, rel=1e-9)


def test_a_cut_by_bytes_makes_the_fullest_rank_less_full() -> None:
    wide = GPTConfig(layers=6, hidden=16, heads=2, vocab=2000)
    by_number, by_bytes = (layerwise_step(4, 8, PACE, wide, cut).held for cut in ("number", "bytes"))
    assert max(own.parameters for own in by_bytes) < max(own.parameters for own in by_number)


def test_an_unknown_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="cut='half' is unknown; choose one of number, bytes"):
        layerwise_step(2, 8, PACE, SMALL, "half")


def test_a_move_runs_real_ranks_and_draws_what_they_did() -> None:
    shown = LayerWiseExplorer(units=2, samples=8, vocabulary=12)
    move(shown, "units", 3)
    assert len(set(re.findall(r">rank \d+<", shown.below.value))) == 3
    assert "3 units: rank " in shown.sentences.value


@pytest.mark.parametrize(
    ("control", "value", "changed"),
    [
        ("units", 8, {"units": 8}),
        ("minibatch", 64, {"samples": 64}),
        ("vocabulary", 4000, {"vocabulary": 4000}),
        ("cut", "bytes", {"cut": "bytes"}),
    ],
)
def test_each_control_changes_its_part_of_the_run(
    called: list[LayerWiseSetting], control: str, value: Any, changed: dict[str, Any]
) -> None:
    shown = LayerWiseExplorer()
    called.clear()
    move(shown, control, value)
    assert called[-1] == SETTING._replace(**changed)


def test_one_unit_alone_is_run_once_for_each_minibatch_and_vocabulary(called: list[LayerWiseSetting]) -> None:
    shown = LayerWiseExplorer()
    for units in (1, 2, 1, 8):
        move(shown, "units", units)
    assert [setting.units for setting in called] == [1, 4, 2, 8]


def test_the_sentences_compare_the_fullest_with_an_equal_share() -> None:
    step = step_of(SETTING)
    text = describe(SETTING, step, step_of(SETTING._replace(units=1)), step.timeline)
    assert (
        "rank 3 is the fullest, with 293 KiB measured, 25% of what one unit alone holds (an equal share is 25%)" in text
    )
    assert (
        "A step takes 40 ms, measured, exactly as predicted; alone 10 ms. On average a unit is busy for 25% of the time"
        in text
    )


def test_the_prediction_is_one_rank_after_the_other() -> None:
    timeline = step_of(SETTING).timeline
    assert layerwise.predict(timeline).makespan == pytest.approx(timeline.makespan)


def test_controls_and_pictures_say_what_they_are(called: list[LayerWiseSetting]) -> None:
    shown = LayerWiseExplorer()
    assert [control.label for control in shown.controls] == ["units", "minibatch", "vocabulary", "cut"]
    for place in (shown.beside, shown.below):
        assert "measured" in place.value
        assert "aria-label" in place.value
