"""The planner against published figures; `python3 course.py bench planner` prints the comparison.

published.json has every figure with its source, the place in it, and our assumptions; it also says which
published figures are left out, and why. Constants belong to devices and to physics, never to a paper:

    published row  ->  model, cluster, plan  ->  estimate  ->  seconds      compared with      published seconds

    left out    the device's matmul is fitted to the *other* stacks of software: a prediction for a machine that the
                planner has never seen
    seen        it is fitted to all stacks, as in the catalogue
    one row     the first row of a stack calibrates, the others are predicted: a prediction for your machine
    naive       FLOPs / (devices x peak), times one constant from the same first row

A stack is the software of one group on one machine. The naive baseline counts recomputation, but no bubble, no traffic
and no shapes.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, calibrate, estimate
from course_lib.planner.bubbles import in_flight
from course_lib.planner.calibrate import fraction_for
from course_lib.planner.communication import ring_seconds
from course_lib.planner.hardware import DEVICES_APART, LINKS, SETUPS, STACKS, half_width
from course_lib.planner.memory import RECIPES, layer_activations, model_state
from course_lib.planner.simulate import simulate
from course_lib.planner.spec import Depth
from course_lib.timeline import Timeline

DATA = Path(__file__).with_name("published.json")
CHIPS = "V100", "A100", "H100", "B200", "GB200", "GB300", "B300"  # neighbors are alike
Row = dict[str, Any]


@cache
def published() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


def rows_of(*quantities: str) -> list[Row]:
    return [row for row in published()["rows"] if row["quantity"] in quantities]


def formula_rows() -> list[Row]:
    """Rows of the published figures that PREDICT calculates."""
    return [row for row in published()["rows"] if row["quantity"] in PREDICT]


def model_of(row: Row) -> ModelSpec:
    return ModelSpec(**published()["models"][row["model"]])


def plan_of(row: Row) -> Plan:
    given = dict(row["plan"])
    if "overlap" in given:
        given["overlap"] = tuple(given["overlap"])
    return Plan(**given)


def chip_of(row: Row) -> str:
    """The chip, without its memory: A100 with 40 and with 80 GB compute equally fast."""
    return row["cluster"]["device"].split("-")[0]


def stack_of(row: Row) -> tuple[str, str]:
    """The stack of a row: the group, and the chip on which it ran."""
    return row["id"].split("-")[0], chip_of(row)


# Step times


@cache
def steps() -> dict[tuple[str, str], list[Row]]:
    """Rows of step times, by stack."""
    stacks: dict[tuple[str, str], list[Row]] = {}
    for row in rows_of("step time"):
        stacks.setdefault(stack_of(row), []).append(row)
    return stacks


def predict(row: Row, matmul: float | None = None) -> Estimate:
    return estimate(model_of(row), Cluster(**row["cluster"], matmul=matmul), plan_of(row), row["global_batch"])


def published_seconds(row: Row) -> float:
    """The step time behind a row; most papers print FLOP/s, and count FLOPs in different ways."""
    if row["unit"] == "s":
        return float(row["value"])
    model, batch, cluster = model_of(row), row["global_batch"], Cluster(**row["cluster"])
    if row["unit"] == "tokens per second and device":
        return batch * model.sequence / (row["value"] * cluster.devices)
    flops = model.step_flops(batch)
    if row["unit"] == "model FLOPs utilization":
        return flops / (row["value"] * cluster.devices * cluster.spec.peak[plan_of(row).precision])
    if row["unit"] == "causal TFLOP/s per device":
        flops -= 3 * model.layers * 2.0 * batch * model.sequence**2 * model.attention_width
    else:
        flops += model.recomputed_flops(batch, plan_of(row).recompute)
    return flops / (row["value"] * 1e12 * cluster.devices)


@cache
def matmul_of_stack(stack: tuple[str, str]) -> float:
    return matmul_of(steps()[stack])


def matmul_of(rows: list[Row]) -> float:
    """The fraction of the peak with which the mean error of rows is zero."""

    def off(matmul: float) -> float:
        found = (math.log(published_seconds(row) / predict(row, matmul).step_time.total) for row in rows)
        return statistics.mean(found)

    return fraction_for(off)


@cache
def matmul_of_chips(without: str = "") -> dict[str, float]:
    """What a typical stack of software reaches on each chip. without: a stack's group to leave out.

    What a stack reaches is its chip's matmul, times what its group's software makes of any chip, times chance. So a
    group that published on two chips compares them, however good its software is. Least squares of logarithms, with
    the spreads that the planner's intervals have: chance within a stack, groups, and chips that are neighbors.
    """
    known = [stack for stack in steps() if stack[0] != without]
    groups = sorted({group for group, _ in known})
    equations = [({chip: 1, group: 1}, math.log(matmul_of_stack((group, chip))), SETUPS) for group, chip in known]
    equations += [({group: 1}, 0.0, STACKS) for group in groups]
    equations += [({chip: 1, neighbor: -1}, 0.0, DEVICES_APART) for chip, neighbor in itertools.pairwise(CHIPS)]
    left = [[terms.get(name, 0) / spread for name in (*CHIPS, *groups)] for terms, _, spread in equations]
    found = np.linalg.lstsq(np.array(left), np.array([right / spread for _, right, spread in equations]), rcond=None)[0]
    return {chip: math.exp(found[i]) for i, chip in enumerate(CHIPS)}


@dataclass(frozen=True)
class Comparison:
    """A published step time and the predicted one. half_width: of the interval, in logarithms."""

    row: Row
    published: float
    predicted: float
    half_width: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_inside(self) -> bool:
        return abs(math.log(self.predicted / self.published)) <= self.half_width


def compared(row: Row, matmul: float, half: float) -> Comparison:
    return Comparison(row, published_seconds(row), predict(row, matmul).step_time.total, half)


@cache
def left_out() -> list[Comparison]:
    """Every step as the planner would predict it without the step's own stack."""
    return list(_from_chips(leaving_out=True))


