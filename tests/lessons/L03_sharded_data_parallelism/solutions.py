"""Solutions to the exercise on sharded data parallelism, as students write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from course_lib.mechanisms.collectives import ring_all_gather, ring_reduce_scatter
from lessons.L03_sharded_data_parallelism import checks
from lessons.L03_sharded_data_parallelism.checks import computed_again as again
from lessons.L03_sharded_data_parallelism.checks import (
    gathered,
    hidden,
    linear,
    place,
    scattered,
    trained,
)
from tests.lessons.changes import told, ways

# reduce_scatter


def around_the_ring(tensor: Tensor) -> Tensor:
    return ring_reduce_scatter(tensor.clone()).clone()


def all_at_once(tensor: Tensor) -> Tensor:
    rank, n = place()
    pieces, others = tensor.tensor_split(n), [other for other in range(n) if other != rank]
    arriving = [torch.empty_like(pieces[rank]) for _ in others]
    handles: list[Any] = [dist.isend(pieces[other], other) for other in others]
    handles += [dist.irecv(buffer, other) for buffer, other in zip(arriving, others, strict=True)]
    for handle in handles:
        handle.wait()
    return pieces[rank] + sum(arriving)


sending, wait = "sending: Any = dist.isend(pieces[to], to)", "sending.wait()"
too_early: tuple[str, ...] = (
    "dist.recv(",
    "receiving = dist.irecv(",
    "        total += arriving\n",
    "        receiving.wait()\n",
)
too_early = *too_early, wait, f"total += arriving; {wait}"
blocking: tuple[str, ...] = wait, "rank < distance and dist.send(pieces[to], to)"
blocking += sending, "rank >= distance and dist.send(pieces[to], to)"
batched: tuple[str, ...] = "in handles", "in dist.batch_isend_irecv(handles)", "dist.isend(", "dist.P2POp(dist.isend, "
batched += "dist.irecv(", "dist.P2POp(dist.irecv, "
alone, result = ("range(1, n)", "()"), "return total"
whole_sum = "total = tensor.clone(); dist.all_reduce(total); return total.tensor_split(n)[rank]"

# all_gather


def handed_around_the_ring(piece: Tensor, size: int) -> Tensor:
    whole = piece.new_empty(size)
    whole.tensor_split(dist.get_world_size())[dist.get_rank()].copy_(piece)
    return ring_all_gather(whole)


gathered_in_a_batch = changed(gathered, "gathered_in_a_batch", *batched)
both = "handles += [dist.isend(piece, to), dist.irecv(pieces[source], source)]"
cut, done = "whole.tensor_split(n)", "return whole"
in_a_list = "pieces[rank].copy_(piece)", "pieces[rank] = piece", done, "return torch.cat(pieces)"
wholes = "other = whole.clone(); handles = [dist.isend(whole, (rank + 1) % n), dist.irecv(other, (rank - 1) % n)]"
wholes += "; [handle.wait() for handle in handles]; return whole"

# train_sharded


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_padding(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    """Pad pieces to equal length, which PyTorch's collectives need."""
    rank, n = place()
    parameters = trainable(model)
    weights = parameters_to_vector(parameters).detach()
    padded = nn.functional.pad(weights, (0, -len(weights) % n))
    shard = padded.chunk(n)[rank].clone()
    optimizer = make_optimizer([shard])
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        gradient = torch.zeros_like(padded)
        torch.cat([p.grad.flatten() for p in parameters], out=gradient[: len(weights)])
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter_single(shard.grad, gradient)
        shard.grad /= n
        optimizer.step()
        dist.all_gather_single(padded, shard)
        vector_to_parameters(padded, parameters)
        model.zero_grad()


