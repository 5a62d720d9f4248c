"""An exercise part: a right solution, the cases to try it in, and wrong solutions as students write them.

    ring_all_reduce = Exercise("ring_all_reduce", right, play, cases, price_case=Case(...))

    @ring_all_reduce.mistake
    def added_in_second_phase(tensor): ...

A wrong solution is a whole misconception, either a program of its own or the right one with a place changed. Same
values on every rank: same misconception. So the bank tests itself. The words about each are on the lesson's page, and
there stand the changed places, too (`prose`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.classroom.checks import prose
from course_lib.instruments.watch import Sent, Watch
from course_lib.ranks import Pace, Run, launch
from course_lib.timeline import compute

TIMEOUT = 10.0  # seconds
Value = Tensor | str  # a value that is not a tensor, in words
Values = dict[str, Value]


class Budget(NamedTuple):
    """What an open task counts, a kind of AMOUNTS, and its levels: what is met, good, as good as `ours`, far better."""

    what: str
    met: float
    good: float
    ours: Callable[..., Any]
    far: float = 0.0


AMOUNTS: dict[str, Callable[[Run], float]] = {
    "emulated milliseconds": lambda run: 1000 * run.timeline.makespan,
    "bytes of extra memory": lambda run: max(programs[0].memory for programs in run.results),
    "percent off on average": lambda run: round(float(run.results[0][0].values["the result[percent off]"])),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One situation to try a function in.

    text: the situation in words, "3 ranks and 7 numbers".
    arguments: makes the arguments of one rank, on that rank.
    new: what the case before did not have: the suspect, if that case passed.
    """

    text: str
    world_size: int
    arguments: Callable[[int], tuple[Any, ...]]
    new: str = ""


class Observed(NamedTuple):
    """Everything that a program did on one rank.

    values, before: its result ("the result") and its arguments afterwards; its arguments as they were.
    sent: the tensors of its messages and collectives.  memory: the most bytes it held in addition.
    ended_group: whether it ended the process group.  fullest: the shapes of the tensors that took the most bytes.
    """

    values: Values
    before: Values
    sent: list[Sent]
    memory: int
    ended_group: bool
    fullest: Sequence[list[int]] = ()


class Mistake(NamedTuple):
    """A wrong solution of a part. fails: whether its run fails."""

    part: str
    program: Callable[..., Any]
    fails: bool

    @property
    def advice(self) -> prose.Advice:
        """The idea behind the mistake, in a sentence, and a question that leads out of it."""
        return prose.words()[self.part, self.program.__name__]


@dataclass(eq=False)
class Part:
    """One part of an exercise: right and wrong solutions, and how to run them.

    name: the student's function.  right: a solution at the best possible price.
    play: calls a solution with the arguments of a case, as play(solution, *arguments); what it returns is compared, and
        so are the arguments afterwards, by their names in play. `result` and `effect` take those of the right solution.
    cases: the cases for a seed: the smallest first, each harder by one thing.
    price_case: the last case, whose price is shown.  pace: of the emulated clock.
    memory: the least extra bytes that are possible; None: those of the right solution.
    rounding: how far a number may be off, as a share of the largest one that the right solution makes.
    compared: the values that matter, by rank, where solutions are free to differ.
    breach: says what is wrong although the result is right; "" if nothing is.  rule: says of a wrong result what no
        mistake of the bank can say.
    programs: the mistakes that are not on the lesson's page; `mistake` adds to them.
    budget: of an open task, which begins with the right solution, and in which any change is allowed that keeps its
        result.
    by_rank: whether it says something on which rank a value is; not if each rank only asks for other numbers.
    """

    name: str
    right: Callable[..., Any]
    play: Callable[..., Any]
    cases: Callable[[int], list[Case]]
    price_case: Case
    pace: Pace = field(default_factory=Pace)
    memory: int | None = None
    rounding: float = 0.0
    compared: Callable[[list[Observed]], list[Values]] = lambda observed: [seen.values for seen in observed]
    breach: Callable[[list[Observed]], str] = lambda observed: ""
    rule: Callable[[list[Observed]], str] = lambda observed: ""
    programs: list[Mistake] = field(default_factory=list)
    budget: Budget | None = None
    by_rank: bool = True

    def mistake(self, program: Callable[..., Any], fails: bool = False) -> Callable[..., Any]:
        """Put a wrong solution into the bank."""
        self.programs.append(Mistake(self.name, program, fails))
        return program

    @functools.cached_property
    def mistakes(self) -> list[Mistake]:
        """All wrong solutions: those whose places stand on the lesson's page, and `programs`."""
        words = prose.words().items()
        of_page = [self._made(name, said) for (part, name), said in words if part == self.name and said.places]
        return [*of_page, *self.programs]

    def _made(self, name: str, said: prose.Advice) -> Mistake:
        """A mistake whose places stand on the page."""
        base = vars(sys.modules[self.right.__module__])[said.base] if said.base else self.right
        return Mistake(self.name, changed(base, name, *said.places), said.fails)

    @functools.cache  # noqa: B019  (an exercise lives as long as the program)
    def all_cases(self, seed: int) -> list[Case]:
        """All cases for a seed; the same objects each time, so that their results can be cached."""
        return [*self.cases(seed), self.price_case]

    def run(self, programs: list[Callable], case: Case) -> Run:
        """Run programs one after the other; a rank's result lists what was observed of each."""
        args = (programs, self.play, self._names(), case.arguments)
        return launch(_leave_all, case.world_size, args, timeout=TIMEOUT, pace=self.pace, device="cpu")

    def _names(self) -> list[str]:
        """The names of a case's arguments."""
        if self.play in (result, effect):
            return [*inspect.signature(self.right).parameters]
        return [*inspect.signature(self.play).parameters][1:]

    def is_seen(self, name: str) -> bool:
        """Whether a student knows what this is; not if it is an argument of a case that no function is called with."""
        return name.partition("[")[0] not in {*self._names()} - {*inspect.signature(self.right).parameters}

    @functools.cache  # noqa: B019
    def run_right(self, case: Case) -> Run:
        return self.run([self.right], case)

    @functools.cache  # noqa: B019
    def run_ours(self, budget: Budget) -> Run:
        return self.run([budget.ours], self.price_case)

    @functools.cache  # noqa: B019
    def run_mistakes(self, case: Case) -> dict[Mistake, list[Observed]]:
        """The results, by rank, of all mistakes whose runs do not fail."""
        mistakes = [mistake for mistake in self.mistakes if not mistake.fails]
        run = self.run([mistake.program for mistake in mistakes], case)
        return dict(zip(mistakes, map(list, zip(*run.results, strict=True)), strict=True))


