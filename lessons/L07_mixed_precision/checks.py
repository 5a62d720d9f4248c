"""The checks for the exercise on mixed precision: compute and send in 16 bits, add up and keep in 32.

update_scale(gradients, scale, good_steps, interval)       the ranks that skip, and the next loss scale
master_step(weights, masters, gradients, optimizer)        updates so small that 16 bits round them away
sum_gradients(micro_batches)                               long sums and large ones, sent in 16 bits
unscale_and_clip(gradients, scale, max_norm)               the norm of gradients on all ranks
lighter_update(weights, gradients, backward, steps, lr)    master weights in as few bytes as possible
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.classroom.checks.evidence import is_same
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Budget, Case, Observed, Values, normal, result
from course_lib.classroom.checks.tables import as_number
from course_lib.ranks import Link, Pace
from course_lib.timeline import compute

PACE = Pace(device={"backward": 0.04, "optimizer": 0.01}, link=Link(latency=0.002, bandwidth=1e6))


def _random(n: int, seed: int) -> Tensor:
    """Random numbers from 1 to 2."""
    return 1 + torch.rand(n, generator=torch.Generator().manual_seed(seed))


# The loss scale


def adapted(gradients: list[Tensor], scale: float, good_steps: int, interval: int) -> tuple[bool, float, int]:
    is_finite = torch.tensor(all(gradient.isfinite().all() for gradient in gradients))
    dist.all_reduce(is_finite, dist.ReduceOp.MIN)
    if not is_finite:
        return False, scale / 2, 0
    good_steps += 1
    if good_steps == interval:
        return True, scale * 2, 0
    return True, scale, good_steps


def _steps(n: int, history: str, interval: int, new: str = "", scale: float = 1024.0) -> Case:
    """A case of several steps. history: for each step the rank whose gradient overflows, "*" for all, "." for none."""
    text = f"{n} ranks and {len(history)} steps, interval {interval}, overflow on (. none, * all): {' '.join(history)}"
    return Case(text, n, partial(_steps_arguments, history, interval, scale), new)


def _steps_arguments(history: str, interval: int, scale: float, rank: int) -> tuple[Any, ...]:
    """Two gradients in each step, which overflow in turn; the first one's sum always does. Rank 2 has none."""
    steps = []
    for step, where in enumerate(history):
        both = [torch.full((3,), 6e4).half(), _random(4, step).half()]
        if where in ("*", str(rank)):
            both[step % 2][step % 3] = (torch.inf, torch.nan, -torch.inf)[step % 3]
        steps.append([] if rank == 2 else both)
    with compute("backward"):
        return steps, scale, 0, interval


def _steps_cases(seed: int) -> list[Case]:
    s, overflow = "." * seed, "overflows, with inf or nan in some gradient"
    alone = "overflows of rank 1 alone, and a nan that the other rank does not have"
    two = [_steps(2, "...." + s, 2), _steps(2, "0.*0*" + s, 3, overflow), _steps(2, ".1...1.." + s, 3, alone)]
    three = _steps(3, "..1..0....0" + s, 3, "3 ranks, and rank 2 has no parameters, so it has no gradients")
    return [*two, three, _steps(4, "3....1.0...." + s, 3, "a scale that is 1 at the beginning", 1.0)]


def _play_steps(fn: Any, steps: list[list[Tensor]], scale: float, good_steps: int, interval: int) -> Any:
    rows = []
    for gradients in steps:
        returned = fn(gradients, scale, good_steps, interval)
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            return returned
        rows.append([float(value) for value in returned])
        scale, good_steps = rows[-1][1], int(rows[-1][2])
    names = ("is the step taken", "scale after it", "good steps after it")
    return dict(zip(names, torch.tensor(rows).T, strict=True))


update_scale = Exercise("update_scale", adapted, _play_steps, _steps_cases, _steps(4, "..3...", 3), PACE)


# Master weights

WIDE = "in 32 bits"


@torch.no_grad()
def updated(weights: list[Tensor], masters: list[Any], gradients: list[Any], optimizer: Any) -> None:
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = None if gradient is None else gradient.float()
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)


def _updates(n: int, dtype: torch.dtype, steps: int, lr: float, new: str = "", gradients: str = "") -> Case:
    """A case of several updates. lr: the learning rate, in units of the dtype's last digit."""
    text = f"{n} ranks, weights in {str(dtype)[6:]}, {steps} steps" + f", gradients {gradients}" * bool(gradients)
    return Case(text, n, partial(_updates_arguments, dtype, steps, lr * torch.finfo(dtype).eps, gradients), new)


