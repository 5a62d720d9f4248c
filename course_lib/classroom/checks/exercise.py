"""An exercise part that checks: called with a student's function, it gives the verdict, in the same steps for each.

each case on real ranks  ->  the price, beside that of the right solution
   |             |
an error:     values that differ from the right solution's:
which one?    which wrong solution has the same, here and in a later case on more ranks?
              if none has: what the numbers show (`telling`), expected and got
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from course_lib.classroom.checks.evidence import Evidence
from course_lib.classroom.checks.part import AMOUNTS, TIMEOUT, Budget, Case, Mistake, Observed, Part
from course_lib.classroom.checks.prose import TEXTS
from course_lib.classroom.checks.telling import told
from course_lib.classroom.checks.verdict import Cost, Idle, Verdict
from course_lib.ranks import Deadlock, RankDied, RankFailed, RankTimeout, Run, RunError, Stopped, renew

FAILED = (Deadlock, RankDied, RankFailed, RankTimeout)  # a run that was stopped has not failed
# Of an open task, from the best, and their shares of the points.
LEVELS = ("far better than ours", 1.0), ("as good as ours", 1.0), ("good", 0.8), ("met", 0.6), ("out of budget", 0.0)
MISSPELT = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")
SLIPS = (*MISSPELT, "AttributeError", "TypeError")
Later = tuple[Evidence | None, list[Mistake]]  # of a later case: what was seen, and the mistakes that fit there, too


@dataclass(eq=False)
class Exercise(Part):
    """A part that students call with their function; its fields are those of `Part`."""

    def __call__(self, fn: Any, seed: int = 0) -> Verdict:
        """Try a student's function on 2, 3 and 4 ranks, and stop at the first case that goes wrong.

        seed: of the numbers and sizes. Raises nothing but Stopped.
        """
        renew("launch")  # cells may have changed the ranks
        try:
            verdict = _examine(self, fn, seed)
        except Stopped:
            raise
        except Exception as error:
            facts = (("What happened", f"{type(error).__name__}: {error}"),)
            verdict = Verdict(self.name, "error", TEXTS["broken"], facts=facts)
        name = getattr(fn, "__name__", "")
        return replace(verdict, name=name) if isinstance(name, str) and name.isidentifier() else verdict


def _examine(exercise: Part, fn: Any, seed: int) -> Verdict:
    passed: list[Evidence] = []
    cases = exercise.all_cases(seed)
    for case in cases:
        wrong: Verdict | None
        try:
            run = exercise.run([fn], case)
        except FAILED as error:
            wrong = _explain_accident(exercise, case, error, fn, passed)
        else:
            observed = ([of[0] for of in one.results] for one in (run, exercise.run_right(case)))
            found = Evidence(exercise, case, *observed)
            wrong = _judge(found, passed, functools.partial(_again, exercise, fn, case, cases))
        if wrong:
            facts = (*wrong.facts, *_what_is_new(case, passed))
            share = 0 if exercise.budget else len(passed) / len(cases)
            return replace(wrong, situation=case.text, facts=facts, share=share)
        passed.append(found)
    count = "both cases" if len(passed) == 2 else f"all {len(passed)} cases"
    begin, between = "Tried" if exercise.budget else "Right", f"from {passed[0].case.text} to {passed[-1].case.text}"
    verdict = Verdict(exercise.name, "passed", f"{begin} in {count}, {between}.", share=1.0)
    if exercise.budget:
        return rated(verdict, exercise, exercise.budget, run)
    return _weigh(verdict, run, exercise.run_right(case), exercise.memory)


def _again(exercise: Part, fn: Any, case: Case, cases: list[Case], mistakes: list[Mistake]) -> Later:
    """The evidence of a later case on more ranks, where less is equal by chance, and the mistakes that fit there, too.

    A case with the same text, plans of the same kind, comes first; others tell apart the mistakes that fit there. None
    and all mistakes if there is no such case, or if a program fails in it.
    """
    more = [one for one in cases[cases.index(case) + 1 : -1] if one.world_size > case.world_size]
    found: Later = None, mistakes
    with contextlib.suppress(*FAILED):
        for another in sorted(more, key=lambda one: one.text != case.text):
            programs = [exercise.right, fn, *(one.program for one in found[1])]
            right, mine, *theirs = map(list, zip(*exercise.run(programs, another).results, strict=True))
            again = Evidence(exercise, another, mine, right)
            fitting = [one for one, seen in zip(found[1], theirs, strict=True) if again.is_like(seen)]
            if fitting == found[1] and not again.differences:
                continue  # right there, as all of these mistakes are
            if fitting or not found[0]:
                found = found[0] or again, fitting
            if len(fitting) < 2:
                break
    return found


def _what_is_new(case: Case, passed: list[Evidence]) -> tuple[tuple[str, str], ...]:
    """A fact: the news in this case; the last one that passed, if nobody knows them."""
    if new := _news(case, passed):
        return (("It was right before. New here, and perhaps why", new),)
    return tuple(("It was right before, with", one.case.text) for one in passed[-1:])


def _news(case: Case, passed: list[Evidence]) -> str:
    """What is new in this case; "" if nobody says, or if it was new in one that passed. Sizes are others each time."""
    known = {one.case.new for one in passed} - {"other sizes"}
    return case.new * (bool(passed) and case.new not in known)


def _judge(found: Evidence, passed: list[Evidence], later: Callable[..., Later] | None = None) -> Verdict | None:
    """The verdict on a run that ended well; None if nothing is wrong. later: runs a later case, to confirm an idea."""
    exercise = found.exercise
    breach = exercise.breach(found.observed) if found.is_right else ""
    if found.is_right and not breach:
        return None
    failing = [one for one in found.mistakes() if not found.would_pass(one)]
    mistakes = [one for one in failing if all(before.would_pass(one) for before in passed)]
    again, confirmed = later(mistakes) if later and not breach else (None, mistakes)
    unnamed = breach or told(found, again)
    verdict = _named(Verdict(exercise.name, "price" if breach else "idea", unnamed), confirmed)
    facts = found.differences[0].facts(exercise.by_rank) if found.differences else ()
    new = tuple(one for one in facts if len(one[1]) < 20 or one[1] not in verdict.message)  # nothing is said twice
    return replace(verdict, facts=() if verdict.message in dict(facts).values() else new)


def _named(verdict: Verdict, mistakes: list[Mistake]) -> Verdict:
    if not mistakes:
        return verdict
    text = " Or: ".join(f"{said.idea} {said.question}" for said in (mistake.advice for mistake in mistakes))
    lead = f"{len(mistakes)} ideas lead to exactly this." if len(mistakes) > 1 else TEXTS["with yours"]
    return replace(verdict, message=f"{lead} {text}", idea=", ".join(one.program.__name__ for one in mistakes))


# Runs that failed


def _explain_accident(
    exercise: Part, case: Case, error: RunError, fn: Callable[..., Any], passed: list[Evidence]
) -> Verdict:
    cause, kind, ended = error.__cause__, type(error.__cause__).__name__, _how_it_ended(error)
    if kind == "NotImplementedError" and not str(cause):
        return Verdict(exercise.name, "unwritten", TEXTS["stub"])
    said = error.message if error.details.startswith("Traceback") else f"{error.message} {error.details}"
    lines = {row.line: row.rank for row in reversed(error.report.rows) if row.line and row.line not in said}
    facts = (("What happened", error.message), *((f"Line of rank {rank}", line) for line, rank in lines.items()))
    parts = 2 if passed else 3  # behind cases that pass, the operations before the same exception may be others
    ways = {one: _how_it_fails(exercise, case, one) for one in exercise.mistakes if one.fails and cause}
    failing = [one for one, way in ways.items() if way[:parts] == ended[:parts]]
    if mistakes := [one for one in failing if not any(_how_it_fails(exercise, was.case, one) for was in passed)]:
        return _named(Verdict(exercise.name, "idea", "", facts=facts), mistakes)
    used = getattr(getattr(fn, "__code__", None), "co_names", ())
    if {"threading", "Thread", "ThreadPoolExecutor"}.intersection(used):
        return Verdict(exercise.name, "idea", TEXTS["thread"], facts=facts)
    if cause is None and not error.details.startswith("Traceback") and not isinstance(error, RankTimeout):
        return Verdict(exercise.name, "idea", error.details, facts=facts)
    if _news(case, passed) and cause and kind not in MISSPELT:
        return Verdict(exercise.name, "idea", TEXTS["new"], facts=facts)
    if kind in SLIPS:
        has_no_handle = "'NoneType' object has no attribute 'wait'" in str(cause)
        what = "no handle" if has_no_handle else "misspelt" if callable(fn) else "called"
        return Verdict(exercise.name, "slip", TEXTS[what], facts=facts)
    text = TEXTS["endless" if isinstance(error, RankTimeout) else "raised"].format(seconds=TIMEOUT)
    return Verdict(exercise.name, "error", text, facts=facts)


@functools.cache
def _how_it_fails(exercise: Part, case: Case, mistake: Mistake) -> tuple:
    """How the run of a wrong solution ends if it fails; () if it does not."""
    try:
        exercise.run([mistake.program], case)
    except FAILED as theirs:
        return _how_it_ended(theirs)
    return ()


def _how_it_ended(error: RunError) -> tuple:
    """The error of a run, as far as it is the same on every machine; which waiting ranks raise, too, is not."""
    raised = [error.histories[row.rank] for row in error.report.rows if row.state == "raised"]
    return type(error), repr(error.__cause__), {tuple((op.name, op.peer, op.elements) for op in one) for one in raised}


# The price


def rated(verdict: Verdict, exercise: Part, budget: Budget, run: Run) -> Verdict:
    """The verdict on a solution of an open task: its level, and its timeline beside those of others."""
    what, met, good, _, far = budget
    given, best = exercise.run_right(exercise.price_case), exercise.run_ours(budget)
    yours, at_first, least = map(AMOUNTS[what], (run, given, best))
    level, share = LEVELS[bisect_left((far, least, good, met), yours / (1 + 1e-9))]
    level = "better than ours" if far < yours < least * (1 - 1e-9) else level
    computed = (run.timeline.busy(rank) - 0.9 * given.timeline.busy(rank) for rank in range(run.world_size))
    if "milliseconds" in what and min(computed) < 0:
        return replace(verdict, outcome="price", message=TEXTS["unseen"], share=0.0)
    why = exercise.rule([of[0] for of in run.results]) or _too_much(run, given, best, what) if share < 1 else ""
    text = f"{verdict.message} {yours:,.0f} {what}: {level}. {why}".rstrip()
    scale = f"{at_first:,.0f} as given, {met:,.0f} met, {good:,.0f} good, {least:,.0f} ours"
    scale += f", {far:,.0f} far better" * bool(far)
    facts = (("The scale", scale),)
    beside = {"as given": given.timeline} | ({"ours": best.timeline} if yours > least else {})
    idle = Idle(run.timeline, best.timeline.idle_fraction(), beside)
    return replace(verdict, outcome="met" if share else "budget", message=text, facts=facts, share=share, idle=idle)


def _too_much(run: Run, given: Run, best: Run, what: str) -> str:
    """A sentence about what costs an open task's solution more than ours; "" if these looks see nothing."""
    (passes, ahead), (least, _) = map(_passes, (run, best))  # a pass may have several spans
    if "memory" in what:
        return f"{TEXTS['passes ahead'].format(ahead=ahead)} " * (ahead > 1) + _fullest(run)
    if passes > least:
        return TEXTS["passes"].format(times=passes / least)
    same = f"{TEXTS['as given']} " * math.isclose(*map(AMOUNTS[what], (run, given)), rel_tol=1e-3)
    last = max(run.timeline.spans, key=lambda span: (round(span.end, 9), -span.rank)).rank
    (lost, most), (least, _) = (_lost(one, last) for one in (run, best))
    begun, few = (len(one.results[last][0].sent) for one in (run, best))
    text = TEXTS["lost"].format(rank=last, begun=begun, few=few, lost=lost, least=least, most=most)
    apart = f" {TEXTS['never at once'].format(rank=last)}" * (_are_at_once(best, last) > _are_at_once(run, last))
    return same + (text + apart) * bool(most)


