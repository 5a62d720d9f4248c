"""What training costs, cut into parts: memory against what a device has, and the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from course_lib.figures.axis import duration, memory_size, number, percent, ticks, time_unit
from course_lib.figures.bars import Bars, bars_in_plotly, draw_bars
from course_lib.figures.frame import draw_legend, draw_origins, draw_title, new_sheet, on_card
from course_lib.figures.palette import STYLES, Style
from course_lib.figures.picture import Picture, Row

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from course_lib.planner import Estimate, Memory


class Held(Protocol):
    """Bytes on one device: a planner's `Memory`, or the `Bytes` of a ledger."""

    @property
    def parameters(self) -> float: ...
    @property
    def gradients(self) -> float: ...
    @property
    def optimizer(self) -> float: ...
    @property
    def activations(self) -> float: ...
    @property
    def total(self) -> float: ...


def _look(kind: str, label: str) -> Style:
    return STYLES[kind]._replace(label=label)


# Where a part belongs to a kind of span, it looks like it: gradients are what a backward pass makes.
MEMORY = {
    "parameters": _look("forward", "parameters"),
    "gradients": _look("backward", "gradients"),
    "optimizer": _look("optimizer", "optimizer state"),
    "activations": _look("weight_grad", "activations"),
    "logits": _look("other", "logits"),
    "buffers": _look("transfer", "buffers"),
}
TIME = {
    "compute": _look("forward", "computing"),
    "recompute": _look("backward", "computing again"),
    "inside": _look("weight_grad", "traffic inside layers"),
    "pipeline": _look("other", "messages between stages"),
    "bubble": _look("wait", "bubble"),
    "data": _look("transfer", "gradients and parameters"),
    "optimizer": _look("optimizer", "optimizer"),
}
MOST_DEVICES = 16


def memory_by_part(
    bars: Mapping[str, Held], capacity: float | None = None, width: int = 800, title: str | None = None
) -> Picture:
    """Draw what lies in a device's memory: a bar for each name, and the bytes a device has for it.

    bars: planned (`estimate.memory`, or all of `devices(estimate)`) or counted by a ledger (`ledger.peak.held`).

    Raises ValueError if there is nothing to draw.
    """
    _refuse_nothing(bars, '{"one GPU": estimate.memory}')
    held = {name: {part: float(getattr(one, part, 0)) for part in MEMORY} for name, one in bars.items()}
    largest = max(capacity or 0, *(sum(parts.values()) for parts in held.values()))
    unit = 2.0 ** (10 * max(i for i in range(5) if largest >= 2 ** (10 * i) or i == 0))
    limit = (capacity, f"a device has {memory_size(capacity)}") if capacity else None
    drawn = Bars(
        values=held,
        styles=_used(MEMORY, held),
        end=1.04 * largest,
        ticks=[unit * tick for tick in ticks(largest / unit, 6)],
        title=f"memory of one device ({memory_size(unit).split()[1]})",
        mark=lambda size: number(size / unit),
        write=memory_size,
        limit=limit,
    )
    origin = "modelled" if any(hasattr(one, "buffers") for one in bars.values()) else "measured"
    return _picture(drawn, origin, _memory_summary(held, capacity), _memory_rows(drawn), unit, width, title)