@cache
def seen() -> list[Comparison]:
    """Every step, with the constants by the catalogue's rule."""
    return list(_from_chips(leaving_out=False))


def _from_chips(leaving_out: bool) -> Iterator[Comparison]:
    for (group, chip), rows in steps().items():
        without = group if leaving_out else ""
        others = sum(stack[1] == chip and stack[0] != without for stack in steps())
        matmul = matmul_of_chips(without)[chip]
        yield from (compared(row, matmul, half_width(others)) for row in rows)


@cache
def after_one_row() -> list[Comparison]:
    """All rows of each stack but the first, on the machine that the first row calibrates."""
    found = []
    for stack, (_, *others) in steps().items():
        mine = first_row_calibrates(stack)
        found += [compared(row, mine.spec.matmul, mine.spread) for row in others]
    return found


@cache
def first_row_calibrates(stack: tuple[str, str]) -> Cluster:
    first = steps()[stack][0]
    cluster, seconds = Cluster(**first["cluster"]), published_seconds(first)
    return calibrate(model_of(first), cluster, plan_of(first), first["global_batch"], seconds)


@cache
def after_any_row() -> list[Comparison]:
    """All other rows after each row of a stack in turn calibrates: is the choice of the first row flattering?"""
    found = []
    for rows in steps().values():
        for measured in rows if len(rows) > 1 else []:
            reaches = matmul_of([measured])
            found += [compared(row, reaches, half_width(0, 1)) for row in rows if row is not measured]
    return found


@cache
def naive() -> list[Comparison]:
    """All rows of each stack but the first, by FLOPs and one constant from the first."""
    found = []
    for first, *others in steps().values():
        share = published_seconds(first) / ideal_seconds(first)
        found += [Comparison(row, published_seconds(row), share * ideal_seconds(row)) for row in others]
    return found


def ideal_seconds(row: Row) -> float:
    model, batch, cluster, plan = model_of(row), row["global_batch"], Cluster(**row["cluster"]), plan_of(row)
    flops = model.step_flops(batch) + model.recomputed_flops(batch, plan.recompute)
    return flops / (cluster.devices * cluster.spec.peak[plan.precision])


def least_errors() -> dict[tuple[str, int], float]:
    """The errors that no planner can avoid: of runs of one source that differ only in their micro-batch, from any law.

    Whatever a micro-batch of b samples costs on a rank, with parts of it fixed and the rest proportional to b, a step
    of m of them through p stages takes c + (m + p - 1) (a + k b) seconds. Each family of runs has a, c and k of its
    own here, none below zero: root mean square of the relative errors of the best three, by model and tp.
    """
    squares: dict[tuple[str, int], list[float]] = {}
    for family in published()["spread"]["families"]:
        relative = []
        for b, seconds in family["steps"]:
            turns = published()["spread"]["batch"] // (family["dp"] * b) + family["pp"] - 1
            relative.append([1 / seconds, turns / seconds, turns * b / seconds])
        squares.setdefault((family["model"], family["tp"]), []).extend(_least_squares(np.array(relative)))
    return {alike: math.sqrt(statistics.mean(found)) for alike, found in squares.items()}