def _fullest(run: Run) -> str:
    """A sentence about the tensors on the rank that holds most, when it does, those of the most numbers first."""
    rank = max(range(run.world_size), key=lambda one: run.results[one][0].memory)
    shapes = Counter(map(tuple, run.results[rank][0].fullest))
    largest = sorted(shapes, key=lambda shape: -shapes[shape] * math.prod(shape))[:3]
    said = ", ".join(f"{shapes[shape]} of {[*shape]}" for shape in largest)
    return TEXTS["fullest"].format(rank=rank, tensors=said)


def _passes(run: Run) -> tuple[int, int]:
    """The forward passes of rank 0, and those before its first backward pass of which autograd keeps something."""
    passes = [span for span in run.timeline.of(0) if span.kind in ("forward", "backward")]
    ahead = itertools.takewhile(lambda span: span.kind == "forward", passes)
    return sum(span.kind == "forward" for span in passes), sum(span.name == "forward" for span in ahead)


def _lost(run: Run, rank: int) -> tuple[int, str]:
    """The emulated milliseconds in which a rank computes nothing; and what most of them go to, in words."""
    spans, by_kind = run.timeline.of(rank), defaultdict[str, list[float]](list)
    turn = min((span.start for span in spans if span.kind == "backward"), default=math.inf)
    for span in spans:
        if span.kind in ("wait", "transfer") and not span.background:
            when = "before the first backward pass" if span.start < turn else "in the backward pass or behind it"
            by_kind[f"{span.name}, {when}"].append(1000 * (span.end - span.start))
    most, seconds = max(by_kind.items(), key=lambda one: sum(one[1]), default=("", []))
    lost = 1000 * (run.timeline.makespan - run.timeline.busy(rank))
    return round(lost), f"{sum(seconds):.0f} ms in {most}" * bool(most)


