"""The cost of training by part: memory against a device's capacity, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING

from course_lib.figures.axis import MEMORY, TIMES, duration, memory_size, percent
from course_lib.figures.bars import bars_panel
from course_lib.figures.chart import Axis, Chart
from course_lib.figures.palette import LIKELY, RANKS, STYLES, Style
from course_lib.figures.picture import Picture, Row
from course_lib.planner import Estimate, Memory
from course_lib.planner.memory import Fit, memory_of

if TYPE_CHECKING:
    from course_lib.instruments.ledger import Bytes


def _look(kind: str, label: str) -> Style:
    return STYLES[kind]._replace(label=label)


# A part that belongs to a kind of span has its look: a backward pass makes gradients.
MEMORY_PARTS = {
    "parameters": _look("forward", "parameters"),
    "gradients": _look("backward", "gradients"),
    "optimizer": _look("optimizer", "optimizer state"),
    "activations": _look("weight_grad", "activations"),
    "logits": _look("other", "logits"),
    "buffers": _look("transfer", "buffers"),
    "margin": _look("wait", "margin"),
}
TIME_PARTS = {
    "compute": _look("forward", "computing"),
    "recompute": _look("backward", "computing again"),
    "inside": RANKS[6]._replace(label="traffic inside layers"),
    "pipeline": _look("other", "messages between stages"),
    "bubble": _look("wait", "bubble"),
    "data": _look("transfer", "gradients and parameters"),
    "optimizer": _look("optimizer", "optimizer"),
}
MOST_DEVICES = 16
Parts = Mapping[str, Mapping[str, float]]  # of each bar


def memory_by_part(
    bars: Mapping[str, Memory | Bytes],
    capacity: float | None = None,
    width: int = 800,
    title: str | None = None,
    usual: float = 0.0,
) -> Picture:
    """Draw the memory of devices by part: a bar for each name, and the capacity of a device.

    What is planned has a range: from what lean software needs to what plain software does.

    bars: planned (`estimate.memory`, or all of `devices(estimate)`) or counted by a ledger (`ledger.peak.held`).
    usual: bytes on the axis; more of them double it, and the picture says so.
    """
    held, origins = _parts_by_bar(bars)
    planned = {name: one for name, one in bars.items() if isinstance(one, Memory)}
    ranges = {name: (one.low, one.high) for name, one in planned.items()}
    largest = max(
        capacity or 0, *(sum(parts.values()) for parts in held.values()), *(high for _, high in ranges.values())
    )
    axis, unit = Axis.in_unit("memory of one device", largest, MEMORY, 6, 1.04, usual)
    styles = _used(MEMORY_PARTS, held)
    limit = (capacity, f"a device has {memory_size(capacity)}") if capacity else None
    panel = bars_panel(held, styles, axis, width, memory_size, unit, limit, ranges)
    chart = Chart([panel], origins, title, width, {**styles, **({LIKELY: None} if ranges else {})})
    fits = {name: _fit(parts, planned.get(name), capacity) for name, parts in held.items()} if capacity else {}
    rows = [_memory_row(name, parts, styles, fits.get(name)) for name, parts in held.items()]
    return Picture.of(chart, _memory_summary(held, capacity, fits), rows)


def _fit(parts: Mapping[str, float], planned: Memory | None, capacity: float) -> Fit:
    if planned:
        return planned.fit(capacity)
    return "fits" if sum(parts.values()) <= capacity else "does not fit"


def _parts_by_bar(bars: Mapping[str, Memory | Bytes]) -> tuple[Parts, set[str]]:
    """The parts of each bar, and their origins."""
    parts = {name: {part: float(getattr(one, part, 0)) for part in MEMORY_PARTS} for name, one in bars.items()}
    return parts, {"modelled" if hasattr(one, "buffers") else "measured" for one in bars.values()}


def devices(estimate: Estimate) -> dict[str, Memory]:
    """The memory of every device of one pipeline, by its place; of a long pipeline, some of them."""
    plan, m = estimate.plan, estimate.plan.micro_batches(estimate.global_batch)
    step = -(-plan.pp // MOST_DEVICES)
    ranks = sorted({*range(0, plan.pp, step), estimate.memory.rank, plan.pp - 1})
    return {f"pipeline rank {one.rank}": one for one in memory_of(ranks, estimate.model, plan, m)}


def step_time_by_part(
    estimates: Mapping[str, Estimate], width: int = 800, title: str | None = None, usual: float = 0.0
) -> Picture:
    """Draw the time of a step by part: a bar for each plan, and the interval of 90% of such steps.

    usual: seconds on the axis; more of them double it, and the picture says so.
    """
    times = {name: _time_parts(one) for name, one in estimates.items()}
    ranges = {name: (one.step_time.low, one.step_time.high) for name, one in estimates.items()}
    longest = max(high for _, high in ranges.values())
    axis, unit = Axis.in_unit("time of one step", longest, TIMES, 6, usual=usual)
    styles = _used(TIME_PARTS, times)
    panel = bars_panel(times, styles, axis, width, duration, unit, ranges=ranges)
    rows: list[Row] = [
        {
            "plan": name,
            **{f"{TIME_PARTS[part].label} (s)": seconds for part, seconds in parts.items() if part in styles},
            "step (s)": sum(parts.values()),
            "with 90% (s)": "{:.4g} to {:.4g}".format(*ranges[name]),
        }
        for name, parts in times.items()
    ]
    chart = Chart([panel], {"modelled"}, title, width, {**styles, LIKELY: None})
    fastest = min(estimates, key=lambda name: estimates[name].step_time.total)
    return Picture.of(chart, f"{_time_summary(times, fastest)} {estimates[fastest].interval}", rows)


def _used(styles: Mapping[str, Style], values: Parts) -> dict[str, Style]:
    """The parts that any bar has."""
    return {part: style for part, style in styles.items() if any(parts[part] > 0 for parts in values.values())}


def _time_parts(estimate: Estimate) -> dict[str, float]:
    parts = estimate.step_time.parts
    inside = parts["tensor"] + parts["context"] + parts["experts"]
    return {part: inside if part == "inside" else parts[part] for part in TIME_PARTS}


def _memory_summary(held: Parts, capacity: float | None, fits: Mapping[str, Fit]) -> str:
    totals = {name: sum(parts.values()) for name, parts in held.items()}
    fullest, most = max(totals.items(), key=itemgetter(1))
    part, size = max(held[fullest].items(), key=itemgetter(1))
    who = f"The most memory is needed by {fullest}:" if len(held) > 1 else f"{fullest} needs"
    text = f"{who} {memory_size(most)}, most of it ({percent(size / most)}) {MEMORY_PARTS[part].label}"
    if capacity is None:
        return f"{text}."
    return f"{text}; a device has {memory_size(capacity)}, so it {fits[fullest]}."


def _memory_row(name: str, parts: Mapping[str, float], styles: Mapping[str, Style], fit: Fit | None) -> Row:
    total = sum(parts.values())
    row = {"device": name, **{style.label: memory_size(parts[part]) for part, style in styles.items()}}
    return {**row, "all": memory_size(total), **({"fits": fit} if fit else {})}


def _time_summary(times: Parts, fastest: str) -> str:
    losses = dict(times[fastest])
    total, compute = sum(losses.values()), losses.pop("compute")
    worst, lost = max(losses.items(), key=itemgetter(1))
    best = f"The fastest of {len(times)} is {fastest}: " if len(times) > 1 else f"{fastest}: "
    text = f"{best}{duration(total)} a step, {percent(compute / total)} of it computing"
    return f"{text}; the largest loss is {TIME_PARTS[worst].label}, {percent(lost / total)}."
