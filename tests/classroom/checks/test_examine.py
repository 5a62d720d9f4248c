"""Every check, before, after and around the bank of its exercise."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import launch
from course_lib.classroom.checks import part, prose
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case, changed, effect
from course_lib.classroom.checks.prose import Advice
from course_lib.ranks import Stopped
from course_lib.ranks.parent import monitor
from lessons.L02_data_parallelism.checks_averaging import gradients
from tests.lessons.parts import checks

scale = 2.0


def neighbors() -> tuple[int, int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % n, (rank - 1) % n


# Slips


def unwritten(tensor: Tensor) -> None:
    raise NotImplementedError()


def misspells_a_name(tensor: Tensor) -> None:
    world_size = dist.get_world_size()
    tensor *= wrold_size * world_size  # type: ignore[name-defined]  # noqa: F821


def misspells_a_method(tensor: Tensor) -> None:
    tensor.tensor_spilt(2)  # type: ignore[attr-defined]


def gives_too_many_arguments(tensor: Tensor) -> None:
    len(tensor, 2)  # type: ignore[call-arg]


def waits_for_no_handle(tensor: Tensor) -> None:
    dist.all_reduce(tensor).wait()


def confuses_shapes(tensor: Tensor) -> None:
    tensor += torch.zeros(len(tensor) + 1)


class Unsendable(Exception):
    """An error that cannot be unpickled: its constructor takes more arguments than unpickling passes."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("neither here nor there")


def raises_what_cannot_travel(tensor: Tensor) -> None:
    raise Unsendable(1, 2)


def never_ends(tensor: Tensor) -> None:
    while True:
        time.sleep(0.02)  # other tests need the cores


def test_a_stub_is_not_a_mistake() -> None:
    verdict = checks.ring_all_reduce(unwritten)
    assert verdict.outcome == "unwritten"
    assert "raise NotImplementedError()" in verdict.message


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (misspells_a_name, "and what stands behind it could not be tried."),
        (misspells_a_method, "and what stands behind it could not be tried."),
        (gives_too_many_arguments, "and what stands behind it could not be tried."),
        (waits_for_no_handle, "without `async_op=True`, a collective is over when it returns."),
    ],
)
def test_a_slip_of_the_keyboard_is_not_called_a_wrong_idea(fn: Any, words: str) -> None:
    verdict = checks.ring_all_reduce(fn)
    assert verdict.outcome == "slip"
    assert verdict.message.endswith(words)
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


def test_wrong_arguments_and_no_function_are_slips() -> None:
    verdict, called = map(checks.ring_all_reduce, (lambda tensor, group: None, torch.ones(2)))
    assert verdict.outcome == called.outcome == "slip"
    assert "missing 1 required positional argument: 'group'" in dict(verdict.facts)["What happened"]
    assert "your function itself, without calling it" in called.message


def test_more_arguments_with_defaults_are_fine() -> None:
    verdict = checks.split_batch(lambda batch, rank, world_size, dim=0: batch.tensor_split(world_size, dim)[rank])
    assert verdict.passed


# Runs that do not come to their end


def sends_first(tensor: Tensor) -> None:
    right, left = neighbors()
    dist.send(tensor, right)
    dist.recv(torch.empty_like(tensor), left)


def receives_first(tensor: Tensor) -> None:
    right, left = neighbors()
    dist.recv(torch.empty_like(tensor), left)
    dist.send(tensor, right)


def exchanges(tensor: Tensor, buffer: Tensor, tag: int = 0) -> None:
    right, left = neighbors()
    sending = dist.isend(tensor, right, tag=tag)
    dist.recv(buffer, left, tag=tag)
    sending.wait()


def tags_by_rank(tensor: Tensor) -> None:
    exchanges(tensor, torch.empty_like(tensor), tag=dist.get_rank())


def receives_once_more(tensor: Tensor) -> None:
    exchanges(tensor, torch.empty_like(tensor))
    dist.recv(torch.empty_like(tensor), neighbors()[1])


