"""Questions about a mesh: the axis that may reach across machines, and a strategy to judge."""

from __future__ import annotations

from course_lib.classroom.questions.asking import choice, each, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.figures import gantt
from course_lib.figures.axis import duration, percent
from lessons.L08_combining_mechanisms.figure import mesh_map
from lessons.L08_combining_mechanisms.runs import INSIDE, PER_MACHINE, HybridExperiment, MeshStep

# Which axis has to stay inside a machine? In each option only one axis reaches across.

ACROSS = {"tp": (1, 1, 8), "pp": (1, 2, 4), "dp": (2, 1, 4)}
MUCH_LONGER = 1.5


def _slow_down(axis: str) -> tuple[float, MeshStep]:
    """The factor by which a slow link makes a step longer if only this axis crosses it, and the step."""
    experiment = HybridExperiment(ACROSS[axis])
    slow, fast = experiment.run(), experiment._replace(between=INSIDE).run()
    return slow.timeline.makespan / fast.timeline.makespan, slow


def _reach_across(axis: str) -> Outcome:
    factor, step = _slow_down(axis)
    experiment, is_much = HybridExperiment(ACROSS[axis]), factor > MUCH_LONGER
    found = {"experiment": experiment, "is_much": is_much, "factor": factor}
    traffic = mesh_map(experiment.sizes, step, None, PER_MACHINE, title="Who talks to whom?")
    waits = gantt(step.timeline, title="With the slow link")
    is_shown = is_much == (axis == "tp") and experiment.is_right(step)
    return Outcome(is_much, found=found, shown=is_shown, pictures=(traffic, waits))


def _compare_axes() -> Outcome:
    factors = {HybridExperiment(sizes).words: _slow_down(axis)[0] for axis, sizes in ACROSS.items()}
    differ = max(factors.values()) > MUCH_LONGER > min(factors.values())
    lines = "; ".join(f"{words}: {factor:.2f} times" for words, factor in factors.items())
    return Outcome(not differ, found={"differ": differ, "lines": lines}, shown=differ)


# Evaluating a training strategy

PROPOSALS = ((1, 1, 8), (1, 2, 4), (2, 1, 4), (8, 1, 1))


def _evaluate() -> Outcome:
    runs = {HybridExperiment(sizes): HybridExperiment(sizes).run() for sizes in PROPOSALS}
    lines = [_evaluated(experiment, step) for experiment, step in runs.items()]
    right = all(experiment.is_right(step) for experiment, step in runs.items())
    slowest = max(runs, key=lambda experiment: runs[experiment].timeline.makespan)
    picture = gantt(runs[slowest].timeline, title=f"A step of their strategy, {slowest.words}")
    is_shown, found = right and slowest.sizes == PROPOSALS[0], {"all": right, "slowest": slowest}
    return Outcome(None, found=found | {"lines": "; ".join(lines)}, shown=is_shown, pictures=(picture,))


def _evaluated(experiment: HybridExperiment, step: MeshStep) -> str:
    timeline = step.timeline
    busy = sum(map(timeline.busy, range(experiment.ranks))) / (experiment.ranks * timeline.makespan)
    whole = sum(HybridExperiment((1, 1, 1)).predicted.held(0))
    held = max(sum(experiment.predicted.held(rank)) for rank in range(experiment.ranks)) / whole
    return (
        f"{experiment.words}: {duration(timeline.makespan)} a step, busy for {percent(busy)} of it, each rank holds "
        f"{percent(held)} of weights, gradients and Adam's state"
    )


QUESTIONS: dict[str, Seeded] = {
    "which_axis_across": Seeded(None, choice({**each(_reach_across, ACROSS), "none": _compare_axes})),
    "evaluate_strategy": Seeded(None, open_case(_evaluate)),
}