def _updates_arguments(dtype: torch.dtype, steps: int, lr: float, are: str, rank: int) -> tuple[Any, ...]:
    """Weights and gradients that differ between ranks, and the learning rate."""
    seeds = [10 * rank + 100 * step for step in range(steps + 1)]
    weights, *gradients = ([_random(3 + i, seed + i) for i in range(3)] for seed in seeds)
    weights = [one.to(dtype) for one in weights]
    of_all: list[list[Any]] = [[one if are == WIDE else one.to(dtype) for one in of_step] for of_step in gradients]
    for of_step in of_all[1::2] if are == "missing" else []:
        of_step[1] = None
    return weights, of_all, lr


def _updates_cases(seed: int) -> list[Case]:
    missing = "several large updates; a weight without a gradient (None), as of an unused layer"
    bf16, fp16, s = torch.bfloat16, torch.float16, seed
    two = [_updates(2, bf16, 2 + s, 4), _updates(2, bf16, 8 + s, 0.1, "many small updates")]
    more = [_updates(2, fp16, 8 + s, 0.1), _updates(3, fp16, 6 + s, 4, missing, "missing")]
    return [*two, *more, _updates(4, fp16, 2, 1e3, "gradients of 32 bits", WIDE), _updates(4, bf16, 8 + s, 0.1)]


def _play_updates(fn: Any, weights: list[Tensor], gradients: list[list[Any]], lr: float) -> dict[str, Any]:
    weights = [weight.clone() for weight in weights]
    views = [weight.view(-1) for weight in weights]
    masters = [nn.Parameter(weight.float()) for weight in weights]
    optimizer = torch.optim.SGD(masters, lr=lr, momentum=0.5)
    for of_step in gradients:
        with compute("optimizer"):
            fn([*weights], masters, of_step, optimizer)
    return {"weights": weights, "views of the weights": views, "masters": [master.detach() for master in masters]}


master_step_price = _updates(4, torch.float16, 3, 0.1)
master_step = Exercise("master_step", updated, _play_updates, _updates_cases, master_step_price, PACE, rounding=1e-6)


# Sums


def mean_of_all(micro_batches: list[Tensor]) -> Tensor:
    n, total = dist.get_world_size(), torch.zeros_like(micro_batches[0], dtype=torch.float32)
    for gradient in micro_batches:
        total += gradient
    total /= n * len(micro_batches)
    message = total.half()
    dist.all_reduce(message)
    return message.float()


def _sums(n: int, micro_batches: int, kind: str, size: int = 20, new: str = "") -> Case:
    text = f"{n} ranks with {micro_batches} micro-batch{'es' * (micro_batches > 1)} of {kind} gradients"
    return Case(text, n, partial(_sums_arguments, micro_batches, kind, size), new)


def _sums_arguments(micro_batches: int, kind: str, size: int, rank: int) -> tuple[list[Tensor]]:
    factor = {"large": 2.0**14.5, "tiny": 2.0**-14}.get(kind, 1.0)
    gradients = [factor * _random(size, 100 * rank + i) for i in range(micro_batches)]
    if kind == "tiny":
        gradients = [torch.linspace(1, 1.5, size) * factor] * micro_batches
    if kind == "very different":
        gradients[0] *= 3000
    if kind == "large" and micro_batches > 1:
        gradients[0][0], gradients[1][0] = 5e4, -5e4  # whose difference is beyond float16
    with compute("backward"):
        return ([gradient.half() for gradient in gradients],)


def _sums_cases(seed: int) -> list[Case]:
    s, small = seed, "gradients so small that a part of one loses its digits"
    long, large = "a sum of one large gradient and many small ones", "gradients close to the largest number of float16"
    several = "several gradients on a rank that are close to the largest number"
    two = [_sums(2, 3 + s, "usual"), _sums(2, 40 + s, "very different", new=long), _sums(2, 1, "large", 20 + s, large)]
    more = [_sums(n, m + s, "usual") for n, m in ((3, 2), (4, 5))]
    two += [_sums(2, 3, "large", new=several), _sums(2, 64, "tiny", new=small)]
    return [*two, more[0], _sums(3, 1, "large"), more[1]]


