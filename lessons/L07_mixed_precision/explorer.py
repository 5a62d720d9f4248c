"""An explorer of mixed precision: choose the bits of each kind of number, and watch a real training.

    | format        ----o  float16       | how large the gradients are, and which |
    | loss scale    o----  none          | of them the format turns into zeros    |
    | weights       ----o  master copy   |                                        |
    | learning      ---o-  rate 0.003    |                                        |
    | divided by    ----o  all tokens    |                                        |
    | the result, in words               |                                        |
    | the loss of this training while it goes on, beside the same one in float32  |

The training stands for one process's share of a large run: its minibatch counts as one of 65,536 micro-batches, and its
loss is divided by the tokens of all of them before the backward pass, or only by its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from typing import NamedTuple

import torch

from course_lib import data
from course_lib.classroom.runs.training import SMALL, flat, gradients_of, train
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View
from course_lib.figures import loss_at_end, loss_curves
from course_lib.figures.axis import counted, number, percent
from course_lib.mechanisms.mixed_precision import LossScaler, MasterWeights
from course_lib.model import TinyGPT
from lessons.L07_mixed_precision.figure import lost, number_range, power
from lessons.L07_mixed_precision.runs import Format, RoundedWeights, exponents

SAMPLES, STEPS = 64, 150
MICRO_BATCHES = 2**16  # in one minibatch, whose tokens the loss may be divided by
PIECE = 10  # steps between two pictures
FORMATS = ("float32", "bfloat16", "float16")
SCALES = {"none": 1.0, "2⁸": 2.0**8, "2¹⁶": 2.0**16, "2⁴⁰": 2.0**40, "dynamic": None}
HIGHEST, GROWTH = 2.0**40, 20  # a dynamic scale's first value, and the good steps after which it is doubled
RATES = (1e-5, 1e-4, 1e-3, 3e-3)


class MixedPrecisionSetting(NamedTuple):
    """The values of the controls. scale: of the loss; None for a dynamic one.  divisor: of the mean over own tokens."""

    format: str
    scale: float | None
    has_master_weights: bool
    learning_rate: float
    divisor: int = MICRO_BATCHES

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.format)


class OngoingTraining:
    """A real training that goes on a few steps at a time.

    losses: of each step so far.  skipped: the number of steps skipped because a gradient overflowed.
    zeros: the share of the first step's gradients that are zero after the backward pass; None before it.
    """

    def __init__(self, setting: MixedPrecisionSetting) -> None:
        self.losses: list[float] = []
        self.zeros: float | None = None
        self.skipped = 0
        self._model = TinyGPT(SMALL, dtype=setting.dtype)
        self._scaler = LossScaler(setting.scale or HIGHEST, dynamic=setting.scale is None, growth_interval=GROWTH)
        keeps = MasterWeights if setting.has_master_weights else RoundedWeights
        # AdamW adds eps to the gradients' size, so it is divided as they are.
        make = partial(torch.optim.AdamW, lr=setting.learning_rate, eps=1e-8 / setting.divisor)
        self._divisor = setting.divisor
        self._optimizer = keeps(self._model.parameters(), make, self._scaler)
        self._minibatches = data.minibatches(data.train_test_split()[0], SAMPLES)

    @property
    def scale(self) -> float:
        return self._scaler.scale_factor

    @property
    def is_broken(self) -> bool:
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    @property
    def pieces_left(self) -> int:
        return 0 if self.is_broken else math.ceil((STEPS - len(self.losses)) / PIECE)

    def go_on(self) -> None:
        """Train PIECE more steps, or as many as are left."""
        if not self.pieces_left:
            return
        piece = islice(self._minibatches, min(PIECE, STEPS - len(self.losses)))
        with one_thread():
            losses = train(self._model, piece, self._loss, self._optimizer, self._scaler, combine=self._look)
        self.losses += [self._divisor * loss for loss in losses]

    def _loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return data.answer_loss(output, targets) / self._divisor

    def _look(self) -> None:
        """Note the gradients' zeros, and an overflow, after a backward pass."""
        gradient = flat(gradients_of(self._model))
        if self.zeros is None:
            self.zeros = (gradient == 0).double().mean().item()
        self.skipped += not gradient.isfinite().all()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: with more, a model this small is no faster, and on a busy computer far slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def first_gradients() -> dict[int, float]:
    """A histogram of the first step's gradients, in float32, of the mean over its own tokens, from `exponents`."""
    model = TinyGPT(SMALL)
    inputs, targets = next(data.minibatches(data.train_test_split()[0], SAMPLES))
    data.answer_loss(model(inputs), targets).backward()
    return exponents(gradients_of(model))


