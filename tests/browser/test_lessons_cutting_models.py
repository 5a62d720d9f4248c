"""Lessons 04 to 06 as a student goes through them: a model is cut between layers, into stages, and inside layers."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.hands import MOVE, cell, drag, fits_one_screen, go_through, pictures, press, says, slider


def test_layerwise_model_parallelism(lab: Any) -> None:
    page = go_through(lab, "04_layerwise_model_parallelism")
    explorer = cell(page, "LayerWiseExplorer()")
    says(explorer, "4 units")
    high = fits_one_screen(explorer)
    press(explorer, "units", "ArrowLeft")
    says(explorer, "3 units")
    drag(explorer, "cut", 1.0)
    expect(slider(explorer, "cut")).to_have_attribute("aria-valuetext", "by bytes")
    expect(pictures(explorer).last).to_contain_text("emulated (real processes and messages, emulated clock): 3 ranks")
    assert fits_one_screen(explorer) == high


def test_pipeline_parallelism(lab: Any) -> None:
    page = go_through(lab, "05_pipeline_parallelism")
    a_schedule_is_run_beside_what_was_predicted(cell(page, "PipelineExplorer()"))
    the_size_of_micro_batches_has_a_minimum(cell(page, "MicroBatchExplorer()"))


def a_schedule_is_run_beside_what_was_predicted(explorer: Any) -> None:
    says(explorer, "4 stages, 8 micro-batches, gpipe, emulated")
    press(explorer, "schedule", "ArrowRight")
    says(explorer, "4 stages, 8 micro-batches, 1f1b, emulated")
    expect(pictures(explorer).first).to_contain_text("at most 1")
    drag(explorer, "stages", 1.0)
    says(explorer, "8 stages, 8 micro-batches, 1f1b, emulated")
    high = fits_one_screen(explorer)
    drag(explorer, "stages", 0.0)
    says(explorer, "2 stages, 8 micro-batches, 1f1b, emulated: 972 ms, exactly as predicted")
    expect(pictures(explorer).last).to_contain_text("emulated (real processes and messages, emulated clock): 2 ranks")
    assert fits_one_screen(explorer) == high
    explorer.get_by_role("button", name="Play", exact=True).click()
    expect(explorer.get_by_role("slider", name="time")).to_be_visible(timeout=MOVE)
    assert fits_one_screen(explorer) == pytest.approx(high, abs=5)  # what follows stays where it was


def the_size_of_micro_batches_has_a_minimum(explorer: Any) -> None:
    says(explorer, "Micro-batches of 4 samples, 8 of them on 4 stages")
    high = fits_one_screen(explorer)
    drag(explorer, "micro-batch", 1.0)
    says(explorer, "Micro-batches of 32 samples, 1 of them on 4 stages")
    press(explorer, "memory", "ArrowLeft", times=2)
    says(explorer, "memory for 8")
    expect(pictures(explorer).first).to_contain_text("32 ✗")
    drag(explorer, "stages", 1.0)
    says(explorer, "Micro-batches of 32 samples, 1 of them on 8 stages")
    assert fits_one_screen(explorer) == high


def test_tensor_parallelism(lab: Any) -> None:
    page = go_through(lab, "06_tensor_parallelism")
    explorer = cell(page, "TensorParallelExplorer()")
    press(explorer, "ranks", "ArrowLeft")
    says(explorer, "2 ranks, columns, rows, hidden size 64, emulated")
    drag(explorer, "cut of A, B", 0.5)
    says(explorer, "2 ranks, rows, columns, hidden size 64, emulated")
    explorer.locator("svg[aria-label*='hold A by rows and B by columns']").wait_for(timeout=MOVE)
    press(explorer, "cut of A, B", "ArrowRight")
    says(explorer, "Wrong: gradient of x is off by")
    drag(explorer, "ranks", 1.0)
    says(explorer, "8 ranks, columns, rows, without f")
    fits_one_screen(explorer)
