"""The checks for pipeline parallelism: a rank's list of actions, running it, the bubble, the best micro-batch.

Lists and numbers are results of functions without communication: each rank asks for its stages, or for other sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Budget, Case, Observed, changed, effect, normal, on_the_clock, prepared
from course_lib.classroom.checks.samples import miscounted
from course_lib.classroom.checks.tables import Plans, as_number, computing
from course_lib.classroom.runs.events import perform
from course_lib.ranks import Link, Pace
from course_lib.schedules import SCHEDULES, Action, Schedule, ScheduleError, peak_in_flight, validate

EARLIER = "gradients of an earlier minibatch, to which yours are added"


# A schedule as data


def listed(name: str, stage: int, n_stages: int, n_micro_batches: int) -> list[Action]:
    ahead = n_micro_batches if name == "gpipe" else min(n_stages - 1 - stage, n_micro_batches)
    actions = [Action("F", stage, k) for k in range(ahead)]
    for k in range(ahead, n_micro_batches):
        actions += [Action("F", stage, k), Action("B", stage, k - ahead)]
    return actions + [Action("B", stage, k) for k in range(n_micro_batches - ahead, n_micro_batches)]


def interleaved(rank: int, n_ranks: int, stages_per_rank: int, n_micro_batches: int) -> list[Action]:
    size = n_ranks
    stages, firsts = range(rank, n_ranks * stages_per_rank, n_ranks), range(0, n_micro_batches, size)
    forwards = [Action("F", s, k) for first in firsts for s in stages for k in range(first, first + size)]
    backwards = [Action("B", s, k) for first in firsts for s in reversed(stages) for k in range(first, first + size)]
    ahead = min((stages_per_rank - 1) * n_ranks + 2 * (n_ranks - 1 - rank), len(forwards))
    actions = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards, strict=False):
        actions += pair
    return actions + backwards[len(forwards) - ahead :]


def _schedule(n: int, name: str, n_stages: int, m: int, new: str = "", each: int = 1, runs: bool = False) -> Case:
    """A case in which n ranks ask for the lists of all ranks of a schedule. each: stages of a rank of the schedule."""
    on_ranks = f" on {n_stages // each} ranks" * (each > 1)
    text = f"{name}, {n_stages} stages{on_ranks}, {m} micro-batch{'es' * (m > 1)}"
    rows = range(n_stages // each)
    return Case(text, n, lambda rank: (name, rows[rank::n], n_stages, m, each, runs), new or "other sizes")


def _schedules(seed: int) -> list[Case]:
    first = [_schedule(2, "gpipe", 3, 2 + seed), _schedule(2, "1f1b", 3, 5 + seed, "1F1B in place of GPipe")]
    sizes = [(3, "gpipe", 4, 3), (3, "1f1b", 5, 7), (4, "1f1b", 4, 9)]
    few = [_schedule(4, "1f1b", 4, m, "fewer micro-batches than stages") for m in (2, 1)]
    return [*first, *(_schedule(n, name, n_stages, m + seed) for n, name, n_stages, m in sizes), *few]


def _interleavings(seed: int) -> list[Case]:
    three = "three stages on each rank"
    few = "only as many micro-batches as ranks"
    sizes = [(2, 2, 2, 4, ""), (2, 2, 2, 2, few), (2, 2, 3, 4, three), (3, 3, 2, 6, ""), (3, 4, 3, 8, three)]
    more = [*sizes, (4, 4, 2, 12, ""), (4, 4, 2, 4, few)]
    name = "interleaved_1f1b"
    return [_schedule(n, name, p * each, m + p * seed, new, each) for n, p, each, m, new in more]


def _play_schedule(fn: Callable, name: str, rows: range, n_stages: int, m: int, each: int, runs: bool) -> Any:
    """Ask for the lists of these rows. each: 1 for a list by schedule and stage, more for a list by rank."""
    lists = {row: fn(name, row, n_stages, m) if each == 1 else fn(row, n_stages // each, each, m) for row in rows}
    if runs:
        perform(lists[dist.get_rank()], n_stages)
    return {f"stage {row}" if each == 1 else f"rank {row}": _as_text(one, row, each) for row, one in lists.items()}


def _as_text(actions: Any, row: int, each: int) -> Any:
    """The actions as text, such as "F0 B0"; with a stage behind the micro-batch if a rank has several."""
    if not isinstance(actions, list):
        return f"{type(actions).__name__}, and not a list of actions"
    for one in actions:
        if not isinstance(one, tuple) or len(one) != 3:
            return f"{one!r:.40}, and not an action"
    return " ".join(f"{op}{k}" if each == 1 and stage == row else f"{op}{k}.{stage}" for op, stage, k in actions)


def _would_do(observed: list[Observed]) -> str:
    """Say why these lists would hang, or in what they are worse than the right ones."""
    name, *sizes = (str(observed[0].values[size]) for size in ("name", "n_stages", "m", "each"))
    n_stages, m, each = map(int, sizes)
    texts = {key.split()[-1]: str(text) for seen in observed for key, text in seen.values.items()}
    word = re.compile(r"([FB])(-?\d+)" + r"\.(\d+)" * (each > 1))
    rows = [[word.fullmatch(one) for one in texts[f"{row}]"].split()] for row in range(n_stages // each)]
    if not all(map(all, rows)):
        return ""
    found = [[(int(one[3]) if each > 1 else row, one) for one in of_row if one] for row, of_row in enumerate(rows)]
    for row, of_row in enumerate(found):
        own, yours = [*range(row, n_stages, len(rows))], sorted({stage for stage, _ in of_row})
        if yours != own:
            return f"Rank {row} has stages {own}, and your list for it has {yours or 'none'}."
        if (ahead := next((i for i, (_, one) in enumerate(of_row) if one[1] == "B"), 0)) > m * each:
            few = f"{m} micro-batch{'es' * (m > 1)}"
            return f"Rank {row} begins with {ahead} forward passes, and there are {few}. How far ahead can it run?"
        if beyond := [one[0] for _, one in of_row if not 0 <= int(one[2]) < m]:
            return f"Rank {row} runs {beyond[0]}, and the {m} micro-batches are numbered from 0 to {m - 1}."
    schedule = Schedule([[Action(one[1], stage, int(one[2])) for stage, one in of_row] for of_row in found])
    try:
        validate(schedule)
    except ScheduleError as error:
        return f"{'With one stage on each rank this' if each == 1 else 'This'} could not run: {error}."
    peaks = map(peak_in_flight, (schedule, SCHEDULES[name](n_stages, m, *[each] * (each > 1))))
    more = [(rank, *pair) for rank, pair in enumerate(zip(*peaks, strict=True)) if pair[0] > pair[1]]
    holds = "It would run, and rank {} would hold the activations of up to {} passes at a time, where {} would do."
    return holds.format(*more[0]) if more else "It would run, and it is another schedule."


on_devices = partial(Exercise, pace=Pace({"forward": 0.05, "backward": 0.1}))
of_lists = partial(on_devices, rule=_would_do, by_rank=False)
price = _schedule(4, "1f1b", 4, 8, runs=True)
pipeline_actions = of_lists("pipeline_actions", listed, _play_schedule, _schedules, price)


price = _schedule(4, "interleaved_1f1b", 8, 8, each=2, runs=True)
interleaved_actions = of_lists("interleaved_actions", interleaved, _play_schedule, _interleavings, price)


# A rank that runs its list


def ran(actions: list[Action], module: nn.Module, inputs: list, targets: list, loss_fn: Callable, width: int) -> None:
    rank, last, samples = dist.get_rank(), dist.get_world_size() - 1, sum(map(len, targets))
    in_flight, sending = {}, []
    for op, _, k in actions:
        if op == "F":
            x = inputs[k]
            if rank > 0:
                x = x.new_empty(len(x), width)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            y = module(x)
            if rank == last:
                y = loss_fn(y, targets[k]) * len(targets[k]) / samples
            else:
                sending.append(dist.isend(y.detach(), rank + 1))
            in_flight[k] = x, y
        else:
            x, y = in_flight.pop(k)
            dy = None
            if rank < last:
                dist.recv(dy := torch.empty_like(y), rank + 1)
            y.backward(dy)
            if rank > 0:
                sending.append(dist.isend(x.grad, rank - 1))
    for handle in sending:
        handle.wait()  # type: ignore[union-attr]


def _step(n: int, name: str, sizes: Sequence[int], seed: int, new: str = "") -> Case:
    text = f"{name}, {n} stages, micro-batches of {', '.join(map(str, sizes))}"
    return Case(text, n, partial(_one_stage_each, name, sizes, seed, new == EARLIER), new)


def _one_stage_each(name: str, sizes: Sequence[int], seed: int, has_gradients: bool, rank: int) -> tuple:
    """A stage of its own on each rank, and on every rank the whole minibatch, in micro-batches."""
    n, own, common = dist.get_world_size(), normal(10 * seed + rank), normal(10 * seed + 9)
    stage = nn.Sequential(nn.Linear(4 if rank else 3, 4 if rank < n - 1 else 2), nn.Tanh())
    inputs, targets = (common(sum(sizes), width).split(sizes) for width in (3, 2))
    prepared(stage, own)
    for parameter in stage.parameters() if has_gradients else []:
        parameter.grad = own(parameter.shape)
    return SCHEDULES[name](n, len(sizes)).actions[rank], stage, inputs, targets, mse_loss, 4


def _steps(seed: int) -> list[Case]:
    uneven, third = "micro-batches of different size", "1F1B, and a third one"
    first = [(2, "gpipe", (3,), ""), (2, "gpipe", (3, 3), "a second micro-batch"), (2, "1f1b", (3, 3, 3), third)]
    more = [(3, "gpipe", (2, 2), ""), (3, "1f1b", (2,) * 4, "1F1B"), (2, "gpipe", (3, 1), uneven)]
    last = [(2, "gpipe", (2,), EARLIER), (4, "1f1b", (3, 1, 2), "")]
    return [_step(n, name, sizes, seed + n, new) for n, name, sizes, new in [*first, *more, *last]]


def _play_actions(
    fn: Callable, actions: list, module: nn.Module, inputs: list, targets: list, loss_fn: Callable, width: int
) -> dict[str, str]:
    """Run the actions. Returns the passes of the module in the order in which they are done."""
    passes: list[str] = []

    def note(module: nn.Module, x: Any, y: Any) -> None:
        k = n if (n := sum(one.startswith("F") for one in passes)) < len(inputs) else " (once more)"
        passes.append(f"F{k}")
        if y.requires_grad:  # not a hook of y itself, which fires for a gradient that stops there, too
            y.grad_fn.register_prehook(lambda _: passes.append(f"B{k}"))

    module.register_forward_hook(note)
    fn(actions, module, inputs, targets, loss_fn, width)
    return {"order of passes": " ".join(passes)}


price = _step(4, "1f1b", (2,) * 6, 0)
run_actions = on_devices("run_actions", ran, _play_actions, _steps, price, rounding=1e-12, rule=miscounted)


# A pipeline with a slow stage


def in_halves(stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss_fn: Callable, width: int) -> None:
    sizes = [len(inputs) // 2, len(inputs) - len(inputs) // 2]
    actions = listed("gpipe", dist.get_rank(), dist.get_world_size(), len(sizes))
    ran(actions, stage, [*inputs.split(sizes)], [*targets.split(sizes)], loss_fn, width)


def _uneven(n: int, samples: int, seed: int, new: str = "") -> Case:
    return Case(f"{n} stages, of which one is slow, {samples} samples", n, partial(_uneven_stage, samples, seed), new)


def _uneven_stage(samples: int, seed: int, rank: int) -> tuple:
    _, stage, inputs, targets, loss_fn, width = _one_stage_each("gpipe", [samples], seed, False, rank)
    slow = 1 + (rank == 1)
    stage._forward_hooks.clear()  # its mark would be one unit more in each pass
    stage[1].register_forward_hook(lambda module, x, y: on_the_clock(y, slow * (1 + len(y))))
    return stage, inputs[0], targets[0], loss_fn, width


def _uneven_cases(seed: int) -> list[Case]:
    return [_uneven(2, 4, seed), _uneven(3, 7 + seed, seed, "samples that two does not divide")]


halves = "[len(inputs) // 2, len(inputs) - len(inputs) // 2]"
ends = "[round(len(inputs) * end / 24) for end in (0, 3, 9, 17, 22, 24)]"
unequal = f"[size for size in torch.tensor({ends}).diff().tolist() if size]"
ours = changed(in_halves, "ours", '"gpipe"', '"1f1b"', halves, unequal)
levels = Budget("emulated milliseconds", 220, 200, ours)
pace = Pace({"forward": 0.001, "backward": 0.002}, Link(0.001))
uneven = partial(Exercise, pace=pace, budget=levels, rule=miscounted)
price = _uneven(4, 24, 0, "24 samples, and a fourth stage")
faster_pipeline = uneven("faster_pipeline", in_halves, effect, _uneven_cases, price, rounding=1e-12)


# Numbers


def idle_share(forward: Sequence[float], backward: Sequence[float], n_micro_batches: int) -> float:
    n, m = len(forward), n_micro_batches

    def seconds(each: Sequence[float]) -> float:
        return sum(each) + (m - 1) * max(each)

    step = seconds(forward) + seconds(backward)
    busy = m * (sum(forward) + sum(backward))
    return 1 - busy / (n * step)


def _pipelines(seed: int, rank: int) -> Plans:
    """Two pipelines of each kind, of 2 to 5 stages: equal ones, one slow stage, or one more that is slow backward.

    In unequal ones the last stage is not the fastest, whose pace would be its own.
    """
    plans: Plans = {"equal stages": [], "a slow stage": [], "two slow stages": []}
    for n, m in ((2 + rank % 2 + seed, 3 + rank), (4 + seed, 2 + rank)):
        equal, slow, slower = [2] * n, (rank + seed) % n, (rank + seed + 1) % n
        one_slow = [2 + (stage == n - 1) + 3 * (stage == slow) for stage in range(n)]
        for forward, kind, more in zip((equal, one_slow, one_slow), plans, (0, 0, 9), strict=True):
            backward = [2 * each + more * (stage == slower) for stage, each in enumerate(forward)]
            plans[kind].append((forward, backward, m))
    return plans


def _in_seconds(plan: tuple, found: Any) -> Any:
    """A share of idle time and what it means in this pipeline, in words; what is no number is unchanged."""
    (forward, backward, m), share, number = plan, idle_share(*plan), as_number(found)
    if not isinstance(number, torch.Tensor) or number.dim():
        return found
    idle = share if abs(number - share) < 1e-6 else float(number)  # what may be rounding has the same words
    step = m * (sum(forward) + sum(backward)) / len(forward) / (1 - share)
    return f"{idle:.6g}, or {idle * step:.6g} s of the {step:g} s that a step takes"


def _run_gpipe(plan: tuple, found: Any) -> None:
    (forward, backward, m), rank = plan, dist.get_rank()
    perform(SCHEDULES["gpipe"](len(forward), m).actions[rank], len(forward), forward[rank], backward[rank])


more = [(3, "equal stages"), (3, "two slow stages"), (4, "equal stages"), (4, "two slow stages")]
with_gpipe = "GPipe on 4 ranks", ([2, 2, 5, 2], [4, 4, 4, 8], 6)
bubble = computing(
    "bubble", idle_share, "pipelines with ", _pipelines, more, with_gpipe, _run_gpipe, _in_seconds, pace=Pace(0.01)
)


def best(samples: int, n_stages: int, overhead: float, per_sample: float, room: float) -> int:
    def seconds(m: int) -> float:
        return (m + n_stages - 1) * (overhead + per_sample * samples / m)

    def held(m: int) -> float:
        return min(n_stages, m) * samples / m

    fitting = [m for m in range(1, samples + 1) if samples % m == 0 and held(m) <= room]
    return min(fitting, key=seconds)


MINIBATCHES = ("roomy minibatches", "minibatches in little room", "minibatches with a large overhead, so few are best")


def _minibatches(seed: int, rank: int) -> Plans:
    """Minibatches of each kind, so varied that no two mistakes are right for the same ones."""
    usual = [(48, 4, 4.5, 1), (96, 2, 6.5 + rank, 1), (120, 3 + rank, 10.5, 2 + seed), (32, 4, 0.5, 3)]
    few = [(64, 6 + seed, 200.5 + rank, 1), (96, 4, 150.5 + seed, 1), (80, 8, 300.5 + rank, 1)]
    rooms = [([*usual, (16, 8, 20.5, 1), (14, 4, 2.5, 1)], (1000,) * 6), (usual[:3], (4, 16, 12)), (few, (64, 48, 40))]
    plans = [[(*plan, room) for plan, room in zip(*pair, strict=True)] for pair in rooms]
    return dict(zip(MINIBATCHES, plans, strict=True))


def _in_turns(plan: tuple, found: Any) -> Any:
    """A number of micro-batches and what it means for this minibatch, in words; what is no number is unchanged."""
    (samples, n, overhead, per_sample, room), m = plan, as_number(found)
    if not isinstance(m, torch.Tensor) or m.dim() or m <= 0:
        return found
    turns = f"{m + n - 1:g} turns of {overhead + per_sample * samples / m:g} s"
    return f"{m:g}: {turns}, and stage 0 holds {min(n, m) * samples / m:g} samples, with room for {room}"


def _run_1f1b(plan: tuple, m: Any) -> None:
    samples, n, overhead, per_sample, _ = plan
    seconds = overhead + per_sample * samples / max(1, int(m))
    perform(SCHEDULES["1f1b"](n, max(1, min(int(m), samples))).actions[dist.get_rank()], n, seconds, seconds)


more = [*((3, kind) for kind in MINIBATCHES), *((4, kind) for kind in MINIBATCHES[:2])]
minibatch, pace = ("1F1B on 4 ranks", (32, 4, 8, 3, 16)), Pace(0.001)
best_micro_batches = computing(
    "best_micro_batches", best, "", _minibatches, more, minibatch, _run_1f1b, _in_turns, pace=pace
)
