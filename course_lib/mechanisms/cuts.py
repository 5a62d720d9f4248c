"""Two matrices, four ways to cut them, and what travels in each.

A product x A can be shared by two ranks in two ways:

    by columns    x [A_0 | A_1]  =  [x A_0 | x A_1]        every rank needs all of x, and gets some columns
    by rows       [x_0 | x_1] [A_0]  =  x_0 A_0 + x_1 A_1  every rank needs some columns of x, and gets an addend
                              [A_1]

An MLP has two products, y = gelu(x A) B, and gelu(u + v) is not gelu(u) + gelu(v): addends have to be summed before
it, columns need not be put together. So the cuts differ in what travels. With n ranks, for x of b bytes, the ring
algorithms send (n - 1) / n times

    cut of A, B         forward                          backward                         together
    columns, rows       all-reduce b                     all-reduce b                     4 b
    columns, columns    all-gather 4 b, all-gather b     all-reduce 4 b, all-reduce b    15 b
    rows, rows          all-reduce 4 b, all-reduce b     all-gather 4 b, all-gather b    15 b
    rows, columns       all-reduce 4 b, all-gather b     all-reduce 4 b, all-gather b    18 b

(an all-reduce of b sends 2 b). The first cut fits together: the second product takes just what the first one leaves.

Such an MLP is a list of pieces. The same list is run, counted, drawn, and broken on purpose.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib.mechanisms import tensor_parallel as tp
from course_lib.mechanisms.tensor_parallel import SEQUENCE, Group
from course_lib.timeline import compute

CUTS = (("columns", "rows"), ("columns", "columns"), ("rows", "rows"), ("rows", "columns"))
DIMENSION = {"columns": 1, "rows": 0}  # of a matrix [in, out], as in x A; a Linear stores it the other way around


class Piece(NamedTuple):
    """One step of an MLP on the ranks.

    run: what it does with this rank's part of x [batch, sequence, width].
    leaves: what every rank has after it: "whole", the same on all; its "columns" or its "positions"; "addends".
    forward, backward: what travels, such as "all-reduce"; "" for nothing.
    work: multiplications for each position, on one rank; 0 for what is no matrix product.
    """

    name: str
    run: Callable[[Tensor], Tensor]
    leaves: str
    forward: str = ""
    backward: str = ""
    work: float = 0.0

    @property
    def is_communication(self) -> bool:
        return self.name in ("f", "g", "take", "join")


def pieces(
    a: Tensor,
    b: Tensor,
    cut: Sequence[str] = ("columns", "rows"),
    group: Group = None,
    sequence_parallel: bool = False,
) -> list[Piece]:
    """The MLP y = gelu(x a) b of a rank, piece by piece.

    a: [hidden, wide] and b: [wide, hidden], the whole matrices; a rank uses its share of each.
    cut: of a and of b, each by "columns" or "rows".
    sequence_parallel: x and y are this rank's positions; else all ranks have all of them.

    Raises ValueError for another cut.
    """
    if tuple(cut) not in CUTS:
        raise ValueError(f"cut={cut!r} is unknown; choose one of {', '.join(map(str, CUTS))}")
    first, second = cut
    gelu = Piece("gelu", F.gelu, "columns" if first == "columns" else "whole")
    fits = (first, second) == ("columns", "rows")
    between = [] if fits else [*_leave(first, b.shape[0], group), *_enter(second, group)]
    after_sum = 1 if first == "rows" else 0  # a GELU of addends would be wrong, one of columns is less work
    return [
        *_enter(first, group, sequence_parallel),
        _product("A", a, first, group),
        *between[:after_sum],
        gelu,
        *between[after_sum:],
        _product("B", b, second, group),
        *_leave(second, b.shape[1], group, sequence_parallel),
    ]


def without_sum(listed: Sequence[Piece], name: str, group: Group = None) -> list[Piece]:
    """The same pieces, but those of this name, "f" or "g", do not add anything up.

    That is what becomes of a layer whose author has forgotten an all-reduce: every shape is right.
    """
    return [_forgetful(piece, group) if piece.name == name else piece for piece in listed]


def gelu_first(listed: Sequence[Piece]) -> list[Piece]:
    """The same pieces, but the GELU before the sum that it should come after."""
    order = list(listed)
    at = [piece.name for piece in order].index("gelu")
    order[at - 1 : at + 1] = order[at]._replace(leaves="addends"), order[at - 1]
    return order


def train_step(listed: Sequence[Piece], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Forward with x, and backward with the gradient of the result: the result, and the gradient of x."""
    tape = []
    for piece in listed:
        x = x.detach().requires_grad_()
        with _marked("forward", piece):
            tape.append((piece, x, piece.run(x)))
        x = tape[-1][2]
    for piece, before, after in reversed(tape):
        with _marked("backward", piece):
            after.backward(gradient)
        assert before.grad is not None
        gradient = before.grad
    return x.detach(), gradient


def _marked(kind: str, piece: Piece) -> contextlib.AbstractContextManager[None]:
    return compute(kind, piece.name, work=piece.work) if piece.work else contextlib.nullcontext()


def _product(name: str, matrix: Tensor, how: str, group: Group) -> Piece:
    own = tp.share(matrix, DIMENSION[how], group)
    leaves = "columns" if how == "columns" else "addends"
    return Piece(name, lambda x: x @ own, leaves, work=matrix.numel() / dist.get_world_size(group))


def _enter(how: str, group: Group, sequence_parallel: bool = False) -> list[Piece]:
    """What a product of this cut needs before it."""
    if how == "rows":
        return [*([_join_positions(group)] if sequence_parallel else []), _take("columns", -1, group)]
    if sequence_parallel:
        return [Piece("f", lambda x: tp.gather_sequence(x, group), "whole", "all-gather", "reduce-scatter")]
    return [Piece("f", lambda x: tp.copy_to_ranks(x, group), "whole", "", "all-reduce")]


def _leave(how: str, width: int, group: Group, sequence_parallel: bool = False) -> list[Piece]:
    """What makes its result whole, or this rank's positions of it. width: of the result."""
    if how == "columns":
        join = Piece("join", lambda x: tp.join(x, -1, width, group), "whole", "all-gather", "")
        return [join, *([_take("positions", SEQUENCE, group)] if sequence_parallel else [])]
    if sequence_parallel:
        return [
            Piece("g", lambda x: tp.sum_and_scatter_sequence(x, group), "positions", "reduce-scatter", "all-gather")
        ]
    return [Piece("g", lambda x: tp.sum_over_ranks(x, group), "whole", "all-reduce", "")]


def _take(leaves: str, dim: int, group: Group) -> Piece:
    return Piece("take", lambda x: tp.take(x, dim, group), leaves, "", "all-gather")


def _join_positions(group: Group) -> Piece:
    n = dist.get_world_size(group)
    return Piece("join", lambda x: tp.join(x, SEQUENCE, n * x.shape[SEQUENCE], group), "whole", "all-gather", "")


def _forgetful(piece: Piece, group: Group) -> Piece:
    if piece.name == "f" and piece.forward:
        return _join_positions(group)._replace(name="f")
    if piece.name == "g" and piece.leaves == "positions":
        return _take("positions", SEQUENCE, group)._replace(name="g")
    return piece._replace(run=lambda x: x, leaves="addends" if piece.name == "g" else "whole", forward="", backward="")