def a_piece_of_each_parameter(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    rank, n = place()
    parameters = trainable(model)
    shards = [parameter.detach().flatten().tensor_split(n)[rank].clone() for parameter in parameters]
    optimizer = make_optimizer(shards)
    for inputs, targets in batches:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for parameter, shard in zip(parameters, shards, strict=True):
            dist.all_reduce(parameter.grad)
            shard.grad = parameter.grad.flatten().tensor_split(n)[rank] / n
        optimizer.step()
        for parameter, shard in zip(parameters, shards, strict=True):
            whole = torch.zeros(parameter.numel(), dtype=parameter.dtype)
            whole.tensor_split(n)[rank].copy_(shard)
            dist.all_reduce(whole)
            parameter.data.copy_(whole.view_as(parameter))


def whole_optimizer(model: nn.Module, batches: list, loss_fn: Callable, make_optimizer: Callable) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(parameters)
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()  # type: ignore[assignment, operator]
        optimizer.step()
        optimizer.zero_grad()


shard, mean, whole = "weights.tensor_split(n)[rank].clone()", "scattered(gradient) / n", "gathered(shard, len(weights))"
frozen_too, grads = (" if parameter.requires_grad", ""), "[parameter.grad for parameter in parameters]"
or_zeros = "[torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]"
parameters_averaged = "dist.all_reduce(parameter.grad)", "dist.all_reduce(parameter.data)", "grad /=", "data /="
step_before = "        optimizer.step()\n", "", "        for p", "        optimizer.step()\n        for p"

# sharded_linear


class Gathered(torch.autograd.Function):
    """A gather with a backward of its own; autograd does the rest."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, size: int) -> Tensor:
        return handed_around_the_ring(shard, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return around_the_ring(gradient) / dist.get_world_size(), None


def used_again(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    def use(x: Tensor, shard: Tensor) -> Tensor:
        return x @ Gathered.apply(shard, shape[0] * shape[1]).view(shape).T

    return checkpoint(use, x, shard, use_reentrant=False)


gather, scatter = "gathered(shard.detach(), shape[0] * shape[1])", "scattered((dy.T @ x).flatten())"
apply, forward = "ShardedLinear.apply(x, shard)", "return x @ whole().T"
saved: tuple[str, ...] = (
    "            ctx.save_for_backward(x)\n",
    "",
    "(x,) =",
    "x, weight =",
    "dy @ whole()",
    "dy @ weight",
)
saved += forward, "weight = whole(); ctx.save_for_backward(x, weight); return x @ weight.T"
own_rows = "(dy.T @ x).flatten().tensor_split(n)[dist.get_rank()]"
own_weights = "shard.repeat(n + 1)[: shape[0] * shape[1]]"
zeros = "flat = shard.new_zeros(shape[0] * shape[1]); flat.tensor_split(n)[dist.get_rank()].copy_(shard.detach())"
sum_of_zeros = f"{zeros}; dist.all_reduce(flat); return flat"
piece_of_sum = "gradient.flatten().tensor_split(n)[dist.get_rank()]"

# recompute


def pytorch_reentrant(block: Any, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def pytorch_with_saved_tensors(block: Any, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


recomputed = "Recomputed.apply(x)"
# All tensors that need a gradient are inputs, so a block without x's gradient works, too.
by_name: tuple[str, ...] = (
    "x: Tensor) -> Tensor:\n            ctx",
    "x: Tensor, *weights: Tensor) -> Tensor:\n            ctx",
)
by_name += recomputed, "Recomputed.apply(x, *block.parameters())", "            y.backward(dy)\n", ""
by_name += "return x.grad", "return torch.autograd.grad(y, [x, *block.parameters()], dy)"
put_back: tuple[str, ...] = (
    "torch.random.fork_rng(devices=[]), ",
    "",
    "    torch.set",
    "    now = torch.get_rng_state(); torch.set",
)
put_back += "y.backward(dy)", "torch.set_rng_state(now); y.backward(dy)"

# faster_layers: right ones are in test_open_tasks, by level

order, again_last = (
    "[*shards, *shards[-2::-1]]",
    ("dy = loss_gradient(x)", "dy = loss_gradient(x); weight = next(weights)"),
)
gathers_the_last_twice = changed(hidden, "gathers_the_last_twice", order, "[*shards, *shards[::-1]]", *again_last)
leaves = "handle = dist.reduce_scatter_single(shard.grad, gradient / n, async_op=True)"
at_the_end = "    handle.wait()  # type: ignore[union-attr]\n"
waits_for_each_scatter = changed(hidden, "waits_for_each_scatter", leaves, f"{leaves}; handle.wait()")
listed: tuple[str, ...] = (
    "handle = dist.get_world_size(), x.shape[1], [], None",
    "handles = dist.get_world_size(), x.shape[1], [], []",
)
listed += (
    "        if handle:\n            handle.wait()\n",
    "",
    at_the_end,
    "    [handle.wait() for handle in handles[::2]]\n",
)
with_none, with_gradients = (leaves.replace("handle =", "handles += [") + f", {kept}]" for kept in ("None", "gradient"))
waits_for_scatters_at_the_end = changed(hidden, "waits_for_scatters_at_the_end", *listed, leaves, with_none)


def hidden_forward_alone(x: Any, shards: Any, forward: Any, backward: Any, loss_gradient: Any) -> None:
    width, inputs, coming = x.shape[1], [], None
    for i in range(len(shards)):
        weight, handle = coming or begun(shards[i], width)
        handle.wait()
        coming = begun(shards[i + 1], width) if i + 1 < len(shards) else None
        inputs.append(x)
        x = forward(x, weight)
    dy = loss_gradient(x)
    for shard in reversed(shards):
        dy, gradient = backward(dy, inputs.pop(), checks.gather(shard, width))
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter_single(shard.grad, gradient / dist.get_world_size())


def begun(shard: Tensor, width: int) -> Any:
    weight = shard.new_empty(width, width)
    return weight, dist.all_gather_single(weight, shard, async_op=True)


next_weight, begins = (
    "weight, after = after, torch.empty_like(after)",
    "    def one_ahead(shards: list[Tensor]) -> Any:\n",
)
turns = next_weight, "weight, after, room = after, room, after"
in_two_rooms = changed(hidden, "in_two_rooms", begins, f"{begins}        room = x.new_empty(width, width)\n", *turns)


def by_messages(x: Any, shards: Any, forward: Any, backward: Any, loss_gradient: Any) -> None:
    """Gathers of isend and irecv, three layers ahead, and scatters that do not share their link on the clock."""
    rank, n = place()
    arriving: dict[int, Any] = {}
    gradients: list[Any] = []

    def begin(i: int) -> None:
        if 0 <= i < len(shards) and i not in arriving:
            weight = x.new_empty(2 * [x.shape[1]])
            rows = weight.tensor_split(n)
            rows[rank].copy_(shards[i])
            handles = [dist.isend(shards[i], (rank + k) % n) for k in range(1, n)]
            arriving[i] = weight, [*handles, *(dist.irecv(rows[(rank - k) % n], (rank - k) % n) for k in range(1, n))]

    def whole(i: int) -> Tensor:
        weight, handles = arriving[i]
        for handle in handles:
            handle.wait()
        return weight

    inputs, last = [], len(shards) - 1
    for i in range(len(shards)):
        for ahead in range(3):
            begin(i + ahead)
        inputs.append(x)
        x = forward(x, whole(i))
        if i < last - 1:
            del arriving[i]
    dy = loss_gradient(x)
    for i in reversed(range(len(shards))):
        begin(i - 1)
        dy, gradient = backward(dy, inputs.pop(), whole(i))
        del arriving[i]
        while gradients:
            gradients.pop().wait()
        shards[i].grad = torch.empty_like(shards[i])
        gradients.append(dist.reduce_scatter_single(shards[i].grad, gradient / n, async_op=True))
    gradients.pop().wait()


class OneAhead(torch.autograd.Function):
    """A layer for autograd, which knows the layers around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Any, i: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.step, ctx.i = step, i
        weight = step.whole(i)
        step.begin(i + 1)
        y = step.forward(x, weight)
        if i + 1 < len(step.shards):
            del step.coming[i]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        step, i = ctx.step, ctx.i
        weight = step.whole(i)
        step.begin(i - 1)
        dx, gradient = step.backward(dy, *ctx.saved_tensors, weight)
        del step.coming[i]
        step.scatter(i, gradient)
        return dx, None, None


class Step:
    def __init__(self, shards: Any, width: int, forward: Any, backward: Any) -> None:
        self.shards, self.width, self.forward, self.backward = shards, width, forward, backward
        self.coming: dict[int, Any] = {}
        self.leaving: Any = None

    def begin(self, i: int) -> None:
        if 0 <= i < len(self.shards):
            self.coming[i] = begun(self.shards[i], self.width)

    def whole(self, i: int) -> Tensor:
        weight, handle = self.coming[i]
        handle.wait()
        return weight

    def scatter(self, i: int, gradient: Tensor) -> None:
        if self.leaving:
            self.leaving.wait()
        shard = self.shards[i]
        shard.grad = torch.empty_like(shard)
        self.leaving = dist.reduce_scatter_single(shard.grad, gradient / dist.get_world_size(), async_op=True)


def by_autograd(x: Any, shards: Any, forward: Any, backward: Any, loss_gradient: Any) -> None:
    step = Step(shards, x.shape[1], forward, backward)
    step.begin(0)
    y = x.requires_grad_()
    for i in range(len(shards)):
        y = OneAhead.apply(y, step, i)
    y.backward(loss_gradient(y.detach()))
    step.leaving.wait()


FASTER_LAYERS: dict[Callable[..., object], int] = {
    hidden_forward_alone: 0,
    waits_for_each_scatter: 1,
    gathers_the_last_twice: 2,
    waits_for_scatters_at_the_end: 3,
    in_two_rooms: 3,
    by_autograd: 3,
}
unmarked = "x = forward(x, weight := next(weights))", "x = torch.tanh(x @ (weight := next(weights)).T)"

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.reduce_scatter: [
        around_the_ring,
        all_at_once,
        *ways(all_at_once, in_a_batch=batched),
        *ways(scattered, some_receive_first=blocking),
    ],
    checks.all_gather: [
        handed_around_the_ring,
        gathered_in_a_batch,
        *ways(
            gathered,
            received_one_by_one=(both, "handles += [dist.isend(piece, to)]; dist.recv(pieces[source], source)"),
            concatenated=(cut, f"[one.clone() for one in {cut}]", done, "return torch.cat(pieces)"),
        ),
    ],
    checks.train_sharded: [
        with_padding,
        a_piece_of_each_parameter,
        *ways(trained, cut_from_the_sum=(mean, "(dist.all_reduce(gradient) or gradient).tensor_split(n)[rank] / n")),
        *ways(trained, updates_a_view=(".clone()", "", f"whole = {whole}", f"whole = weights.copy_({whole})")),
    ],
    checks.sharded_linear: [
        used_again,
        *ways(
            linear,
            copied_before_it_is_scattered=(
                "dy @ whole()",
                "dy @ (weight := whole())",
                "scattered((dy.T @ x).flatten()) / n",
                "scattered((whole_gradient := (turned := dy.T.contiguous()) @ x).flatten() / n)",
            ),
            gathered_by_all_reduce=(f"return {gather}", sum_of_zeros),
            scattered_by_all_reduce=(
                "gradient = ",
                "dist.all_reduce(gradient := dy.T @ x); gradient = ",
                scatter,
                piece_of_sum,
            ),
            saves_both=("save_for_backward(x)", "save_for_backward(x, shard)", "(x,) =", "x, _ ="),
        ),
    ],
    checks.recompute: [
        pytorch_reentrant,
        pytorch_with_saved_tensors,
        *ways(
            again,
            random_numbers_put_back=put_back,
            as_of_several=("y.backward(dy)", "torch.autograd.backward([y], [dy])"),
        ),
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.reduce_scatter: told(
        scattered,
        takes_from_the_whole_sum=("a collective at work", *alone, result, whole_sum),
        adds_before_it_waits=("nan in it", *too_early),
        adds_to_the_argument=("changes `tensor`", "pieces[rank].clone()", "pieces[rank]"),
        multiplies_its_own=("sends nothing", *alone, result, "return n * total"),
        returns_all_pieces=("than it should have", result, "return pieces"),
        in_single_precision=("than it should have", result, "return total.float()"),
        turns_it_around=("in the wrong places", result, "return total.flip(0)"),
        twice_too_large=("2 times too large", result, "return 2 * total"),
        talks_to_one_rank_alone=("should be minus piece 0 of `tensor` of rank 1", "range(1, n)", "range(1, 2)"),
    ),
    checks.all_gather: told(
        gathered,
        adds_up_zeros=(
            "a collective at work",
            "new_empty",
            "new_zeros",
            *alone,
            done,
            "dist.all_reduce(whole); return whole",
        ),
        repeats_its_own=("sends nothing", *alone, done, "return piece.repeat(n + 1)[:size]"),
        changes_its_piece=("changes `piece`", done, "piece.zero_(); return whole"),
        leaves_out_the_last_place=("than it should have", done, "return whole[:-1]"),
        sends_wholes=("send 9, 9 numbers, where 3 each would do", done, wholes),
    ),
    checks.train_sharded: told(
        trained,
        trains_alone=("sends nothing", shard, "weights.clone()", mean, "gradient", whole, "shard"),
        decays_what_is_frozen=("with a gradient of zeros", *frozen_too, grads, or_zeros),
        trains_on_the_first_batch=("as it is after the first step", "in batches", "in batches[:1]"),
        normalizes_the_inputs=(
            "changes `batches[0][0]`",
            "optimizer.step()",
            "optimizer.step(); inputs -= inputs.mean()",
        ),
        ends_in_single_precision=("than it should have", "(whole,", "(whole.float(),"),
    )
    | told(
        whole_optimizer,  # with SGD the result is even right, and nothing is sharded
        averages_parameters=("a rank keeps the optimizer's state of 16 parameters", *step_before, *parameters_averaged),
    ),
    checks.sharded_linear: told(
        linear,
        loses_dx=("`the result[dx]` is None", apply, "ShardedLinear.apply(x.detach(), shard)"),
        loses_the_gradient=("`the result[gradient of shards[0]]` is None", "(x, shard)\n", "(x, shard.detach())\n"),
        averages_outputs=(
            "Wrong: `the result[y]`. Right: `the result[dx]` and 1 more",
            forward,
            "dist.all_reduce(y := x @ whole().T); return y / n",
        ),
        multiplies_its_own_rows=("sends nothing", gather, own_weights, scatter, own_rows),
        saves_the_weight=("The whole weight is kept", *saved),
        twice_the_output=("2 times too large", apply, f"2 * {apply}"),
        normalizes_in_place=("changes `shards[0]`", forward, "shard.data /= 2; return x @ whole().T"),
    )
    | told(
        used_again,
        keeps_all_weights=(
            "bytes at a time. The whole model takes 12,288",
            "checkpoint(use, x, shard, use_reentrant=False)",
            "use(x, shard)",
        ),
    ),
    checks.recompute: told(
        again,
        returns_x=("`0.up.grad` is None", recomputed, "x"),
        without_any_gradient=("No gradient comes back", recomputed, "block(x).detach()"),
        dropout_off=("not what was asked for", "class", "getattr(block, '__self__', block).eval()\n    class"),
        keeps_the_insides_itself=(
            "Everything inside the block is kept until the backward pass",
            recomputed,
            "block(x).clone()",
        ),
    ),
    checks.faster_layers: told(
        hidden,
        gathers_into_one_room=("nan in it", next_weight, "weight = after"),
        does_not_use_the_clock=("calls of forward]` is not what it should be: 0", *unmarked),
        keeps_all_gradients=("bytes at a time. The whole model takes 16,384", *listed, leaves, with_gradients),
    ),
}

# Runs that do not come to their end
ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.reduce_scatter: told(
        scattered,
        sends_first=("somebody must receive first", sending, "dist.send(pieces[to], to)", wait, "pass"),
        sends_to_its_neighbor=(
            "Rank 0 has sent rank 1 a message that it does not",
            "[to], to)",
            "[to], (rank + 1) % n)",
        ),
        buffer_of_another_dtype=("the dtype of what arrives", "torch.empty_like(total)", "torch.empty(len(total))"),
        knows_four_ranks=("tuple index out of range", "pieces[rank].clone()", "pieces[rank + 4].clone()"),
    ),
    checks.all_gather: told(
        gathered,
        cut_by_chunk=("has the right size for what should travel", *in_a_list, cut, "[*whole.chunk(n)]"),
        receives_first=("nobody has sent yet", both, "dist.recv(pieces[source], source); dist.send(piece, to)"),
    ),
    checks.train_sharded: told(
        trained, stumbles_over_what_is_frozen=("raises an exception here, and raised none before", *frozen_too)
    ),
    checks.sharded_linear: told(
        linear,
        returns_the_whole_gradient=("expected shape compatible with [3]", f"{scatter} / n", "(dy.T @ x).flatten()"),
        forgets_autograd=("does not require grad", apply, "x.detach() @ whole().T"),
    ),
    checks.recompute: told(
        again,
        computes_in_float=("expected m1 and m2 to have the same dtype", recomputed, f"{recomputed}.float()"),
        gradients_by_name=("has no attribute 'parameters'", *by_name),
        a_wrong_shape_goes_back=("Mismatch in shape", "y.backward(dy)", "y.backward(dy[0])"),
        on_rank_0_alone=("The call that waits", recomputed, f"x if dist.get_rank() else {recomputed}"),
    ),
    checks.faster_layers: told(
        hidden,
        forgets_the_last_scatter=("began reduce_scatter and returned without waiting", at_the_end, ""),
        goes_one_too_far=("IndexError", "shards[1:]:", "[*shards[1:], shards[len(shards)]]:"),
    ),
}
