"""Runs of an MLP's two matrices, cut in four ways, and the communication of each.

Two ranks can share a product x A in two ways:

    by columns    x [A_0 | A_1]  =  [x A_0 | x A_1]        every rank needs all of x, and gets some columns
    by rows       [x_0 | x_1] [A_0]  =  x_0 A_0 + x_1 A_1  every rank needs some columns of x, and gets a partial sum
                              [A_1]

An MLP has two products, y = gelu(x A) B, and gelu(u + v) is not gelu(u) + gelu(v): partial sums must be added up
before it, columns need not be gathered. So the cuts differ in communication. With n ranks, for x of b bytes, the ring
algorithms send (n - 1) / n times

    cut of A, B         forward                          backward                         together
    columns, rows       all-reduce b                     all-reduce b                     4 b
    columns, columns    all-gather 4 b, all-gather b     all-reduce 4 b, all-reduce b    15 b
    rows, rows          all-reduce 4 b, all-reduce b     all-gather 4 b, all-gather b    15 b
    rows, columns       all-reduce 4 b, all-gather b     all-reduce 4 b, all-gather b    18 b

(an all-reduce of b sends 2 b). In the first cut the second product takes just what the first one leaves.

Such an MLP is a list of operations. The same list is run, counted, drawn, and broken by mistakes.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course_lib.classroom.runs.steps import after_barrier
from course_lib.mechanisms.tensor_parallel import linear as tp
from course_lib.mechanisms.tensor_parallel.linear import SEQUENCE
from course_lib.ranks import Pace, launch
from course_lib.timeline import Timeline, compute

CUTS = (("columns", "rows"), ("columns", "columns"), ("rows", "rows"), ("rows", "columns"))
DIMENSION = {"columns": 1, "rows": 0}  # of a matrix [in, out], as in x A; a Linear stores it the other way around


class LayerOperation(NamedTuple):
    """One operation of an MLP on the ranks.

    run: the operation on this rank's part of x [batch, sequence, width].
    leaves: what a rank has after it: all of it ("whole"), its "columns" or "positions", or "partial sums".
    forward, backward: the communication, such as "all-reduce"; "" for none.
    work: multiplications per position on one rank; 0 unless it is a matrix product.
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


def cut_mlp(a: Tensor, b: Tensor, cut: Sequence[str], sequence_parallel: bool = False) -> list[LayerOperation]:
    """A rank's operations of the MLP y = gelu(x a) b.

    a: [hidden, wide] and b: [wide, hidden], the whole matrices; a rank uses its share of each.
    cut: the cut of a and of b, each by "columns" or "rows".
    sequence_parallel: whether a rank's x and y are only its positions.
    """
    first, second = cut
    gelu = LayerOperation("gelu", F.gelu, "columns" if first == "columns" else "whole")
    fits = (first, second) == ("columns", "rows")
    between = [] if fits else [*_leave(first, b.shape[0]), *_enter(second)]
    after_sum = 1 if first == "rows" else 0  # a GELU of partial sums would be wrong; one of columns is less work
    return [
        *_enter(first, sequence_parallel),
        _product("A", a, first),
        *between[:after_sum],
        gelu,
        *between[after_sum:],
        _product("B", b, second),
        *_leave(second, b.shape[1], sequence_parallel),
    ]


def without_sum(operations: Sequence[LayerOperation], name: str) -> list[LayerOperation]:
    """Replace the operations of this name, "f" or "g", by ones that do not add up.

    This is a layer whose author has forgotten an all-reduce: every shape is right.
    """
    return [_forgetful(operation) if operation.name == name else operation for operation in operations]


def gelu_first(operations: Sequence[LayerOperation]) -> list[LayerOperation]:
    """Move the GELU of these operations before the sum that it should follow."""
    order = list(operations)
    at = [operation.name for operation in order].index("gelu")
    order[at - 1 : at + 1] = order[at]._replace(leaves="partial sums"), order[at - 1]
    return order