def _rounded_alike(observed: list[Observed]) -> list[Values]:
    """The values to compare; the true mean in place of a result that is equal to it up to rounding, on all ranks."""
    results = [seen.values.get("the result", "") for seen in observed]
    given = [one for seen in observed for one in seen.before.values() if isinstance(one, Tensor)]
    first, mean = results[0], torch.stack(given).double().mean(0)
    if not isinstance(first, Tensor) or not all(is_same(one, first) for one in results):
        return [seen.values for seen in observed]
    is_mean = is_same(first.double(), mean, ROUNDING * float(mean.abs().max()))
    return [seen.values | {"the result": mean.to(first.dtype)} if is_mean else seen.values for seen in observed]


def _bytes_sent(seen: Observed, ranks: int) -> float:
    """The bytes that leave a rank: all of a message, and as many as a ring of so many ranks takes for a collective."""
    pieces = {"send": 1, "allreduce": 2 * (ranks - 1) / ranks, "allgather": ranks - 1}
    shares = [pieces.get(one.operation.split("_")[0], (ranks - 1) / ranks) * one.content.nbytes for one in seen.sent]
    return round(sum(shares))


def _two_bytes(observed: list[Observed]) -> str:
    """Check for two bytes per number, with room for pieces that are padded, and for a scalar besides."""
    ranks, n = len(observed), observed[0].values["the result"].numel()  # type: ignore[union-attr]
    most, least = max(_bytes_sent(seen, ranks) for seen in observed), 4 * n * (ranks - 1) // ranks
    too_much = f"The mean is right, but a rank sends {most} bytes, where {least} would do: an all-reduce of 16 bits."
    return too_much * (most > least + 16)


ROUNDING = 2.0**-8  # a rank rounds once, then each sum: at most 8 times 2^-11
price, summing = _sums(4, 4, "usual", 3_000), partial(Exercise, rounding=ROUNDING, compared=_rounded_alike)
sum_gradients = summing("sum_gradients", mean_of_all, result, _sums_cases, price, PACE, breach=_two_bytes)


# The norm


def clipped(gradients: list[Tensor], scale: float, max_norm: float) -> bool:
    for gradient in gradients:
        gradient /= scale
    total = torch.zeros(())
    for gradient in gradients:
        total += gradient.square().sum()
    dist.all_reduce(total)
    if not total.isfinite():
        return False
    factor = max_norm / total.sqrt()
    for gradient in gradients:
        gradient *= factor.clamp(max=1)
    return True


def _norms(n: int, kind: str, max_norm: float, new: str = "") -> Case:
    return Case(f"{n} ranks, {kind}, max_norm {max_norm:g}", n, partial(_norms_arguments, kind, max_norm), new)


def _norms_arguments(kind: str, max_norm: float, rank: int) -> tuple[list[Tensor], float, float]:
    """Two gradients on each rank, but none on rank 2; those of rank 0 are the largest."""
    scale = 256.0
    gradients = [scale * (4 - rank) * _random(3 + i, 10 * rank + i) for i in range(0 if rank == 2 else 2)]
    if kind.endswith(f"rank {rank}"):
        gradients[-1][1] = torch.inf if "inf" in kind else torch.nan
    with compute("backward"):
        return gradients, scale, max_norm


def _norms_cases(seed: int) -> list[Case]:
    small, inf, nan = (f"{what} gradient" for what in ("a small", "one infinite", "one undefined"))
    none, s = "a rank without parameters, so without gradients", seed / 8
    two = [_norms(2, "a large norm", 1 + s), *(_norms(2, "a norm below", most, small) for most in (1e9, 30))]
    two += [_norms(2, "inf on rank 1", 1, inf), _norms(2, "nan on rank 0", 1, nan)]
    three = [_norms(3, "a large norm", 2 + s, none), _norms(3, "inf on rank 0", 1)]
    four = [_norms(4, "a large norm", 2 + s), _norms(4, "nan on rank 3", 1), _norms(4, "a norm below", 1e9)]
    return [*two, *three, *four]


def _play_norms(fn: Any, gradients: list[Tensor], scale: float, max_norm: float) -> Any:
    return as_number(fn([*gradients], scale, max_norm))


def _view_norms(observed: list[Observed]) -> list[Values]:
    """The values to compare: gradients and result, or the result alone if the step has to be skipped."""
    given = [one for seen in observed for one in seen.before.values() if isinstance(one, Tensor)]
    matters = all(one.isfinite().all() for one in given)
    return [{name: one for name, one in seen.values.items() if matters or name == "the result"} for seen in observed]