def does_not_wait(tensor: Tensor) -> None:
    right, left = neighbors()
    dist.isend(tensor, right)
    dist.recv(torch.empty_like(tensor), left)


def buffer_too_small(tensor: Tensor) -> None:
    exchanges(tensor, torch.empty(tensor.numel() - 1))


def buffer_too_large(tensor: Tensor) -> None:
    exchanges(tensor, torch.empty(tensor.numel() + 1))


def buffer_of_wrong_dtype(tensor: Tensor) -> None:
    exchanges(tensor, torch.empty(tensor.numel(), dtype=torch.float64))


def collective_on_rank_0(tensor: Tensor) -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)


def leaves_the_ring(tensor: Tensor) -> None:
    dist.send(tensor, dist.get_rank() + 1)


ACCIDENTS = {
    sends_first: "somebody must receive first",
    receives_first: "a message that nobody has sent yet",
    tags_by_rank: "Rank 1 sends with tag 1, and rank 0 waits for tag 0",
    receives_once_more: "Rank 0 waits for message 2 of rank 1, which has sent 1",
    does_not_wait: "Keep the handle that it returns and call its wait()",
    buffer_too_small: "has the right size for what should travel",
    buffer_too_large: "has the right size for what should travel",
    buffer_of_wrong_dtype: "the dtype of what arrives",
    collective_on_rank_0: "The call that waits",
}