def _are_at_once(run: Run, rank: int) -> bool:
    """Whether a rank ever has two messages on their way at the same time."""
    moves = [span for span in run.timeline.of(rank) if span.kind == "transfer" and span.duration]
    return any(after.start < before.end - 1e-9 for before, after in itertools.pairwise(moves))


def _weigh(verdict: Verdict, run: Run, right: Run, memory: int | None) -> Verdict:
    """Add the price of a right function, beside the best: that of the right solution, or this one if it is lower."""
    price = sent, calls, held, idle = _price(run)
    least_sent, least_calls, least_held, least_idle = map(min, price, _price(right))
    costs = (
        Cost("bytes a rank sends", f"{sent:,}", f"{least_sent:,}"),
        Cost("operations they take", f"{calls:,}", f"{least_calls:,}"),
        Cost("bytes of extra memory on a rank", f"{held:,}", f"{least_held if memory is None else memory:,}"),
        Cost("idle time (emulated)", f"{idle:.0%}", f"{least_idle:.0%}"),
    )
    said = tuple(one for one in costs if {one.yours, one.best} - {"0", "0%"})  # what nobody pays is no price
    remarks = []
    if sent >= 1.5 * least_sent > 0:
        remarks.append(f"Your ranks send {sent / least_sent:.1f} times the bytes that are needed.")
    if calls > least_calls:
        remarks.append(f"You communicate {calls} times where {least_calls} would do; each pays the latency anew.")
    return replace(verdict, costs=said, remarks=tuple(remarks), idle=Idle(run.timeline, least_idle))


def _price(run: Run) -> tuple[int, int, int, float]:
    """Bytes sent, operations and bytes of extra memory, each of the rank that has most; and the share of idle time."""
    observed: list[Observed] = [programs[0] for programs in run.results]
    sent = max(map(run.timeline.bytes_sent, range(run.world_size)))
    calls, held = max(len(one.sent) for one in observed), max(one.memory for one in observed)
    return sent, calls, held, run.timeline.idle_fraction()
