"""The checks for layer-wise model parallelism: where to cut, a step over ranks, and what each of them holds.

Splits and bytes come out of the function alone: each rank asks for those of other models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from itertools import chain, combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.checks.exercise import Case, Exercise, on_the_clock
from course_lib.checks.pipeline import perform, table
from course_lib.ranks import Link, Pace
from course_lib.schedules import SCHEDULES

Costs = list[int]

# Where to cut


def split(costs: Costs, n_stages: int) -> list[range]:
    def price(stages: list[range]) -> float:
        return max(sum(costs[i] for i in stage) for stage in stages)

    cuts = combinations(range(1, len(costs)), n_stages - 1)
    splits = [[range(*ends) for ends in pairwise((0, *cut, len(costs)))] for cut in cuts]
    return min(splits, key=price)


MODELS = {  # how many stages to make of how many layers
    "equal layers": ((2, 4), (3, 6), (4, 8)),
    "unequal layers": ((2, 8), (3, 9), (4, 12)),
    "stages of different length": ((5, 11), (4, 10), (3, 11)),
    "as many stages as layers": ((3, 3), (4, 4), (5, 5)),
    "a single stage": ((1, 1), (1, 4)),
}


def _models(kind: str, seed: int, rank: int) -> list[tuple[Costs, int]]:
    random = torch.Generator().manual_seed(100 * seed + rank)
    drawn = [(torch.randint(1, 30, (layers,), generator=random).tolist(), n) for n, layers in MODELS[kind]]
    return [([5] * len(costs), n) for costs, n in drawn] if kind == "equal layers" else drawn


def _splits(seed: int) -> list[Case]:
    equal, *unequal, tight, one = MODELS
    kinds = [(2, equal), *((n, kind) for n in (2, 3, 4) for kind in unequal), (3, tight), (2, one)]
    return [table(n, kind, functools.partial(_models, kind, seed), kind) for n, kind in kinds]


def _play_splits(fn: Callable, models: list[tuple[Costs, int]], runs: bool) -> dict[str, Any]:
    found = [fn(*model) for model in models]
    dearest = [_dearest(stages, *model) for stages, model in zip(found, models, strict=True)]
    if runs and dearest[0].startswith("the"):
        own = sum(models[0][0][i] for i in found[0][dist.get_rank()])
        perform(SCHEDULES["gpipe"](4, 8).actions[dist.get_rank()], 4, own, own)
    return {f"{n} stages, costs {costs}": one for (costs, n), one in zip(models, dearest, strict=True)}


def _dearest(stages: Any, costs: Costs, n_stages: int) -> str:
    """What the dearest stage costs, or why this is no split."""
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, Iterable) for stage in stages):
        return "no list of stages"
    lists, every = [*map(list, stages)], [*range(len(costs))]
    layers = [*chain(*lists)]
    wrong = {f"{len(lists)} stages": len(lists) != n_stages, "an empty stage": [] in lists}
    wrong |= {"other layers": sorted(layers) != every, "layers out of order": layers != every}
    found = [text for text, is_so in wrong.items() if is_so]
    return found[0] if found else f"the dearest costs {max(sum(costs[i] for i in stage) for stage in lists)}"


priced = table(4, "ten layers", lambda rank: [([3, *[10] * 8, 22], 4)], runs=True)
split_layers = Exercise(
    "split_layers", split, _play_splits, _splits, priced, Pace({"forward": 0.002, "backward": 0.004})
)
change = split_layers.change
price, waits = "max(sum(costs[i] for i in stage) for", "For which stage do all the others wait?"
squares = "sum(sum(costs[i] for i in stage) ** 2 for"
change("by_number", price, "sum(len(stage) ** 2 for", "You look at the number of layers.", ask="Are all equal?")
change("least_squares", price, squares, "This makes all stages as even as can be.", waits)
change("cheapest", price, price.replace("max", "-min"), "The cheapest stage is as dear as can be.", waits)


def _filled(costs: Costs, n_stages: int, is_full: Callable[[Costs, int, float], bool]) -> list[range]:
    """Stage by stage, each until it is full. is_full: asked with its costs, the next, and the mean of the rest."""
    stages, first = [], 0
    for left in range(n_stages - 1, 0, -1):
        last = first + 1
        while last < len(costs) - left and not is_full(costs[first:last], costs[last], sum(costs[first:]) / (left + 1)):
            last += 1
        stages.append(range(first, last))
        first = last
    return [*stages, range(first, len(costs))]


@split_layers.mistake("No stage but the last goes above the mean.", ask="What is left over for the last?")
def never_above_the_mean(costs: Costs, n_stages: int) -> list[range]:
    return _filled(costs, n_stages, lambda own, following, _: sum(own) + following > sum(costs) / n_stages)


@split_layers.mistake("A stage is closed once it has reached the mean.", ask="How far above it may it be?")
def above_the_mean(costs: Costs, n_stages: int) -> list[range]:
    return _filled(costs, n_stages, lambda own, following, _: sum(own) >= sum(costs) / n_stages)


@split_layers.mistake("No stage goes above the mean of what is left.", ask="Is the mean ever out of reach?")
def mean_of_the_rest(costs: Costs, n_stages: int) -> list[range]:
    return _filled(costs, n_stages, lambda own, following, mean: sum(own) + following > mean)


@split_layers.mistake("Layers go to the stage that has least.", ask="How often would the hidden states have to travel?")
def out_of_order(costs: Costs, n_stages: int) -> list[list[int]]:
    stages: list[list[int]] = [[] for _ in range(n_stages)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(stages, key=lambda stage: sum(costs[j] for j in stage)).append(i)
    return stages


# A step over ranks


def passed_on(stage: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable, width: int) -> Tensor | None:
    rank, last, loss = dist.get_rank(), dist.get_world_size() - 1, None
    x = inputs
    if rank > 0:
        x = inputs.new_empty(len(inputs), width)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank == last:
        loss = loss_fn(y, targets)
        loss.backward()
    else:
        dist.send(y.detach(), rank + 1)
        dist.recv(dy := torch.empty_like(y), rank + 1)
        if y.requires_grad:
            y.backward(dy)
    if rank > 0:
        dist.send(x.grad, rank - 1)  # type: ignore[arg-type]
    return loss


def _steps(n: int, layers: int, seed: int, steps: int = 1, frozen: int = -1, new: str = "", wider: int = 0) -> Case:
    text = f"{n} ranks, {layers} layer{'s' * (layers > 1)} on each" + f", {steps} minibatches" * (steps > 1)
    arguments = functools.partial(_one_stage_each, n, layers, seed, steps, frozen, wider)
    return Case(text + f", those of rank {frozen} frozen" * (frozen >= 0), n, arguments, new)


def _one_stage_each(n: int, layers: int, seed: int, steps: int, frozen: int, wider: int, rank: int) -> tuple:
    """Stages of equal width, so that any mistake has shapes that fit, unless each should be wider than the last."""
    own, common = (torch.Generator().manual_seed(number) for number in (10 * seed + rank, 10 * seed + 9))
    widths = [4 + wider * rank] * layers + [4 + wider * (rank + 1)]
    stage = nn.Sequential(*(m for pair in pairwise(widths) for m in (nn.Linear(*pair), nn.Tanh()))).double()
    for parameter in stage.parameters():
        parameter.data = torch.randn(parameter.shape, generator=own, dtype=torch.float64)
        parameter.requires_grad_(rank != frozen)
    stage.register_forward_hook(lambda module, inputs, output: on_the_clock(output))
    sizes = [(3, w) for _ in range(steps) for w in (4, 4 + wider * n)]
    drawn = [torch.randn(size, generator=common, dtype=torch.float64) for size in sizes]
    return stage, [*zip(drawn[::2], drawn[1::2], strict=True)], mse_loss, widths[0]


def _all_steps(seed: int) -> list[Case]:
    twice, frozen = "a second minibatch, whose gradients are added to the first one's", "a stage that is not trained"
    sizes = [(2, 1), (2, 2), (3, 2), (4, 1)]
    steps = [_steps(n, layers, seed + n, new="more layers on a rank" * (n == layers)) for n, layers in sizes]
    frozen_ones = [_steps(3, 1, seed, frozen=rank, new=frozen) for rank in (1, 0)]
    return [*steps, *(_steps(n, 1, seed, 2, new=twice) for n in (2, 3, 4)), *frozen_ones]


def _play_steps(fn: Callable, stage: nn.Module, minibatches: list, loss_fn: Callable, width: int) -> dict[str, Any]:
    losses = [fn(stage, inputs, targets, loss_fn, width) for inputs, targets in minibatches]
    numbers = [
        torch.as_tensor(one, dtype=torch.float64).detach() if isinstance(one, float | Tensor) else one for one in losses
    ]
    return {f"loss of minibatch {i}": loss for i, loss in enumerate(numbers)}


PACE = Pace({"forward": 0.05, "backward": 0.1}, Link(latency=0.001))
priced = _steps(4, 2, 0, new="hidden states get wider from rank to rank", wider=2)
forward_and_backward = Exercise(
    "forward_and_backward", passed_on, _play_steps, _all_steps, priced, PACE, rounding=1e-12
)
change = forward_and_backward.change
back, whose, own = (
    "y.backward(dy)",
    "What does the next rank know that this one does not?",
    "stage(x + (inputs - x).detach())",
)
leaf, passed = "Nobody asks for the gradient of what has arrived.", "dist.send(x.grad if rank == last else dy"
frozen = "A frozen stage has nothing to go back through on the first rank."
change("no_leaf", "x.requires_grad_()", "pass", leaf, ask="How does autograd know that you want it?", fails=True)
change("frozen_forgotten", "if y.requires_grad", "if True", frozen, ask="Has `y` a history there?", fails=True)
change("own_inputs", "stage(x)", own, "Each rank computes with the inputs.", ask="What does the rank before send?")
change("own_loss", back, "loss_fn(y, targets).backward()", "Every rank has a loss of its own.", whose)
change("from_ones", back, "y.sum().backward()", "You go back from ones in place of what has arrived.", whose)
change("divided", back, "y.backward(dy / (last + 1))", "Each rank divides by their number.", ask="Is anything a mean?")
change(
    "without_loss", "loss.backward()", "y.sum().backward()", "The last rank goes back from `y`.", ask="And the loss?"
)
change("dy_returned", "dist.send(x.grad", passed, "A rank passes on the gradient that it got.", ask="What is it of?")
change("cleared", "y = stage(x)", "stage.zero_grad(); y = stage(x)", "Earlier gradients are gone.", ask="Who clears?")


# Who holds what


def held(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, int, int, int]]:
    found = []
    for stage in stages:
        parameters = 4 * sum((widths[i] + 1) * widths[i + 1] for i in stage)
        optimizer = 2 * parameters + 4 * 2 * len(stage)
        activations = 4 * samples * sum(widths[stage.start : stage.stop + 1])
        found.append((parameters, parameters, optimizer, activations))
    return found


WIDTHS, STAGES = [72, *[64] * 6, 36], [range(2), range(2, 4), range(4, 5), range(5, 7)]


def _networks(layers: int, equal: bool, seed: int, rank: int) -> list[tuple]:
    """A network with so many layers on each of three ranks, or one on the first, and one or two on the last."""
    lengths = [layers] * 3 if equal else [1, layers, 1 + rank % 2]
    stages = [range(sum(lengths[:r]), sum(lengths[: r + 1])) for r in range(3)]
    widths = torch.randint(2, 20, (sum(lengths) + 1,), generator=torch.Generator().manual_seed(9 * seed + rank))
    return [(widths.tolist(), stages, 5 + seed + rank)]


def _splits_held(seed: int) -> list[Case]:
    first, more = (2, (1, True), "one layer on each rank"), "more layers on a rank"
    kinds = [(n, *kind) for n in (2, 3, 4) for kind in (((2, True), more), ((3, False), "stages of different length"))]
    return [table(n, new, functools.partial(_networks, *sizes, seed), new) for n, sizes, new in [first, *kinds]]


def _play_held(fn: Callable, networks: list[tuple], runs: bool) -> dict[str, Any]:
    (widths, stages, samples), found = networks[0], fn(*networks[0])
    with contextlib.suppress(TypeError, ValueError):
        found = torch.tensor([[float(number) for number in of_rank] for of_rank in found], dtype=torch.float64)
    if runs and isinstance(found, Tensor) and len(found) == dist.get_world_size():
        torch.empty(int(found[dist.get_rank()].sum()), dtype=torch.uint8)
    return {f"{stages} of {widths}, {samples} samples": found}


priced = table(4, "seven layers on 4 ranks", lambda rank: [(WIDTHS, STAGES, 32)], runs=True)
who_holds_what = Exercise("who_holds_what", held, _play_held, _splits_held, priced)
change = who_holds_what.change
acts, use = "sum(widths[stage.start : stage.stop + 1])", "What does the backward pass of a layer need?"
every, whole = "for i in range(len(widths) - 1))", "Each rank has all layers."
change("no_bias", "(widths[i] + 1)", "widths[i]", "The biases are missing.", ask="What else is there than a weight?")
change("whole_model", "for i in stage)", every, whole, ask="Which layers does a rank compute?")
change("one_number", "2 * parameters", "parameters", "AdamW keeps one number.", ask="And of the squares?")
change("no_steps", " + 4 * 2 * len(stage)", "", "AdamW's steps are missing.", ask="What else is in its state?")
change("one_sample", "4 * samples *", "4 *", "Activations are those of one sample.", ask="How many are there?")
change("not_arrived", acts, "sum(widths[i + 1] for i in stage)", "What a rank is given is missing.", use)
change("not_sent", acts, "sum(widths[i] for i in stage)", "What a rank sends on is missing.", use)
change("twice", acts, "sum(widths[i] + widths[i + 1] for i in stage)", "Tensors between layers count twice.", use)
change("largest", acts, f"max({acts[4:-1]})", "This is the largest one alone.", ask="When can the others go?")
