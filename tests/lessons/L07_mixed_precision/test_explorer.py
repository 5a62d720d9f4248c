"""The explorer of mixed precision, moved without a browser. Its trainings are real, and short."""

from __future__ import annotations

import asyncio
import re
from itertools import islice
from typing import Any

import pytest
import torch

from course_lib import data
from course_lib.classroom.runs.training import SMALL
from course_lib.model import TinyGPT
from lessons.L07_mixed_precision import explorer as mixed_precision
from lessons.L07_mixed_precision.explorer import (
    MICRO_BATCHES,
    MixedPrecisionExplorer,
    MixedPrecisionSetting,
    OngoingTraining,
)
from tests.classroom.widgets.hands import move

SCALED, TOO_LARGE = 2.0**16, 2.0**40


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture that shortens trainings to few steps."""
    monkeypatch.setattr(mixed_precision, "STEPS", 40)


def trained(setting: MixedPrecisionSetting) -> OngoingTraining:
    training = OngoingTraining(setting)
    while training.pieces_left:
        training.go_on()
    return training


def said(shown: MixedPrecisionExplorer) -> str:
    return shown.sentences.value


def test_a_training_is_the_one_that_plain_torch_does() -> None:
    model = TinyGPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-8 / MICRO_BATCHES)
    losses = []
    for inputs, targets in islice(data.minibatches(data.train_test_split()[0], 64), 40):
        loss = data.answer_loss(model(inputs), targets) / MICRO_BATCHES
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(MICRO_BATCHES * loss.item())
    assert trained(MixedPrecisionSetting("float32", 1.0, False, 3e-3)).losses == losses


@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.usefixtures("one_piece")
def test_a_loss_scale_changes_no_digit_where_the_range_is_wide(format: str) -> None:
    plain, scaled = (trained(MixedPrecisionSetting(format, scale, True, 3e-3)).losses for scale in (1.0, SCALED))
    assert plain == scaled


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (MixedPrecisionSetting("float16", 1.0, True, 3e-3), "of the way of float32"),
        (MixedPrecisionSetting("float16", SCALED, True, 3e-3), "as far as float32"),
        (MixedPrecisionSetting("float16", 1.0, True, 3e-3, 1), "as far as float32"),
        (MixedPrecisionSetting("float16", TOO_LARGE, True, 3e-3), "40 steps skipped because of an overflow"),
        (MixedPrecisionSetting("float16", None, True, 3e-3), "as far as float32"),
        (MixedPrecisionSetting("float16", SCALED, False, 3e-3), "After 1 step the loss is not a number"),
    ],
)
def test_what_is_left_out_is_seen(setting: MixedPrecisionSetting, words: str) -> None:
    assert words in said(MixedPrecisionExplorer(*setting))


def test_small_updates_need_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "STEPS", 80)
    shown = MixedPrecisionExplorer("bfloat16", 1.0, False, 1e-5)
    assert re.search(r"It has come (nowhere|\d% of the way of float32)", said(shown))
    move(shown, "weights", True)
    shown.complete()
    assert "as far as float32" in said(shown)


def test_a_dynamic_scale_comes_down_until_nothing_overflows() -> None:
    training = trained(MixedPrecisionSetting("float16", None, True, 3e-3))
    assert 0 < training.skipped < 20
    assert 2.0**20 < training.scale < TOO_LARGE


@pytest.mark.usefixtures("one_piece")
def test_the_sentences_say_what_vanishes_and_what_overflows() -> None:
    shown = MixedPrecisionExplorer()
    assert "float16 with no loss scale: of the finished gradient 16% vanish and 0% overflow" in said(shown)
    move(shown, "loss scale", TOO_LARGE)
    assert "float16 with a loss scale of 2⁴⁰: of the finished gradient 0% vanish and" in said(shown)
    assert "and 0% overflow" not in said(shown)
    move(shown, "format", "bfloat16")
    assert "0% vanish and 0% overflow; after a backward pass in bfloat16, 0% are zeros" in said(shown)


@pytest.mark.usefixtures("no_pause")
def test_the_curve_grows_piece_by_piece_until_a_move_begins_a_new_one(begun: list[Any]) -> None:
    async def until(steps: int, shown: MixedPrecisionExplorer) -> None:
        for _ in range(100):  # far more turns of the loop than views
            if f"Step {steps} of 40" not in said(shown):
                await asyncio.sleep(0)
        assert f"Step {steps} of 40" in said(shown)

    async def watch() -> None:
        shown = MixedPrecisionExplorer()
        assert "Step 40 of 40" in said(shown)
        move(shown, "loss scale", SCALED)
        (_, left_alone), picture = begun[-1], shown.below.value
        assert len(left_alone.losses) == 10
        await until(20, shown)
        assert shown.below.value != picture
        move(shown, "format", "bfloat16")
        await until(40, shown)
        assert len(begun[-1][1].losses) == 40
        assert len(left_alone.losses) == 20  # nothing continued the first one

    asyncio.run(watch())


@pytest.mark.usefixtures("one_piece")
def test_float32_is_trained_once_for_each_learning_rate(begun: list[Any]) -> None:
    shown = MixedPrecisionExplorer()
    assert [setting.format for setting, _ in begun] == ["float32", "float16"]
    move(shown, "format", "bfloat16")
    move(shown, "learning", 1e-3)
    move(shown, "learning", 3e-3)
    again = [(setting.format, setting.learning_rate) for setting, _ in begun[2:]]
    assert again == [("bfloat16", 3e-3), ("float32", 1e-3), ("bfloat16", 1e-3), ("bfloat16", 3e-3)]


def test_a_training_leaves_the_kernel_as_many_threads_as_it_had() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        OngoingTraining(MixedPrecisionSetting("float32", 1.0, False, 1e-3)).go_on()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
