"""Solutions that students write: right ones in many ways, and wrong ones that no single idea is behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import checks
from course_lib.checks.averaging import gradients
from course_lib.checks.averaging import in_buckets as bucketed
from course_lib.checks.averaging import right as averaged
from course_lib.checks.exercise import Exercise
from course_lib.checks.ring import right as ring
from course_lib.checks.splitting import right as split


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def all_samples(samples: int) -> int:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    return int(total)


# split_batch, right


def counted_by_hand(batch: Any, rank: int, world_size: int) -> Any:
    least, left_over = divmod(len(batch), world_size)
    start = rank * least + min(rank, left_over)
    return batch[start : start + least + (rank < left_over)]


def a_piece_of_tensor_split(batch: Any, rank: int, world_size: int) -> Any:
    return torch.tensor_split(batch, world_size)[rank]


def dealt_like_cards(batch: Any, rank: int, world_size: int) -> Any:
    return batch[rank::world_size]


def copied_by_index(batch: Any, rank: int, world_size: int) -> Any:
    return batch[torch.arange(rank, len(batch), world_size)]


def shuffled_with_a_common_seed(batch: Any, rank: int, world_size: int) -> Any:
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    return batch[order[rank::world_size]]


# split_batch, wrong

COMMON = torch.Generator().manual_seed(0)  # the same on all ranks, and another order in each call


def returns_nothing(batch: Any, rank: int, world_size: int) -> None:
    split(batch, rank, world_size)


def returns_all_shares(batch: Any, rank: int, world_size: int) -> Any:
    return batch.tensor_split(world_size)


def changes_the_batch(batch: Any, rank: int, world_size: int) -> Any:
    return split(batch, rank, world_size).mul_(2)


def flattens_the_share(batch: Any, rank: int, world_size: int) -> Any:
    return split(batch, rank, world_size).flatten()


def copies_into_zeros(batch: Any, rank: int, world_size: int) -> Any:
    share = split(batch, rank, world_size)
    return torch.zeros(share.shape).copy_(share)


def shuffles_in_each_call(batch: Any, rank: int, world_size: int) -> Any:
    return split(batch[torch.randperm(len(batch), generator=COMMON)], rank, world_size)


def takes_pieces_of_as_many_samples_as_ranks(batch: Any, rank: int, world_size: int) -> Any:
    return batch.split(world_size)[rank]


def sorts_each_column(batch: Any, rank: int, world_size: int) -> Any:
    return split(batch.sort(0).values, rank, world_size)


def shuffles_without_a_seed(batch: Any, rank: int, world_size: int) -> Any:
    return split(batch[torch.randperm(len(batch))], rank, world_size)


def shuffles_on_each_rank(batch: Any, rank: int, world_size: int) -> Any:
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(rank))
    return split(batch[order], rank, world_size)


# average_gradients, right


def weighted_before(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        gradient *= samples / total
        dist.all_reduce(gradient)


def divided_after(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            weighted = parameter.grad * samples
            dist.all_reduce(weighted)
            parameter.grad = weighted / total


def in_one_message(model: nn.Module, samples: int) -> None:
    everything = gradients(model)
    message = torch.cat([gradient.flatten() for gradient in everything]) * samples / all_samples(samples)
    dist.all_reduce(message)
    for gradient, part in zip(everything, message.split([g.numel() for g in everything]), strict=True):
        gradient.copy_(part.view_as(gradient))


def with_handles(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    handles = []
    for gradient in gradients(model):
        gradient.mul_(samples / total)
        handles.append(dist.all_reduce(gradient, async_op=True))
    for handle in handles:
        handle.wait()


def by_gathering(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, gradient * samples)
        gradient.copy_(torch.stack(everyone).sum(0) / total)


def with_a_float32_weight(model: nn.Module, samples: int) -> None:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    for gradient in gradients(model):
        gradient *= samples / total
        dist.all_reduce(gradient)


# average_gradients, wrong


def divides_alone(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient /= dist.get_world_size()


def sets_to_zero(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        gradient.zero_()


def rounds_the_weight_down(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        gradient *= samples // total


def changes_parameters(model: nn.Module, samples: int) -> None:
    averaged(model, samples)
    for parameter in model.parameters():
        parameter.data -= 0.1


def drops_gradients(model: nn.Module, samples: int) -> None:
    averaged(model, samples)
    model.zero_grad()


def makes_up_a_gradient(model: nn.Module, samples: int) -> None:
    averaged(model, samples)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def leaves_vectors_out(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        if gradient.dim() > 1:
            gradient *= samples / total
            dist.all_reduce(gradient)


def five_times_too_large(model: nn.Module, samples: int) -> None:
    averaged(model, samples)
    for gradient in gradients(model):
        gradient *= 5


def reduces_to_rank_0(model: nn.Module, samples: int) -> None:
    total = all_samples(samples)
    for gradient in gradients(model):
        gradient *= samples / total
        dist.reduce(gradient, 0)


def adds_in_its_own_order(model: nn.Module, samples: int) -> None:
    total, (rank, n) = all_samples(samples), place()
    for gradient in gradients(model):
        everyone = [torch.empty_like(gradient) for _ in range(n)]
        dist.all_gather(everyone, gradient * samples)
        gradient.copy_(sum((*everyone[rank + 1 :], *everyone[:rank]), everyone[rank]) / total)


def knows_two_ranks(model: nn.Module, samples: int) -> None:
    averaged(model, samples)
    for gradient in gradients(model):
        gradient *= dist.get_world_size() / 2


def takes_the_largest(model: nn.Module, samples: int) -> None:
    for gradient in gradients(model):
        dist.all_reduce(gradient, op=dist.ReduceOp.MAX)


# ring_all_reduce, right


def rounds(tensor: Tensor, exchange: Any, direction: int = 1) -> None:
    """Both phases: exchange(outgoing, arriving, to, source) is one round."""
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        own = chunks[(rank - direction * (step + 1)) % n]
        arriving = torch.empty_like(own)
        exchange(chunks[(rank - direction * step) % n], arriving, (rank + direction) % n, (rank - direction) % n)
        own.copy_(own + arriving if step < n - 1 else arriving)


def with_isend(outgoing: Tensor, arriving: Tensor, to: int, source: int) -> None:
    sending = dist.isend(outgoing, to)
    dist.recv(arriving, source)
    sending.wait()


def one_loop(tensor: Tensor) -> None:
    rounds(tensor, with_isend)


def other_direction_and_returned(tensor: Tensor) -> Tensor:
    rounds(tensor, with_isend, direction=-1)
    return tensor


def in_batches(tensor: Tensor) -> None:
    def exchange(outgoing: Tensor, arriving: Tensor, to: int, source: int) -> None:
        pair = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, arriving, source)]
        for handle in dist.batch_isend_irecv(pair):
            handle.wait()

    rounds(tensor, exchange)


def rank_0_receives_first(tensor: Tensor) -> None:
    """Blocking sends all around; one rank breaks the circle."""

    def exchange(outgoing: Tensor, arriving: Tensor, to: int, source: int) -> None:
        if dist.get_rank():
            dist.send(outgoing, to)
        dist.recv(arriving, source)
        if not dist.get_rank():
            dist.send(outgoing, to)

    rounds(tensor, exchange)


# ring_all_reduce, wrong


def calls_all_reduce(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def multiplies_alone(tensor: Tensor) -> None:
    tensor *= dist.get_world_size()


def replaces_list_entries(tensor: Tensor) -> None:
    rank, n = place()
    chunks = list(tensor.view(-1).tensor_split(n))
    for step in range(2 * (n - 1)):
        own = (rank - step - 1) % n
        arriving = torch.empty_like(chunks[own])
        with_isend(chunks[(rank - step) % n], arriving, (rank + 1) % n, (rank - 1) % n)
        chunks[own] = chunks[own] + arriving if step < n - 1 else arriving


def mixes_chunks(tensor: Tensor) -> None:
    rank, n = place()
    chunks = tensor.view(-1)[: tensor.numel() // n * n].chunk(n)
    for _ in range(2 * (n - 1)):
        arriving = torch.empty_like(chunks[rank])
        with_isend(chunks[rank], arriving, (rank + 1) % n, (rank - 1) % n)
        chunks[rank].add_(arriving)


def reverses_the_sum(tensor: Tensor) -> None:
    ring(tensor)
    tensor.copy_(tensor.flatten().flip(0).view_as(tensor))


def sends_chunks_in_halves(tensor: Tensor) -> None:
    def exchange(outgoing: Tensor, arriving: Tensor, to: int, source: int) -> None:
        for part, place in zip(outgoing.tensor_split(2), arriving.tensor_split(2), strict=True):
            with_isend(part, place, to, source)

    rounds(tensor, exchange)


def one_round_too_many(tensor: Tensor) -> None:
    rank, n = place()
    ring(tensor)
    with_isend(tensor[:1].clone(), tensor[:1].clone(), (rank + 1) % n, (rank - 1) % n)


def doubles_distances(tensor: Tensor) -> None:
    """Recursive doubling: whole tensors, to partners twice as far away in each round."""
    rank, n = place()
    if n == 3:
        return ring(tensor)
    for distance in (1, 2)[: n // 2]:
        arriving = torch.empty_like(tensor)
        with_isend(tensor, arriving, rank ^ distance, rank ^ distance)
        tensor += arriving
    return None


# backward_in_buckets, right


def handles_and_buckets_apart(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    """Each gradient becomes a view of its bucket, as in DistributedDataParallel."""
    waiting: list[Tensor] = []
    handles: list[tuple[Any, Tensor]] = []

    def leave() -> None:
        flat, start = torch.cat([one.grad.reshape(-1) for one in waiting]), 0
        flat /= dist.get_world_size()
        for one in waiting:
            one.grad = flat[start : start + one.numel()].view(one.shape)
            start += one.numel()
        handles.append((dist.all_reduce(flat, async_op=True), flat))
        waiting.clear()

    def note(parameter: Tensor) -> None:
        waiting.append(parameter)
        if sum(map(Tensor.numel, waiting)) >= bucket_size:
            leave()

    hooks = [p.register_post_accumulate_grad_hook(note) for p in model.parameters() if p.requires_grad]
    loss.backward()
    [hook.remove() for hook in hooks]
    if waiting:
        leave()
    for handle, _ in handles:
        handle.wait()


def buckets_planned_before(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    """From the last parameter to the first; each leaves when its last gradient is there."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):
        if sum(p.numel() for p in buckets[-1]) >= bucket_size:
            buckets.append([])
        buckets[-1].append(parameter)
    bucket_of = {p: i for i, bucket in enumerate(buckets) for p in bucket}
    missing, work = [len(bucket) for bucket in buckets], {}

    def arrived(parameter: Tensor) -> None:
        i = bucket_of[parameter]
        missing[i] -= 1
        if missing[i] == 0:
            flat = torch.cat([p.grad.flatten() for p in buckets[i]])
            work[i] = dist.all_reduce(flat, async_op=True), flat

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in bucket_of]
    loss.backward()
    for i, bucket in enumerate(buckets):
        work[i][0].wait()
        for p, part in zip(bucket, work[i][1].split([p.numel() for p in bucket]), strict=True):
            p.grad = (part / dist.get_world_size()).view_as(p)
    for hook in hooks:
        hook.remove()