def changed(program: Callable[..., Any], name: str, *places: str) -> Callable[..., Any]:
    """A program of this name: the given one with some places of its source changed.

    places: pairs of old and new text, one after the other.
    Raises ValueError unless an old text stands in the source exactly once.
    """
    source = inspect.getsource(program)
    for old, new in zip(places[::2], places[1::2], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} stands {source.count(old)} times in {program.__name__}, not once")
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(source, vars(sys.modules[program.__module__]), made)
    other = made[program.__name__]
    other.__name__ = other.__qualname__ = name
    return other


# Ways to play


def result(solution: Callable[..., Any], *arguments: Any) -> Any:
    return solution(*arguments)


def effect(solution: Callable[..., Any], *arguments: Any) -> None:
    """Play a solution for its effect on the arguments alone; its result is ignored."""
    solution(*arguments)


# On a rank


def normal(seed: int) -> Callable[..., Tensor]:
    """A function that draws random float64 tensors of a given shape, new ones each time."""
    random = torch.Generator().manual_seed(seed)
    return functools.partial(torch.randn, generator=random, dtype=torch.float64)


def prepared(module: nn.Module, draw: Callable[..., Tensor]) -> nn.Module:
    """A module with random parameters; its passes advance the emulated clock."""
    for parameter in module.parameters():
        parameter.data = draw(parameter.shape)
    module.register_forward_hook(lambda module, inputs, output: on_the_clock(output))
    return module


def on_the_clock(output: Tensor, work: float = 1.0) -> Tensor:
    """Advance the emulated clock by a forward pass now, and by a backward pass when this output's gradient arrives."""

    def backward(_: Tensor) -> None:
        with compute("backward", work=work):
            pass

    with compute("forward", "" if torch.is_grad_enabled() else "forward, kept by nobody", work=work):
        pass
    if output.requires_grad:
        output.register_hook(backward)
    return output


def _leave_all(rank: int, programs: list[Callable], play: Callable, names: list[str], make: Callable) -> list[Observed]:
    return [_observe(rank, program, play, names, make(rank)) for program in programs]


def _observe(rank: int, program: Callable, play: Callable, names: list[str], arguments: tuple[Any, ...]) -> Observed:
    torch.default_generator.manual_seed(1000 + rank)  # torch.manual_seed notes a whole stack for each other device
    named = dict(zip(names, arguments, strict=True))
    before = _values_of(named)
    torch.use_deterministic_algorithms(True)  # torch.empty gives nan, so reading too early is wrong every time
    with Watch() as watch:
        returned = play(program, *arguments)
    torch.use_deterministic_algorithms(False)
    after = _values_of({"the result": returned, **named})
    return Observed(after, before, watch.sent, watch.peak, not dist.is_initialized(), watch.fullest)


def _values_of(thing: Any, name: str = "") -> Values:
    """All values inside a thing: copies of tensors, a module's parameters and gradients, everything else in words."""
    if isinstance(thing, Tensor):
        return {name: thing.detach().clone()}
    if isinstance(thing, nn.Module):
        parameters = dict(thing.named_parameters())
        return _values_of(parameters | {f"{key}.grad": parameter.grad for key, parameter in parameters.items()})
    if isinstance(thing, dict):
        inside = [_values_of(value, f"{name}[{key}]" if name else key) for key, value in thing.items()]
    elif isinstance(thing, list | tuple):
        inside = [{name: f"{len(thing)} values"}, *(_values_of(one, f"{name}[{i}]") for i, one in enumerate(thing))]
    else:
        return {name: str(thing) if isinstance(thing, int | float | str | None) else f"a {type(thing).__name__}"}
    return {key: value for values in inside for key, value in values.items()}
