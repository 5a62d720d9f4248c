"""The checks for layer-wise model parallelism: where to cut, a step over ranks, and what each rank holds.

Splits and bytes are results of a function without communication: each rank asks for those of other models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Budget, Case, normal, prepared
from course_lib.classroom.checks.samples import miscounted
from course_lib.classroom.checks.tables import Plans, as_numbers, computing
from course_lib.classroom.runs.events import perform
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


MODELS = {  # kind: (number of stages, number of layers) of each model
    "equal layers": ((2, 4), (3, 6), (4, 8)),
    "unequal layers": ((2, 8), (3, 9), (4, 12)),
    "stages of different length": ((5, 11), (4, 10), (3, 11)),
    "as many stages as layers": ((3, 3), (4, 4), (5, 5)),
    "a single stage": ((1, 1), (1, 4)),
}


def _models(seed: int, rank: int) -> Plans:
    random = torch.Generator()
    models = {}
    for kind, sizes in MODELS.items():
        random.manual_seed(100 * seed + rank)
        drawn = [(torch.randint(1, 30, (layers,), generator=random).tolist(), n) for n, layers in sizes]
        models[kind] = [([5] * len(costs), n) for costs, n in drawn] if kind == "equal layers" else drawn
    return models


def _pass_through(model: tuple, stages: Any) -> None:
    if _dearest(model, stages).startswith("the"):
        own = sum(model[0][i] for i in stages[dist.get_rank()])
        perform(SCHEDULES["gpipe"](4, 8).actions[dist.get_rank()], 4, own, own)


def _dearest(model: tuple, stages: Any) -> str:
    """The cost of the most expensive stage, or the reason why this is no split."""
    costs, n_stages = model
    if not isinstance(stages, list | tuple) or not all(isinstance(stage, Iterable) for stage in stages):
        return "no list of stages"
    lists, every = [*map(list, stages)], [*range(len(costs))]
    layers = [*chain(*lists)]
    empty = [number for number, layers_of_one in enumerate(lists) if not layers_of_one]
    wrong = {f"{len(lists)} stages": len(lists) != n_stages, f"no layer on stages {empty}": bool(empty)}
    wrong |= {f"layers {layers}, not {every}": layers != every}
    if found := [text for text, is_so in wrong.items() if is_so]:
        return found[0]
    better, prices = split(costs, n_stages), [sum(costs[i] for i in stage) for stage in lists]
    least = max(sum(costs[i] for i in stage) for stage in better)
    more = f": {prices}; with stages from layers {[one.start for one in better]} it is {least}"
    return f"the dearest costs {max(prices)}" + more * (max(prices) > least)


split_layers_more = [(n, kind) for n in (3, 4) for kind in ("unequal layers", "stages of different length")]
price_case, pace = ("ten layers", ([3, *[10] * 8, 22], 4)), Pace({"forward": 0.002, "backward": 0.004})
split_layers = computing(
    "split_layers", split, "", _models, split_layers_more, price_case, _pass_through, value=_dearest, pace=pace
)


def never_above_the_mean(costs: Costs, n_stages: int) -> list[range]:
    stages, first = [], 0
    for left in range(n_stages - 1, 0, -1):
        last = first + 1
        while last < len(costs) - left and sum(costs[first : last + 1]) <= sum(costs) / n_stages:
            last += 1
        stages.append(range(first, last))
        first = last
    return [*stages, range(first, len(costs))]


split_layers.mistake(never_above_the_mean)


@split_layers.mistake
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


def _steps(n: int, layers: int, seed: int, steps: int = 1, frozen: int = -1, new: str = "", **sizes: int) -> Case:
    text = f"{n} ranks, {layers} layer{'s' * (layers > 1)} on each" + f", {steps} minibatches" * (steps > 1)
    text += f", {sizes['samples']} samples" if "samples" in sizes else ""
    arguments = partial(_one_stage_each, n, layers, seed, steps, frozen, **sizes)
    return Case(text + f", those of rank {frozen} frozen" * (frozen >= 0), n, arguments, new)


def _one_stage_each(
    n: int, layers: int, seed: int, steps: int, frozen: int, rank: int, wider: int = 0, samples: int = 3
) -> tuple:
    """Stages of equal width, so that shapes fit whatever the mistake; with `wider`, each is wider than the last."""
    own, common = normal(10 * seed + rank), normal(10 * seed + 9)
    widths = [4 + wider * rank] * layers + [4 + wider * (rank + 1)]
    stage = nn.Sequential(*(m for pair in pairwise(widths) for m in (nn.Linear(*pair), nn.Tanh())))
    minibatches = [(common(samples, 4), common(samples, 4 + wider * n)) for _ in range(steps)]
    return prepared(stage, own).requires_grad_(rank != frozen), minibatches, mse_loss, widths[0]


def _all_steps(seed: int) -> list[Case]:
    twice, frozen = "a second minibatch, whose gradients are added to the first one's", "a stage that is not trained"
    sizes = [(2, 1), (2, 2), (3, 2), (4, 1)]
    steps = [_steps(n, layers, seed + n, new="more layers on a rank" * (n == layers)) for n, layers in sizes]
    frozen_ones = [_steps(3, 1, seed, frozen=rank, new=frozen) for rank in (1, 0)]
    return [*steps, *(_steps(n, 1, seed, 2, new=twice) for n in (2, 3, 4)), *frozen_ones]


def _play_steps(fn: Callable, stage: nn.Module, minibatches: list, loss_fn: Callable, width: int) -> dict[str, Any]:
    losses = [fn(stage, inputs, targets, loss_fn, width) for inputs, targets in minibatches]
    return {f"loss of minibatch {i}": as_numbers(loss) for i, loss in enumerate(losses)}


PACE = Pace({"forward": 0.05, "backward": 0.1}, Link(latency=0.001))
price_steps = _steps(4, 2, 0, new="hidden states get wider from rank to rank", wider=2)
rule = partial(miscounted, inputs="minibatches[0][0]", targets="minibatches[0][1]")
forward_and_backward = Exercise(
    "forward_and_backward", passed_on, _play_steps, _all_steps, price_steps, PACE, rounding=1e-12, rule=rule
)


# In little memory


def _odd_minibatches(seed: int) -> list[Case]:
    """Minibatches that no pieces of two or more divide, whatever their size."""
    sizes = [(2, 3, 1), (3, 5, 1), (2, 17, 2)]
    return [_steps(n, 2, seed + n, steps, samples=samples, new="more samples") for n, samples, steps in sizes]


def sample_by_sample(stage: nn.Module, inputs: Tensor, targets: Tensor, loss_fn: Callable, width: int) -> Any:
    total, size = None, 1
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        loss = passed_on(stage, x, y, lambda a, b: loss_fn(a, b) * (len(b) / len(targets)), width)
        total = None if loss is None else loss.detach() + (0 if total is None else total)
    return total


price = _steps(4, 4, 0, samples=64, new="64 samples, and four layers on each rank")
levels = Budget("bytes of extra memory", 9_000, 4_138, sample_by_sample, 800)
in_little_memory = partial(Exercise, rounding=1e-12, budget=levels, rule=rule)
lighter_step = in_little_memory("lighter_step", passed_on, _play_steps, _odd_minibatches, price, PACE)


# Who holds what


def held(widths: list[int], stages: list[range], samples: int) -> list[tuple[int, int, int, int]]:
    found = []
    for stage in stages:
        parameters = 4 * sum((widths[i] + 1) * widths[i + 1] for i in stage)
        optimizer = 2 * parameters + 4 * 2 * len(stage)
        activations = 4 * samples * sum(widths[stage.start : stage.stop + 1])
        found.append((parameters, parameters, optimizer, activations))
    return found


KINDS = "parameters", "gradients", "optimizer", "activations"
WIDTHS, STAGES = [72, *[64] * 6, 36], [range(2), range(2, 4), range(4, 5), range(5, 7)]


def _networks(seed: int, rank: int) -> Plans:
    """Networks of each kind, each cut for three ranks."""
    lengths = {"one layer on each rank": [1] * 3, "more layers on a rank": [2] * 3}
    lengths |= {"stages of different length": [1, 3, 1 + rank % 2]}
    return {kind: [_network(of_stages, seed, rank)] for kind, of_stages in lengths.items()}


def _network(lengths: list[int], seed: int, rank: int) -> tuple[list[int], list[range], int]:
    stages = [range(sum(lengths[:r]), sum(lengths[: r + 1])) for r in range(len(lengths))]
    widths = torch.randint(2, 20, (sum(lengths) + 1,), generator=torch.Generator().manual_seed(9 * seed + rank))
    return widths.tolist(), stages, 5 + seed + rank


def _by_kind(network: tuple, found: Any) -> Any:
    """The bytes of all ranks by kind, if they are as many as they should be."""
    is_table = isinstance(table := as_numbers(found), Tensor) and table.shape == (len(network[1]), len(KINDS))
    return dict(zip(KINDS, table.T, strict=True)) if is_table else found


def _hold(network: tuple, found: Any) -> None:
    torch.empty(int(sum(found[dist.get_rank()])), dtype=torch.uint8)


who_holds_what_more = [(n, kind) for n in (3, 4) for kind in ("more layers on a rank", "stages of different length")]
price_network = "seven layers on 4 ranks", (WIDTHS, STAGES, 32)
who_holds_what = computing("who_holds_what", held, "", _networks, who_holds_what_more, price_network, _hold, _by_kind)
