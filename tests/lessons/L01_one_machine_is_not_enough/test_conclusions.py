"""Conclusions of the lesson on one machine, confirmed elsewhere."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

from course_lib.planner import DEVICES, Cluster, Plan, estimate
from course_lib.planner.models import GPT3
from lessons.L01_one_machine_is_not_enough.explorer import TOKENS
from tests.lessons.conclusions import Conclusion, confirm

NAME = "one_machine_is_not_enough"
LARGEST = GPT3["175B"]
YEAR = 365.25 * 86_400


def kept(samples: int = 1, sequence: int = 2048, flash: bool = True) -> float:
    """Bytes of activations of the largest model."""
    model = replace(LARGEST, sequence=sequence, flash_attention=flash)
    return estimate(model, Cluster(nodes=1), Plan(dp=8, micro_batch=samples), 64).memory.activations


CONCLUSIONS = [
    Conclusion(
        "The first three are {{state:in_words}} bytes for each parameter with Adam, in 32 bits as in mixed precision.",
        "Rajbhandari et al. 2020, section 3.1: at least 24 GB for GPT-2 with 1.5 billion parameters",
        lambda: 16 * 1.5e9 == 24e9,
    ),
    Conclusion(
        "Activations grow with the samples at a time and with the length of a text, or with its square where attention "
        "keeps its scores.",
        "Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h) bytes a layer, beside the planner's, for GPT-3",
        lambda: (
            isclose(kept(4, 4096), 4 * 4096 * 12288 * 96 * 34, rel_tol=0.01)
            and isclose(kept(1, 4096, False), 4096 * 12288 * 96 * (34 + 5 * 96 * 4096 / 12288), rel_tol=0.01)
        ),
    ),
    Conclusion(
        "Training costs about six FLOPs for each parameter and token.",
        "Brown et al. 2020, table D.1: 3.14e23 FLOPs for 174.6 billion parameters and 300 billion tokens",
        lambda: isclose(6 * LARGEST.parameters * 300e9, 3.14e23, rel_tol=0.01),
    ),
    Conclusion(
        "A model of many billions of parameters meets both limits of one device: it does not fit, and it would take "
        "too long.",
        "every device of the catalogue, with all layers recomputed, and with every FLOP of its peak",
        lambda: all(
            estimate(LARGEST, Cluster(name, 1, 1), Plan(recompute="full", precision=precision), 1).fit == "does not fit"
            and 6 * LARGEST.parameters * TOKENS["175B"] / device.peak[precision] > 20 * YEAR
            for name, device in DEVICES.items()
            for precision in ["bf16" if "bf16" in device.peak else "fp16"]
        ),
    ),
]


@pytest.mark.parametrize("conclusion", CONCLUSIONS, ids=lambda one: one.sentence[:40])
def test_it_holds_elsewhere(conclusion: Conclusion) -> None:
    confirm(NAME, conclusion)