def _least_squares(columns: np.ndarray) -> list[float]:
    """Squared residuals of the best approximation of ones by a nonnegative combination of columns."""
    tried = []
    for some in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        weights = np.linalg.lstsq(columns[:, some], np.ones(len(columns)), rcond=None)[0]
        if (weights >= 0).all():
            tried.append([float(one) for one in (columns[:, some] @ weights - 1) ** 2])
    return min(tried, key=sum)


@dataclass(frozen=True)
class Sweep:
    """Published plans for one model, batch and machine, to find the cost of the planner's choice among them."""

    name: str
    rows: list[Row]

    def regret(self, matmul: float | None = None) -> float:
        """The share by which the chosen plan took longer than the best one. matmul: None for the catalogue's."""
        chosen = min(self.rows, key=lambda row: predict(row, matmul).step_time.total)
        return published_seconds(chosen) / min(map(published_seconds, self.rows)) - 1

    @property
    def regret_after_one_row(self) -> float:
        """The regret after the first row of the stack has calibrated the machine."""
        return self.regret(first_row_calibrates(stack_of(self.rows[0])).spec.matmul)


def sweeps() -> list[Sweep]:
    """Runs of one release of a stack that differ in their plan alone, and not in their precision."""
    alike: dict[str, list[Row]] = {}
    for (group, chip), rows in steps().items():
        for row in rows:
            where = f"{Cluster(**row['cluster']).devices} {chip}", plan_of(row).precision, row.get("release", "")
            same = f"{group}, {row['model']}, batch {row['global_batch']}, {' '.join(where)}".rstrip()
            alike.setdefault(same, []).append(row)
    return [Sweep(name, rows) for name, rows in alike.items() if len(rows) > 1]


def whole_sweeps() -> dict[str, tuple[int, float]]:
    """The runs of `least_errors`, one sweep for each model: the number of plans, and the regret."""
    known = {row["model"]: row for rows in steps().values() for row in rows if row["id"].startswith("vtrain")}
    tried: dict[str, list[Comparison]] = {}
    for family in published()["spread"]["families"]:
        row = known[family["model"]]
        for b, seconds in family["steps"]:
            plan = row["plan"] | {name: family[name] for name in ("dp", "tp", "pp")} | {"micro_batch": b}
            one = {**row, "plan": plan, "value": seconds}
            tried.setdefault(family["model"], []).append(Comparison(one, seconds, predict(one).step_time.total))
    found = {}
    for model, runs in tried.items():
        chosen = min(runs, key=lambda run: run.predicted)
        found[model] = len(runs), chosen.published / min(run.published for run in runs) - 1
    return found


# Memory


def fits() -> dict[str, bool]:
    """Whether the planner allows what each published run did: what ran may fit, what ran out of memory may not."""
    ran = {row["id"]: predict(row).fit != "does not fit" for row in rows_of("step time", "memory")}
    return ran | {row["id"]: not predict(row).fits for row in rows_of("out of memory")}


def by_assumption() -> dict[str, Estimate]:
    """Runs that fit for certain only with an assumption that is not in their source, estimated without it."""
    rows = [row for row in rows_of("step time") if "assumes" in row]
    return {row["id"]: predict({**row, "plan": {**row["plan"], **row["assumes"]}}) for row in rows}


@dataclass(frozen=True)
class Figure:
    """A published figure that is not a step time, and the planner's."""

    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """The signed error; relative unless the row says absolute."""
        difference = self.predicted - self.row["value"]
        return difference if self.row.get("absolute") else difference / self.row["value"]

    @property
    def is_within_tolerance(self) -> bool:
        return abs(self.error) <= self.row["tolerance"] + 1e-12


@cache
def figures() -> list[Figure]:
    return [Figure(row, PREDICT[row["quantity"]](row)) for row in formula_rows()]


def _memory(row: Row) -> float:
    """Memory in 1e9 bytes; nvidia-smi's figures include the margin, an allocator's do not."""
    memory = predict(row).memory
    return (memory.total if "nvidia-smi" in row["unit"] else memory.tensors) / 1e9


# Formulas: nothing is calibrated


def _parameters(row: Row) -> float:
    return model_of(row).parameters / 1e9


def _flops(row: Row) -> float:
    model = model_of(row)
    return model.step_flops(row["global_batch"]) + model.recomputed_flops(row["global_batch"], row["recompute"])


def _training_days(row: Row) -> float:
    model = model_of(row)
    flops_per_token = (model.step_flops(1) + model.recomputed_flops(1, "full")) / model.sequence
    return row["tokens"] * flops_per_token / (row["devices"] * row["tflops"] * 1e12) / 86_400


