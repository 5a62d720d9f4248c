"""Solutions to the exercise on layer-wise model parallelism, as students write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib import checks
from course_lib.checks.exercise import Exercise
from course_lib.checks.layerwise import held, passed_on, split
from course_lib.instruments.ledger import Ledger
from course_lib.mechanisms import layerwise

Costs = list[int]

# split_layers, right


def by_the_course(costs: Costs, n_stages: int) -> list[range]:
    return layerwise.split_layers(len(costs), n_stages, costs)


def one_stage_at_a_time(costs: Costs, n_stages: int) -> list[list[int]]:
    """Where the last stage begins, and all before it by the same function."""

    def dearest(stages: list[list[int]]) -> float:
        return max(sum(costs[i] for i in stage) for stage in stages)

    layers = list(range(len(costs)))
    if n_stages == 1:
        return [layers]
    starts = range(n_stages - 1, len(costs))
    return min(([*one_stage_at_a_time(costs[:i], n_stages - 1), layers[i:]] for i in starts), key=dearest)


def by_a_limit(costs: Costs, n_stages: int) -> list[range]:
    """The lowest limit under which the stages, each as full as can be, are not too many."""
    for limit in range(max(costs), sum(costs) + 1):
        stages: list[range] = []
        first = own = 0
        for i, cost in enumerate(costs):
            left = n_stages - len(stages) - 1  # stages after this one, which need a layer each
            if i > first and (own + cost > limit or len(costs) - i <= left):
                stages.append(range(first, i))
                first, own = i, 0
            own += cost
        stages.append(range(first, len(costs)))
        if len(stages) <= n_stages:
            return stages
    raise AssertionError("all layers on one stage are within the last limit")


def by_a_table(costs: Costs, n_stages: int) -> tuple[list[int], ...]:
    sums = [0, *accumulate(costs)]

    @cache
    def best(stop: int, n: int) -> tuple[float, tuple[int, ...]]:
        if n == 1:
            return sums[stop], (0,)
        tried = []
        for start in range(n - 1, stop):
            dearest, starts = best(start, n - 1)
            tried.append((max(dearest, sums[stop] - sums[start]), (*starts, start)))
        return min(tried)

    starts = best(len(costs), n_stages)[1]
    return tuple(list(range(*ends)) for ends in zip(starts, (*starts[1:], len(costs)), strict=True))


# split_layers, wrong


def lengths_alone(costs: Costs, n_stages: int) -> list[int]:
    return [len(stage) for stage in split(costs, n_stages)]


def what_it_costs(costs: Costs, n_stages: int) -> int:
    return max(sum(costs[i] for i in stage) for stage in split(costs, n_stages))


def costs_in_place_of_layers(costs: Costs, n_stages: int) -> list[list[int]]:
    return [[costs[i] for i in stage] for stage in split(costs, n_stages)]


def last_layer_lost(costs: Costs, n_stages: int) -> list[range]:
    *others, last = split(costs, n_stages)
    return [*others, last[:-1]]


def empty_stages(costs: Costs, n_stages: int) -> list[range]:
    return [range(len(costs)), *[range(0)] * (n_stages - 1)]


def stages_as_needed(costs: Costs, n_stages: int) -> list[list[int]]:
    """No stage is dearer than the dearest layer, however many this makes."""
    stages: list[list[int]] = [[]]
    for i, cost in enumerate(costs):
        if sum(costs[j] for j in stages[-1]) + cost > max(costs):
            stages.append([])
        stages[-1].append(i)
    return stages


def sorts_the_costs(costs: Costs, n_stages: int) -> list[range]:
    costs.sort()
    return split(costs, n_stages)


def prints_only(costs: Costs, n_stages: int) -> None:
    print(split(costs, n_stages))


# forward_and_backward, right


def with_two_functions(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def received(shape: tuple[int, ...], source: int) -> Tensor:
        tensor = torch.zeros(shape, dtype=torch.float64)
        dist.recv(tensor, source)
        return tensor

    x = inputs if rank == 0 else received((len(inputs), width), rank - 1).requires_grad_(True)
    y = stage(x)
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dy = received(tuple(y.shape), rank + 1)
        if rank > 0 or any(parameter.requires_grad for parameter in stage.parameters()):
            torch.autograd.backward(y, dy)
        if rank > 0:
            dist.send(x.grad, rank - 1)  # type: ignore[arg-type]
        return None
    loss = loss_fn(y, targets)
    loss.backward()
    dist.send(x.grad, rank - 1)  # type: ignore[arg-type]
    return loss.detach()


def with_handles(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> float | None:
    rank, last, handles, dy = dist.get_rank(), dist.get_world_size() - 1, [], None
    x = inputs.clone()
    if rank:
        x = inputs.new_zeros(inputs.shape[0], width)
        dist.irecv(x, rank - 1).wait()
    y = stage(x.requires_grad_())  # the first rank's gradient is of no use, and does no harm
    result = loss_fn(y, targets) if rank == last else y
    if rank < last:
        handles.append(dist.isend(y.detach().clone(), rank + 1))
        dist.irecv(dy := torch.empty(y.shape).to(y), rank + 1).wait()
    result.backward(dy)
    if rank:
        handles.append(dist.isend(x.grad, rank - 1))  # type: ignore[arg-type]
    for handle in handles:
        handle.wait()
    return result.item() if rank == last else None


def with_autograd_grad(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    """Gradients by torch.autograd.grad, added on one's own."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.empty(len(inputs), width, dtype=inputs.dtype) if rank else inputs.clone()
    if rank:
        dist.recv(x, rank - 1)
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    y = stage(x.requires_grad_())
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dy = torch.empty_like(y)
        dist.recv(dy, rank + 1)
    loss = loss_fn(y, targets) if rank == last else None
    dx, *found = torch.autograd.grad(y if loss is None else loss, [x, *trained], dy if loss is None else None)
    for parameter, gradient in zip(trained, found, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    if rank:
        dist.send(dx, rank - 1)
    return loss


def as_a_product(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    """Backward from the scalar (y * dy).sum(), whose gradient is dy."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty(len(inputs), width, dtype=torch.float64, requires_grad=True)
    if rank != 0:
        dist.recv(arrived.data, src=rank - 1)
    y = stage(arrived if rank != 0 else inputs)
    if rank == n - 1:
        scalar = loss_fn(y, targets)
    else:
        dist.send(y.data, dst=rank + 1)
        dy = torch.empty_like(y)
        dist.recv(dy, src=rank + 1)
        scalar = (y * dy).sum()
    if scalar.requires_grad:
        scalar.backward()
    if rank != 0:
        dist.send(arrived.grad, dst=rank - 1)  # type: ignore[arg-type]
    return scalar if rank == n - 1 else None


# forward_and_backward, wrong


def does_nothing(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> None:
    pass


def loss_not_returned(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> None:
    passed_on(stage, inputs, targets, loss_fn, width)


def five_times_the_loss(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    return passed_on(stage, inputs, targets, lambda y, target: 5 * loss_fn(y, target), width)


def updates_as_well(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    loss = passed_on(stage, inputs, targets, loss_fn, width)
    for parameter in stage.parameters():
        parameter.data -= parameter.grad
    return loss


def clears_afterwards(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    loss = passed_on(stage, inputs, targets, loss_fn, width)
    stage.zero_grad()
    return loss


def loss_to_all(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor:
    loss = passed_on(stage, inputs, targets, loss_fn, width)
    shared = torch.zeros((), dtype=torch.float64) if loss is None else loss.detach()
    dist.broadcast(shared, dist.get_world_size() - 1)
    return shared


def layers_backwards(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    return passed_on(nn.Sequential(*reversed(stage)), inputs, targets, loss_fn, width)


# Runs that do not come to their end


def all_receive_first(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    dist.recv(inputs.clone(), (dist.get_rank() - 1) % dist.get_world_size())
    return passed_on(stage, inputs, targets, loss_fn, width)


def buffer_without_dtype(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> None:
    if dist.get_rank():
        dist.recv(torch.empty(len(inputs), width), dist.get_rank() - 1)
    else:
        dist.send(stage(inputs).detach(), 1)


def for_two_ranks(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    """Rank 1 is the last one, whatever comes after it."""
    if dist.get_rank() == 0:
        y = stage(inputs)
        dist.send(y.detach(), 1)
        dist.recv(dy := torch.empty_like(y), 1)
        y.backward(dy)
        return None
    dist.recv(x := inputs.new_empty(len(inputs), width), dist.get_rank() - 1)
    loss = loss_fn(stage(x.requires_grad_()), targets)
    loss.backward()
    dist.send(x.grad, dist.get_rank() - 1)  # type: ignore[arg-type]
    return loss


def no_graph(stage: Any, inputs: Tensor, targets: Tensor, loss_fn: Any, width: int) -> Tensor | None:
    """The layers compute without a graph, as if sending were evaluating."""
    with torch.no_grad():
        y = stage(inputs)
    return passed_on(nn.Sequential(Constant(y)), inputs, targets, loss_fn, width)


class Constant(nn.Module):
    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = y

    def forward(self, x: Tensor) -> Tensor:
        return self.y


# who_holds_what, right


def layer_by_layer(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, int, int, int]]:
    ranks = []
    for stage in stages:
        weights = biases = outputs = 0
        for layer in stage:
            weights += widths[layer] * widths[layer + 1]
            biases += widths[layer + 1]
            outputs += samples * widths[layer + 1]
        parameters = (weights + biases) * 4
        inputs = samples * widths[stage[0]]
        ranks.append((parameters, parameters, 2 * parameters + len(stage) * 8, 4 * (inputs + outputs)))
    return ranks


def counted(widths: list[int], stages: list[range], samples: int) -> list[list[int]]:
    """Each rank's layers are made, trained for a step and counted."""
    ranks = []
    for stage in stages:
        module = network(widths, stage)
        optimizer = torch.optim.AdamW(module.parameters())
        x = torch.randn(samples, widths[stage.start], requires_grad=stage.start > 0)
        with Ledger(module, optimizer) as ledger:
            y = module(x)
            activations = ledger.now.activations
            y.sum().backward()
            optimizer.step()
            own = ledger.now
        ranks.append([own.parameters, own.gradients, own.optimizer, activations])
    return ranks


def network(widths: list[int], stage: range) -> nn.Sequential:
    return nn.Sequential(*(m for i in stage for m in (nn.Linear(widths[i], widths[i + 1]), nn.Tanh())))


def on_meta(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, int, int, int]]:
    ranks = []
    for stage in stages:
        with torch.device("meta"):
            tensors = list(network(widths, stage).parameters())
            kept = [torch.empty(samples, width) for width in widths[stage[0] : stage[-1] + 2]]
        own = sum(tensor.nbytes for tensor in tensors)
        ranks.append((own, own, 2 * own + 4 * len(tensors), sum(tensor.nbytes for tensor in kept)))
    return ranks


def with_tensors(widths: list[int], stages: list[range], samples: int) -> list[Tensor]:
    w = torch.tensor(widths)
    numbers = (w[:-1] + 1) * w[1:]
    rows = []
    for stage in stages:
        own = 4 * numbers[stage.start : stage.stop].sum()
        activations = 4 * samples * w[stage.start : stage.stop + 1].sum()
        rows.append(torch.stack([own, own, 2 * own + 8 * len(stage), activations]))
    return rows


# who_holds_what, wrong


def in_numbers(widths: list[int], stages: list[range], samples: int) -> list[tuple[float, ...]]:
    return [tuple(number / 4 for number in rank) for rank in held(widths, stages, samples)]


def in_kilobytes(widths: list[int], stages: list[range], samples: int) -> list[str]:
    return [f"{sum(rank) / 1000} kB" for rank in held(widths, stages, samples)]


def totals(widths: list[int], stages: list[range], samples: int) -> list[int]:
    return [sum(rank) for rank in held(widths, stages, samples)]


def of_all_together(widths: list[int], stages: list[range], samples: int) -> tuple[int, ...]:
    return tuple(map(sum, zip(*held(widths, stages, samples), strict=True)))


def parameters_alone(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, ...]]:
    return [(rank[0], 0, 0, 0) for rank in held(widths, stages, samples)]


