"""What every check does before, after and around the bank of its exercise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import checks, launch
from course_lib.checks import examine

scale = 2.0


def unwritten(tensor: Tensor) -> None:
    raise NotImplementedError()


def misspells_a_name(tensor: Tensor) -> None:
    world_size = dist.get_world_size()
    tensor *= wrold_size * world_size  # type: ignore[name-defined]  # noqa: F821


def misspells_a_function(tensor: Tensor) -> None:
    dist.isned(tensor, 0)  # type: ignore[attr-defined]


def misspells_a_method(tensor: Tensor) -> None:
    tensor.tensor_spilt(2)  # type: ignore[attr-defined]


def gives_too_many_arguments(tensor: Tensor) -> None:
    len(tensor, 2)  # type: ignore[call-arg]


def confuses_shapes(tensor: Tensor) -> None:
    tensor += torch.zeros(len(tensor) + 1)


class Unsendable(Exception):
    """Its constructor wants more than unpickling gives it."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("neither here nor there")


def raises_what_cannot_travel(tensor: Tensor) -> None:
    raise Unsendable(1, 2)


def never_ends(tensor: Tensor) -> None:
    while True:
        pass


def test_a_stub_is_not_a_mistake() -> None:
    verdict = checks.ring_all_reduce(unwritten)
    assert verdict.outcome == "unwritten"
    assert "raise NotImplementedError()" in verdict.message


@pytest.mark.parametrize(
    ("fn", "meant"),
    [
        (misspells_a_name, "Did you mean `world_size`?"),
        (misspells_a_function, "Did you mean `isend`?"),
        (misspells_a_method, "Did you mean `tensor_split`?"),
        (gives_too_many_arguments, "says nothing about your idea yet."),
    ],
)
def test_a_slip_of_the_keyboard_is_not_called_a_wrong_idea(fn: Any, meant: str) -> None:
    verdict = checks.ring_all_reduce(fn)
    assert verdict.outcome == "slip"
    assert verdict.message.endswith(meant)
    assert "test_examine.py, line" in dict(verdict.facts)["What happened"]


@pytest.mark.parametrize(
    ("fn", "words"),
    [(confuses_shapes, "The size of tensor a (6) must match"), (raises_what_cannot_travel, "neither here nor there")],
)
def test_another_exception_is_neither_slip_nor_idea(fn: Any, words: str) -> None:
    verdict = checks.ring_all_reduce(fn)
    assert (verdict.outcome, verdict.idea) == ("error", "")
    assert words in dict(verdict.facts)["What happened"]
    assert "Traceback" not in str(verdict)


def test_wrong_arguments_are_told_before_anything_runs() -> None:
    verdict = checks.ring_all_reduce(lambda tensor, group: None)
    assert verdict.outcome == "slip"
    assert "calls `ring_all_reduce(tensor)`" in verdict.message
    assert "your function is `ring_all_reduce(tensor, group)`" in verdict.message


def test_more_arguments_with_defaults_are_fine() -> None:
    verdict = checks.split_batch(lambda batch, rank, world_size, dim=0: batch.tensor_split(world_size, dim)[rank])
    assert verdict.passed


def test_calling_the_function_instead_of_naming_it_is_told() -> None:
    with pytest.raises(TypeError, match="give the function itself, without parentheses"):
        checks.ring_all_reduce(None)  # type: ignore[arg-type]


def test_an_endless_loop_ends_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "TIMEOUT", 1.5)
    verdict = checks.ring_all_reduce(never_ends)
    assert verdict.outcome == "error"
    assert verdict.message.startswith("Nothing here should take 1.5 seconds")
    assert "Time limit" in dict(verdict.facts)["What happened"]


def test_the_next_launch_works_after_a_deadlock() -> None:
    assert not checks.ring_all_reduce(lambda tensor: dist.recv(tensor, 1 - dist.get_rank())).passed
    assert launch(lambda rank: rank, 2).results == [0, 1]


def test_variables_around_the_function_are_seen() -> None:
    assert checks.ring_all_reduce(lambda tensor: tensor.mul_(scale)).idea == "nothing_sent"
