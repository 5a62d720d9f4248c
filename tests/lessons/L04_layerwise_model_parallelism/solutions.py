"""Solutions to the exercise on layer-wise model parallelism, as students write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from course_lib.instruments.ledger import Ledger
from course_lib.mechanisms import layerwise
from lessons.L04_layerwise_model_parallelism import checks
from lessons.L04_layerwise_model_parallelism.checks import held, passed_on, split
from tests.lessons.changes import told, ways

Costs = list[int]

# split_layers


def by_the_course(costs: Costs, n_stages: int) -> list[range]:
    return layerwise.split_layers(len(costs), n_stages, costs)


def by_a_limit(costs: Costs, n_stages: int) -> list[range]:
    """Find the lowest limit with which filling stages one after the other needs no more than n_stages."""
    for limit in range(max(costs), sum(costs) + 1):
        stages: list[range] = []
        first = own = 0
        for i, cost in enumerate(costs):
            left = n_stages - len(stages) - 1  # leave a layer for each stage after this one
            if i > first and (own + cost > limit or len(costs) - i <= left):
                stages.append(range(first, i))
                first, own = i, 0
            own += cost
        stages.append(range(first, len(costs)))
        if len(stages) <= n_stages:
            return stages
    raise AssertionError("all layers on one stage are within the last limit")


best = "min(splits, key=price)"

# forward_and_backward

send, receive = "dist.send(y.detach(), rank + 1)", "dist.recv(dy := torch.empty_like(y), rank + 1)"
back, done, forward = "y.backward(dy)", "return loss", "y = stage(x)"
with_two_functions = changed(
    passed_on,
    "with_two_functions",
    *(back, "torch.autograd.backward(y, dy)", done, "return None if loss is None else loss.detach()"),
    *("inputs.new_empty(len(inputs), width)", "torch.zeros(len(inputs), width, dtype=torch.float64)"),
)
handles: tuple[str, ...] = (
    send,
    "sending = dist.isend(y.detach().clone(), rank + 1)",
    receive,
    f"{receive}; sending.wait()",
)
handles += (
    "dist.recv(x, rank - 1)",
    "dist.irecv(x, rank - 1).wait()",
    done,
    "return loss.item() if rank == last else None",
)
# gradients by torch.autograd.grad, added by hand
by_grad: tuple[str, ...] = (
    "x = inputs\n",
    "x, dy = inputs.clone().requires_grad_(), None\n",
    "loss.backward()",
    "y = loss",
)
by_grad += "        if y.requires_grad:\n            y.backward(dy)\n", ""
by_grad += (
    "    if rank > 0:\n        dist.send(x.grad, rank - 1)  # type: ignore[arg-type]",
    """\
    trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    dx, *gradients = torch.autograd.grad(y, [x, *trained], dy)
    for parameter, gradient in zip(trained, gradients):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    if rank > 0:
        dist.send(dx, rank - 1)""",
)
to_all = "loss = torch.zeros((), dtype=torch.float64) if loss is None else loss.detach(); dist.broadcast(loss, last)"

# who_holds_what


def counted(widths: list[int], stages: list[range], samples: int) -> list[list[int]]:
    """Build each rank's layers, train them for a step, and count bytes."""
    ranks = []
    for stage in stages:
        module = nn.Sequential(*(m for i in stage for m in (nn.Linear(widths[i], widths[i + 1]), nn.Tanh())))
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


layers = "(widths[i] + 1) * widths[i + 1] for i in stage", "widths[i] * widths[i + 1] + widths[i + 1] for i in stage"
numbers, rows = "(parameters, parameters, optimizer, activations)", "return found"
layer_by_layer = changed(held, "layer_by_layer", *layers, numbers, f"list({numbers})")

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.split_layers: [
        by_the_course,
        by_a_limit,
        *ways(split, last_of_the_best=(best, "min(reversed(splits), key=price)")),
        *ways(split, lists_in_a_tuple=("return min(splits, key=price)", f"return tuple(map(list, {best}))")),
    ],
    checks.forward_and_backward: [
        with_two_functions,
        *ways(
            passed_on,
            with_handles=handles,
            with_autograd_grad=by_grad,
            as_a_product=(back, "(y * dy).sum().backward()"),
        ),
    ],
    checks.who_holds_what: [
        counted,
        layer_by_layer,
        *ways(
            held,
            rows_as_tensors=(numbers, f"torch.tensor({numbers})"),
            all_in_a_tensor=(rows, "return torch.tensor(found)"),
        ),
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.split_layers: told(
        split,
        lengths_alone=("is not what it should be", best, f"[len(stage) for stage in {best}]"),
        last_layer_lost=("is not what it should be", "*cut, len(costs))", "*cut, len(costs) - 1)"),
        one_stage_more=("is not what it should be", "n_stages - 1", "min(n_stages, len(costs) - 1)"),
        sorts_the_costs=("changes `plans[0][0][0]`", "cuts =", "costs.sort(); cuts ="),
    ),
    checks.forward_and_backward: told(
        passed_on,
        loss_not_returned=("loss of minibatch 0]` is None", done, "return None"),
        five_times_the_loss=("5 times too large", "loss_fn(y, targets)", "5 * loss_fn(y, targets)"),
        updates_as_well=(
            "changes `0.weight`",
            done,
            "[one.data.sub_(one.grad) for one in stage.parameters()]; return loss",
        ),
        clears_afterwards=("`0.weight.grad` is None", done, "stage.zero_grad(); return loss"),
        loss_to_all=(
            "On rank 0, `the result[loss of minibatch 0]` has another",
            done,
            f"{to_all}; return loss",
        ),
        layers_backwards=("not what was asked for", forward, "y = nn.Sequential(*reversed(stage))(x)"),
    ),
    checks.who_holds_what: told(
        held,
        in_numbers=("4 times too small", rows, "return [tuple(number / 4 for number in rank) for rank in found]"),
        in_kilobytes=(
            "[parameters]` is missing",
            numbers,
            "f'{sum((parameters, parameters, optimizer, activations)) / 1000} kB'",
        ),
        totals=("[parameters]` is missing", numbers, f"sum({numbers})"),
        parameters_alone=("[parameters]`", numbers, "(parameters, 0, 0, 0)"),
        one_step_more=("Every number that is wrong is 4 more", "4 * 2 * len(stage)", "4 * (2 * len(stage) + 1)"),
        grows_the_widths=("changes `plans[0][0]`", rows, "widths.append(1); return found"),
    ),
}

ACCIDENTS: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.forward_and_backward: told(
        passed_on,
        all_receive_first=(
            "somebody must send first",
            "x = inputs\n",
            "dist.recv(x := inputs, (rank - 1) % (last + 1))\n",
        ),
        buffer_without_dtype=("the dtype of what", "inputs.new_empty(", "torch.empty("),
        for_two_ranks=("It was right before, with: 2 ranks, 2 layers on each", "rank == last", "rank > 0"),
        no_graph=("does not require grad", forward, "y = stage(x).detach()"),
    ),
}
