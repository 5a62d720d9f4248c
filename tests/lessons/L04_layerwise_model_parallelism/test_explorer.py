"""The explorer of layer-wise model parallelism, moved without a browser. Its runs are real."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from course_lib.model import GPTConfig
from course_lib.ranks import Pace
from lessons.L04_layerwise_model_parallelism import explorer as layerwise
from lessons.L04_layerwise_model_parallelism.explorer import LayerWiseExplorer, LayerWiseSetting, describe
from lessons.L04_layerwise_model_parallelism.runs import layerwise_step
from tests.classroom.widgets.hands import move
from tests.lessons.stand_ins import one_at_a_time

SETTING = LayerWiseSetting(units=4, samples=32, vocabulary=1000, cut="number")
SMALL = GPTConfig(layers=6, hidden=16, heads=2)
PACE = Pace({"forward": 1.0, "backward": 2.0})


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


def test_one_unit_alone_is_run_once_for_each_minibatch_and_vocabulary(called: list[Any]) -> None:
    shown = LayerWiseExplorer()
    for units in (1, 2, 1, 8):
        move(shown, "units", units)
    assert [setting.units for setting in called] == [1, 4, 2, 8]


def test_the_sentences_compare_the_fullest_with_an_equal_share() -> None:
    step = one_at_a_time(SETTING)
    text = describe(SETTING, step, one_at_a_time(SETTING._replace(units=1)), step.timeline)
    assert (
        "rank 3 is the fullest, with 293 KiB measured, 25% of what one unit alone holds (an equal share is 25%)" in text
    )
    assert (
        "A step takes 40 ms, measured, exactly as predicted; alone 10 ms. On average a unit is busy for 25% of the time"
        in text
    )
