"""Pipeline schedules as data: the actions of each rank, in order.

A model is cut into stages, a minibatch into micro-batches. A schedule is one list of actions for each rank, and
nothing else; the same list is checked, simulated, drawn, asked about and executed.

    F  forward                            needs F of the stage before
    B  whole backward, or its two halves: needs F of this stage, and B or I of the stage after
    I  gradient of the stage's input      the half that the stage before is waiting for
    W  gradient of its weights            needs I; nobody waits for it, so it can fill a bubble

    1f1b, 3 stages, 4 micro-batches       rank 0  F0 F1 F2          B0 F3 B1    B2    B3
                                          rank 1     F0 F1    B0 F2 B1 F3 B2    B3
                                          rank 2        F0 B0 F1 B1 F2 B2 F3 B3

Where a rank holds one stage (naive, gpipe, 1f1b, zb_h1, zb_h2), stage s is on rank s. interleaved_1f1b deals its
stages out in turn, zbv and dualpipev fold them into a V, so that the last stage is on the first rank:

    interleaved_1f1b   rank 0: 0, 3   rank 1: 1, 4   rank 2: 2, 5
    zbv, dualpipev     rank 0: 0, 5   rank 1: 1, 4   rank 2: 2, 3

Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM" (1f1b, interleaved); Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ICLR (zb_h1, zb_h2, zbv);
DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (DualPipe, here without its second copy of the parameters).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

OPS = ("F", "B", "I", "W")


class Action(NamedTuple):
    """One computation: `op`, one of OPS, of a stage for a micro-batch; both count from 0."""

    op: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.op} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: `actions[rank]` lists the rank's actions, in order. Make a new one, never change one."""

    actions: list[list[Action]]

    @property
    def n_ranks(self) -> int:
        return len(self.actions)

    @cached_property
    def n_stages(self) -> int:
        return 1 + max((action.stage for row in self.actions for action in row), default=-1)

    @cached_property
    def n_micro_batches(self) -> int:
        return 1 + max((action.micro_batch for row in self.actions for action in row), default=-1)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that holds each stage: the first rank with an action of it."""
        last_first = reversed(list(enumerate(self.actions)))  # so that the first one stays
        return {action.stage: rank for rank, row in last_first for action in row}

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return sorted(stage for stage, holder in self.rank_of.items() if holder == rank)


class ScheduleError(ValueError):
    """A schedule that would hang or compute something wrong: names the rank, the action and what is missing."""


# Checking


def validate(schedule: Schedule) -> None:
    """Accept exactly the schedules that can run: each gradient computed once, and no rank left waiting forever.

    Sends count as free: an action's result is available as soon as it is computed.

    Raises ScheduleError, which names rank, action and the missing input.
    """
    schedule = Schedule(schedule.actions)  # checked again each time: somebody may have changed a list
    _check_actions(schedule)
    _check_completeness(schedule)
    for _ in in_order(schedule):
        pass


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """All actions with their ranks, each after its inputs and after the actions before it on its rank.

    Ranks take turns, one action each, so this is also the order in time if every action takes equally long.

    Raises ScheduleError if no rank can go on.
    """
    done: set[Action] = set()
    position = [0] * schedule.n_ranks
    while unfinished := [rank for rank, row in enumerate(schedule.actions) if position[rank] < len(row)]:
        waiting = [(rank, schedule.actions[rank][position[rank]]) for rank in unfinished]
        ready = [(rank, action) for rank, action in waiting if missing_input(schedule, action, done) is None]
        if not ready:
            raise _stuck(schedule, waiting, done)
        for rank, action in ready:
            position[rank] += 1
            done.add(action)
        yield from ready


def inputs_of(schedule: Schedule, action: Action) -> list[tuple[Action, ...]]:
    """The inputs of an action, as tuples of alternatives: it needs one of each (a gradient comes from B or from I)."""
    op, stage, k = action
    if op == "F":
        return [(Action("F", stage - 1, k),)] if stage else []
    if op == "W":
        return [(Action("I", stage, k),)]
    own = (Action("F", stage, k),)
    return [own] if stage == schedule.n_stages - 1 else [own, (Action("B", stage + 1, k), Action("I", stage + 1, k))]


def messages_of(schedule: Schedule, action: Action) -> list[Action]:
    """The message of an action to another stage, named after the action there that waits for it: one F or B, or none.

    A gradient is named after the whole backward, B, whether B or I will use it.
    """
    op, stage, k = action
    if op == "F" and stage < schedule.n_stages - 1:
        return [Action("F", stage + 1, k)]
    return [Action("B", stage - 1, k)] if op in "BI" and stage > 0 else []


def messages_from(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action]]:
    """The messages of a rank, in order, each with the rank it goes to, which may be the rank itself."""
    for action in schedule.actions[rank]:
        for message in messages_of(schedule, action):
            yield schedule.rank_of[message.stage], message


def missing_input(schedule: Schedule, action: Action, done: set[Action]) -> Action | None:
    """The first of an action's inputs that has not been computed; None if it can run."""
    return next((any_of[0] for any_of in inputs_of(schedule, action) if done.isdisjoint(any_of)), None)


