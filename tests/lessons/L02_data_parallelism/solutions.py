"""Solutions as students write them: right ones in many ways, and wrong ones without a single misconception."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from lessons.L02_data_parallelism import checks
from lessons.L02_data_parallelism.checks_averaging import in_buckets
from lessons.L02_data_parallelism.checks_averaging import right as in_one_message
from lessons.L02_data_parallelism.checks_splitting import right as split
from tests.lessons.changes import told, ways

# split_batch

share = "batch[start:stop]"


def copied_by_index(batch: Tensor, rank: int, world_size: int) -> Tensor:
    return batch[torch.arange(rank, len(batch), world_size)]


def shuffled(batch: Tensor, rank: int, world_size: int) -> Tensor:
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    return batch[order[rank::world_size]]


# average_gradients


def one_by_one(model: nn.Module, samples: int) -> None:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    for parameter in model.parameters():
        if parameter.grad is not None:
            weighted = parameter.grad * samples
            dist.all_reduce(weighted)
            parameter.grad = weighted / total


summed, divided, is_there = "dist.all_reduce(weighted)", "weighted / total", "if parameter.grad is not None"
zeros = "if parameter.grad is None: parameter.grad = torch.zeros_like(parameter)\n        if True"
in_flight = "[one.wait() for one in [dist.all_reduce(part, async_op=True) for part in message.tensor_split(3)]]"
gathered = "everyone = [weighted.clone() for _ in range(dist.get_world_size())]; dist.all_gather(everyone, weighted)"
own_first = "weighted = sum(everyone[dist.get_rank() :] + everyone[: dist.get_rank()])"
by_gathering = changed(one_by_one, "by_gathering", summed, f"{gathered}; weighted = sum(everyone)")

# ring_all_reduce


def one_loop(tensor: Tensor) -> Tensor:
    """Do both phases in one loop."""
    rank, n = dist.get_rank(), dist.get_world_size()
    to, source = (rank + 1) % n, (rank - 1) % n
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * n - 2):
        outgoing, own = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(own)
        sending = dist.isend(outgoing, to)
        dist.recv(arriving, source)
        sending.wait()
        own.copy_(own + arriving if step < n - 1 else arriving)
    return tensor


outgoing, own, neighbors = "(rank - step) % n", "(rank - step - 1) % n", "(rank + 1) % n, (rank - 1) % n"
send, receive, wait = "sending = dist.isend(outgoing, to)", "dist.recv(arriving, source)", "sending.wait()"
cut = "tensor.view(-1).tensor_split(n)"
blocking = send, "rank and dist.send(outgoing, to)", wait, "rank or dist.send(outgoing, to)"
rank_0_receives_first = changed(one_loop, "rank_0_receives_first", *blocking)
pairs: tuple[str, ...] = send, "both = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, arriving, source)]"
pairs += receive, "handles = dist.batch_isend_irecv(both)", wait, "[handle.wait() for handle in handles]"
halves = "for half, other in zip(outgoing.tensor_split(2), arriving.tensor_split(2)): "
halves += "sending = dist.isend(half, to); dist.recv(other, source); sending.wait()"
evens_first = "order = sorted(range(n), key=lambda rank: rank % 2); rank = order.index(rank); to, source"

# backward_in_buckets


def planned_before(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    """Plan buckets from the last parameter to the first; each leaves when its last gradient is there."""
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


divide, leave, put_back = "message /= dist.get_world_size()", "bucket.clear()", "one.grad = part.view_as(one)"
divided_at_once = divide, "pass", leave, f"{divide}; {leave}"
divides_while_it_is_on_its_way = changed(in_buckets, "divides_while_it_is_on_its_way", *divided_at_once)
divided_before = changed(in_buckets, "divided_before", divide, "pass", "in_flight.app", f"{divide}; in_flight.app")
views = "for one, part in zip(bucket, message.split([one.numel() for one in bucket])): one.grad = part.view_as(one)"
# The hook gets the gradient, which is not yet in `.grad`.
given: tuple[str, ...] = (
    "post_accumulate_grad_hook(ready)",
    "hook(lambda g, one=one: arrived.update({one: g}) or ready(one))",
)
given += "one.grad.flatten()", "arrived[one].flatten()", "    trained = ", "    arrived = {}\n    trained = "

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.split_batch: [
        copied_by_index,
        shuffled,
        *ways(
            split,
            a_piece_of_tensor_split=(share, "batch.tensor_split(world_size)[rank]"),
            dealt_like_cards=(share, "batch[rank::world_size]"),
        ),
    ],
    checks.average_gradients: [
        one_by_one,
        by_gathering,
        *ways(
            one_by_one,
            in_place=("parameter.grad * samples", "parameter.grad.mul_(samples / int(total))", divided, "weighted"),
            with_a_float32_weight=("* samples", "* (samples / total)", divided, "weighted"),
        ),
        *ways(in_one_message, with_handles=("dist.all_reduce(message)", in_flight)),
    ],
    checks.ring_all_reduce: [
        one_loop,
        rank_0_receives_first,
        *ways(
            one_loop,
            in_batches=pairs,
            other_direction=(
                neighbors,
                "(rank - 1) % n, (rank + 1) % n",
                "rank - step)",
                "rank + step)",
                own,
                own.replace("-", "+"),
            ),
        ),
    ],
    checks.backward_in_buckets: [
        planned_before,
        divided_before,
        *ways(
            in_buckets,
            by_gradient_hooks=given,
            views_of_a_message=(put_back, "pass", leave, f"{views}\n        {leave}"),
        ),
    ],
}

# The right words for each wrong one
WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.split_batch: told(
        split,
        returns_nothing=("`a row of the result[inputs]` is None", "return ", ""),
        returns_all_shares=("than it should have", share, "batch.tensor_split(world_size)"),
        changes_the_batch=("changes `inputs`", share, f"{share}.mul_(2)"),
        flattens_the_share=("than it should have", share, f"{share}.flatten()"),
        copies_into_zeros=(
            "`a row of the result[targets]` has another dtype",
            share,
            f"torch.zeros({share}.shape).copy_({share})",
        ),
        takes_as_many_samples_as_ranks=("rank 0: 0, 1; rank 1: 2, 3.", share, "batch.split(world_size)[rank]"),
        sorts_each_column=("`inputs and targets` is not what it should be", share, "batch.sort(0).values[start:stop]"),
    )
    | told(
        shuffled,
        shuffles_in_each_call=("Inputs and targets do not belong together", "seed(0)", "seed(batch.dim())"),
        shuffles_without_a_seed=("These samples go to your ranks", ", generator=torch.Generator().manual_seed(0)", ""),
    ),
    checks.average_gradients: told(
        one_by_one,
        divides_alone=("sends nothing", summed, "pass", "dist.all_reduce(total)", "total *= 2"),
        rounds_the_weight_down=("Every gradient is zero", "* samples", "* (samples // total)", divided, "weighted"),
        makes_up_a_gradient=("changes `blocks.0.position.weight.grad`", is_there, zeros),
        leaves_vectors_out=(
            "Still as before: `blocks.1.norm.weight.grad` and 1 more",
            is_there,
            f"{is_there} and parameter.dim() > 1",
        ),
        reduces_to_rank_0=("on rank 1. Right on rank 0.", summed, "dist.reduce(weighted, 0)"),
        adds_in_its_own_order=("different numbers in their last digits", summed, f"{gathered}; {own_first}"),
        knows_two_ranks=("1.5 times too large. There are 3 ranks", divided, f"{divided} * dist.get_world_size() / 2"),
        takes_the_largest=(
            "0.5 times the largest, place by place",
            summed,
            "dist.all_reduce(weighted, dist.ReduceOp.MAX)",
        ),
        changes_parameters=("changes `blocks.0.token.weight`", summed, f"{summed}; parameter.data -= 0.1"),
        drops_gradients=("`blocks.0.token.weight.grad` is None", divided, "None"),
    ),
    checks.ring_all_reduce: told(
        one_loop,
        calls_all_reduce=("a collective at work", "2 * n - 2", "0", "return tensor", "dist.all_reduce(tensor)"),
        multiplies_alone=("sends nothing", "2 * n - 2", "0", "return tensor", "tensor *= n"),
        replaces_list_entries=("`tensor` is what it was before", cut, f"[*{cut}]", "own.copy_(", f"chunks[{own}] = ("),
        mixes_chunks=("In round 2 of 2 rank 0 sends a mix of different elements", outgoing, "rank", own, "rank"),
        reverses_the_sum=(
            "Your messages carry what they should",
            "return tensor",
            "tensor.copy_(tensor.flatten().flip(0).view_as(tensor))",
        ),
        sends_chunks_in_halves=(
            "sends 4 messages with 6 numbers in all, where 2 messages with 6 numbers would do",
            *(receive, "pass", wait, "pass", send, halves),
        ),
        another_ring=(
            "Rank 0 sends to rank 2, which is not its neighbor",
            *("to, source", evens_first, neighbors, "order[(rank + 1) % n], order[(rank - 1) % n]"),
        ),
    ),
    checks.backward_in_buckets: {
        divides_while_it_is_on_its_way: "These are sums over the ranks",
        **told(
            in_buckets,
            never_goes_back=("`0.weight.grad` is None", "loss.backward()", "pass"),
            goes_back_alone=("sends nothing", "(ready)", "(lambda _: None)"),
            full_when_larger=("A bucket of exactly `bucket_size` numbers stays", ">= bucket_size", "> bucket_size"),
            each_gradient_twice=(
                "sends 9 messages with 120 numbers in all, where 3 messages with 60 numbers would do",
                *(put_back, f"{put_back}; dist.all_reduce(part.clone())"),
            ),
            divides_by_two=("1.5 times too large. There are 3 ranks", divide, "message /= 2"),
        ),
    },
}

# Runs that do not come to their end
ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.backward_in_buckets: told(
        in_buckets,
        hooks_the_frozen_one=("a frozen parameter, which gets no gradient", " if parameter.requires_grad", ""),
        nobody_waits=("Keep the handle that it returns and call its wait()", "handle.wait()", "pass"),
        once_more_on_rank_0=(
            "The call that waits",
            "if bucket:",
            "dist.get_rank() or dist.all_reduce(loss.data)\n    if bucket:",
        ),
    ),
}