def _mfu(row: Row) -> float:
    cluster = Cluster(**row["cluster"])
    return model_of(row).step_flops(row["global_batch"]) / (
        row["seconds"] * cluster.devices * cluster.spec.peak["fp16"]
    )


def _activation_share(row: Row) -> float:
    model, cut = model_of(row), plan_of(row).slice
    alone = cut._replace(sequence_parallel=False)
    return layer_activations(model, cut, cut.recompute) / layer_activations(model, alone, "none")


def _model_state(row: Row) -> float:
    return sum(model_state(int(row["parameters"]), plan_of(row))) / 1e9


def _checkpoint(row: Row) -> float:
    """16-bit parameters and the optimizer's state, in 1e12 bytes."""
    return model_of(row).parameters * (RECIPES["bf16"].parameter + RECIPES["bf16"].optimizer) / 1e12


def _data_volume(row: Row) -> float:
    model, plan = ModelSpec(1, 64, 1, 1, 1), plan_of(row)
    sent = estimate(model, Cluster(nodes=plan.dp // 8), plan, plan.dp).flows["data"].bytes
    return sent / (2 * model.parameters) * plan.dp / (plan.dp - 1)


def _tensor_volume(row: Row) -> float:
    model = model_of(row)
    return estimate(model, Cluster(), plan_of(row), 1).flows["tensor"].bytes / (2 * model.layers)


def _pipeline_volume(row: Row) -> float:
    plan = plan_of(row)
    sent = estimate(model_of(row), Cluster(nodes=plan.pp), plan, 1).flows["pipeline"].bytes
    return sent / 2 / 2  # two bytes a number, forward and back


def _all_reduce(row: Row) -> float:
    return ring_seconds("all_reduce", row["bytes"], row["devices"], LINKS[row["link"]])


# Schedules: simulated action by action


def depth_of(row: Row) -> Depth:
    return Depth(row["p"], row.get("v", 1), row["schedule"])


def longest_rank(timeline: Timeline) -> float:
    """Seconds from a rank's first computation to its last, on the rank where it is longest.

    Ranks of a zero-bubble schedule start and end their steps at different times, one after the other.
    """
    longest = 0.0
    for rank in range(timeline.world_size):
        computing = [span for span in timeline.of(rank) if span.kind not in ("wait", "transfer")]
        longest = max(longest, computing[-1].end - computing[0].start)
    return longest


def _bubble_rate(row: Row) -> float:
    v, costs = row["v"], row["milliseconds"]
    parts = {name: costs[name] / v for name in ("forward", "backward", "weight_grad")}
    step = longest_rank(simulate(depth_of(row).schedule_of(row["m"]), **parts, transfer=costs["transfer"]))
    return 1 - row["m"] * v * sum(parts.values()) / step


def _bubble_over_ideal(row: Row) -> float:
    v = row.get("v", 1)
    return simulate(depth_of(row).schedule_of(row["m"]), 1 / v, 2 / v).makespan / (3 * row["m"]) - 1


def _in_flight(row: Row) -> float:
    return in_flight(Plan(pp=row["p"], schedule=row["schedule"]), 0, row["m"])


def _relative_throughput(row: Row) -> float:
    """The throughput of a pipeline whose stages share one model, relative to the row that calibrates."""
    reference = next(r for r in published()["rows"] if r["quantity"] == row["quantity"] and r.get("calibrates"))
    return reference["value"] * _gpipe_seconds(reference) / _gpipe_seconds(row)


def _gpipe_seconds(row: Row) -> float:
    p, m = row["p"], row["m"]
    return simulate(Depth(p, 1, "gpipe").schedule_of(m), 1 / (p * m), 2 / (p * m)).makespan


PREDICT: dict[str, Callable[[Row], float]] = {
    "parameters": _parameters,
    "flops": _flops,
    "training time": _training_days,
    "mfu": _mfu,
    "activation share": _activation_share,
    "model state": _model_state,
    "checkpoint": _checkpoint,
    "memory": _memory,
    "data volume": _data_volume,
    "tensor volume": _tensor_volume,
    "pipeline volume": _pipeline_volume,
    "all-reduce": _all_reduce,
    "bubble rate": _bubble_rate,
    "bubble over ideal": _bubble_over_ideal,
    "in flight": _in_flight,
    "relative throughput": _relative_throughput,
}


# The report


@dataclass(frozen=True)
class Summary:
    """Errors of some rows: how many, mean signed, mean absolute and worst, as fractions."""

    n: int
    signed: float
    mean: float
    worst: float

    def __str__(self) -> str:
        return f"{self.n} steps, mean {self.mean:.1%}, worst {self.worst:.1%}, signed {self.signed:+.1%}"


def summary(comparisons: list[Comparison]) -> Summary:
    errors = [one.error for one in comparisons]
    sizes = [abs(error) for error in errors]
    return Summary(len(errors), statistics.mean(errors), statistics.mean(sizes), max(sizes))


def coverage(comparisons: list[Comparison]) -> float:
    """The share of published steps inside their interval."""
    return statistics.mean(one.is_inside for one in comparisons)


def table() -> str:
    """Every step time, left out, seen and after one row."""
    calibrated = {one.row["id"]: one for one in after_one_row()}
    lines = [f"{'step':38} {'published':>10} {'left out':>9} {'seen':>8} {'one row':>8}   source"]
    for out, known in zip(left_out(), seen(), strict=True):
        row = out.row
        by_first = f"{calibrated[row['id']].error:+.1%}" if row["id"] in calibrated else "the row"
        lines.append(
            f"{row['id']:38} {out.published:8.2f} s {out.error:+9.1%} {known.error:+8.1%} {by_first:>8}   "
            f"{row['source']}, {row['where']}{'' if out.is_inside else ' OUTSIDE its interval'}"
        )
    return "\n".join(lines)


def source_table(out: list[Comparison], one: list[Comparison], flops: list[Comparison]) -> str:
    """Errors by stack, and of all: left out, after one row with the worst, and by FLOPs and a constant beside them."""
    lines = [f"{'stack':24} rows  left out  inside  one row  inside   worst   FLOPs"]
    for stack in (*dict.fromkeys(stack_of(found.row) for found in out), None):
        kinds = ([found for found in kind if stack in (None, stack_of(found.row))] for kind in (out, one, flops))
        apart, known, naively = kinds
        line = (" on ".join(stack) if stack else "all").ljust(24)
        line += f" {len(apart):4} {summary(apart).mean:9.1%} {coverage(apart):7.0%}"
        if known:
            after = summary(known)
            line += f" {after.mean:8.1%} {coverage(known):7.0%} {after.worst:7.1%} {summary(naively).mean:7.1%}"
        lines.append(line)
    return "\n".join(lines)


def figure_table() -> str:
    lines = [f"{'figure':38} {'published':>13} {'planner':>13} {'error':>8}   unit and source"]
    for one in figures():
        row = one.row
        error = f"{one.error:+.4f}" if row.get("absolute") else f"{one.error:+.1%}"
        mark = "" if one.is_within_tolerance else " OUTSIDE its tolerance"
        lines.append(
            f"{row['id']:38} {row['value']:13.6g} {one.predicted:13.6g} {error:>8}   "
            f"{row['unit']}; {row['source']}, {row['where']}{mark}"
        )
    return "\n".join(lines)


def report() -> str:
    """The report: first the predictions for machines never seen, then the rest."""
    outside = sum(not one.is_within_tolerance for one in figures())
    wrong = [name for name, is_right in fits().items() if not is_right]
    chips = ", ".join(f"{chip} {matmul:.3f}" for chip, matmul in matmul_of_chips().items())
    worst = max(after_one_row(), key=lambda one: abs(one.error)).row
    whole = ", ".join(f"{model} {regret:.1%} of {n} plans" for model, (n, regret) in whole_sweeps().items())
    own = ", ".join(f"{model} with tp={tp} {error:.1%}" for (model, tp), error in sorted(least_errors().items()))
    return "\n".join(
        [
            f"its whole source left out:    {summary(left_out())}; {coverage(left_out()):.0%} in their interval",
            f"after one row of its source:  {summary(after_one_row())}; {coverage(after_one_row()):.0%} in theirs",
            f"... whichever row that is:    {summary(after_any_row())}",
            f"... its worst:                {worst['id']}: {worst.get('note', 'nothing known')}",
            f"... by FLOPs and a constant:  {summary(naive())}",
            f"vTrain's steps from any law:  {own}",
            f"seen, as the catalogue is:    {summary(seen())}",
            f"matmul of a typical stack:    {chips}",
            f"published runs that may fit or run out of memory as they did: {len(fits()) - len(wrong)} of {len(fits())}"
            + (f"; not {', '.join(wrong)}" if wrong else "")
            + f"; by an assumption of ours: {', '.join(by_assumption())}",
            f"regret among all of vTrain's steps of one model: {whole}",
            "regret, as shipped and after one row:",
            *(
                f"{sweep.regret():6.1%} {sweep.regret_after_one_row:6.1%}  {len(sweep.rows)} plans: {sweep.name}"
                for sweep in sweeps()
            ),
            f"other figures outside their tolerance: {outside} of {len(figures())}",
            *(f"left out: {what}: {why}" for what, why in published()["left_out"]),
        ]
    )