def _check_actions(schedule: Schedule) -> None:
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        if not row:
            raise ScheduleError(f"rank {rank} has nothing to do; give each rank a stage")
        for action in row:
            if action.op not in OPS or action.stage < 0 or action.micro_batch < 0:
                known = f"an op is one of {', '.join(OPS)}; stages and micro-batches count from 0"
                raise ScheduleError(f"rank {rank}: {action!r} is no action; {known}")
            if action in seen:
                raise ScheduleError(f"rank {rank}: {action} is there twice; run it once")
            if schedule.rank_of[action.stage] != rank:
                home = f"rank {schedule.rank_of[action.stage]} holds stage {action.stage}, so its actions belong there"
                raise ScheduleError(f"rank {rank} cannot run {action}: {home}")
            seen.add(action)


def _check_completeness(schedule: Schedule) -> None:
    """Every stage computes F and B, or F, I and W, for every micro-batch."""
    if not schedule.actions:
        raise ScheduleError("the schedule has no ranks; give actions for at least one")
    there = {action for row in schedule.actions for action in row}
    for stage in range(schedule.n_stages):
        holder = f"rank {schedule.rank_of[stage]}" if stage in schedule.rank_of else "the schedule"
        for k in range(schedule.n_micro_batches):
            forward, whole, half, weights = (Action(op, stage, k) for op in OPS)
            halves = {half, weights} & there
            for action in [forward, *([half, weights] if halves else [whole])]:
                if action not in there:
                    raise ScheduleError(f"{holder} never runs {action}; add it")
            if halves and whole in there:
                raise ScheduleError(f"{holder} runs {whole}, the whole backward, and a half of it; keep one of the two")


def _stuck(schedule: Schedule, waiting: list[tuple[int, Action]], done: set[Action]) -> ScheduleError:
    """The error of a rank that waits for itself, or else of the first that waits for what another one cannot reach."""
    inputs = ((rank, action, missing_input(schedule, action, done)) for rank, action in waiting)
    missing = [(rank, action, lacking, schedule.rank_of[lacking.stage]) for rank, action, lacking in inputs if lacking]
    blocked = dict(waiting)
    rank, action, lacking, holder = min(missing, key=lambda one: (one[0] != one[3], one[2] == blocked.get(one[3])))
    if lacking not in schedule.actions[holder]:
        lacking = lacking._replace(op="I")  # that schedule splits this backward
    if holder == rank:
        why = "which comes later on the same rank"
    else:
        why = f"which rank {holder} cannot reach: it waits in {blocked.get(holder)}"
    return ScheduleError(f"rank {rank} waits forever in {action}: it needs {lacking}, {why}")


# Counting and showing


def peak_in_flight(schedule: Schedule) -> list[int]:
    """The most micro-batches whose activations each rank holds at once, counted once for each of its stages.

    Activations are held from F to B, or to W if the backward is split, since W still needs them.
    """
    more = {"F": 1, "B": -1, "I": 0, "W": -1}
    return [max(accumulate((more[action.op] for action in row), initial=0)) for row in schedule.actions]


