"""An explorer of a mesh: arrange eight ranks, and see the bytes between them, and their waits.

    | dp x pp x tp   ---o---   2 x 2 x 2    | the ranks as a grid, lines    |
    | micro-batches  ---o---   4            | as wide as the bytes sent,    |
    | schedule       -o-----   1f1b         | and the bytes predicted       |
    | precision      o------   32 bits      |                               |
    | the result, in words                  |                               |
    | the timeline of all ranks                                             |

Each move trains one step on eight real ranks, on two emulated machines of four with a slow link between them. Bytes are
counted in the trace, the updated weights are compared with those of one process.
"""

from __future__ import annotations

import torch

from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import EXACTLY, HALF, WIDTH, Explorer, View, compared
from course_lib.figures import gantt
from course_lib.figures.axis import counted, data_size, duration, percent
from course_lib.planner import simulate
from lessons.L08_combining_mechanisms import exact_bytes
from lessons.L08_combining_mechanisms.figure import mesh_map, total
from lessons.L08_combining_mechanisms.runs import (
    CONFIG,
    PER_MACHINE,
    UPDATE,
    HybridExperiment,
    MeshStep,
    Sizes,
    predicted_to_send,
)

RANKS = 8
USUAL = 1.1  # seconds on the axis of time
MESHES = ((8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (2, 1, 4), (1, 4, 2), (1, 2, 4), (1, 1, 8))
MICRO_BATCHES = (1, 2, 4, 8)
NAMES = ("gpipe", "1f1b", "zb_h1")
PRECISIONS = {torch.float32: "32 bits", torch.bfloat16: "bfloat16"}
AXIS_NAMES = {"tp": "tensor ranks", "pp": "stages", "dp": "replicas"}
LEFT_OUT = " (each stage first tells the next what its tensors look like, which the prediction leaves out)"


# Predictions


def predict(experiment: HybridExperiment) -> float:
    """Seconds of a step: simulated pipelines, with the all-reduces of tensor ranks at the end of each action, and then
    the time on the links for the loss, the gradients and the updated weights.

    The prediction is exact except for the first message from a stage to the next, which describes its tensors
    (`StageMessages`) and which the simulator leaves out: with several stages a step takes up to 0.03% longer.
    """
    pace, (_, pp, tp), seconds = experiment.pace, experiment.sizes, experiment.seconds
    forward, backward = (
        [seconds + _talk(experiment, kind, stage) for stage in range(pp)] for kind in ("forward", "backward")
    )
    links = [pace.links_among([home, home + tp])[0] for home in range(0, (pp - 1) * tp, tp)]
    hops = [link.seconds(_hidden(experiment)) for link in links]
    pipelines = simulate(experiment.schedule, forward, backward, seconds, [*hops, 0.0]).makespan
    loss = pace.collective_seconds("all_reduce", exact_bytes.NUMBER, list(range(RANKS)))
    return pipelines + loss + max(_update(experiment, rank) for rank in range(RANKS))


def _hidden(experiment: HybridExperiment) -> int:
    """Bytes of a micro-batch's hidden states."""
    return _tokens(experiment) * CONFIG.hidden * experiment.dtype.itemsize


def _tokens(experiment: HybridExperiment) -> int:
    """The tokens of a micro-batch."""
    return experiment.samples // experiment.sizes[0] // experiment.micro_batches * CONFIG.sequence


def _talk(experiment: HybridExperiment, kind: str, stage: int) -> float:
    """Seconds that tensor ranks take for the all-reduces of an action: of hidden states two per layer and one at each
    end of the model; for the loss one of a number per token, and one of two numbers per token.
    """
    is_first, is_last = stage == 0, stage == experiment.sizes[1] - 1
    number = 2 * CONFIG.layers // experiment.sizes[1] + (is_first if kind == "forward" else is_last)
    sizes = [_hidden(experiment)] * number
    if kind == "forward" and is_last:
        sizes += [4 * _tokens(experiment), 8 * _tokens(experiment)]
    group = experiment.group(stage * experiment.sizes[2], "tp")
    return sum(experiment.pace.collective_seconds("all_reduce", size, group) for size in sizes)


def _update(experiment: HybridExperiment, rank: int) -> float:
    """Seconds in which replicas reduce-scatter the gradients, update their shards, and all-gather the weights."""
    group, seconds = experiment.group(rank, "dp"), UPDATE
    for numbers, tensors in experiment.predicted.buckets(rank):
        seconds += experiment.pace.collective_seconds("all_to_all", len(group) * (numbers + tensors) * 4, group)
        seconds += experiment.pace.collective_seconds("all_gather", numbers * experiment.dtype.itemsize, group)
    return seconds


# Views


def look(experiment: HybridExperiment) -> View:
    step, predicted = experiment.run(), predict(experiment)
    in_all = {axis: sum(sent[axis] for sent in predicted_to_send(experiment)) for axis in exact_bytes.AXES}
    return View(
        describe(experiment, step, predicted),
        mesh_map(experiment.sizes, step, in_all, PER_MACHINE, HALF, "Who talks to whom?"),
        gantt(step.timeline, width=WIDTH, title="What did every rank do?", usual=USUAL),
    )


def describe(experiment: HybridExperiment, step: MeshStep, predicted: float) -> str:
    """Say how long a step took beside the prediction, who sends most, and whether bytes and weights are right."""
    timeline = step.timeline
    busy = sum(map(timeline.busy, range(RANKS))) / (RANKS * timeline.makespan)
    what = f"{counted(experiment.micro_batches, 'micro-batch')}, {experiment.name}, {PRECISIONS[experiment.dtype]}"
    time = compared(timeline.makespan, predicted)
    return (
        f"{experiment.words}, {what}, {timeline.origin}: {duration(timeline.makespan)} for a step, "
        f"{time}{'' if time == EXACTLY else LEFT_OUT}; the ranks computed for {percent(busy)} of it. "
        f"{_most(step)} {_as_predicted(experiment, step)} {_verdict(experiment, step)}{_without_effect(experiment)}"
    )


def _most(step: MeshStep) -> str:
    counts = {axis: total(step.sent, axis) for axis in AXIS_NAMES}
    axis = max(counts, key=lambda axis: counts[axis])
    everything = sum(counts.values())
    share = percent(counts[axis] / everything)
    return f"Most of the {data_size(everything)} is sent by {AXIS_NAMES[axis]}, {share}."


def _as_predicted(experiment: HybridExperiment, step: MeshStep) -> str:
    """Compare the bytes sent with the prediction, rank by rank and axis by axis."""
    for rank, predicted in enumerate(predicted_to_send(experiment)):
        for axis in exact_bytes.AXES:
            if predicted[axis] != sum(count for (source, _), count in step.sent[axis].items() if source == rank):
                return f"Rank {rank} did not send what was predicted on axis {axis}."
    return "Every rank sent what was predicted, to the byte."


def _verdict(experiment: HybridExperiment, step: MeshStep) -> str:
    if not experiment.is_right(step):
        return f"Wrong: the updated weights are {percent(step.off)} off those of one process."
    if experiment.dtype == torch.float32:
        return "The updated weights are those of one process."
    rounding = f"The updated weights are those of one process, up to {percent(step.off)}: 16 bits round."
    return f"{rounding} They save bytes here, and no computing."


def _without_effect(experiment: HybridExperiment) -> str:
    """A sentence for the cases in which the schedule makes no difference to the time."""
    if experiment.sizes[1] == 1:
        return " With one stage there is nothing to schedule: a step takes as long with any schedule."
    return " With one micro-batch, gpipe and 1f1b are the same." if experiment.micro_batches == 1 else ""


class MeshExplorer(Explorer):
    """An explorer of the arrangement of eight ranks, micro-batches, schedule, and precision."""

    def __init__(
        self,
        mesh: Sizes = (2, 2, 2),
        micro_batches: int = 4,
        schedule: str = "1f1b",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        controls = [
            Slider("dp x pp x tp", MESHES, mesh, [" x ".join(map(str, sizes)) for sizes in MESHES]),
            Slider("micro-batches", MICRO_BATCHES, micro_batches),
            Slider("schedule", NAMES, schedule),
            Slider("precision", tuple(PRECISIONS), dtype, tuple(PRECISIONS.values())),
        ]
        super().__init__(
            controls,
            lambda *values: [look(HybridExperiment(*values))],
            (352, 312),
            lambda *values: HybridExperiment(*values).run(),
        )