def everything_twice(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, ...]]:
    return [tuple(2 * number for number in rank) for rank in held(widths, stages, samples)]


def grows_the_widths(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, int, int, int]]:
    found = held(widths, stages, samples)
    widths.append(1)
    return found


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.split_layers: [by_the_course, one_stage_at_a_time, by_a_limit, by_a_table],
    checks.forward_and_backward: [with_two_functions, with_handles, with_autograd_grad, as_a_product],
    checks.who_holds_what: [layer_by_layer, counted, on_meta, with_tensors],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.split_layers: {
        lengths_alone: "is not what it should be",
        what_it_costs: "is not what it should be",
        costs_in_place_of_layers: "is not what it should be",
        last_layer_lost: "is not what it should be",
        empty_stages: "is not what it should be",
        stages_as_needed: "is not what it should be",
        sorts_the_costs: "changes `plans[0][0][0]`",
        prints_only: "is not what it should be",
    },
    checks.forward_and_backward: {
        does_nothing: "`0.weight.grad` is not even of the right type",
        loss_not_returned: "loss of minibatch 0]` is not even of the right type",
        five_times_the_loss: "5 times too large",
        updates_as_well: "changes `0.weight`",
        clears_afterwards: "`0.weight.grad` is not even of the right type",
        loss_to_all: "On rank 0, `the result[loss of minibatch 0]` is not even of the right type",
        layers_backwards: "not what one process would have",
    },
    checks.who_holds_what: {
        in_numbers: "4 times too small",
        in_kilobytes: "not even of the right type",
        totals: "not even of the right type",
        of_all_together: "not even of the right type",
        parameters_alone: "not what was asked for",
        everything_twice: "2 times too large",
        grows_the_widths: "changes `plans[0][0]`",
    },
}

ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.forward_and_backward: {
        all_receive_first: "somebody must send first",
        buffer_without_dtype: "the dtype of what",
        for_two_ranks: "is a number of ranks written into your code?",
        no_graph: "does not require grad",
    },
}