def _norms_said(observed: list[Observed]) -> str:
    """A sentence about the norm of all gradients, before and after, if they are clipped and keep their direction."""
    scale, most = (float(str(observed[0].before[name])) for name in ("scale", "max_norm"))
    names = [(seen, name) for seen in observed for name in seen.before if name.startswith("gradients[")]
    before = torch.cat([seen.before[name] for seen, name in names]) / scale  # type: ignore[misc]
    after = torch.cat([seen.values[name] for seen, name in names])  # type: ignore[misc]
    norm, mine = float(before.norm()), float(after.norm())
    if not norm > most or not is_same(after / mine, before / norm, 1e-4):
        return ""
    as_if = f"You leave one of {mine:.3g}, as if it had been {norm * most / mine:.3g}, and max_norm is {most:g}."
    return f"Without the scale, the gradients of all ranks together have a norm of {norm:.3g}. {as_if}"


price = _norms(4, "a large norm", 1)
of_norms = partial(Exercise, rounding=1e-5, compared=_view_norms, rule=_norms_said)  # PyTorch adds 1e-6 to the norm
unscale_and_clip = of_norms("unscale_and_clip", clipped, _play_norms, _norms_cases, price, PACE)


# Masters in little memory


def upper_half(master: Tensor) -> Tensor:
    """The upper 16 bits of each float32 number, as a view."""
    return master.view(torch.bfloat16)[..., 1::2]


def whole_masters(weights: list[Tensor], gradients: list[Tensor], backward: Any, steps: int, lr: float) -> None:
    masters = [weight.float() for weight in weights]
    for _ in range(steps):
        backward()
        wide = [gradient.float() for gradient in gradients]
        updates = [lr * gradient for gradient in wide]
        masters = [master - update for master, update in zip(masters, updates, strict=True)]
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(upper_half(master))


def lower_halves(weights: list[Tensor], gradients: list[Tensor], backward: Any, steps: int, lr: float) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [weight.view(-1).tensor_split(n) for weight in weights]
    lower = [torch.zeros_like(of_ranks[rank], dtype=torch.int16) for of_ranks in shards]
    for _ in range(steps):
        backward()
        for of_ranks, gradient, low in zip(shards, gradients, lower, strict=True):
            master = torch.stack([low, of_ranks[rank].view(torch.int16)], -1).view(torch.float32).flatten()
            master.sub_(gradient.view(-1).tensor_split(n)[rank], alpha=lr)
            low.copy_(master.view(torch.int16)[::2])
            of_ranks[rank].copy_(upper_half(master))
            del master  # before the next one is made
            for other, shard in enumerate(of_ranks):
                dist.broadcast(shard, other)


def _training(n: int, layers: int, rows: int, columns: int, steps: int, seed: int = 0, new: str = "") -> Case:
    text = f"{n} ranks, {2 * layers} weights of {rows * columns} and {columns} numbers, {steps} step{'s' * (steps > 1)}"
    return Case(text, n, partial(_training_arguments, layers, rows, columns, steps, seed), new)


def _training_arguments(layers: int, rows: int, columns: int, steps: int, seed: int, rank: int) -> tuple[Any, ...]:
    """The same on all ranks: weights, room for gradients, and what each step adds to its gradients."""
    draw, shapes = normal(seed), [(rows, columns), (columns,)] * layers
    weights, gradients, *drawn = ([draw(*shape).bfloat16() for shape in shapes] for _ in range(2 + steps))
    return weights, gradients, drawn, 2.0**-9


def _training_cases(seed: int) -> list[Case]:
    uneven, few = "numbers of weights that the ranks do not divide", "weights with fewer numbers than there are ranks"
    two = [_training(2, 1, 3, 4, steps, seed, "more steps" * (steps > 1)) for steps in (1, 12 + seed)]
    return [*two, _training(3, 2, 5, 4, 12, seed, uneven), _training(4, 2, 5, 3, 12, seed, few)]


def _play_training(fn: Any, weights: list[Tensor], gradients: list[Tensor], drawn: list[Any], lr: float) -> None:
    left = [*drawn]

    @compute("backward")
    def backward() -> None:
        """Write gradients, in place; their second halves depend on the first halves of the weights."""
        assert left, "backward() is called more often than there are steps"
        for weight, gradient, new in zip(weights, gradients, left.pop(0), strict=True):
            gradient.copy_(new).view(-1)[-(new.numel() // 2) :].add_(weight.view(-1)[: new.numel() // 2])

    fn([*weights], [*gradients], backward, len(drawn), lr)


price = _training(4, 4, 25, 10, 8, new="more and larger weights")
levels = Budget("bytes of extra memory", 6_240, 2_400, lower_halves, 600)
lighter_update = Exercise("lighter_update", whole_masters, _play_training, _training_cases, price, PACE, budget=levels)
