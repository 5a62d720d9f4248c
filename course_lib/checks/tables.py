"""Parts that only compute, and send nothing: each rank asks for other plans, which are rows of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_lib.checks.exercise import Case

Plans = dict[str, list[tuple]]  # by what is new in them


def table(n: int, text: str, plans: Callable[[int], list[tuple]], new: str = "other sizes", runs: bool = False) -> Case:
    """plans: those of a rank.  runs: whether the first of them is run, for the price."""
    return Case(text, n, lambda rank: (plans(rank), runs), new)


def tables(what: str, plans: Callable[[int, int], Plans], more: list[tuple[int, str]], seed: int) -> list[Case]:
    """A case with each kind of plans on 2 ranks, and then these, on more. plans: those of a seed and a rank."""

    def case(n: int, kind: str, new: str) -> Case:
        return table(n, f"{what} {kind}", lambda rank: plans(seed, rank)[kind], new)

    return [case(2, kind, kind) for kind in plans(seed, 0)] + [case(n, kind, "other sizes") for n, kind in more]


def played(
    name: str, run: Callable[[tuple, Any], None], value: Callable[[Any, tuple], Any] = lambda found, plan: found
) -> Callable[[Callable, list[tuple], bool], dict[str, Any]]:
    """How to play such a part. run: a plan and what was found for it.  value: what matters of what was found."""

    def play(fn: Callable, plans: list[tuple], runs: bool) -> dict[str, Any]:
        found = [fn(*plan) for plan in plans]
        if runs:
            run(plans[0], found[0])
        return {f"{name}{plan}": as_numbers(value(one, plan)) for plan, one in zip(plans, found, strict=True)}

    return play


def as_numbers(found: Any) -> Any:
    """A number, several, or rows of them as a tensor, so that they are compared as numbers; anything else as it is."""
    try:
        return torch.as_tensor(found, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return found