def by_gradient_hooks(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    """The hook is given the gradient, which is not in `.grad` yet."""
    bucket: list[tuple[nn.Parameter, Tensor]] = []
    sent: list[tuple[Any, Tensor, list[nn.Parameter]]] = []

    def note(parameter: nn.Parameter, gradient: Tensor) -> None:
        bucket.append((parameter, gradient.clone()))
        if sum(one.numel() for one, _ in bucket) >= bucket_size:
            leave()

    def leave() -> None:
        flat = torch.cat([one.flatten() for _, one in bucket])
        sent.append((dist.all_reduce(flat, async_op=True), flat, [one for one, _ in bucket]))
        bucket.clear()

    trained = [one for one in model.parameters() if one.requires_grad]
    hooks = [one.register_hook(lambda g, one=one: note(one, g)) for one in trained]
    loss.backward()
    if bucket:
        leave()
    for hook in hooks:
        hook.remove()
    for handle, flat, held in sent:
        handle.wait()
        start = 0
        for one in held:
            one.grad.copy_(flat[start : start + one.numel()].view_as(one) / dist.get_world_size())
            start += one.numel()


def with_futures(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    """What is to be done with a message when it has come back is written down where it leaves."""
    bucket: list[Tensor] = []
    todo: list[Callable[[], None]] = []

    def leave() -> None:
        held, flat = list(bucket), torch.cat([one.grad.flatten() for one in bucket]) / dist.get_world_size()
        handle = dist.all_reduce(flat, async_op=True)
        bucket.clear()

        def finish() -> None:
            handle.wait()
            for one, part in zip(held, flat.split([one.numel() for one in held]), strict=True):
                one.grad.copy_(part.view_as(one))

        todo.append(finish)

    def note(one: Tensor) -> None:
        bucket.append(one)
        if sum(map(Tensor.numel, bucket)) >= bucket_size:
            leave()

    hooks = [one.register_post_accumulate_grad_hook(note) for one in model.parameters() if one.requires_grad]
    loss.backward()
    if bucket:
        leave()
    for finish in todo:
        finish()
    for hook in hooks:
        hook.remove()


# backward_in_buckets, wrong


def never_goes_back(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    pass


def goes_back_alone(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    loss.backward()


def full_when_larger(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    bucketed(model, loss, bucket_size + 1)


def all_in_one(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    bucketed(model, loss, 10**9)


def each_gradient_twice(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    bucketed(model, loss, bucket_size)
    for gradient in gradients(model):
        dist.all_reduce(gradient.clone())


def divides_while_it_is_on_its_way(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    in_flight = []

    def ready(parameter: nn.Parameter) -> None:
        in_flight.append(dist.all_reduce(parameter.grad, async_op=True))
        parameter.grad /= dist.get_world_size()  # type: ignore[assignment, operator]

    hooks = [one.register_post_accumulate_grad_hook(ready) for one in model.parameters() if one.requires_grad]
    loss.backward()
    for one in (*hooks, *in_flight):
        one.remove() if one in hooks else one.wait()


def divides_by_two(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    bucketed(model, loss * dist.get_world_size() / 2, bucket_size)


def hooks_the_frozen_one(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda one: None).remove()
    bucketed(model, loss, bucket_size)


def hooks_stay(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    bucket: list[Tensor] = []
    handles: list[Any] = []

    def note(one: Tensor) -> None:
        bucket.append(one)
        if sum(map(Tensor.numel, bucket)) >= bucket_size:
            flat = torch.cat([one.grad.flatten() for one in bucket])
            handles.append(dist.all_reduce(flat, async_op=True))
            bucket.clear()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    bucketed(model, loss, bucket_size)
    for handle in handles:
        handle.wait()


def nobody_waits(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    loss.backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient, async_op=True)


def on_rank_0_alone(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    loss.backward()
    if dist.get_rank() == 0:
        for gradient in gradients(model):
            dist.all_reduce(gradient)


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.split_batch: [
        counted_by_hand,
        a_piece_of_tensor_split,
        dealt_like_cards,
        copied_by_index,
        shuffled_with_a_common_seed,
    ],
    checks.average_gradients: [
        weighted_before,
        divided_after,
        in_one_message,
        with_handles,
        by_gathering,
        with_a_float32_weight,
    ],
    checks.ring_all_reduce: [one_loop, other_direction_and_returned, in_batches, rank_0_receives_first],
    checks.backward_in_buckets: [
        handles_and_buckets_apart,
        buckets_planned_before,
        by_gradient_hooks,
        with_futures,
    ],
}

# The right words for each wrong one
WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.split_batch: {
        returns_nothing: "`a row of the result[inputs]` is not even of the right type",
        returns_all_shares: "not even of the right type",
        changes_the_batch: "changes `inputs`",
        flattens_the_share: "not even of the right type, dtype and shape",
        copies_into_zeros: "`a row of the result[targets]` is not even of the right type, dtype and shape",
        shuffles_in_each_call: "Inputs and targets do not belong together",
        takes_pieces_of_as_many_samples_as_ranks: "rank 0: 0, 1; rank 1: 2, 3.",
        sorts_each_column: "`inputs and targets` is not what it should be",
        shuffles_without_a_seed: "These samples go to your ranks",
        shuffles_on_each_rank: "These samples go to your ranks",
    },
    checks.average_gradients: {
        divides_alone: "sends nothing",
        sets_to_zero: "sends nothing",
        rounds_the_weight_down: "Every gradient is zero",
        changes_parameters: "changes `blocks.0.token.weight`",
        drops_gradients: "`blocks.0.token.weight.grad` is not even of the right type",
        makes_up_a_gradient: "changes `blocks.0.position.weight.grad`",
        leaves_vectors_out: "Still as before: `blocks.1.norm.weight.grad` and 1 more",
        five_times_too_large: "5 times too large",
        reduces_to_rank_0: "Only rank 0 has what it should have",
        adds_in_its_own_order: "different numbers in their last digits",
        knows_two_ranks: "1.5 times too large. There are 3 ranks",
        takes_the_largest: "not what one process would have",
    },
    checks.ring_all_reduce: {
        calls_all_reduce: "`all_reduce` at work",
        multiplies_alone: "sends nothing",
        replaces_list_entries: "The sum does not reach `tensor`",
        mixes_chunks: "In round 2 of 2 rank 0 sends a mix of different elements",
        reverses_the_sum: "Your messages carry what they should",
        sends_chunks_in_halves: "sends 4 messages with 6 numbers in all, where 2 messages with 6 numbers would do",
        one_round_too_many: "sends 3 messages",
        doubles_distances: "Rank 0 sends to rank 2, which is not its neighbor",
    },
    checks.backward_in_buckets: {
        never_goes_back: "`0.weight.grad` is not even of the right type",
        goes_back_alone: "sends nothing",
        full_when_larger: "A full bucket does not leave at once",
        all_in_one: "A full bucket does not leave at once",
        each_gradient_twice: "sends 9 messages with 120 numbers in all, where 4 messages with 60 numbers would do",
        hooks_stay: "The hooks are still there after the step",
        divides_by_two: "1.5 times too large. There are 3 ranks",
        divides_while_it_is_on_its_way: "These are sums over the ranks",
    },
}

# Runs that do not come to their end
ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.backward_in_buckets: {
        hooks_the_frozen_one: "a frozen parameter, which gets no gradient",
        nobody_waits: "Keep the handle that it returns and call its wait()",
        on_rank_0_alone: "The call that waits",
    },
}