def forward_and_backward(operations: Sequence[LayerOperation], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Run forward with x, backward with the gradient of the result. Returns the result and the gradient of x."""
    tape = []
    for operation in operations:
        x = x.detach().requires_grad_()
        with _marked("forward", operation):
            tape.append((operation, x, operation.run(x)))
        x = tape[-1][2]
    for operation, before, after in reversed(tape):
        with _marked("backward", operation):
            after.backward(gradient)
        assert before.grad is not None
        gradient = before.grad
    return x.detach(), gradient


def _marked(kind: str, operation: LayerOperation) -> contextlib.AbstractContextManager[None]:
    return compute(kind, operation.name, work=operation.work) if operation.work else contextlib.nullcontext()


def _product(name: str, matrix: Tensor, how: str) -> LayerOperation:
    own = tp.shard(matrix, DIMENSION[how])
    leaves = "columns" if how == "columns" else "partial sums"
    return LayerOperation(name, lambda x: x @ own, leaves, work=matrix.numel() / dist.get_world_size())


def _enter(how: str, sequence_parallel: bool = False) -> list[LayerOperation]:
    """The operations that a product of this cut needs before it."""
    if how == "rows":
        return [*([_join_positions()] if sequence_parallel else []), _take("columns", -1)]
    if sequence_parallel:
        return [LayerOperation("f", tp.gather_sequence, "whole", "all-gather", "reduce-scatter")]
    return [LayerOperation("f", tp.copy_to_ranks, "whole", "", "all-reduce")]


def _leave(how: str, width: int, sequence_parallel: bool = False) -> list[LayerOperation]:
    """The operations from a product's result to the whole, or to this rank's positions. width: of the result."""
    if how == "columns":
        join = LayerOperation("join", lambda x: tp.gather_from_ranks(x, -1, width), "whole", "all-gather", "")
        return [join, *([_take("positions", SEQUENCE)] if sequence_parallel else [])]
    if sequence_parallel:
        return [LayerOperation("g", tp.reduce_scatter_sequence, "positions", "reduce-scatter", "all-gather")]
    return [LayerOperation("g", tp.sum_over_ranks, "whole", "all-reduce", "")]


def _take(leaves: str, dim: int) -> LayerOperation:
    return LayerOperation("take", lambda x: tp.scatter_to_ranks(x, dim), leaves, "", "all-gather")


def _join_positions() -> LayerOperation:
    n = dist.get_world_size()
    return LayerOperation(
        "join", lambda x: tp.gather_from_ranks(x, SEQUENCE, n * x.shape[SEQUENCE]), "whole", "all-gather"
    )


def _forgetful(operation: LayerOperation) -> LayerOperation:
    if operation.name == "f" and operation.forward:
        return _join_positions()._replace(name="f")
    if operation.name == "g" and operation.leaves == "positions":
        return _take("positions", SEQUENCE)._replace(name="g")
    leaves = "partial sums" if operation.name == "g" else "whole"
    return operation._replace(run=lambda x: x, leaves=leaves, forward="", backward="")


# On real ranks, beside one process

POSITIONS = 32
WAYS = {  # name: (the cut, the mistake)
    **{", ".join(cut): (cut, "") for cut in CUTS},
    "columns, rows, without f": (("columns", "rows"), "f"),
    "columns, rows, without g": (("columns", "rows"), "g"),
    "rows, columns, GELU before the sum": (("rows", "columns"), "gelu"),
}
ROUNDING = 1e-4  # far more than the rounding of these sums in 32 bits, far less than any mistake


class CutRun(NamedTuple):
    """An MLP that was run on ranks, forward and backward.

    traffic: bytes that a rank sends for each operation, forward and backward.
    off: for each result the largest difference from one process's, on any rank, as a share of its largest number.
    """

    operations: list[LayerOperation]
    traffic: list[tuple[int, int]]
    off: dict[str, float]
    timeline: Timeline

    @property
    def sent(self) -> int:
        return sum(map(sum, self.traffic))

    @property
    def wrong(self) -> list[str]:
        return [name for name, share in self.off.items() if share > ROUNDING]


def run_cut(
    way: str, ranks: int, hidden: int = 64, sequence_parallel: bool = False, pace: Pace | None = None
) -> CutRun:
    """Run an MLP of this hidden size, cut in one of the WAYS, and compare it with one process.

    Raises ValueError for an unknown way.
    """
    if way not in WAYS:
        raise ValueError(f"way={way!r} is unknown; choose one of {', '.join(map(repr, WAYS))}")
    run = launch(_run_cut, ranks, (*WAYS[way], hidden, sequence_parallel), pace=pace)
    operations = run.results[0][0]
    off = {name: max(result[1][name] for result in run.results) for name in run.results[0][1]}
    step = after_barrier(run.timeline)
    return CutRun(operations, _traffic(step, operations), off, step)


def _run_cut(
    rank: int, cut: tuple[str, str], mistake: str, hidden: int, sequence_parallel: bool
) -> tuple[list[LayerOperation], dict[str, float]]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn((1, POSITIONS, hidden), generator=generator) for _ in range(2))
    shapes = (hidden, 4 * hidden), (4 * hidden, hidden)
    a, b = ((torch.randn(shape, generator=generator) / shape[0] ** 0.5).requires_grad_() for shape in shapes)
    operations = cut_mlp(a, b, cut, sequence_parallel)
    operations = gelu_first(operations) if mistake == "gelu" else without_sum(operations, mistake)
    own = (lambda tensor: tp.shard(tensor, tp.SEQUENCE)) if sequence_parallel else _all
    y, of_x, *of_matrices = _one_process(a, b, x, gradient, cut)
    dist.barrier()
    got = (*forward_and_backward(operations, own(x), own(gradient)), *_gradients(a, b, cut))
    expected = (own(y), own(of_x), *of_matrices)
    names = ("y", "gradient of x", "gradient of A", "gradient of B")
    off = {name: _off(one, right) for name, one, right in zip(names, got, expected, strict=True)}
    return [operation._replace(run=_all) for operation in operations], off  # without the matrices in `run`


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _gradients(a: Tensor, b: Tensor, cut: tuple[str, str]) -> list[Tensor]:
    """The gradients of this rank's shares of the matrices."""
    return [tp.shard(m.grad, DIMENSION[how]).clone() for m, how in zip((a, b), cut, strict=True) if m.grad is not None]


def _one_process(a: Tensor, b: Tensor, x: Tensor, gradient: Tensor, cut: tuple[str, str]) -> list[Tensor]:
    """The results of one process with whole matrices: y, the gradient of x, and this rank's shares of the matrices'."""
    a, b, x = (tensor.detach().clone().requires_grad_() for tensor in (a, b, x))
    y = F.gelu(x @ a) @ b
    y.backward(gradient)
    assert x.grad is not None
    return [y.detach(), x.grad, *_gradients(a, b, cut)]


def _off(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def _traffic(timeline: Timeline, operations: list[LayerOperation]) -> list[tuple[int, int]]:
    """The bytes that rank 0 sends for each operation, forward and backward, read off its trace."""
    sent = iter([span.bytes for span in timeline.of(0) if span.kind == "transfer"])
    forward = [next(sent, 0) if operation.forward else 0 for operation in operations]
    backward = [next(sent, 0) if operation.backward else 0 for operation in reversed(operations)]
    return list(zip(forward, reversed(backward), strict=True))
