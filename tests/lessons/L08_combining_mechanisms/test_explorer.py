"""The explorer of a mesh, moved without a browser."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from course_lib.timeline import COMPUTE_KINDS, Timeline
from lessons.L08_combining_mechanisms.explorer import (
    MESHES,
    MICRO_BATCHES,
    NAMES,
    PRECISIONS,
    MeshExplorer,
    describe,
    predict,
)
from lessons.L08_combining_mechanisms.runs import BETWEEN, HybridExperiment, Sizes
from tests.classroom.widgets.hands import move
from tests.lessons.stand_ins import as_predicted

BOX = HybridExperiment((2, 2, 2))
UPDATES = ("all_to_all", "all_gather")
KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}  # of an action
WORK = 64 * 4 * 3 * 0.005 / 8 + 0.004  # seconds of each rank: an eighth of all samples and layers, and an update


def sentences(shown: MeshExplorer) -> str:
    return shown.sentences.value


def test_a_move_runs_eight_real_ranks_beside_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as at_first:
        at_first.setattr(HybridExperiment, "run", as_predicted)
        shown = MeshExplorer()
    assert "dp 2 x pp 2 x tp 2, 4 micro-batches, 1f1b, 32 bits, emulated: " in sentences(shown)
    before = shown.beside.value
    move(shown, "dp x pp x tp", (2, 4, 1))
    assert shown.beside.value != before
    for words in (
        "dp 2 x pp 4 x tp 1",
        "Every rank sent what was predicted, to the byte.",
        "The updated weights are those of one process.",
    ):
        assert words in sentences(shown)
    assert "emulated (real processes and messages, emulated clock)" in shown.below.value


@pytest.mark.parametrize(
    "experiment",
    [
        BOX,
        BOX._replace(dtype=torch.bfloat16),
        HybridExperiment((1, 4, 2), 2, "zb_h1"),
        HybridExperiment((4, 1, 2), 1),
    ],
)
def test_real_ranks_take_as_long_as_predicted(experiment: HybridExperiment) -> None:
    timeline, (_, pp, tp) = experiment.run().timeline, experiment.sizes
    # Not predicted: messages of 512 bytes that describe the hidden states before the first micro-batch.
    links = [experiment.pace.links_among([stage * tp, (stage + 1) * tp])[0] for stage in range(pp - 1)]
    ahead = sum(512 / link.bandwidth for link in links)
    assert timeline.makespan == pytest.approx(predict(experiment) + ahead, rel=1e-9)
    for rank in range(8):
        assert timeline.busy(rank) == pytest.approx(WORK, rel=1e-9)
        planned = [KINDS[action.op] for action in experiment.schedule.actions[rank // tp % pp]]
        assert [span.kind for span in timeline.of(rank) if span.kind in COMPUTE_KINDS] == [*planned, "optimizer"]


@pytest.mark.parametrize("sizes", MESHES)
def test_every_setting_has_the_same_work(sizes: tuple[int, int, int]) -> None:
    for micro_batches in MICRO_BATCHES:
        for name in NAMES:
            one = HybridExperiment(sizes, micro_batches, name)
            for actions in one.schedule.actions:
                marks = [(KINDS[action.op], 1.0, "weight_grad" if action.op == "B" else "") for action in actions]
                seconds = [one.pace.compute_seconds(*mark) for mark in [*marks, ("optimizer", 1.0, "")]]
                assert sum(filter(None, seconds)) == pytest.approx(WORK)


def test_the_prediction_knows_the_bubble_and_the_slow_link() -> None:
    times = {sizes: predict(HybridExperiment(sizes)) for sizes in MESHES}
    assert max(times, key=lambda sizes: times[sizes]) == (1, 1, 8)
    # 480 ms of work; with 4 stages and 4 micro-batches 7 turns take the place of 4.
    assert 0.48 * 7 / 4 < times[2, 4, 1] < 1.1 * 0.48 * 7 / 4
    assert 0.48 < times[8, 1, 1] < 1.5 * 0.48


def test_half_the_bits_are_half_the_bytes_but_for_gradients_and_no_computing() -> None:
    wide, narrow = (HybridExperiment((2, 2, 2), dtype=dtype) for dtype in PRECISIONS)
    steps = [one.run().timeline for one in (wide, narrow)]
    assert steps[1].busy(0) == pytest.approx(steps[0].busy(0))
    assert narrow.predicted.sent(0)["tp"] == pytest.approx(wide.predicted.sent(0)["tp"] / 2, rel=0.05)
    counts = 4 * sum(tensors for _, tensors in wide.predicted.buckets(0))  # how many replicas had a gradient of each
    assert narrow.predicted.sent(0)["dp"] - counts == (wide.predicted.sent(0)["dp"] - counts) * 3 / 4
    gradients, weights = ([_moved(step, name) for step in steps] for name in UPDATES)
    assert gradients[1] == pytest.approx(gradients[0])
    latency = 2 * BETWEEN.latency  # latency of two messages to the other machine, whatever the precision
    assert weights[1] - latency == pytest.approx((weights[0] - latency) / 2)


def _moved(timeline: Timeline, name: str) -> float:
    """Seconds that rank 0 spends on this operation."""
    return sum(span.duration for span in timeline.of(0) if span.name == name and not span.background)


def test_what_is_wrong_is_said(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = MeshExplorer()
    monkeypatch.setattr(HybridExperiment, "run", lambda experiment: as_predicted(experiment, off=0.5))
    move(shown, "micro-batches", 2)
    assert "Wrong: the updated weights are 50% off those of one process." in sentences(shown)
    lost = as_predicted(BOX)
    lost.sent["dp"][3, 7] -= 1
    monkeypatch.setattr(HybridExperiment, "run", lambda experiment: lost)
    move(shown, "micro-batches", 4)
    assert "Rank 3 did not send what was predicted on axis dp." in sentences(shown)


@pytest.mark.parametrize("sizes", MESHES)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_where_the_schedule_makes_no_difference_the_sentences_say_so(sizes: Sizes, micro_batches: int) -> None:
    experiments = {name: HybridExperiment(sizes, micro_batches, name) for name in NAMES}
    times = {round(predict(one), 9) for one in experiments.values()}
    are_same = experiments["gpipe"].schedule.actions == experiments["1f1b"].schedule.actions
    for one in experiments.values():
        text = describe(one, as_predicted(one), predict(one))
        assert ("With one stage there is nothing to schedule" in text) == (len(times) == 1)
        assert ("gpipe and 1f1b are the same" in text) == (are_same and len(times) > 1)


def test_in_16_bits_the_rounding_is_said(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridExperiment, "run", lambda experiment: as_predicted(experiment, off=0.03))
    assert "those of one process, up to 3%: 16 bits round." in sentences(MeshExplorer(dtype=torch.bfloat16))
