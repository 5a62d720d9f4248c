"""Non-contiguous tensors: every operation is right with them, or refused with a way out."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import Pace, RankFailed, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

N = 3
SHAPE = (3, 2)
Layout = Callable[[torch.Tensor], torch.Tensor]


def part(values: torch.Tensor, *rows: slice) -> torch.Tensor:
    """These values as a view of a larger tensor, whose other numbers must not change."""
    size = [3 * n for n in values.shape]
    view = torch.full(size, -9.0)[rows]
    view.copy_(values)
    return view


LAYOUTS: dict[str, Layout] = {
    "contiguous": torch.clone,
    "columns": lambda values: part(values, slice(values.shape[0]), slice(1, None, 3)),
    "every second row": lambda values: part(values, slice(1, 2 * values.shape[0], 2), slice(values.shape[1])),
    "transposed": lambda values: values.T.contiguous().T,
    "expanded": lambda values: part(values[:1], slice(1), slice(values.shape[1])).expand(values.shape),
}


def values(rank: int, rows: int = 3, equal: bool = False) -> torch.Tensor:
    """The numbers of a rank: different ones everywhere, or equal rows, which can be expanded ones."""
    base = torch.arange(2.0).expand(rows, 2) if equal else torch.arange(2.0 * rows).view(rows, 2)
    return base + 100 * rank


def untouched(view: torch.Tensor) -> bool:
    """Whether all numbers around a view are as they were."""
    if view.is_contiguous() or view._base is None or view._base.shape[0] != 3 * view.shape[0]:
        return True
    before = view.clone()
    view.fill_(-9.0)
    clean = bool((view._base == -9.0).all())
    view.copy_(before)
    return clean


class Case:
    """One operation on one rank with tensors in some layout: the results, and the expected ones."""

    def __init__(self, rank: int, given: Layout, taken: Layout, equal: bool, finish: Callable | None) -> None:
        self.rank, self.given, self.taken, self.equal, self.finish = rank, given, taken, equal, finish

    def own(self, rank: int | None = None, rows: int = 3) -> torch.Tensor:
        return values(self.rank if rank is None else rank, rows, self.equal)

    def of_all(self) -> list[torch.Tensor]:
        return [self.own(rank) for rank in range(N)]

    def empty(self, rows: int = 3) -> torch.Tensor:
        return self.taken(torch.full((rows, 2), -1.0))

    def empties(self) -> list[torch.Tensor]:
        return [self.empty() for _ in range(N)]

    def run(self, operation: Callable, *args, **options) -> None:
        work = operation(*args, **options, **({"async_op": True} if self.finish else {}))
        if self.finish:
            self.finish(work)

    def all_reduce(self):
        x = self.given(self.own())
        self.run(dist.all_reduce, x)
        return x, sum(self.of_all())

    def broadcast(self):
        x = self.given(self.own())
        self.run(dist.broadcast, x, 1)
        return x, self.own(1)

    def reduce(self):
        x = self.given(self.own())
        self.run(dist.reduce, x, 1)
        return (x, sum(self.of_all())) if self.rank == 1 else None

    def all_gather(self):
        box = self.empties()
        self.run(dist.all_gather, box, self.given(self.own()))
        return box, self.of_all()

    def all_gather_single(self):
        box = self.empty(3 * N)
        self.run(dist.all_gather_single, box, self.given(self.own()))
        return box, torch.cat(self.of_all())

    def gather(self):
        box = self.empties() if self.rank == 1 else None
        self.run(dist.gather, self.given(self.own()), box, 1)
        return (box, self.of_all()) if self.rank == 1 else None

    def scatter(self):
        x = self.empty()
        self.run(dist.scatter, x, [self.given(each) for each in self.of_all()] if self.rank == 1 else None, 1)
        return x, self.own()

    def reduce_scatter(self):
        x = self.empty()
        self.run(dist.reduce_scatter, x, [self.given(each + self.rank) for each in self.of_all()])
        return x, N * self.own() + sum(range(N))

    def reduce_scatter_single(self):
        x = self.empty()
        self.run(dist.reduce_scatter_single, x, self.given(values(0, 3 * N, self.equal) + self.rank))
        share = values(0, 3 * N, self.equal)[3 * self.rank : 3 * self.rank + 3]
        return x, N * share + sum(range(N))

    def all_to_all(self):
        box = self.empties()
        self.run(dist.all_to_all, box, [self.given(each + 10 * self.rank) for each in self.of_all()])
        return box, [self.own() + 10 * rank for rank in range(N)]

    def all_to_all_single(self):
        x = self.empty()
        self.run(dist.all_to_all_single, x, self.given(self.own()))
        return x, torch.stack([each[self.rank] for each in self.of_all()])

    def send(self):
        left, right = (self.rank - 1) % N, (self.rank + 1) % N
        x = self.empty()
        if self.rank == 0:
            dist.send(self.given(self.own()), right)
        dist.recv(x, left)
        if self.rank != 0:
            dist.send(self.given(self.own()), right)
        return x, self.own(left)

    def isend(self):
        left, right = (self.rank - 1) % N, (self.rank + 1) % N
        x = self.empty()
        sending, receiving = dist.isend(self.given(self.own()), right), dist.irecv(x, left)
        (self.finish or by_waiting)(receiving)
        sending.wait()
        return x, self.own(left)

    def recv_any_source(self):
        x = self.empty()
        if self.rank == 0:
            dist.recv(x)
            return x, self.own(2)
        if self.rank == 2:
            dist.send(self.given(self.own()), 0)
        return None


IN_PLACE = ("all_reduce", "broadcast", "reduce")
OUT_OF_PLACE = (
    *("all_gather", "all_gather_single", "gather", "scatter", "reduce_scatter", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "send", "isend", "recv_any_source"),
)
COLLECTIVES = (*IN_PLACE, *OUT_OF_PLACE[:8])
WITH_GAPS = [name for name in LAYOUTS if name != "expanded"]


def wrong_ones(rank: int, operation: str, finish: Callable | None = None) -> list[tuple[str, str, str]]:
    """The layouts of inputs and outputs with which an operation gives wrong results."""
    found = []
    for given in WITH_GAPS if operation in IN_PLACE else LAYOUTS:
        for taken in [given] if operation in IN_PLACE else WITH_GAPS:
            case = Case(rank, LAYOUTS[given], LAYOUTS[taken], given == "expanded", finish)
            verdict = judge(getattr(case, operation)())
            if verdict != "right":
                found.append((given, taken, verdict))
    return found


def judge(outcome: tuple | None) -> str:
    if outcome is None:
        return "right"
    got, expected = (list(each) if isinstance(each, list) else [each] for each in outcome)
    if not all(map(torch.equal, got, expected)):
        return f"{got} instead of {expected}"
    return "right" if all(map(untouched, got)) else "wrote elsewhere"


@pytest.mark.parametrize("operation", [*IN_PLACE, *OUT_OF_PLACE])
def test_an_operation_is_right_with_every_layout_of_what_it_reads_and_writes(operation: str) -> None:
    assert launch(wrong_ones, N, (operation,)).results == [[]] * N


def by_waiting(work: Any) -> None:
    work.wait()


def by_future(work: Any) -> None:
    work.get_future().wait()


@pytest.mark.parametrize("finish", [by_waiting, by_future])
@pytest.mark.parametrize("operation", [*COLLECTIVES, "isend"])
def test_so_is_an_asynchronous_one_however_its_end_is_seen(operation: str, finish: Callable) -> None:
    if finish is not by_waiting and operation in ("reduce_scatter", "reduce_scatter_single", "isend"):
        pytest.skip("PyTorch's own handle has no future, and does not say that it has ended, before it is waited for")
    assert launch(wrong_ones, N, (operation, finish)).results == [[]] * N


@pytest.mark.parametrize("operation", [*IN_PLACE, *OUT_OF_PLACE])
def test_what_shows_the_same_numbers_several_times_cannot_be_written_into(operation: str) -> None:
    def write(rank: int) -> None:
        getattr(Case(rank, LAYOUTS["expanded"], LAYOUTS["expanded"], True, None), operation)()

    with pytest.raises(RankFailed, match=r"would write into .* x = x\.contiguous\(\)"):
        launch(write, N)


def from_all_others(rank: int, of_its_own: bool) -> list[float]:
    """What arrives from the other ranks, as it is read one after the other, in a buffer for each or in one for all."""
    torch.use_deterministic_algorithms(True)
    others = [other for other in range(dist.get_world_size()) if other != rank]
    buffer = torch.zeros(2)
    buffers = [torch.zeros(2) if of_its_own else buffer for _ in others]
    sending = [dist.isend(torch.full((2,), float(rank)), other) for other in others]
    receiving = [dist.irecv(into, other) for into, other in zip(buffers, others, strict=True)]
    read = []
    for handle, into in zip(receiving, buffers, strict=True):
        handle.wait()
        read.append(into.sum().item())
    for handle in sending:
        handle.wait()
    torch.use_deterministic_algorithms(False)
    return read


@pytest.mark.parametrize("of_its_own", [True, False])
def test_a_buffer_to_which_several_messages_are_on_their_way_is_nan(of_its_own: bool) -> None:
    """Elsewhere it would hold what came last, and now and then what was wanted."""
    read = launch(from_all_others, 3, args=(of_its_own,), pace=Pace(0.001)).results[0]
    assert read == [2.0, 4.0] if of_its_own else all(map(math.isnan, read))