def as_text(schedule: Schedule) -> str:
    """One line for each rank, one column for each unit of time, if every action took one.

    A stage is written behind the micro-batch if a rank holds several: F2.5 is micro-batch 2 on stage 5.

    Raises ScheduleError if the schedule cannot run.
    """
    several = schedule.n_stages > schedule.n_ranks
    ends: dict[Action, int] = {}
    rows: list[list[str]] = [[] for _ in schedule.actions]
    for rank, action in in_order(schedule):
        needed = [ends[one] for any_of in inputs_of(schedule, action) for one in any_of if one in ends]
        start = max([len(rows[rank]), *needed])
        rows[rank] += [""] * (start - len(rows[rank]))
        rows[rank].append(f"{action.op}{action.micro_batch}" + (f".{action.stage}" if several else ""))
        ends[action] = start + 1
    width = max(len(cell) for row in rows for cell in row)
    lines = (" ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows)
    return "\n".join(f"rank {rank}  {line}" for rank, line in enumerate(lines))


# One rank's part


class RankSchedule(NamedTuple):
    """The part of a schedule for one rank.

    A message is named after the action that needs it: Action("F", s, k) are the inputs of stage s for micro-batch k,
    Action("B", s, k) the gradients of its outputs.
    """

    rank: int
    actions: tuple[Action, ...]
    stages: list[int]
    rank_of: dict[int, int]
    last: int  # stage
    n_micro_batches: int
    arriving: dict[int, list[Action]]  # messages from each other rank, in the order in which it sends them
    fetching: list[Action]  # the same messages, in the order in which this rank needs them
    used: dict[Action, list[Action]]  # the messages of this rank that a peer must have used before it sent this one


def rank_schedule(schedule: Schedule, rank: int) -> RankSchedule:
    """Check a schedule, and find the messages to this rank."""
    return _rank_schedule(tuple(map(tuple, schedule.actions)), rank)


@lru_cache(maxsize=64)  # a training asks for the same again and again
def _rank_schedule(actions: tuple[tuple[Action, ...], ...], rank: int) -> RankSchedule:
    schedule = Schedule([list(row) for row in actions])
    validate(schedule)
    arriving = {
        peer: [message for to, message in messages_from(schedule, peer) if to == rank]
        for peer in range(schedule.n_ranks)
        if peer != rank
    }
    remote = {message for messages in arriving.values() for message in messages}
    fetching = [message for message in map(_message_for, actions[rank]) if message in remote]
    used = {message: before for peer in arriving for message, before in _used_before(schedule, rank, peer)}
    last, stages = schedule.n_stages - 1, schedule.stages_of(rank)
    m = schedule.n_micro_batches
    return RankSchedule(rank, actions[rank], stages, schedule.rank_of, last, m, arriving, fetching, used)


def _message_for(action: Action) -> Action | None:
    """The message that an action waits for, unless it is at an end of the pipeline."""
    return None if action.op == "W" else action._replace(op="F" if action.op == "F" else "B")


def _used_before(schedule: Schedule, rank: int, peer: int) -> Iterator[tuple[Action, list[Action]]]:
    """Each message from the peer to this rank, with this rank's messages that the peer has used since the last one."""
    own = {message for to, message in messages_from(schedule, rank) if to == peer}
    used: list[Action] = []
    for action in schedule.actions[peer]:
        message = _message_for(action)
        if message in own:
            used.append(message)
        for answer in messages_of(schedule, action):
            if schedule.rank_of[answer.stage] == rank:
                yield answer, used
                used = []


# Building
#
# A builder writes down each rank's steps, and `_numbered` gives them their micro-batches: the first F of a stage is for
# micro-batch 0, the next for 1. A schedule that begins with more micro-batches than there are is built for enough of
# them and loses the others afterward; no micro-batch waits for another, so the rest still runs.

Turn = tuple[str, int]  # op and stage


def naive(n_stages: int, n_micro_batches: int) -> Schedule:
    """One micro-batch after the other, forward through all stages and back: one rank works, the others wait."""
    return _build(lambda stage: [("F", stage), ("B", stage)] * n_micro_batches, n_stages, n_micro_batches)


def gpipe(n_stages: int, n_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). Every rank holds all micro-batches at once."""
    m = n_micro_batches
    return _build(lambda stage: [("F", stage)] * m + [("B", stage)] * m, n_stages, m)


def one_forward_one_backward(n_stages: int, n_micro_batches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021): as gpipe in time, but rank r holds no more than n_stages - r micro-batches."""
    enough = max(n_micro_batches, n_stages)

    def steps(stage: int) -> list[Turn]:
        ahead = n_stages - 1 - stage
        forward, backward = ("F", stage), ("B", stage)
        return [forward] * ahead + [forward, backward] * (enough - ahead) + [backward] * ahead

    return _build(steps, n_stages, n_micro_batches)


def interleaved_1f1b(n_stages: int, n_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B: rank r of p holds stages r, r + p, r + 2p, ...; the bubble shrinks by stages_per_rank.

    Micro-batches pass through a rank's stages in groups of p. Where p does not divide the micro-batches, the groups
    are as equal as can be, none smaller than p unless there are fewer (Narayanan et al. 2021 leave this case out).

    Raises ValueError if stages_per_rank does not divide n_stages.
    """
    p = _ranks(n_stages, n_micro_batches, stages_per_rank)
    n_groups = max(1, n_micro_batches // p)
    groups = [(n_micro_batches + i) // n_groups for i in reversed(range(n_groups))]

    def steps(rank: int) -> list[Turn]:
        stages = range(rank, n_stages, p)
        forwards = [("F", stage) for group in groups for stage in stages for _ in range(group)]
        backwards = [("B", stage) for group in groups for stage in reversed(stages) for _ in range(group)]
        ahead = min((stages_per_rank - 1) * groups[0] + 2 * (p - 1 - rank), len(forwards))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        return forwards[:ahead] + [step for pair in pairs for step in pair] + backwards[len(forwards) - ahead :]

    return _build(steps, p, n_micro_batches)


def zb_h1(n_stages: int, n_micro_batches: int) -> Schedule:
    """ZB-H1 (Qi et al. 2024): 1F1B with split backwards; a third of its bubble, and no rank holds more than rank 0."""
    return _zero_bubble(n_stages, n_micro_batches, 1)


def zb_h2(n_stages: int, n_micro_batches: int) -> Schedule:
    """ZB-H2 (Qi et al. 2024): twice the forwards before the first backward, and no bubble if F, I and W last equally.

    Needs 2 n_stages - 1 micro-batches or more for that, and holds as many on every rank.
    """
    return _zero_bubble(n_stages, n_micro_batches, 2)


def _zero_bubble(p: int, n_micro_batches: int, factor: int) -> Schedule:
    """Build a schedule in which all ranks run ahead by the same number of forwards and delayed W, and hold as much."""
    enough = max(n_micro_batches, factor * (p - 1) + 1)

    def steps(stage: int) -> list[Turn]:
        ahead, delayed = factor * (p - 1 - stage), factor * stage
        f, i, w = ("F", stage), ("I", stage), ("W", stage)
        steady = [f, i, w] * (enough - ahead - delayed)
        return [f] * ahead + [f, i] * delayed + steady + [i, w] * ahead + [w] * delayed

    return _build(steps, p, n_micro_batches)


def zbv(n_stages: int, n_micro_batches: int) -> Schedule:
    """ZB-V (Qi et al. 2024): two stages on each rank in a V; no bubble, with the memory of 1F1B.

    n_stages = 2 p stages on p ranks, rank r holding stages r and 2 p - 1 - r.

    Raises ValueError if n_stages is odd.
    """
    p = _ranks(n_stages, n_micro_batches, 2)
    enough = max(n_micro_batches, 2 * p - 1)

    def steps(r: int) -> list[Turn]:
        (f0, i0, w0), (f1, i1, w1) = ([(op, stage) for op in "FIW"] for stage in (r, n_stages - 1 - r))
        return (
            [f0] * (2 * (p - r) - 1)
            + [f1, f0] * r
            + [f1, i1, w1] * (p - r)
            + [f0, i0, w0, f1, i1, w1] * (enough - 2 * p + r + 1)
            + [i0, w0, f1, i1, w1] * (p - r - 1)
            + [i0, i1] * r
            + [i0, w0] * (p - r)
            + [w1] * r
            + [w0] * r
        )

    return _build(steps, p, n_micro_batches)


def dualpipev(n_stages: int, n_micro_batches: int) -> Schedule:
    """DualPipeV: two stages on each rank in a V, fed from both ends of the V at once.

    n_stages = 2 p stages on p ranks, rank r holding stages r and 2 p - 1 - r. In the middle part each rank pairs a
    forward with a backward of its other stage; hardware that overlaps the two hides communication behind compute.

    Raises ValueError if n_stages is odd or there are fewer micro-batches than stages.
    """
    p = _ranks(n_stages, n_micro_batches, 2)
    if n_micro_batches < n_stages:
        raise ValueError(
            f"n_micro_batches={n_micro_batches} is too few for dualpipev: it fills {n_stages} stages from both ends, "
            f"so give at least {n_stages}, or choose zbv, which runs with any number"
        )

    def steps(r: int) -> list[Turn]:
        (f0, b0, i0, w0), (f1, b1, i1, w1) = ([(op, stage) for op in OPS] for stage in (r, n_stages - 1 - r))
        late = ([i1, i0] * (r + 1))[r + 1 :]  # the second half of the last backwards is split
        weights = [("W", stage) for _, stage in late] + [w0] * (p - 1 - r)
        return (
            [f0] * (2 * (p - 1 - r))
            + [f0, f1] * (r + 1)
            + [i1, w1, f1] * (p - 1 - r)
            + [f0, b1, f1, b0] * (n_micro_batches - 2 * p + r + 1)
            + [b1, f1, b0] * (p - 1 - r)
            + ([b1, b0] * (r + 1))[: r + 1]
            + late
            + [step for w in weights[: p - 1 - r] for step in (w, i0)]
            + weights[p - 1 - r :]
        )

    return _build(steps, p, n_micro_batches)


def _build(steps: Callable[[int], list[Turn]], n_ranks: int, n_micro_batches: int) -> Schedule:
    """The schedule in which each rank takes these steps. Raises ValueError for a number below 1."""
    _check_sizes(n_ranks, n_micro_batches)
    return Schedule([_numbered(steps(rank), n_micro_batches) for rank in range(n_ranks)])


def _numbered(steps: list[Turn], n_micro_batches: int) -> list[Action]:
    """The actions of these steps: each stage takes micro-batches in order; a whole backward counts as both halves."""
    taken: Counter[Turn] = Counter()
    actions = []
    for op, stage in steps:
        actions.append(Action(op, stage, taken["I" if op == "B" else op, stage]))
        taken.update((half, stage) for half in ("IW" if op == "B" else op))
    return [action for action in actions if action.micro_batch < n_micro_batches]


def _ranks(n_stages: int, n_micro_batches: int, stages_per_rank: int) -> int:
    _check_sizes(n_stages, n_micro_batches)
    if stages_per_rank < 1 or n_stages % stages_per_rank:
        raise ValueError(
            f"n_stages={n_stages} cannot be dealt out to ranks with stages_per_rank={stages_per_rank}; "
            f"n_stages counts all stages of the pipeline, so give a multiple of {max(1, stages_per_rank)}"
        )
    return n_stages // stages_per_rank


def _check_sizes(n_stages: int, n_micro_batches: int) -> None:
    for name, value in (("n_stages", n_stages), ("n_micro_batches", n_micro_batches)):
        if value < 1:
            raise ValueError(f"{name}={value} has to be at least 1")


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