def scaled(shares: Mapping[int, float], scale: float) -> dict[int, float]:
    """The histogram of the same numbers multiplied by a power of two, which changes their size but no digit."""
    up = round(math.log2(scale))
    return {exponent + up: share for exponent, share in shares.items()}


def look(setting: MixedPrecisionSetting, in_32_bits: OngoingTraining) -> Iterator[View]:
    """Train from beginning to end. in_32_bits: the same training in float32, as far as it has come."""
    training, left = OngoingTraining(setting), 1
    while left:
        training.go_on()
        in_32_bits.go_on()
        left = max(training.pieces_left, in_32_bits.pieces_left)
        losses = {"float32": in_32_bits.losses, f"{setting.format}, as set": training.losses}
        curves = loss_curves(losses, STEPS, WIDTH, "Does it learn?")
        sizes = scaled(first_gradients(), training.scale / setting.divisor)
        range_of = number_range(sizes, Format.of(setting.dtype), HALF, "How large are the gradients?")
        yield View(describe(setting, training, in_32_bits), range_of, curves, left)


def describe(setting: MixedPrecisionSetting, training: OngoingTraining, in_32_bits: OngoingTraining) -> str:
    """Say what the format does to the gradients, and how far the training has come beside float32."""
    shares = lost(scaled(first_gradients(), training.scale / setting.divisor), Format.of(setting.dtype))
    scale = "no loss scale" if setting.scale == 1 else f"a loss scale of {power(round(math.log2(training.scale)))}"
    return (
        f"{setting.format} with {scale}{', for now' * (setting.scale is None)}: of the finished gradient "
        f"{percent(shares['zero'])} vanish and {percent(shares['infinite'])} overflow; after a backward pass in "
        f"{setting.format}, {percent(training.zeros or 0)} are zeros. {_progress(training, in_32_bits)}"
    )


def _progress(training: OngoingTraining, in_32_bits: OngoingTraining) -> str:
    steps = len(training.losses)
    if training.is_broken:
        return f"After {counted(steps - 1, 'step')} the loss is not a number, and nothing is left."
    text = f"Step {steps} of {STEPS}, measured: loss {number(loss_at_end(training.losses))}"
    text += f", {counted(training.skipped, 'step')} skipped because of an overflow" * bool(training.skipped)
    reference = in_32_bits.losses[:steps]
    text += f"; float32 {number(loss_at_end(reference))}."
    if steps == PIECE:  # too early to tell
        return text
    share = (training.losses[0] - loss_at_end(training.losses)) / (reference[0] - loss_at_end(reference))
    return f"{text} It has come {_share_in_words(share)}."


def _share_in_words(share: float) -> str:
    if share > 0.9:
        return "as far as float32" if share > 0.97 else "nearly as far as float32"
    return f"{percent(share)} of the way of float32" if share > 0.01 else "nowhere"


class MixedPrecisionExplorer(Explorer):
    """An explorer of format, loss scale, masters, learning rate and divisor; a training goes on until the next move."""

    def __init__(
        self,
        format: str = "float16",
        scale: float | None = 1.0,
        has_master_weights: bool = True,
        learning_rate: float = 3e-3,
        divisor: int = MICRO_BATCHES,
    ) -> None:
        keeps = ("in the format only", "master copy in 32 bits")
        controls = [
            Slider("format", FORMATS, format),
            Slider("loss scale", tuple(SCALES.values()), scale, tuple(SCALES)),
            Slider("weights", (False, True), has_master_weights, keeps),
            Slider("learning", RATES, learning_rate, [f"rate {each:.5f}".rstrip("0") for each in RATES]),
            Slider("divided by", (1, MICRO_BATCHES), divisor, ("its own tokens", "all tokens")),
        ]
        in_32_bits = cache(lambda rate: OngoingTraining(MixedPrecisionSetting("float32", 1.0, False, rate)))
        super().__init__(controls, lambda *values: look(MixedPrecisionSetting(*values), in_32_bits(values[3])))
