"""The planner against what was published: `python -m course_lib.planner.validate`.

published.json has every figure with its source, the place in it, and what had to be assumed. For each kind of device
one row calibrates a single number, the fraction of the peak that matrix products reach; the other rows are predicted:

    published row  ->  model, cluster, plan  ->  estimate  ->  seconds      compared with      published seconds
                                                  naive: FLOPs / (devices x peak x one constant from the same row)

The naive baseline knows what is computed twice, but no bubble, no traffic and no shapes. All other constants are the
same for all devices and were not fitted; with half or twice INNER_LOSS, or 0.55 for the streaming fraction in place of
0.8, the mean error stays below 5%, as the calibrated number makes up for most of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from course_lib.planner.communication import ring_seconds
from course_lib.planner.estimate import Estimate, estimate
from course_lib.planner.hardware import DEVICES, LINKS, Cluster
from course_lib.planner.memory import RECIPES, layer_activations, model_state
from course_lib.planner.pipeline import in_flight
from course_lib.planner.simulate import simulate
from course_lib.planner.spec import Depth, ModelSpec, Plan
from course_lib.timeline import Timeline

DATA = Path(__file__).with_name("published.json")
Row = dict[str, Any]
MEMORY = ("activation share", "model state", "checkpoint")


@dataclass(frozen=True)
class Comparison:
    """One published figure and what the planner says. `naive` is the baseline's figure, for step times only."""

    row: Row
    published: float
    predicted: float
    naive: float | None = None

    @property
    def error(self) -> float:
        """Signed; relative unless the row says absolute."""
        difference = self.predicted - self.published
        return difference if self.row.get("absolute") else difference / self.published

    @property
    def is_within_tolerance(self) -> bool:
        return abs(self.error) <= self.row["tolerance"] + 1e-12

    @property
    def calibrates(self) -> bool:
        return bool(self.row.get("calibrates"))


@cache
def published() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


def model_of(row: Row) -> ModelSpec:
    return ModelSpec(**published()["models"][row["model"]])


def plan_of(row: Row) -> Plan:
    given = dict(row["plan"])
    if "overlap" in given:
        given["overlap"] = tuple(given["overlap"])
    return Plan(**given)


def compare() -> list[Comparison]:
    """All rows of published.json, in its order."""
    return [comparison(row) for row in published()["rows"]]


def comparison(row: Row) -> Comparison:
    if row["quantity"] == "step time":
        return Comparison(row, published_seconds(row), predict(row).step_time.total, naive_seconds(row))
    return Comparison(row, row["value"], PREDICT[row["quantity"]](row))


# Step times: one row calibrates a device, the others are predicted


def predict(row: Row, matmul: float | None = None) -> Estimate:
    fraction = calibrated(row["cluster"]["device"]) if matmul is None else matmul
    return estimate(model_of(row), Cluster(**row["cluster"], matmul=fraction), plan_of(row), row["global_batch"])


@cache
def calibrated(device: str) -> float:
    """The fraction of the peak for matrix products that makes the device's calibrating row come out right."""
    row, low, high = _calibrating_row(device), 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        too_slow = predict(row, middle).step_time.total > published_seconds(row)
        low, high = (middle, high) if too_slow else (low, middle)
    return low


def _calibrating_row(device: str) -> Row:
    rows = (row for row in published()["rows"] if row["quantity"] == "step time" and row.get("calibrates"))
    return next(row for row in rows if row["cluster"]["device"] == device)


def published_seconds(row: Row) -> float:
    """The step time a row stands for; most papers print FLOP/s and count their FLOPs differently."""
    if row["unit"] == "s":
        return float(row["value"])
    model, batch, cluster = model_of(row), row["global_batch"], Cluster(**row["cluster"])
    flops = model.step_flops(batch)
    if row["unit"] == "model FLOPs utilization":
        return flops / (row["value"] * cluster.devices * cluster.spec.peak[plan_of(row).precision])
    if row["unit"] == "causal TFLOP/s per device":
        flops -= 3 * model.layers * 2.0 * batch * model.sequence**2 * model.hidden
    else:
        flops += model.recomputed_flops(batch, plan_of(row).recompute)
    return flops / (row["value"] * 1e12 * cluster.devices)


def naive_seconds(row: Row) -> float:
    """FLOPs over peak, times the one constant that makes the calibrating row come out right."""
    reference = _calibrating_row(row["cluster"]["device"])
    return _ideal_seconds(row) * published_seconds(reference) / _ideal_seconds(reference)


