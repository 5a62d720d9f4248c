"""Stand-ins for the runs of explorers: predictions in place of real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from course_lib import Span, Timeline
from course_lib.instruments.ledger import Bytes
from course_lib.planner import simulate
from course_lib.schedules import SCHEDULES
from lessons.L02_data_parallelism.explorer import DataParallelSetting
from lessons.L04_layerwise_model_parallelism.explorer import LayerWiseSetting
from lessons.L04_layerwise_model_parallelism.runs import LayerWiseStep
from lessons.L05_pipeline_parallelism.explorer import PipelineSetting
from lessons.L05_pipeline_parallelism.explorer_micro_batches import MicroBatchSetting
from lessons.L06_tensor_parallelism.runs import CutRun, run_cut
from lessons.L08_combining_mechanisms import exact_bytes
from lessons.L08_combining_mechanisms.explorer import predict
from lessons.L08_combining_mechanisms.runs import HybridExperiment, MeshStep


def step_of(ranks: int, seconds: float) -> Timeline:
    """A step in which every rank computes for nine tenths of the time, and sends for the last one."""
    end = 0.9 * seconds
    spans = [Span(rank, "forward", "", 0.0, end) for rank in range(ranks)]
    spans += [Span(rank, "transfer", "all_reduce", end, seconds) for rank in range(ranks)]
    return Timeline(spans, ranks, "emulated")


def perfect(setting: DataParallelSetting) -> Timeline:
    return step_of(setting.ranks, setting.batch_size * 0.006 / setting.ranks)


def one_at_a_time(setting: LayerWiseSetting) -> LayerWiseStep:
    """A step of one rank after the other; the last holds a fifth more than an equal share."""
    spans = [Span(rank, "forward", "", 0.01 * rank, 0.01 * (rank + 1)) for rank in range(setting.units)]
    share = 1_000_000 // setting.units
    held = [Bytes(parameters=share) for _ in range(setting.units - 1)]
    return LayerWiseStep(Timeline(spans, setting.units), [*held, Bytes(parameters=share + share // 5)])


def simulated(setting: PipelineSetting) -> Timeline:
    return replace(setting.predict(), origin="emulated")


def sized(setting: MicroBatchSetting) -> Timeline:
    schedule, seconds = SCHEDULES["1f1b"](setting.stages, setting.micro_batches), setting.seconds
    return replace(simulate(schedule, seconds["forward"], seconds["backward"]), origin="emulated")


def as_predicted(experiment: HybridExperiment, off: float = 0.0) -> MeshStep:
    sent: dict[str, dict[tuple[int, int], int]] = {axis: {} for axis in exact_bytes.AXES}
    for rank in range(8):
        for axis, count in experiment.predicted.sent(rank).items():
            group = list(range(8)) if axis == "all" else experiment.group(rank, axis)
            sent[axis][rank, group[(group.index(rank) + 1) % len(group)]] = count
    spans = [Span(rank, "forward", "", 0.0, predict(experiment)) for rank in range(8)]
    return MeshStep(Timeline(spans, 8, "emulated"), sent, off, {})


class Cut(NamedTuple):
    """The values of the controls of tensor parallelism."""

    ranks: int
    hidden: int
    way: str
    sequence_parallel: bool

    def run(self) -> CutRun:
        """Run the cut without a pace."""
        return run_cut(self.way, self.ranks, self.hidden, self.sequence_parallel)


STAND_INS: dict[Any, Callable[[Any], Any]] = {
    DataParallelSetting: perfect,
    LayerWiseSetting: one_at_a_time,
    PipelineSetting: simulated,
    MicroBatchSetting: sized,
    HybridExperiment: as_predicted,
}
