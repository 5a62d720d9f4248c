"""Solutions to the exercise on sharded data parallelism, as students write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from course_lib import checks
from course_lib.checks.exercise import Exercise
from course_lib.checks.sharding import computed_again as again
from course_lib.checks.sharding import gathered, linear, place, scattered, trained
from course_lib.mechanisms.collectives import ring_all_gather, ring_reduce_scatter

# reduce_scatter, right


def to_the_owner(tensor: Tensor) -> Tensor:
    rank, n = place()
    total = tensor.tensor_split(n)[rank].clone()
    for distance in range(1, n):
        outgoing = tensor.tensor_split(n)[(rank + distance) % n]
        arriving = torch.empty_like(total)
        handle = dist.isend(outgoing, (rank + distance) % n)
        dist.recv(arriving, (rank - distance) % n)
        handle.wait()
        total += arriving
    return total


def around_the_ring(tensor: Tensor) -> Tensor:
    return ring_reduce_scatter(tensor.clone()).clone()


def all_at_once(tensor: Tensor) -> Tensor:
    rank, n = place()
    pieces = tensor.tensor_split(n)
    arriving = {other: torch.empty_like(pieces[rank]) for other in range(n) if other != rank}
    handles = [dist.isend(pieces[other], other) for other in arriving]
    handles += [dist.irecv(buffer, other) for other, buffer in arriving.items()]
    for handle in handles:
        handle.wait()
    return pieces[rank] + sum(arriving.values())


def in_a_batch(tensor: Tensor) -> Tensor:
    rank, n = place()
    pieces = tensor.tensor_split(n)
    arriving = [torch.empty_like(pieces[rank]) for _ in range(n)]
    arriving[rank].copy_(pieces[rank])
    others = [other for other in range(n) if other != rank]
    operations = [dist.P2POp(dist.isend, pieces[other], other) for other in others]
    operations += [dist.P2POp(dist.irecv, arriving[other], other) for other in others]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    return torch.stack(arriving).sum(0)


def with_blocking_pairs(tensor: Tensor) -> Tensor:
    """Of each pair of ranks, the lower one sends first."""
    rank, n = place()
    pieces = tensor.tensor_split(n)
    total = pieces[rank].clone()
    for other in range(n):
        arriving = torch.empty_like(total)
        if rank < other:
            dist.send(pieces[other], other)
            dist.recv(arriving, other)
        if rank > other:
            dist.recv(arriving, other)
            dist.send(pieces[other], other)
        if rank != other:
            total = total + arriving
    return total


# reduce_scatter, wrong


def picks_from_the_whole_sum(tensor: Tensor) -> Tensor:
    rank, n = place()
    whole = tensor.clone()
    dist.all_reduce(whole)
    return whole.tensor_split(n)[rank]


def adds_to_the_argument(tensor: Tensor) -> Tensor:
    rank, n = place()
    return tensor.tensor_split(n)[rank].copy_(scattered(tensor))


def multiplies_its_own(tensor: Tensor) -> Tensor:
    rank, n = place()
    return tensor.tensor_split(n)[rank] * n


def returns_all_pieces(tensor: Tensor) -> Any:
    scattered(tensor)
    return tensor.tensor_split(dist.get_world_size())


def in_single_precision(tensor: Tensor) -> Tensor:
    return scattered(tensor.float())


def turns_it_around(tensor: Tensor) -> Tensor:
    return scattered(tensor).flip(0)


def twice_too_large(tensor: Tensor) -> Tensor:
    return 2 * scattered(tensor)


def talks_to_one_rank_alone(tensor: Tensor) -> Tensor:
    rank, n = place()
    pieces = tensor.tensor_split(n)
    arriving = torch.empty_like(pieces[rank])
    handle = dist.isend(pieces[(rank + 1) % n], (rank + 1) % n)
    dist.recv(arriving, (rank - 1) % n)
    handle.wait()
    return pieces[rank] + arriving


def sends_first(tensor: Tensor) -> Tensor:
    rank, n = place()
    pieces = tensor.tensor_split(n)
    total = pieces[rank].clone()
    for other in range(n):
        if other != rank:
            dist.send(pieces[other], other)
            dist.recv(total, other)
    return total


def buffer_of_another_dtype(tensor: Tensor) -> Tensor:
    rank, n = place()
    pieces = tensor.tensor_split(n)
    arriving = torch.empty(len(pieces[rank]))
    handle = dist.isend(pieces[(rank + 1) % n], (rank + 1) % n)
    dist.recv(arriving, (rank - 1) % n)
    handle.wait()
    return pieces[rank] + arriving


def knows_four_ranks(tensor: Tensor) -> Tensor:
    return tensor.tensor_split(4)[dist.get_rank() + 4]


# all_gather, right


def into_a_list(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    pieces = [torch.empty(len(range(size)[len_of(size, r, n)]), dtype=piece.dtype) for r in range(n)]
    pieces[rank] = piece
    handles = [dist.isend(piece, other) for other in range(n) if other != rank]
    for other in range(n):
        if other != rank:
            dist.recv(pieces[other], other)
    for handle in handles:
        handle.wait()
    return torch.cat(pieces)


def len_of(size: int, rank: int, n: int) -> slice:
    """Where a rank's piece lies; the first ones are one longer."""
    least, left_over = divmod(size, n)
    start = rank * least + min(rank, left_over)
    return slice(start, start + least + (rank < left_over))