def _ideal_seconds(row: Row) -> float:
    model, batch, cluster, plan = model_of(row), row["global_batch"], Cluster(**row["cluster"]), plan_of(row)
    flops = model.step_flops(batch) + model.recomputed_flops(batch, plan.recompute)
    return flops / (cluster.devices * cluster.spec.peak[plan.precision])


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
    alone = cut._replace(sequence_parallel=False, recompute="none")
    return layer_activations(model, cut) / layer_activations(model, alone)


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
    """Of a pipeline whose stages share one model, against the row that calibrates."""
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
    "data volume": _data_volume,
    "tensor volume": _tensor_volume,
    "pipeline volume": _pipeline_volume,
    "all-reduce": _all_reduce,
    "bubble rate": _bubble_rate,
    "bubble over ideal": _bubble_over_ideal,
    "in flight": _in_flight,
    "relative throughput": _relative_throughput,
}


# The table


@dataclass(frozen=True)
class Summary:
    """Errors of some predicted rows: how many, mean signed, mean absolute and worst, as fractions."""

    n: int
    signed: float
    mean: float
    worst: float

    def __str__(self) -> str:
        return f"{self.n} rows, signed {self.signed:+.1%}, mean {self.mean:.1%}, worst {self.worst:.1%}"


def summary(errors: list[float]) -> Summary:
    sizes = [abs(error) for error in errors]
    return Summary(len(errors), sum(errors) / len(errors), sum(sizes) / len(sizes), max(sizes))


def predicted_steps(comparisons: list[Comparison]) -> list[Comparison]:
    return [one for one in comparisons if one.row["quantity"] == "step time" and not one.calibrates]


def utilization(one: Comparison, seconds: float) -> float:
    """FLOPs by peak FLOP/s in that many seconds, what is computed twice included."""
    return _ideal_seconds(one.row) / seconds


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: 1 if both put the rows in the same order."""
    ranks = [{value: rank for rank, value in enumerate(sorted(values))} for values in (a, b)]
    n = len(a)
    squares = sum((ranks[0][x] - ranks[1][y]) ** 2 for x, y in zip(a, b, strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def table(comparisons: list[Comparison]) -> str:
    lines = [f"{'row':34} {'published':>13} {'planner':>13} {'error':>8} {'allowed':>8}  unit and source"]
    for one in comparisons:
        is_step = one.row["quantity"] == "step time"
        mark = "calibrates" if one.calibrates else "" if one.is_within_tolerance else "OUTSIDE"
        error = f"{one.error:+.4f}" if one.row.get("absolute") else f"{one.error:+.1%}"
        allowed = f"{one.row['tolerance']:.4f}" if one.row.get("absolute") else f"{one.row['tolerance']:.1%}"
        unit = "s" if is_step else one.row["unit"]
        lines.append(
            f"{one.row['id']:34} {one.published:13.6g} {one.predicted:13.6g} {error:>8} {allowed:>8}  "
            f"{unit}; {one.row['source']}, {one.row['where']} {mark}"
        )
    return "\n".join(lines)


def report(comparisons: list[Comparison]) -> str:
    steps = predicted_steps(comparisons)
    memory = [one for one in comparisons if one.row["quantity"] in MEMORY]
    naive = [one.naive / one.published - 1 for one in steps if one.naive is not None]
    real = [utilization(one, one.published) for one in steps]
    order = rank_correlation(real, [utilization(one, one.predicted) for one in steps])
    outside = sum(not one.is_within_tolerance for one in comparisons)
    fractions = ", ".join(f"{device} {calibrated(device):.3f}" for device in DEVICES if _is_calibrated(device))
    return "\n".join(
        [
            f"matrix products reach, calibrated on one row each: {fractions}",
            f"step time, planner:  {summary([one.error for one in steps])}",
            f"step time, naive:    {summary(naive)}",
            f"utilization, rank correlation: {order:.2f} (the naive baseline has one for all of a device)",
            f"memory:              {summary([one.error for one in memory])}",
            f"outside their tolerance: {outside} of {len(comparisons)} rows",
        ]
    )


def _is_calibrated(device: str) -> bool:
    rows = (row for row in published()["rows"] if row["quantity"] == "step time" and row.get("calibrates"))
    return any(row["cluster"]["device"] == device for row in rows)


def main() -> None:
    comparisons = compare()
    print(table(comparisons))
    print()
    print(report(comparisons))


if __name__ == "__main__":
    main()
