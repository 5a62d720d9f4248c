"""The way from a student's function to a verdict, the same for every exercise.

    do the arguments fit?  ->  run on 2, 3 and 4 real ranks  ->  the price
                                  |                   |
                               an accident,        a result that one process
                               a deadlock:         does not have: which
                               which idea          idea leads to that?
                               leads there?

A misconception is a function that looks at the evidence and returns its explanation, or None if it does not fit.
A bank is an ordered tuple of them; the first that fits is told.
"""

from __future__ import annotations

import builtins
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from course_lib.checks.verdict import Verdict
from course_lib.ranks import Pace, RankFailed, RankTimeout, Run, RunError, Stopped, launch

TIMEOUT = 10.0  # seconds
SLIPS = ("NameError", "UnboundLocalError", "AttributeError", "TypeError", "ImportError", "ModuleNotFoundError")

Explanation = str | None


class Case(Protocol):
    """One situation to try a function in; `str` says it in words."""

    @property
    def world_size(self) -> int: ...


Tried = TypeVar("Tried", bound=Case)
Evidence = TypeVar("Evidence")


@dataclass(frozen=True)
class Exercise(Generic[Tried, Evidence]):
    """What a check needs to know about one exercise.

    name, arguments: of the student's function.
    cases: what to try, smallest first, for a seed.  priced: the case whose price is shown, run at `pace`.
    play: what each rank does, called with (rank, student's function, case). Only the student's exceptions leave it.
    gather: makes evidence of a run.
    is_right: whether the result is that of one process. The banks only explain what is not right.
    weigh: adds the price to the verdict of a right function.
    ideas: the bank for wrong results.  accidents: for runs that did not end well.  prices: for right results that
        cost more than the exercise allows.
    """

    name: str
    arguments: tuple[str, ...]
    cases: Callable[[int], list[Tried]]
    priced: Tried
    play: Callable[..., Any]
    gather: Callable[[Tried, Run], Evidence]
    is_right: Callable[[Evidence], bool]
    weigh: Callable[[Evidence, Verdict], Verdict]
    ideas: tuple[Callable[[Evidence], Explanation], ...]
    accidents: tuple[Callable[[RunError], Explanation], ...] = ()
    prices: tuple[Callable[[Evidence], Explanation], ...] = ()
    pace: Pace | None = None


def examine(exercise: Exercise[Tried, Evidence], fn: Callable[..., Any], seed: int) -> Verdict:
    """Try the student's function in every case, and stop at the first that goes wrong."""
    if not callable(fn):
        raise TypeError(f"{exercise.name}={fn!r} is not a function; give the function itself, without parentheses")
    verdict = _examine(exercise, fn, seed)
    name = getattr(fn, "__name__", "")
    return replace(verdict, name=name) if name.isidentifier() else verdict


def _examine(exercise: Exercise[Tried, Evidence], fn: Callable[..., Any], seed: int) -> Verdict:
    if complaint := _wrong_arguments(exercise, fn):
        return Verdict(exercise.name, "slip", complaint)
    cases = exercise.cases(seed)
    for case in cases:
        found = _try(exercise, fn, case, None)
        if isinstance(found, Verdict):
            return found
    found = _try(exercise, fn, exercise.priced, exercise.pace)
    if isinstance(found, Verdict):
        return found
    tried = f"Tried with {'; '.join(map(str, cases))}: each time the result was that of one process."
    return exercise.weigh(found, Verdict(exercise.name, "passed", tried))


def _try(
    exercise: Exercise[Tried, Evidence], fn: Callable[..., Any], case: Tried, pace: Pace | None
) -> Evidence | Verdict:
    """Run one case. Returns the evidence if all is well, else the verdict."""
    try:
        run = launch(exercise.play, case.world_size, (fn, case), timeout=TIMEOUT, pace=pace, device="cpu")
    except Stopped:
        raise
    except RunError as error:
        return replace(_explain_accident(exercise, error, fn), situation=str(case))
    found = exercise.gather(case, run)
    verdict = _judge(exercise, found)
    return replace(verdict, situation=str(case)) if verdict else found