def devices(estimate: Estimate) -> dict[str, Memory]:
    """What every device of one pipeline holds, by its place; in a long pipeline, some of them."""
    from course_lib.planner.memory import memory_of_rank

    plan, m = estimate.plan, estimate.plan.micro_batches(estimate.global_batch)
    step = -(-plan.pp // MOST_DEVICES)
    ranks = sorted({*range(0, plan.pp, step), estimate.memory.rank, plan.pp - 1})
    return {f"pipeline rank {rank}": memory_of_rank(estimate.model, plan, m, rank) for rank in ranks}


def step_time_by_part(estimates: Mapping[str, Estimate], width: int = 800, title: str | None = None) -> Picture:
    """Draw what the time of a step goes into: a bar for each plan.

    Raises ValueError if there is nothing to draw.
    """
    _refuse_nothing(estimates, '{"our plan": estimate(...)}')
    times = {name: _time_parts(one) for name, one in estimates.items()}
    longest = max(sum(parts.values()) for parts in times.values())
    unit, unit_name = time_unit(longest)
    drawn = Bars(
        values=times,
        styles=_used(TIME, times),
        end=longest,
        ticks=[unit * tick for tick in ticks(longest / unit, 6)],
        title=f"time of one step ({unit_name})",
        mark=lambda seconds: number(seconds / unit),
        write=duration,
    )
    rows: list[Row] = [
        {
            "plan": name,
            **{f"{TIME[part].label} (s)": seconds for part, seconds in parts.items() if part in drawn.styles},
            "step (s)": sum(parts.values()),
        }
        for name, parts in times.items()
    ]
    return _picture(drawn, "modelled", _time_summary(times), rows, unit, width, title)


def _refuse_nothing(bars: Mapping[str, object], example: str) -> None:
    if not bars:
        raise ValueError(f"there is nothing to draw; give at least one bar, for instance {example}")


def _used(styles: Mapping[str, Style], values: Mapping[str, Mapping[str, float]]) -> dict[str, Style]:
    """The parts that any bar has."""
    return {part: style for part, style in styles.items() if any(parts[part] > 0 for parts in values.values())}


def _time_parts(estimate: Estimate) -> dict[str, float]:
    parts = estimate.step_time.parts
    return {part: parts["tensor"] + parts["context"] if part == "inside" else parts[part] for part in TIME}


def _picture(
    bars: Bars, origin: str, summary: str, rows: list[Row], unit: float, width: int, title: str | None
) -> Picture:
    sheet = new_sheet(width)
    y = draw_title(sheet, title)
    y = draw_origins(sheet, {origin}, y)
    y = draw_legend(sheet, bars.styles, y)
    sheet.height = draw_bars(sheet, bars, y)

    def figure() -> go.Figure:
        return on_card(bars_in_plotly(bars, unit), title, {origin})

    return Picture(sheet, summary, rows, figure)


def _memory_summary(held: Mapping[str, Mapping[str, float]], capacity: float | None) -> str:
    totals = {name: sum(parts.values()) for name, parts in held.items()}
    fullest = max(totals, key=lambda name: totals[name])
    part = max(held[fullest], key=lambda part: held[fullest][part])
    share = percent(held[fullest][part] / totals[fullest])
    text = f"{fullest} needs {memory_size(totals[fullest])}, most of it ({share}) {MEMORY[part].label}"
    if len(held) > 1:
        text = f"The most memory is needed by {text.replace(' needs ', ': ', 1)}"
    if capacity is None:
        return f"{text}."
    if totals[fullest] <= capacity:
        return f"{text}; a device has {memory_size(capacity)}, so {'all of them fit' if len(held) > 1 else 'it fits'}."
    over = [name for name, total in totals.items() if total > capacity]
    which = "it does not fit" if len(held) == 1 else f"{len(over)} of {len(held)} do not fit"
    return f"{text}; a device has {memory_size(capacity)}, so {which}."


def _memory_rows(bars: Bars) -> list[Row]:
    rows: list[Row] = []
    for name, parts in bars.values.items():
        total = sum(parts.values())
        row = {"device": name, **{style.label: memory_size(parts[part]) for part, style in bars.styles.items()}}
        rows.append({**row, "all": memory_size(total), **({"fits": total <= bars.limit[0]} if bars.limit else {})})
    return rows


def _time_summary(times: Mapping[str, Mapping[str, float]]) -> str:
    totals = {name: sum(parts.values()) for name, parts in times.items()}
    fastest = min(totals, key=lambda name: totals[name])
    losses = {part: seconds for part, seconds in times[fastest].items() if part != "compute"}
    worst = max(losses, key=lambda part: losses[part])
    total = totals[fastest]
    best = f"The fastest of {len(times)} is {fastest}: " if len(times) > 1 else f"{fastest}: "
    text = f"{best}{duration(total)} a step, {percent(times[fastest]['compute'] / total)} of it computing"
    return f"{text}; the largest loss is {TIME[worst].label}, {percent(losses[worst] / total)}."