@pytest.mark.parametrize(("fn", "words"), ACCIDENTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_run_that_does_not_end_is_told_why(fn: Any, words: str) -> None:
    verdict = checks.ring_all_reduce(fn)
    assert verdict.outcome == "idea"
    assert words in verdict.message
    assert "test_examine.py, line" in str(verdict)


@pytest.mark.parametrize("fn", [buffer_too_small, buffer_of_wrong_dtype])
def test_a_wrong_buffer_is_told_also_before_other_ranks_have_noticed(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the rank that received too much dies while the others still wait."""
    monkeypatch.setattr(monitor, "_GRACE", 0.0)
    assert ACCIDENTS[fn] in checks.ring_all_reduce(fn).message


def test_a_neighbor_beyond_the_last_rank_is_told_with_the_ring() -> None:
    assert "(rank + 1) % world_size" in str(checks.ring_all_reduce(leaves_the_ring))


def test_an_endless_loop_ends_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "TIMEOUT", 1.5)
    verdict = checks.ring_all_reduce(never_ends)
    assert verdict.outcome == "error"
    assert "Nothing here should take" in verdict.message
    assert "Time limit" in dict(verdict.facts)["What happened"]


def test_the_next_launch_works_after_a_deadlock() -> None:
    assert not checks.ring_all_reduce(lambda tensor: dist.recv(tensor, 1 - dist.get_rank())).passed
    assert launch(lambda rank: rank, 2).results == [0, 1]


def test_variables_around_the_function_are_seen() -> None:
    assert "sends nothing" in checks.ring_all_reduce(lambda tensor: tensor.mul_(scale)).message


# The news of a case


def divides_the_frozen_parameter(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()  # type: ignore[operator, assignment]
        dist.all_reduce(parameter.grad)


def misspells_what_is_new(model: nn.Module, samples: int) -> None:
    for parameter in model.parameters():
        gradient = parameter.grad if parameter.grad is not None else gradeint  # type: ignore[name-defined]  # noqa: F821
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)


def waits_without_a_handle(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient).wait()


def test_what_goes_wrong_with_what_is_new_is_told_so() -> None:
    verdict = checks.average_gradients(divides_the_frozen_parameter)
    assert verdict.outcome == "idea"
    assert "raises an exception here, and raised none before" in verdict.message
    assert "its `.grad` is None" in dict(verdict.facts)["It was right before. New here, and perhaps why"]


def test_what_goes_wrong_without_it_is_not_blamed_on_it() -> None:
    assert "frozen" not in str(checks.average_gradients(waits_without_a_handle))
    assert checks.average_gradients(misspells_what_is_new).outcome == "slip"


# The machine itself


def ends_the_group(tensor: Tensor) -> None:
    dist.destroy_process_group()


def test_ending_the_process_group_does_not_pass() -> None:
    assert "ends the process group" in checks.ring_all_reduce(ends_the_group).message


def doubled(tensor: Tensor) -> Tensor:
    return 2 * tensor


def numbers(rank: int) -> tuple[Tensor]:
    return (torch.tensor([1.0, 2.0, 4.0]) * (rank + 1),)


def play(fn: Any, tensor: Tensor) -> Any:
    return fn(tensor)


def make(**options: Any) -> Exercise:
    case = Case("2 ranks", 2, numbers)
    return Exercise("doubled", doubled, play, lambda seed: [case], price_case=case, **options)


def test_when_two_ideas_fit_both_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tripled, said = make(), {("doubled", name): Advice(f"{name}.", "Which?") for name in ("Three", "Thrice", "Four")}
    monkeypatch.setattr(prose, "words", lambda: said)
    for name, factor in (("Three", 3), ("Thrice", 3.0), ("Four", 4)):
        tripled.mistake(named(name, times(factor)))
    verdict = tripled(lambda tensor: tensor * 3)
    assert "2 ideas lead to exactly this. Three. Which? Or: Thrice. Which?" in verdict.message
    assert "Four" not in verdict.message


def named(name: str, program: Any) -> Any:
    program.__name__ = name
    return program


def times(factor: float) -> Any:
    def scaled(tensor: Tensor) -> Tensor:
        return tensor * factor

    return scaled


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda tensor: tensor * 6, "3 times too large"),
        (lambda tensor: (2 * tensor).roll(1), "The numbers are right, and stand in the wrong places."),
        (lambda tensor: torch.cat([2 * tensor[:2], 5 * tensor[2:]]), "Wrong: 1 of the 3 elements of `the result`."),
        (lambda tensor: 0 * tensor, "Every number that is wrong is 0."),
        (lambda tensor: 2 * tensor + torch.tensor([0.1, 0.0, 0.05]), "not what was asked for"),  # 2, 4 and 8 are exact
        (lambda tensor: (2 * tensor).double(), "than it should have"),
        (lambda tensor: (2 * tensor)[:, None], "than it should have"),
        (lambda tensor: tensor.mul_(2), "changes `tensor`"),
        (
            lambda tensor: 2 * tensor + dist.get_rank(),
            "is 1 more than it should be. Wrong: `the result` on rank 1. Right on rank 0.",
        ),
        (lambda tensor: tensor + 0.5, "not what was asked for"),
        (lambda tensor: tensor * float("nan"), "has nan in it where a finite number should be"),
        (lambda tensor: (one for one in tensor), "than it should have"),
    ],
)
def test_a_result_is_compared_in_dtype_shape_and_value(fn: Any, words: str) -> None:
    verdict = make(rounding=1e-6)(fn)
    assert words in verdict.message
    assert {"Where", "Expected", "Got"} <= dict(verdict.facts).keys()


def test_what_is_not_finite_is_named_and_whether_it_was_sent() -> None:
    def divided(tensor: Tensor) -> Tensor:
        dist.all_reduce(quotients := tensor / torch.tensor([0.0, 1.0, 1.0]))
        return quotients * torch.tensor([1.0, 1.0, torch.nan])

    message = make()(divided).message
    assert "has inf and nan in it where a finite number should be. So has what rank 0 sends." in message
    assert "sends" not in make()(lambda tensor: tensor / 0).message


@pytest.mark.parametrize(("given", "told"), [("two words", "two words"), ("", "nothing")])
def test_a_text_is_told_without_quotes(given: str, told: str) -> None:
    facts = dict(make()(lambda tensor: given).facts)
    assert (facts["Expected"], facts["Got"]) == ("2, 4, 8", told)


def raises_something_else(tensor: Tensor) -> Tensor:
    raise RuntimeError("the cat")


def raises_at_the_same_place(tensor: Tensor) -> Tensor:
    raise RuntimeError("the dog")


def test_the_same_kind_of_exception_is_not_the_same_idea() -> None:
    tripled = make()
    tripled.mistake(raises_at_the_same_place, fails=True)
    assert tripled(raises_something_else).idea == ""


def test_whoever_passed_a_case_does_not_have_an_idea_that_fails_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case(f"{n} ranks", n, numbers) for n in (2, 3)]
    tripled = Exercise("doubled", doubled, play, lambda seed: cases, price_case=cases[-1])
    monkeypatch.setattr(prose, "words", lambda: {("doubled", "refuses"): Advice("It refuses.", "Why?")})
    tripled.mistake(refuses, fails=True)
    assert tripled(refuses).idea == "refuses"
    assert tripled(lambda tensor: refuses(tensor) if dist.get_world_size() == 3 else 2 * tensor).idea == ""


def test_nan_of_another_origin_is_not_the_same_idea(monkeypatch: pytest.MonkeyPatch) -> None:
    tripled = make()
    monkeypatch.setattr(prose, "words", lambda: {("doubled", "nan_summed"): Advice("A sum.", "Of what?")})
    tripled.mistake(named("nan_summed", undefined_after(dist.ReduceOp.SUM)))
    assert tripled(undefined_after(dist.ReduceOp.SUM)).idea == "nan_summed"
    assert tripled(undefined_after(dist.ReduceOp.SUM, times=lambda tensor: tensor.exp())).idea == ""


def test_a_change_that_is_a_multiple_is_told() -> None:
    cases = [Case("2 ranks", 2, uneven)]
    moved = Exercise("moved", moves(1), effect, lambda seed: cases, price_case=cases[0], rounding=1e-6)
    assert "`tensor` changes 2 times as much as it should." in moved(moves(2)).message


@pytest.mark.parametrize("wrong", [torch.nan, -torch.inf])
def test_what_is_infinite_in_the_right_result_too_is_no_multiple(wrong: float) -> None:
    def overflows(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:2], tensor[2:] * torch.inf])

    def other(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:2], tensor[2:] * wrong])

    cases = [Case("2 ranks", 2, numbers)]
    exercise = Exercise("overflows", overflows, play, lambda seed: cases, price_case=cases[0])
    assert "Wrong: 1 of the 3 elements of `the result`." in exercise(other).message


# What is told of which values


def numbered(right: list[Any], **options: Any) -> Exercise:
    """A part whose right result is this one, with a gradient that the student's function does not get."""
    cases = [Case("2 ranks", 2, lambda rank: (torch.tensor([0.5, 0.25, 4.0]), torch.tensor([7.5, 0.25, 0.5])))]
    return Exercise("numbered", given(right), play_with_gradient, lambda seed: cases, cases[0], **options)


def given(values: list[Any]) -> Any:
    def result(tensor: Tensor) -> Tensor:
        return torch.tensor(values)

    return result


def play_with_gradient(fn: Any, tensor: Tensor, dy: Tensor) -> Any:
    return fn(tensor)


def test_a_name_is_not_too_large() -> None:
    """A rank is a name, as is a token: nobody means one more than the right one, or twice as much."""
    assert numbered([1, 2, 3])(given([1, 2, 3])).passed
    message = numbered([5, 6, 8])(given([6, 7, 9])).message
    assert message == "This is not what was asked for."
    assert numbered([2, 4, 8])(given([1, 2, 4])).message == message
    assert "1 more than it should be" in numbered([5.0, 6.0, 8.0])(given([6.0, 7.0, 9.0])).message


def test_a_wrong_value_is_not_explained_by_an_argument_that_students_do_not_have() -> None:
    plus = numbered([1.0, 2.0, 4.5])(given([8.5, 2.25, 5.0])).message
    assert plus == "This is not what was asked for."
    assert "plus `tensor` of rank 0 as it was" in numbered([1.0, 2.0, 4.5])(given([1.5, 2.25, 8.5])).message


def test_a_rank_that_only_asks_for_other_numbers_is_no_place() -> None:
    def wrong_on_rank_1(tensor: Tensor) -> Tensor:
        return torch.tensor([1.0, 2.0, 4.5]) + dist.get_rank() * torch.tensor([0.0, 2.0, 3.0])

    def facts(exercise: Exercise) -> dict[str, str]:
        return dict(exercise(wrong_on_rank_1).facts)

    asking, taking = numbered([1.0, 2.0, 4.5], by_rank=False), numbered([1.0, 2.0, 4.5])
    assert facts(taking)["Where"] == "rank 1, the result"
    assert facts(asking).keys() == {"Expected", "Got"}
    assert "on rank 1. Right on rank 0." in taking(wrong_on_rank_1).message
    assert "rank" not in str(asking(wrong_on_rank_1)).partition("Tried: 2 ranks")[2]


def ones(size: int, rank: int) -> tuple[torch.Tensor]:
    return (torch.ones(size),)


def test_what_is_new_is_only_said_if_somebody_knows_it() -> None:
    even = {"four": (3, 4, "an even number"), "six": (4, 6, "an even number")}
    sizes = {"one": (2, 1, ""), "two": (2, 2, ""), "three": (3, 3, "other sizes"), "five": (3, 5, "other sizes")} | even
    cases = [Case(text, n, functools.partial(ones, size), new) for text, (n, size, new) in sizes.items()]
    exercise = Exercise("doubled", doubled, play, lambda seed: cases, cases[-1])

    def said(size: int) -> tuple[str, str]:
        return exercise(lambda tensor: tensor * (3 if len(tensor) == size else 2)).facts[-1]

    assert said(2) == ("It was right before, with", "one")
    assert said(3) == said(5) == ("It was right before. New here, and perhaps why", "other sizes")
    assert said(4) == ("It was right before. New here, and perhaps why", "an even number")
    assert said(6) == ("It was right before, with", "four")


# What two cases say


def sums(share: Any) -> Any:
    """A program that adds up over ranks, and multiplies by what `share` returns for their number."""

    def summed(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total * share(dist.get_world_size())

    return summed


def on_two_and_three_ranks() -> Exercise:
    cases = [Case(f"{n} ranks", n, uneven) for n in (2, 3, 4)]
    return Exercise("summed", sums(lambda n: 1), play, lambda seed: cases[:2], cases[2], rounding=1e-6)


def uneven(rank: int) -> tuple[Tensor]:
    return (torch.tensor([1.5, -2.25, 4.125, 0.3, 7.7]) ** (rank + 1),)


def test_an_idea_that_does_not_fit_on_more_ranks_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    summed = on_two_and_three_ranks()
    monkeypatch.setattr(prose, "words", lambda: {("summed", "averaged"): Advice("This is a mean.", "Who divides?")})
    summed.mistake(named("averaged", sums(lambda n: 1 / n)))
    assert summed(sums(lambda n: 1 / n)).idea == "averaged"
    halved = summed(sums(lambda n: 1 / 2))
    assert halved.idea == ""
    assert halved.message == "Every number that is wrong is 2 times too small. With 3 ranks: 2 times."


def scaled_by(one: float, two: float, three: float) -> Any:
    """A program with another factor for each size of its argument."""

    def scaled(tensor: Tensor) -> Tensor:
        return tensor * (one, two, three)[len(tensor) - 1]

    return scaled


@pytest.mark.parametrize(
    ("student", "idea"),
    [((2, 1, 3), "first"), ((2, 1, 4), "second"), ((2, 1, 1), ""), ((2, 2, 3), "")],
)
def test_an_idea_is_confirmed_where_it_makes_a_difference(monkeypatch: Any, student: Any, idea: str) -> None:
    """Both mistakes are right with two numbers, so three of them have to tell."""
    cases = [Case(f"{n} numbers", ranks, functools.partial(ones, n)) for n, ranks in ((1, 2), (2, 3), (3, 4))]
    exercise = Exercise("scaled", scaled_by(1, 1, 1), play, lambda seed: cases, cases[0])
    both = {("scaled", name): Advice(f"{name}.", "Why?") for name in ("first", "second")}
    monkeypatch.setattr(prose, "words", lambda: both)
    exercise.mistake(named("first", scaled_by(2, 1, 3)))
    exercise.mistake(named("second", scaled_by(2, 1, 4)))
    assert exercise(scaled_by(*student)).idea == idea


def test_a_mistake_that_fails_on_more_ranks_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_on_three(tensor: Tensor) -> Tensor:
        return refuses(tensor) if dist.get_world_size() > 2 else sums(lambda n: 1 / n)(tensor)

    summed = on_two_and_three_ranks()
    monkeypatch.setattr(prose, "words", lambda: {("summed", "fails_on_three"): Advice("A mean.", "Why?")})
    summed.mistake(fails_on_three)
    assert summed(sums(lambda n: 1 / 2)).idea == "fails_on_three"


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (lambda n: 1 / n, "2 times too small. With 3 ranks: 3 times. There are 2 ranks."),
        (lambda n: 1 / 2, "2 times too small. With 3 ranks: 2 times."),
        (lambda n: n + 3, "5 times too large. With 3 ranks: 6 times."),
    ],
)
def test_a_factor_is_that_of_the_ranks_only_if_more_ranks_confirm_it(share: Any, words: str) -> None:
    message = on_two_and_three_ranks()(sums(share)).message
    assert words in message and ("There are" in message) == ("There are" in words)


def test_whoever_sends_as_little_as_is_right_does_not_have_an_idea_that_sends_more(monkeypatch: Any) -> None:
    def sent_for_nothing(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor.clone())
        return tensor * 3

    def sent_once_more(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor.clone())
        return sent_for_nothing(tensor)

    summed = on_two_and_three_ranks()
    names = ("sent_once_more", "sent_for_nothing")
    monkeypatch.setattr(prose, "words", lambda: {("summed", name): Advice(name, "Why?") for name in names})
    summed.mistake(sent_once_more)
    assert summed(sent_for_nothing).idea == ""
    assert summed(sent_once_more).idea == "sent_once_more"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((0.5, 0.25), "0.5 times `tensor` of rank 0 as it was plus 0.25 times `tensor` of rank 1 as it was"),
        ((1.0, 0.0), "is exactly `tensor` of rank 0 as it was"),
        ((1.0, -1.0), "`tensor` of rank 0 as it was minus `tensor` of rank 1 as it was"),
    ],
)
def test_a_wrong_sum_is_told_as_what_each_rank_counts(weights: tuple[float, float], words: str) -> None:
    def weighted(tensor: Tensor) -> Tensor:
        return sums(lambda n: 1)(tensor * weights[min(dist.get_rank(), 1)])

    assert words in on_two_and_three_ranks()(weighted).message