def handed_around_the_ring(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    whole = torch.empty(size, dtype=piece.dtype)
    whole.tensor_split(n)[rank].copy_(piece)
    return ring_all_gather(whole)


def received_in_place(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    whole = torch.zeros(size, dtype=piece.dtype)
    whole[len_of(size, rank, n)] = piece
    others = [other for other in range(n) if other != rank]
    handles = [dist.irecv(whole[len_of(size, other, n)], other) for other in others]
    handles += [dist.isend(piece, other) for other in others]
    for handle in handles:
        handle.wait()
    return whole


def gathered_in_a_batch(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    pieces = list(piece.new_empty(size).tensor_split(n))
    pieces[rank] = piece
    others = [other for other in range(n) if other != rank]
    operations = [dist.P2POp(dist.irecv, pieces[other], other) for other in others]
    operations += [dist.P2POp(dist.isend, piece, other) for other in others]
    for handle in dist.batch_isend_irecv(operations):
        handle.wait()
    return torch.cat(pieces)


# all_gather, wrong


def adds_up_zeros(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    whole = piece.new_zeros(size)
    whole[len_of(size, rank, n)] = piece
    dist.all_reduce(whole)
    return whole


def repeats_its_own(piece: Tensor, size: int) -> Tensor:
    return piece.repeat(dist.get_world_size() + 1)[:size]


def returns_a_list(piece: Tensor, size: int) -> Any:
    return gathered(piece, size).tensor_split(dist.get_world_size())


def gathers_in_single_precision(piece: Tensor, size: int) -> Tensor:
    return gathered(piece.float(), size)


def changes_its_piece(piece: Tensor, size: int) -> Tensor:
    whole = gathered(piece, size)
    piece.zero_()
    return whole


def leaves_out_the_last_place(piece: Tensor, size: int) -> Tensor:
    return gathered(piece, size)[:-1]


def passes_wholes_around(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    whole = gathered(piece, size)
    handle = dist.isend(whole, (rank + 1) % n)
    dist.recv(whole.clone(), (rank - 1) % n)
    handle.wait()
    return whole


def cut_by_chunk(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    pieces = list(piece.new_zeros(size).chunk(n))
    pieces[rank] = piece
    handles = [dist.isend(piece, other) for other in range(n) if other != rank]
    for other in range(n):
        if other != rank:
            dist.recv(pieces[other], other)
    for handle in handles:
        handle.wait()
    return torch.cat(pieces)


def receives_first(piece: Tensor, size: int) -> Tensor:
    rank, n = place()
    pieces = piece.new_zeros(size).tensor_split(n)
    dist.recv(pieces[(rank - 1) % n], (rank - 1) % n)
    dist.send(piece, (rank + 1) % n)
    return torch.cat(pieces)


# train_sharded, right


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def with_padding(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    """Pieces of equal length, as PyTorch's collectives want them."""
    rank, n = place()
    parameters = trainable(model)
    weights = parameters_to_vector(parameters).detach()
    size = -(-len(weights) // n)
    padded = torch.cat([weights, weights.new_zeros(n * size - len(weights))])
    shard = nn.Parameter(padded[rank * size : (rank + 1) * size].clone())
    optimizer = make_optimizer([shard])
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        gradient = torch.zeros_like(padded)
        torch.cat([p.grad.flatten() for p in parameters], out=gradient[: len(weights)])
        shard.grad = torch.empty_like(shard)
        dist.reduce_scatter_single(shard.grad, gradient)
        shard.grad /= n
        optimizer.step()
        dist.all_gather_single(padded, shard.detach())
        vector_to_parameters(padded[: len(weights)], parameters)
        optimizer.zero_grad()
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


def updates_a_view(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    """The shard is a part of the weights, which are the model's parameters."""
    parameters = trainable(model)
    weights = parameters_to_vector(parameters).detach()
    vector_to_parameters(weights, parameters)
    shard = weights.tensor_split(dist.get_world_size())[dist.get_rank()]
    optimizer = make_optimizer([shard])
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in parameters])
        shard.grad = ring_reduce_scatter(gradient) / dist.get_world_size()
        optimizer.step()
        ring_all_gather(weights)
        for parameter in parameters:
            parameter.grad = None


def owners_broadcast(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    """Each piece of the weights has an owner, to whom gradients go and who sends out the new ones."""
    rank, n = place()
    parameters = trainable(model)
    weights = parameters_to_vector(parameters).detach().clone()
    pieces = weights.tensor_split(n)
    optimizer = make_optimizer([pieces[rank]])
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        gradient = parameters_to_vector([p.grad for p in parameters]) / n  # type: ignore[misc]
        for owner, piece in enumerate(gradient.tensor_split(n)):
            dist.reduce(piece, owner)
        pieces[rank].grad = gradient.tensor_split(n)[rank]
        optimizer.step()
        for owner, piece in enumerate(pieces):
            dist.broadcast(piece, owner)
        vector_to_parameters(weights, parameters)
        model.zero_grad()


# train_sharded, wrong


def trains_alone(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    optimizer = make_optimizer(trainable(model))
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def averages_parameters(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    """With SGD this is even right, and nothing is sharded."""
    trains = make_optimizer(parameters := trainable(model))
    for inputs, targets in batches:
        trains.zero_grad()
        loss_fn(model(inputs), targets).backward()
        trains.step()
        for parameter in parameters:
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def decays_what_is_frozen(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    weights = parameters_to_vector(model.parameters()).detach()
    shard = weights.tensor_split(n)[rank].clone()
    optimizer = make_optimizer([shard])
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        each = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        shard.grad = scattered(parameters_to_vector(each)) / n
        optimizer.step()
        vector_to_parameters(gathered(shard, len(weights)), model.parameters())
        model.zero_grad()


def trains_on_the_first_batch(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    trained(model, batches[:1], loss_fn, make_optimizer)


def takes_rank_0_s_gradient(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    def from_rank_0(inputs: Any, targets: Any) -> Any:
        for tensor in (inputs, targets):
            dist.broadcast(tensor, 0)
        return inputs, targets

    copies = [from_rank_0(inputs.clone(), targets.clone()) for inputs, targets in batches]
    trained(model, copies, loss_fn, make_optimizer)


def normalizes_the_inputs(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    trained(model, batches, loss_fn, make_optimizer)
    for inputs, _ in batches:
        inputs -= inputs.mean()


def trains_in_single_precision(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    batches = [(inputs.float(), targets.float()) for inputs, targets in batches]
    trained(model.float(), batches, loss_fn, make_optimizer)


def stumbles_over_what_is_frozen(model: nn.Module, batches: Any, loss_fn: Any, make_optimizer: Any) -> None:
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    model.zero_grad()
    trained(model, batches, loss_fn, make_optimizer)


# sharded_linear, right


class Padded(torch.autograd.Function):
    """With PyTorch's collectives, which want pieces of equal length."""

    @staticmethod
    def whole(shard: Tensor, shape: Any) -> Tensor:
        size = -(-shape[0] * shape[1] // dist.get_world_size())
        padded = nn.functional.pad(shard.detach(), (0, size - len(shard)))
        pieces = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, padded)
        lengths = map(len, torch.empty(shape[0] * shape[1]).tensor_split(len(pieces)))
        return torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)]).view(shape)

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, shape: Any) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        return x @ Padded.whole(shard, shape).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        gradient = dy.T @ x
        dist.all_reduce(gradient)
        own = gradient.flatten().tensor_split(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()
        return dy @ Padded.whole(shard, ctx.shape), own, None


def with_collectives(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return Padded.apply(x, shard, shape)


class InARing(torch.autograd.Function):
    @staticmethod
    def gather(shard: Tensor, shape: Any) -> Tensor:
        flat = shard.new_empty(shape[0] * shape[1])
        flat.tensor_split(dist.get_world_size())[dist.get_rank()].copy_(shard)
        return ring_all_gather(flat).view(shape)

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, shape: Any) -> Tensor:
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        return nn.functional.linear(x, InARing.gather(shard, shape))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, shard = ctx.saved_tensors
        gradient = ring_reduce_scatter(dy.T @ x).clone()
        return dy.mm(InARing.gather(shard, ctx.shape)), gradient.div_(dist.get_world_size()), None


def around_a_ring(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return InARing.apply(x, shard, shape)


class Gathered(torch.autograd.Function):
    """Only the gather has a backward of its own; autograd knows the rest."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, size: int) -> Tensor:
        return gathered(shard, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return scattered(gradient) / dist.get_world_size(), None


def computed_again(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    def use(x: Tensor, shard: Tensor) -> Tensor:
        return x @ Gathered.apply(shard, shape[0] * shape[1]).view(shape).T

    return torch.utils.checkpoint.checkpoint(use, x, shard, use_reentrant=False)


def by_the_page(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return linear(x, shard, shape)


# sharded_linear, wrong


def keeps_all_weights(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return x @ Gathered.apply(shard, shape[0] * shape[1]).view(shape).T


def loses_dx(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return linear(x.detach(), shard, shape)


def loses_the_gradient(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return linear(x, shard.detach(), shape)


def computes_in_single_precision(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return linear(x.float(), shard.float(), shape)


def averages_outputs(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    y = linear(x, shard, shape)
    dist.all_reduce(y.data)
    y.data /= dist.get_world_size()
    return y


def multiplies_its_own_rows(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    weight = torch.cat([shard, shard.detach().repeat(shape[0] * shape[1])])[: shape[0] * shape[1]]
    return x @ weight.view(shape).T


def twice_the_output(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return 2 * linear(x, shard, shape)


def normalizes_in_place(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    y = linear(x, shard, shape)
    shard.data /= 2
    return y


class Unsharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, size: int) -> Tensor:
        return gathered(shard, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient)
        return gradient, None


def returns_the_whole_gradient(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return x @ Unsharded.apply(shard, shape[0] * shape[1]).view(shape).T


def forgets_autograd(x: Tensor, shard: Tensor, shape: Any) -> Tensor:
    return x.detach() @ gathered(shard.detach(), shape[0] * shape[1]).view(shape).T


# recompute, right


def with_gradients_by_name(block: Any, x: Tensor) -> Tensor:
    """All that needs a gradient goes in, so that a block without x's gradient would work as well."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
            ctx.x, ctx.state = x.detach(), torch.random.get_rng_state()
            with torch.no_grad():
                return block(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            now = torch.random.get_rng_state()
            torch.random.set_rng_state(ctx.state)
            with torch.enable_grad():
                x = ctx.x.clone().requires_grad_()
                y = block(x)
            torch.random.set_rng_state(now)
            return torch.autograd.grad(y, [x, *block.parameters()], dy)

    return Again.apply(x, *block.parameters())


def pytorch_reentrant(block: Any, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def pytorch_with_saved_tensors(block: Any, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def by_hooks_on_saved_tensors(block: Any, x: Tensor) -> Tensor:
    """What autograd wants to keep is kept as a number, and made again when the first one is asked for."""
    state, count = torch.get_rng_state(), 0
    made: list[Tensor] = []

    def number(tensor: Tensor) -> int:
        nonlocal count
        count += 1
        return count - 1

    def tensor_of(number: int) -> Tensor:
        if not made:
            with (
                torch.enable_grad(),
                torch.random.fork_rng(devices=[]),
                torch.autograd.graph.saved_tensors_hooks(lambda one: made.append(one.detach()), lambda _: x),
            ):
                torch.set_rng_state(state)
                block(x.detach().requires_grad_())
        one, made[number] = made[number], x
        if number == 0:
            made.clear()
        return one

    with torch.autograd.graph.saved_tensors_hooks(number, tensor_of):
        return block(x)


def in_one_function_for_all(block: Any, x: Tensor) -> Tensor:
    return Checkpointed.apply(x, block, torch.get_rng_state())


class Checkpointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any, state: Tensor) -> Tensor:
        ctx.save_for_backward(x, state)
        ctx.block = block
        return block(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, state = ctx.saved_tensors
        leaf = x.detach()
        leaf.requires_grad = True
        before = torch.get_rng_state()
        torch.set_rng_state(state)
        torch.set_grad_enabled(True)
        ctx.block(leaf).backward(dy)
        torch.set_grad_enabled(False)
        torch.set_rng_state(before)
        return leaf.grad, None, None


# recompute, wrong


def returns_x(block: Any, x: Tensor) -> Tensor:
    return x


def without_any_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return block(x)


def computes_in_float(block: Any, x: Tensor) -> Tensor:
    return again(block, x).float()


def dropout_off(block: Any, x: Tensor) -> Tensor:
    block.eval()
    return again(block, x)


def a_wrong_shape_goes_back(block: Any, x: Tensor) -> Tensor:
    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = block(x)
            y.backward(dy[0])
            return x.grad

    return Again.apply(x)


def gradient_of_x_twice(block: Any, x: Tensor) -> Tensor:
    y = again(block, x)
    y.register_hook(lambda dy: 2 * dy)
    return y


def keeps_the_insides_itself(block: Any, x: Tensor) -> Tensor:
    KEPT.append(block(x))
    return KEPT[-1].clone()


KEPT: list[Tensor] = []


def on_rank_0_alone(block: Any, x: Tensor) -> Tensor:
    return again(block, x) if dist.get_rank() == 0 else x


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.reduce_scatter: [to_the_owner, around_the_ring, all_at_once, in_a_batch, with_blocking_pairs],
    checks.all_gather: [into_a_list, handed_around_the_ring, received_in_place, gathered_in_a_batch],
    checks.train_sharded: [with_padding, a_piece_of_each_parameter, updates_a_view, owners_broadcast],
    checks.sharded_linear: [by_the_page, with_collectives, around_a_ring, computed_again],
    checks.recompute: [
        with_gradients_by_name,
        pytorch_reentrant,
        pytorch_with_saved_tensors,
        by_hooks_on_saved_tensors,
        in_one_function_for_all,
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.reduce_scatter: {
        picks_from_the_whole_sum: "`all_reduce` at work",
        adds_to_the_argument: "changes `tensor`",
        multiplies_its_own: "sends nothing",
        returns_all_pieces: "not even of the right type",
        in_single_precision: "not even of the right type, dtype and shape",
        turns_it_around: "in the wrong order",
        twice_too_large: "2 times too large",
        talks_to_one_rank_alone: "This is not what one process would have",
    },
    checks.all_gather: {
        adds_up_zeros: "`all_reduce` at work",
        repeats_its_own: "sends nothing",
        returns_a_list: "not even of the right type",
        gathers_in_single_precision: "not even of the right type, dtype and shape",
        changes_its_piece: "changes `piece`",
        leaves_out_the_last_place: "not even of the right type, dtype and shape",
        passes_wholes_around: "sends 9 numbers in all, where 3 would do",
    },
    checks.train_sharded: {
        trains_alone: "sends nothing",
        averages_parameters: "Every rank keeps the whole optimizer",
        decays_what_is_frozen: "changes `0.bias`",
        trains_on_the_first_batch: "not what one process would have",
        takes_rank_0_s_gradient: "not what one process would have",
        normalizes_the_inputs: "changes `batches[0][0]`",
        trains_in_single_precision: "not even of the right type, dtype and shape",
    },
    checks.sharded_linear: {
        keeps_all_weights: "The whole weight is kept",
        loses_dx: "`the result[dx]` is not even of the right type",
        loses_the_gradient: "`the result[gradient of shards[0]]` is not even of the right type",
        computes_in_single_precision: "not even of the right type, dtype and shape",
        averages_outputs: "not what one process would have",
        multiplies_its_own_rows: "sends nothing",
        twice_the_output: "2 times too large",
        normalizes_in_place: "changes `shards[0]`",
    },
    checks.recompute: {
        returns_x: "`0.up.grad` is not even of the right type",
        without_any_gradient: "No gradient comes back",
        dropout_off: "not what one process would have",
        gradient_of_x_twice: "not what one process would have",
        keeps_the_insides_itself: "Everything inside the block is kept until the backward pass",
    },
}

# Runs that do not come to their end
ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.reduce_scatter: {
        sends_first: "somebody must receive first",
        buffer_of_another_dtype: "the dtype of what arrives",
        knows_four_ranks: "tuple index out of range",
    },
    checks.all_gather: {cut_by_chunk: "the size of what arrives", receives_first: "nobody has sent yet"},
    checks.train_sharded: {stumbles_over_what_is_frozen: "raises an exception at something that is new"},
    checks.sharded_linear: {
        returns_the_whole_gradient: "expected shape compatible with [3]",
        forgets_autograd: "does not require grad",
    },
    checks.recompute: {
        computes_in_float: "expected m1 and m2 to have the same dtype",
        a_wrong_shape_goes_back: "Mismatch in shape",
        on_rank_0_alone: "The call that waits",
    },
}