def _judge(exercise: Exercise[Tried, Evidence], evidence: Evidence) -> Verdict | None:
    """What is wrong with the results of one run; None if nothing is."""
    if not exercise.is_right(evidence):
        idea, text = recognize(exercise.ideas, evidence) or ("", _NO_IDEA)
        return Verdict(exercise.name, "idea", text, idea=idea)
    if found := recognize(exercise.prices, evidence):
        idea, text = found
        return Verdict(exercise.name, "price", text, idea=idea)
    return None


_NO_IDEA = "The result is wrong, in a way that this check has no words for. Try the smallest case on paper."


def recognize(bank: Iterable[Callable[[Evidence], Explanation]], evidence: Evidence) -> tuple[str, str] | None:
    """The first misconception of a bank that fits the evidence: its name and its explanation."""
    for misconception in bank:
        if text := misconception(evidence):
            return misconception.__name__, text
    return None


# Before the run


def _wrong_arguments(exercise: Exercise[Any, Any], fn: Callable[..., Any]) -> Explanation:
    try:
        parameters = inspect.signature(fn)
        parameters.bind(*exercise.arguments)
    except TypeError:
        wanted = f"{exercise.name}({', '.join(exercise.arguments)})"
        yours = f"{exercise.name}{parameters}"
        return f"The check calls `{wanted}`, and your function is `{yours}`: give it these arguments again."
    return None


# After a run that did not end well


def _explain_accident(exercise: Exercise[Any, Any], error: RunError, fn: Callable[..., Any]) -> Verdict:
    cause = error.__cause__
    if isinstance(cause, NotImplementedError):
        text = "Replace `raise NotImplementedError()` by your own lines. The hints above unfold one by one."
        return Verdict(exercise.name, "unwritten", text)
    facts = (("What happened", error.message), *(("Line", line) for line in _lines(error)))
    if found := recognize(exercise.accidents, error):
        idea, text = found
        return Verdict(exercise.name, "idea", text, idea=idea, facts=facts)
    if isinstance(error, RankFailed) and type(cause).__name__ in SLIPS:
        return Verdict(exercise.name, "slip", _explain_slip(cause, fn), facts=facts)
    return Verdict(exercise.name, "error", _advice(error), facts=facts)


def _advice(error: RunError) -> str:
    """What to do about an accident that no bank knows."""
    if isinstance(error, RankTimeout):
        return f"Nothing here should take {TIMEOUT:g} seconds: perhaps a loop never ends. Look at what would end it."
    if error.__cause__ is None and not error.details.startswith("Traceback"):
        return error.details
    return (
        "Your function raised an exception, so its idea could not be tried. The last words of the exception usually "
        "name the thing that is not what the line takes it for; print its shape or its value just before."
    )


def _lines(error: RunError) -> list[str]:
    """The lines of the student's code at which ranks stood, without those that the message names already."""
    lines = dict.fromkeys(row.line for row in error.report.rows if row.line)
    return [line for line in lines if line not in error.message]


def _explain_slip(cause: BaseException | None, fn: Callable[..., Any]) -> str:
    """Plain words for a misspelt name or a wrong type, with what was probably meant."""
    text = str(cause)
    misspelt = re.search(r"(?:name|variable) '(\w+)'", text) or re.search(r"attribute '(\w+)'", text)
    meant = difflib.get_close_matches(misspelt[1], set(_names_around(text, fn)) - {misspelt[1]}) if misspelt else []
    advice = f" Did you mean `{meant[0]}`?" if meant else ""
    return f"Python stopped at one line; this says nothing about your idea yet.{advice}"


def _names_around(text: str, fn: Callable[..., Any]) -> list[str]:
    """The names that could stand where the misspelt one does."""
    module = re.search(r"module '([\w.]+)'", text)
    if module:
        return dir(importlib.import_module(module[1]))
    if "'Tensor'" in text:
        return dir(importlib.import_module("torch").Tensor)
    code = getattr(fn, "__code__", None)
    local = [*code.co_varnames, *code.co_names] if code else []
    return [*local, *getattr(fn, "__globals__", {}), *dir(builtins)]


def contains(error: RunError, *patterns: str) -> bool:
    """Whether the error's first sentence or its original exception has one of these patterns in it."""
    text = f"{error.message}\n{error.__cause__ or ''}"
    return any(re.search(pattern, text) for pattern in patterns)