def test_the_largest_in_place_of_a_sum_is_told() -> None:
    def largest(tensor: Tensor) -> Tensor:
        dist.all_reduce(most := tensor.clone(), dist.ReduceOp.MAX)
        return most

    assert "the largest, place by place, of `tensor` of rank r" in on_two_and_three_ranks()(largest).message


def test_what_is_no_sum_is_not_told_as_one() -> None:
    message = on_two_and_three_ranks()(lambda tensor: sums(lambda n: 1)(tensor.exp())).message
    assert message == "This is not what was asked for."


def test_a_flag_that_says_no_in_another_way_is_not_called_wrong() -> None:
    def asks(flag: float, wrong: float) -> Any:
        def asked(tensor: Tensor) -> Any:
            dist.all_reduce(torch.tensor(flag))
            return {"flag": torch.ones(2), "scale": torch.tensor([1.0, 2.0, 4.0]) ** wrong}

        return asked

    cases = [Case("2 ranks", 2, uneven)]
    asked = Exercise("asked", asks(1, 1), play, lambda seed: cases, cases[0])
    message = asked(asks(0, 1.5)).message
    assert "message" not in message and "Right: `the result[flag]`" in message


def test_what_is_small_beside_a_small_change_is_not_called_rounding() -> None:
    def moved_a_little(by: list[float]) -> Any:
        return lambda tensor: tensor.add_(torch.tensor(by))

    cases = [Case("2 ranks", 2, uneven)]
    right, wrong = (moved_a_little(by) for by in ([0.01, 0.03, 0.02, 0.01, 0.02], [0.02, 0.03, 0.01, 0.04, 0.01]))
    moved = Exercise("moved", right, effect, lambda seed: cases, cases[0], rounding=1e-6)
    assert "nearly right" not in moved(wrong).message
    barely = moved(moved_a_little([0.0101, 0.03, 0.02, 0.01, 0.02]))
    assert "nearly right" in barely.message


