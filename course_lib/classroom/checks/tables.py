"""Parts that compute and send nothing: each rank asks for other plans, which are rows of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case

Plans = dict[str, list[tuple]]  # keys say what is new in them


def computing(
    name: str,
    right: Callable[..., Any],
    what: str,
    plans: Callable[[int, int], Plans],
    more: list[tuple[int, str]],
    price_case: tuple[str, tuple],
    run: Callable[[tuple, Any], None],
    value: Callable[[tuple, Any], Any] = lambda plan, found: found,
    **options: Any,
) -> Exercise:
    """The part with this name, which tries each kind of plans on 2 ranks, then some kinds on more.

    what: the plans' name, before their kind.  plans: those of a seed and a rank.  more: ranks, with a kind for each.
    price_case: the name of a plan for 4 ranks, and that plan.  run: runs that plan on a rank, given the plan and the
        answer for it.  value: the part of an answer that matters.
    """

    def play(fn: Callable, plans: list[tuple], runs: bool) -> dict[str, Any]:
        found = [fn(*plan) for plan in plans]
        if runs:
            run(plans[0], found[0])
        return {f"{name}{plan}": as_numbers(value(plan, one)) for plan, one in zip(plans, found, strict=True)}

    text, plan = price_case
    last = Case(text, 4, lambda rank: ([plan], True), "other sizes")
    return Exercise(name, right, play, partial(_cases, what, plans, more), last, by_rank=False, **options)


def _cases(what: str, plans: Callable[[int, int], Plans], more: list[tuple[int, str]], seed: int) -> list[Case]:
    def case(n: int, kind: str, new: str) -> Case:
        return Case(f"{what}{kind}", n, lambda rank: (plans(seed, rank)[kind], False), new)

    return [case(2, kind, kind) for kind in plans(seed, 0)] + [case(n, kind, "other sizes") for n, kind in more]


def as_numbers(found: Any, dtype: torch.dtype | None = torch.float64) -> Any:
    """Numbers, or rows of numbers, as a tensor, so that they are compared as numbers; anything else unchanged.

    dtype: None for that of the numbers; whole ones are names then, of which no check says that one is too large.
    """
    try:
        return torch.tensor(_plain(found), dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return found


def as_number(found: Any) -> Any:
    """One number, or a tensor of any shape with one number, as a tensor to compare."""
    return as_numbers(found.squeeze() if isinstance(found, Tensor) else found)


def _plain(found: Any) -> Any:
    if isinstance(found, list | tuple):
        return [_plain(one) for one in found]
    return found.tolist() if isinstance(found, Tensor) else found
