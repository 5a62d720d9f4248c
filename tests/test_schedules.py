"""Schedules, against a small machine that runs them with integers, and against published figures and orders.

The machine below is independent of the code under test: its stages multiply by primes, its ranks have mailboxes, and a
schedule is right if the gradients of the primes are those of one process and no message is left over.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs
from hypothesis import event, given, settings
from hypothesis import strategies as st

from course_lib.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    ScheduleError,
    as_text,
    in_order,
    inputs_of,
    messages_from,
    peak_in_flight,
    validate,
)
from tests import random_schedules

PRIMES = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]
ONE_STAGE_EACH = ["naive", "gpipe", "1f1b", "zb_h1", "zb_h2"]


class DoesNotRun(Exception):
    pass


class Machine:
    """Ranks that multiply: stage s computes y = PRIMES[s] x, and the loss is the sum of the last stage's results."""

    def __init__(self, schedule: Schedule) -> None:
        self.rows = schedule.actions
        everything = [action for row in self.rows for action in row]
        if not all(self.rows) or not everything:
            raise DoesNotRun("a rank without work")
        self.n_stages = 1 + max(action.stage for action in everything)
        self.micro_batches = range(1 + max(action.micro_batch for action in everything))
        self.mail: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        self.saved: list[dict[tuple[int, int], int]] = [{} for _ in self.rows]
        self.halfway: list[dict[tuple[int, int], int]] = [{} for _ in self.rows]
        self.gradients: list[dict[int, int]] = [defaultdict(int) for _ in self.rows]
        for k in self.micro_batches:
            self.mail["x", 0, k] = [100 + k]

    def run(self) -> None:
        waiting = [list(row) for row in self.rows]
        while any(waiting):
            left = sum(map(len, waiting))
            for rank, row in enumerate(waiting):
                if row and self.can(rank, row[0]):
                    self.do(rank, row.pop(0))
            if left == sum(map(len, waiting)):
                raise DoesNotRun("hangs")
        if any(self.mail.values()) or any(self.saved) or any(self.halfway):
            raise DoesNotRun("leaves something behind")
        if sorted((s, g) for rank in self.gradients for s, g in rank.items()) != sorted(self.right_answer()):
            raise DoesNotRun("wrong gradients")

    def can(self, rank: int, action: Action) -> bool:
        op, stage, k = action
        if op == "F":
            return bool(self.mail["x", stage, k])
        if op == "W":
            return (stage, k) in self.halfway[rank]
        if op in ("B", "I"):
            return bool(self.mail["g", stage, k]) and (stage, k) in self.saved[rank]
        raise DoesNotRun("unknown op")

    def do(self, rank: int, action: Action) -> None:
        op, stage, k = action
        if op == "F":
            self.saved[rank][stage, k] = x = self.mail["x", stage, k].pop()
            is_last = stage == self.n_stages - 1
            self.mail["g" if is_last else "x", stage + (not is_last), k].append(1 if is_last else x * PRIMES[stage])
        elif op == "W":
            self.gradients[rank][stage] += self.halfway[rank].pop((stage, k))
        else:
            gradient = self.mail["g", stage, k].pop()
            self.halfway[rank][stage, k] = gradient * self.saved[rank].pop((stage, k))
            if stage:
                self.mail["g", stage - 1, k].append(gradient * PRIMES[stage])
            if op == "B":
                self.do(rank, Action("W", stage, k))

    def right_answer(self) -> Iterator[tuple[int, int]]:
        product = 1
        for stage in range(self.n_stages):
            product *= PRIMES[stage]
        inputs = sum(100 + k for k in self.micro_batches)
        return ((stage, inputs * product // PRIMES[stage]) for stage in range(self.n_stages))


def runs(schedule: Schedule) -> bool:
    try:
        Machine(schedule).run()
    except DoesNotRun:
        return False
    return True


def is_accepted(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def built(names: list[str] = list(SCHEDULES), ranks: range = range(1, 6), most: int = 12) -> Iterator[Any]:  # noqa: B006
    """The schedules of these definitions, each with name, number of ranks and number of micro-batches."""
    for name in names:
        stages_on_each = [1] if name in ONE_STAGE_EACH else [2]
        for p in ranks:
            for m in range(1, most + 1):
                for v in [1, 2, 3] if name == "interleaved_1f1b" else stages_on_each:
                    if name != "dualpipev" or m >= 2 * p:
                        more = {"stages_per_rank": v} if name == "interleaved_1f1b" else {}
                        yield name, p, m, v, SCHEDULES[name](p * v, m, **more)


# Schedules that run, and schedules that do not


def test_every_schedule_of_every_size_is_accepted_and_runs() -> None:
    for name, p, m, v, schedule in built():
        assert (schedule.n_ranks, schedule.n_stages, schedule.n_micro_batches) == (p, p * v, m), name
        validate(schedule)
        Machine(schedule).run()


@given(random=st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_whatever_order_respects_what_each_action_needs_is_accepted(random: Random) -> None:
    schedule = random_schedules.that_can_run(random)
    Machine(schedule).run()
    validate(schedule)


@given(random=st.randoms(use_true_random=False), changes=st.integers(1, 3))
@settings(max_examples=800, deadline=None)
def test_a_schedule_is_accepted_exactly_if_it_runs(random: Random, changes: int) -> None:
    schedule = random_schedules.that_can_run(random)
    for _ in range(changes):
        schedule = random_schedules.tampered_with(schedule, random)
    event("runs" if runs(schedule) else "does not run")
    assert is_accepted(schedule) == runs(schedule)


def f(stage: int, k: int) -> Action:
    return Action("F", stage, k)


def b(stage: int, k: int) -> Action:
    return Action("B", stage, k)


def i(stage: int, k: int) -> Action:
    return Action("I", stage, k)


def w(stage: int, k: int) -> Action:
    return Action("W", stage, k)


GOOD = [[f(0, 0), f(0, 1), b(0, 0), b(0, 1)], [f(1, 0), b(1, 0), f(1, 1), b(1, 1)]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        pytest.param(
            [[f(0, 0), b(0, 0), f(0, 1), b(0, 1)], [f(1, 0), f(1, 1), b(1, 0), b(1, 1)]],
            "rank 0 waits forever in B of micro-batch 0 on stage 0: it needs B of micro-batch 0 on stage 1, "
            "which rank 1 cannot reach: it waits in F of micro-batch 1 on stage 1",
            id="two ranks wait for each other",
        ),
        pytest.param(
            [[a for k in (0, 1) for a in (f(r, k), b(r, k))] for r in (0, 1)] + [[f(2, 0), f(2, 1), b(2, 0), b(2, 1)]],
            "rank 1 waits forever in B of micro-batch 0 on stage 1: it needs B of micro-batch 0 on stage 2, "
            "which rank 2 cannot reach: it waits in F of micro-batch 1 on stage 2",
            id="the first rank waits for what the second one waits in",
        ),
        pytest.param(
            [GOOD[0], [b(1, 0), f(1, 0), f(1, 1), b(1, 1)]],
            "rank 1 waits forever in B of micro-batch 0 on stage 1: it needs F of micro-batch 0 on stage 1, "
            "which comes later on the same rank",
            id="a rank waits for itself",
        ),
        pytest.param(
            [GOOD[0], GOOD[1][:2] + GOOD[1][3:]],
            "rank 1 never runs F of micro-batch 1 on stage 1; add it",
            id="a forward is missing",
        ),
        pytest.param(
            [[*GOOD[0][:3], i(0, 1)], GOOD[1]],
            "rank 0 never runs W of micro-batch 1 on stage 0; add it",
            id="the weight gradient is missing",
        ),
        pytest.param(
            [[*GOOD[0], f(0, 0)], GOOD[1]],
            "F of micro-batch 0 on stage 0 is there twice",
            id="a forward too much",
        ),
        pytest.param(
            [GOOD[0][:3], [*GOOD[1], b(0, 1)]],
            "rank 1 cannot run B of micro-batch 1 on stage 0: rank 0 holds stage 0",
            id="a stage on two ranks",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_rank_action_and_what_is_missing(rows: list[list[Action]], words: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(words)):
        validate(Schedule(rows))


def test_a_list_that_was_changed_is_checked_as_it_is_now() -> None:
    schedule = SCHEDULES["1f1b"](2, 2)
    validate(schedule)
    schedule.actions[1].append(f(2, 0))
    with pytest.raises(ScheduleError, match="never runs"):
        validate(schedule)


@pytest.mark.parametrize(
    ("name", "n_stages", "n_micro_batches", "more", "words"),
    [
        ("interleaved_1f1b", 5, 4, {}, "n_stages=5 cannot be dealt out to ranks with stages_per_rank=2"),
        ("zbv", 3, 4, {}, "n_stages=3 .* give a multiple of 2"),
        ("dualpipev", 4, 3, {}, "n_micro_batches=3 is too few for dualpipev.* at least 4, or choose zbv"),
    ],
)
def test_sizes_that_a_definition_forbids_are_refused(
    name: str, n_stages: int, n_micro_batches: int, more: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SCHEDULES[name](n_stages, n_micro_batches, **more)


# Published figures


def ends(schedule: Schedule, seconds: dict[str, int]) -> list[list[int]]:
    """The end of each action, by rank, computed independently as the longest path to the action."""
    before = {action: row[n - 1] if n else None for row in schedule.actions for n, action in enumerate(row)}
    last = max(action.stage for action in before)
    known: dict[Action, int] = {}

    def end(action: Action) -> int:
        if action not in known:
            op, stage, k = action
            needs = {"F": [f(stage - 1, k)], "W": [i(stage, k)]}.get(
                op, [f(stage, k), b(stage + 1, k), i(stage + 1, k)]
            )
            if op in "BI" and stage == last:
                needs = [f(stage, k)]
            previous = before[action]
            started = max((end(a) for a in [*needs, previous] if a in before), default=0)
            known[action] = started + seconds[op]
        return known[action]

    return [[end(action) for action in row] for row in schedule.actions]


def makespan(schedule: Schedule, **seconds: int) -> int:
    return max(row[-1] for row in ends(schedule, seconds))


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 3, 8, 16])
def test_times_are_those_of_the_papers(p: int, m: int) -> None:
    assert makespan(SCHEDULES["naive"](p, m), F=1, B=2) == 3 * m * p
    assert makespan(SCHEDULES["gpipe"](p, m), F=1, B=2) == 3 * (m + p - 1)  # Huang et al. 2019
    assert makespan(SCHEDULES["1f1b"](p, m), F=1, B=2) == 3 * (m + p - 1)  # Narayanan et al. 2021
    if m >= 2 * p - 1:
        # Qi et al. 2024, table 2, with F, I and W of one unit: a bubble of (p - 1)(F + I - W), and for ZB-H2 of
        # (p - 1)(F + I - 2 W), none at all once a rank has begun.
        assert makespan(SCHEDULES["zb_h1"](p, m), F=1, I=1, W=1) == 3 * m + p - 1
        for rank, row in enumerate(ends(SCHEDULES["zb_h2"](p, m), {"F": 1, "I": 1, "W": 1})):
            assert row == list(range(rank + 1, rank + 1 + 3 * m))


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("p", [2, 4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p: int, v: int) -> None:
    """Narayanan et al. 2021: the bubble is (p - 1)(F + B) / v; F and B are of all v stages of a rank."""
    m, schedule = 3 * p, SCHEDULES["interleaved_1f1b"](p * v, 3 * p, stages_per_rank=v)
    whole = v * 4  # F and B of a whole rank's layers, so that one stage's are 4
    assert makespan(schedule, F=2, B=2) == m * whole + (p - 1) * whole // v


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zbv_leaves_no_gap_on_any_rank_once_it_has_begun(p: int) -> None:
    for row in ends(SCHEDULES["zbv"](2 * p, 3 * p), {"F": 1, "I": 1, "W": 1}):
        assert row == list(range(row[0], row[0] + 6 * 3 * p))


def test_the_most_activations_in_flight_are_those_of_the_papers() -> None:
    for name, p, m, v, schedule in built(ranks=range(1, 9), most=20):
        full = range(p)  # ranks; the figures hold where there are enough micro-batches
        published = {
            "naive": [1 for _ in full],
            "gpipe": [m for _ in full],  # Huang et al. 2019
            "1f1b": [p - r for r in full],  # Narayanan et al. 2021
            "interleaved_1f1b": [(v - 1) * p + 2 * (p - 1 - r) + 1 for r in full],  # the same
            "zb_h1": [p for _ in full],  # Qi et al. 2024, table 2
            "zb_h2": [2 * p - 1 for _ in full],
            "zbv": [2 * p for _ in full],  # section 6: as 1F1B, here in halves
            "dualpipev": [2 * p + 1 for _ in full],  # DeepSeek-AI's table: one more than there are stages
        }[name]
        if name == "interleaved_1f1b" and m % p:
            continue
        if m >= 2 * p + 1:
            assert peak_in_flight(schedule) == [min(peak, m * v) for peak in published], (name, p, m, v)
        elif name != "dualpipev":
            assert all(peak <= min(most, m * v) for peak, most in zip(peak_in_flight(schedule), published, strict=True))


# PyTorch's orders


def order_of(kind: Any, p: int, m: int, v: int) -> list[list[Action]]:
    """The actions of a PyTorch schedule on each rank, without the process group that it normally needs."""
    ours = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    schedule = object.__new__(kind)
    rounds = max(1, m // p)
    vars(schedule).update(pp_group_size=p, n_local_stages=v, _n_microbatches=m, num_stages=p * v)
    vars(schedule).update(number_of_rounds=rounds, microbatches_per_round=m // rounds)
    rows = []
    for rank in range(p):
        steps = [step for step in schedule._calculate_single_rank_operations(rank) if step is not None]
        flat = [part for step in steps for part in (step.sub_actions or (step,))]
        rows.append([Action(ours[a.computation_type.name], a.stage_index, a.microbatch_index) for a in flat])
    return rows


@pytest.mark.parametrize(
    ("name", "kind", "more", "v"),
    [
        ("interleaved_1f1b", theirs.ScheduleInterleaved1F1B, {"stages_per_rank": 2}, 2),
        ("interleaved_1f1b", theirs.ScheduleInterleaved1F1B, {"stages_per_rank": 3}, 3),
        ("zb_h1", theirs.ScheduleInterleavedZeroBubble, {}, 1),
        ("zbv", theirs.ScheduleZBVZeroBubble, {}, 2),
        ("dualpipev", theirs.ScheduleDualPipeV, {}, 2),
    ],
)
def test_the_order_is_that_of_pytorch(name: str, kind: Any, more: dict[str, int], v: int) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (*range(1, 13), 16, 24):
            if (name == "dualpipev" and m < 2 * p) or (name == "interleaved_1f1b" and m % max(1, m // p)):
                continue
            assert SCHEDULES[name](p * v, m, **more).actions == order_of(kind, p, m, v), (p, m)


# Reading a schedule


def test_stages_are_found_on_their_ranks() -> None:
    assert SCHEDULES["1f1b"](3, 2).rank_of == {0: 0, 1: 1, 2: 2}
    interleaved, folded = SCHEDULES["interleaved_1f1b"](6, 3, stages_per_rank=2), SCHEDULES["zbv"](6, 3)
    assert [interleaved.stages_of(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [folded.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_in_order_every_action_comes_after_what_it_needs() -> None:
    for _, _, _, _, schedule in built(ranks=range(2, 4), most=6):
        done: set[Action] = set()
        rows: list[list[Action]] = [[] for _ in schedule.actions]
        for rank, action in in_order(schedule):
            assert all(done.intersection(any_of) for any_of in inputs_of(schedule, action))
            done.add(action)
            rows[rank].append(action)
        assert rows == schedule.actions


def test_everything_that_is_passed_on_is_needed_once_by_the_rank_it_goes_to() -> None:
    for _, _, m, _, schedule in built(ranks=range(1, 4), most=6):
        sent = [message for rank in range(schedule.n_ranks) for message in messages_from(schedule, rank)]
        assert len(set(sent)) == len(sent) == 2 * m * (schedule.n_stages - 1)
        for to, (op, stage, k) in sent:
            half = {Action("I", stage, k)} if op == "B" else set()
            assert {Action(op, stage, k), *half} & set(schedule.actions[to])


def test_a_schedule_is_drawn_with_a_column_for_each_unit_of_time() -> None:
    assert as_text(SCHEDULES["1f1b"](3, 4)).splitlines() == [
        "rank 0  F0 F1 F2       B0 F3 B1    B2    B3",
        "rank 1     F0 F1    B0 F2 B1 F3 B2    B3",
        "rank 2        F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert as_text(SCHEDULES["interleaved_1f1b"](4, 1)).splitlines() == [
        "rank 0  F0.0      F0.2           B0.2      B0.0",
        "rank 1       F0.1      F0.3 B0.3      B0.1",
    ]


def test_schedules_need_no_torch() -> None:
    program = "import sys, course_lib.schedules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1]).returncode == 0