def moves(times: float) -> Any:
    def moved(tensor: Tensor) -> None:
        tensor += times * torch.tensor([1.0, 2.0, 3.0, 1.0, 4.0])

    return moved


def undefined_after(operation: Any, times: Any = torch.clone) -> Any:
    def undefined(tensor: Tensor) -> Tensor:
        dist.all_reduce(times(tensor), operation)
        return tensor * torch.nan

    return undefined


def test_a_price_is_not_called_an_idea_that_costs_nothing() -> None:
    """If a mistake's result is right in this case, the same result does not prove that mistake."""

    def breach(observed: list[Any]) -> str:
        return "Too many bytes." if observed[0].sent[0].content.dtype == torch.float64 else ""

    tripled = make(breach=breach)
    tripled.mistake(sends(torch.float32))
    verdict = tripled(sends(torch.float64))
    assert (verdict.outcome, verdict.message, verdict.idea) == ("price", "Too many bytes.", "")


def sends(dtype: torch.dtype) -> Any:
    def doubled_and_sent(tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor.to(dtype))
        return 2 * tensor

    return doubled_and_sent


def test_what_may_be_rounding_is_right() -> None:
    assert make(rounding=1e-6)(lambda tensor: tensor * (2 + 1e-7)).passed
    assert not make()(lambda tensor: tensor * (2 + 3e-7)).passed


def test_a_check_never_raises_by_itself() -> None:
    verdict = make(compared=lambda observed: [{}][1:5])(doubled)
    assert (verdict.outcome, verdict.message) == ("error", prose.TEXTS["broken"])


def refuses(tensor: Tensor) -> Tensor:
    raise ValueError("no")


def test_a_stop_while_wrong_solutions_are_tried_stops_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(checked: Exercise, programs: list[Any], case: Case) -> Any:
        if programs == [also_refuses]:
            raise Stopped("Stopped.")
        return really_run(checked, programs, case)

    def also_refuses(tensor: Tensor) -> Tensor:
        raise ValueError("no")

    tripled, really_run = make(), Exercise.run
    tripled.mistake(also_refuses, fails=True)
    monkeypatch.setattr(Exercise, "run", run)
    with pytest.raises(Stopped):
        tripled(refuses)


def test_a_check_begins_with_fresh_ranks_whatever_a_cell_has_done_to_those_that_are_there(tmp_path: Path) -> None:
    def notes_its_process(tensor: Tensor) -> None:
        (tmp_path / str(os.getpid())).touch()

    before = launch(lambda rank: os.getpid(), 4).results
    checks.ring_all_reduce(notes_its_process)
    asked = [int(file.name) for file in tmp_path.iterdir()]
    assert asked and not set(asked) & set(before)


def test_a_change_of_the_right_solution_has_to_be_one() -> None:
    with pytest.raises(ValueError, match=r"'batch' stands \d+ times in right, not once"):
        changed(checks.split_batch.right, "ambiguous", "batch", "batch + 1")
    assert "ambiguous" not in [mistake.program.__name__ for mistake in checks.split_batch.mistakes]
