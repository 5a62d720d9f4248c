"""Solutions that students write: right ones in many ways, and wrong ones that no single idea is behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import checks
from course_lib.checks.exercise import Exercise
from course_lib.checks.mixed_precision import adapted, clipped, mean_of_all, updated

# update_scale, right


def scale_by_a_flag(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    overflow = torch.zeros(1)
    for gradient in gradients:
        if not torch.isfinite(gradient).all():
            overflow += 1
    dist.all_reduce(overflow)
    if overflow.item() > 0:
        return False, scale * 0.5, 0
    if good_steps == interval - 1:
        return True, 2.0 * scale, 0
    return True, scale, good_steps + 1


def scale_by_gathering(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, all(bool(gradient.isfinite().all()) for gradient in gradients))
    if all(everyone):
        good_steps += 1
        return (True, scale * 2, 0) if good_steps >= interval else (True, scale, good_steps)
    return False, scale / 2, 0


def scale_by_the_largest(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    bad = any((gradient.isnan() | gradient.isinf()).any() for gradient in gradients)
    worst = torch.tensor(int(bad))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    take = worst.item() == 0
    good_steps = (good_steps + 1) % interval if take else 0
    factor = 0.5 if not take else 2.0 if good_steps == 0 else 1.0
    return take, scale * factor, good_steps


def scale_in_tensors(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    is_finite = torch.stack([torch.ones((), dtype=torch.bool), *(g.isfinite().all() for g in gradients)]).all().int()
    dist.all_reduce(is_finite, dist.ReduceOp.PRODUCT)
    good = (torch.tensor(good_steps) + 1) * is_finite
    grows = good == interval
    scale = torch.where(is_finite == 0, torch.tensor(scale / 2), torch.where(grows, scale * 2, scale))
    return is_finite == 1, scale, good.where(~grows, 0)


# update_scale, wrong


def scale_returns_a_pair(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    return adapted(gradients, scale, good_steps, interval)[:2]


def scale_returns_nothing(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> None:
    adapted(gradients, scale, good_steps, interval)


def scale_divided_by_ten(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    take, new, good_steps = adapted(gradients, scale, good_steps, interval)
    return take, new if take else scale / 10, good_steps


def scale_upside_down(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    take, new, good_steps = adapted(gradients, scale, good_steps, interval)
    return not take, new, good_steps


def scale_clears_gradients(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    result = adapted(gradients, scale, good_steps, interval)
    for gradient in gradients:
        gradient.zero_()
    return result


def scale_with_a_largest_that_drops_nan(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    """MAX over ranks may swallow a nan; in how many ways depends on the backend."""
    largest = max(
        (gradient.nan_to_num(0, torch.inf, torch.inf).max() for gradient in gradients), default=torch.zeros(())
    )
    largest = largest.float().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return adapted([largest], scale, good_steps, interval)


def scale_without_asking(gradients: Any, scale: Any, good_steps: Any, interval: Any) -> Any:
    if all(gradient.isfinite().all() for gradient in gradients):
        good_steps += 1
        return (True, scale * 2, 0) if good_steps == interval else (True, scale, good_steps)
    return False, scale / 2, 0


# master_step, right


def masters_in_order(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    for i, gradient in enumerate(gradients):
        masters[i].grad = gradient.to(torch.float32) if gradient is not None else None
    optimizer.step()
    for i, master in enumerate(masters):
        weights[i].copy_(master.detach())


def masters_cleared_after(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    for master, gradient in zip(masters, gradients, strict=True):
        if gradient is not None:
            master.grad = gradient.float()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight[:] = master


def masters_by_data(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    for master, gradient in zip(masters, gradients, strict=True):
        if gradient is not None:
            master.grad = torch.zeros_like(master)
            master.grad += gradient
    optimizer.step()
    for weight, master in zip(weights, masters, strict=True):
        weight.data.copy_(master.data.to(weight.dtype))


def masters_all_at_once(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    pairs = [(master, gradient) for master, gradient in zip(masters, gradients, strict=True) if gradient is not None]
    for master, gradient in pairs:
        master.grad = gradient.type(master.dtype)
    optimizer.step()
    torch._foreach_copy_(weights, [master.detach() for master in masters])


# master_step, wrong


def masters_in_other_weights(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    copies = [weight.clone() for weight in weights]
    updated(copies, masters, gradients, optimizer)
    weights[:] = copies


def masters_not_used(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    lr = optimizer.param_groups[0]["lr"]
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is not None:
            weight -= lr * gradient


def masters_stepped_twice(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    updated(weights, masters, gradients, optimizer)
    updated(weights, masters, gradients, optimizer)


def masters_uphill(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    updated(weights, masters, [None if gradient is None else -gradient for gradient in gradients], optimizer)


def masters_averaged(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    """Ranks have different parameters here; there is nothing to average."""
    for gradient in gradients:
        if gradient is not None:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    updated(weights, masters, gradients, optimizer)


def masters_clear_gradients(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    updated(weights, masters, gradients, optimizer)
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def masters_with_zeros_for_none(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    """A gradient of zero is not the same as none: momentum goes on."""
    zeros = [torch.zeros_like(master) for master in masters]
    updated(weights, masters, [zero if g is None else g for zero, g in zip(zeros, gradients, strict=True)], optimizer)


def masters_rounded_down(weights: Any, masters: Any, gradients: Any, optimizer: Any) -> None:
    updated(weights, masters, gradients, optimizer)
    for weight, master in zip(weights, masters, strict=True):
        lower = torch.nextafter(weight, torch.zeros_like(weight))
        weight.copy_(torch.where(weight.float() > master, lower, weight))


# sum_gradients, right


def sum_by_stack(micro_batches: Any) -> Any:
    mean = torch.stack(micro_batches).float().mean(0)
    message = (mean / dist.get_world_size()).to(torch.float16)
    dist.all_reduce(message)
    return message.to(torch.float32)


def sum_by_a_mean_that_is_wide_inside(micro_batches: Any) -> Any:
    """One operation of PyTorch adds up in 32 bits, and rounds once."""
    message = torch.stack(micro_batches).mean(0) / dist.get_world_size()
    dist.all_reduce(message)
    return message.float()


def sum_in_float64(micro_batches: Any) -> Any:
    mean = sum(gradient.double() for gradient in micro_batches) / (len(micro_batches) * dist.get_world_size())
    message = mean.half()
    dist.all_reduce(message)
    return message.float()


def sum_divided_as_it_goes(micro_batches: Any) -> Any:
    n, total = dist.get_world_size(), torch.zeros(micro_batches[0].shape)
    for gradient in micro_batches:
        total += gradient.float() / (len(micro_batches) * n)
    message = total.half()
    handle = dist.all_reduce(message, async_op=True)
    handle.wait()
    return message.float()


def sum_by_scatter(micro_batches: Any) -> Any:
    """Travels in 16 bits, and is added up in 32, by one rank for each chunk."""
    n = dist.get_world_size()
    mean = sum(gradient.float() for gradient in micro_batches) / (len(micro_batches) * n)
    padded = torch.nn.functional.pad(mean, (0, -len(mean) % n)).half()
    chunks = [torch.empty_like(padded[: len(padded) // n]) for _ in range(n)]
    dist.all_to_all(chunks, list(padded.chunk(n)))
    own = torch.stack(chunks).float().sum(0).half()
    whole = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(whole, own)
    return torch.cat(whole)[: len(mean)].float()


# sum_gradients, wrong


def sum_alone(micro_batches: Any) -> Any:
    return torch.stack(micro_batches).float().mean(0)


def sum_in_place(micro_batches: Any) -> Any:
    for gradient in micro_batches[1:]:
        micro_batches[0] += gradient
    micro_batches[0] /= len(micro_batches)
    return mean_of_all(micro_batches[:1])


def sum_without_the_first(micro_batches: Any) -> Any:
    return mean_of_all(micro_batches[1:] or micro_batches)


def sum_in_bfloat16(micro_batches: Any) -> Any:
    mean = torch.stack(micro_batches).float().mean(0) / dist.get_world_size()
    message = mean.bfloat16()
    dist.all_reduce(message)
    return message.float()


def sum_to_rank_0(micro_batches: Any) -> Any:
    message = (torch.stack(micro_batches).float().mean(0) / dist.get_world_size()).half()
    dist.reduce(message, 0)
    return message.float()


def sum_as_a_list(micro_batches: Any) -> Any:
    return mean_of_all(micro_batches).tolist()


def sum_for_two_ranks(micro_batches: Any) -> Any:
    return mean_of_all(micro_batches) * dist.get_world_size() / 2


# unscale_and_clip, right


def clip_by_norms(gradients: Any, scale: Any, max_norm: Any) -> Any:
    for gradient in gradients:
        gradient.mul_(1 / scale)
    squares = torch.tensor(float(sum(torch.linalg.vector_norm(gradient) ** 2 for gradient in gradients)))
    dist.all_reduce(squares)
    norm = math.sqrt(squares.item()) if math.isfinite(squares.item()) else math.inf
    if norm == math.inf:
        return False
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    return True


def clip_as_pytorch_does(gradients: Any, scale: Any, max_norm: Any) -> Any:
    for gradient in gradients:
        gradient.div_(scale)
    norms = [gradient.norm() for gradient in gradients]
    square = torch.stack(norms).norm() ** 2 if norms else torch.zeros(())
    dist.all_reduce(square)
    coefficient = torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient)
    return bool(square.isfinite())


def clip_and_unscale_at_once(gradients: Any, scale: Any, max_norm: Any) -> Any:
    square = sum((gradient.double() / scale).square().sum() for gradient in gradients) + torch.zeros(1).double()
    dist.all_reduce(square)
    if not torch.isfinite(square):
        return False
    factor = min(1.0, max_norm / square.sqrt().item()) / scale
    for gradient in gradients:
        gradient.copy_(gradient * factor)
    return True


def clip_with_a_flag(gradients: Any, scale: Any, max_norm: Any) -> Any:
    for gradient in gradients:
        gradient /= scale
    finite = torch.tensor([float(all(bool(gradient.isfinite().all()) for gradient in gradients))])
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    if finite.item() == 0:
        return finite > 0
    square = torch.zeros(1) + sum((gradient**2).sum() for gradient in gradients)
    dist.all_reduce(square)
    for gradient in gradients:
        gradient *= torch.minimum(torch.ones(1), max_norm / square.sqrt())
    return finite > 0


# unscale_and_clip, wrong


def clip_nothing_returned(gradients: Any, scale: Any, max_norm: Any) -> None:
    clipped(gradients, scale, max_norm)


def clip_above_the_square(gradients: Any, scale: Any, max_norm: Any) -> bool:
    is_taken = clipped(gradients, scale, math.inf)
    total = torch.stack([*(gradient.square().sum() for gradient in gradients), torch.zeros(())]).sum()
    dist.all_reduce(total)
    for gradient in gradients if total > max_norm else []:
        gradient *= max_norm / total.sqrt()
    return is_taken


def clip_in_other_tensors(gradients: Any, scale: Any, max_norm: Any) -> bool:
    gradients[:] = [gradient.clone() for gradient in gradients]
    return clipped(gradients, scale, max_norm)


def clip_elsewhere(gradients: Any, scale: Any, max_norm: Any) -> Any:
    return clipped([gradient.clone() for gradient in gradients], scale, max_norm)


def clip_upside_down(gradients: Any, scale: Any, max_norm: Any) -> Any:
    return not clipped(gradients, scale, max_norm)


def clip_says_so_in_words(gradients: Any, scale: Any, max_norm: Any) -> str:
    return str(clipped(gradients, scale, max_norm))


def clip_each_tensor(gradients: Any, scale: Any, max_norm: Any) -> Any:
    take = clipped(gradients, scale, math.inf)
    for gradient in gradients:
        gradient *= (max_norm / gradient.norm()).clamp(max=1)
    return take


def clip_each_number(gradients: Any, scale: Any, max_norm: Any) -> Any:
    take = clipped(gradients, scale, math.inf)
    for gradient in gradients:
        gradient.clamp_(-max_norm / 10, max_norm / 10)
    return take


def clip_multiplied(gradients: Any, scale: Any, max_norm: Any) -> Any:
    return clipped(gradients, 1 / scale, max_norm)


def _clipped_unless(skips: Callable[[Tensor], Tensor]) -> Callable[[Any, float, float], bool]:
    """Looks at the sum of all squares whether to skip."""

    def program(gradients: list[Tensor], scale: float, max_norm: float) -> bool:
        total = sum((gradient.div_(scale).square().sum() for gradient in gradients), torch.zeros(()))
        dist.all_reduce(total)
        for gradient in gradients:
            gradient *= min(1.0, max_norm / float(total.sqrt()))
        return not skips(total)

    return program


def clip_sees_no_inf(gradients: list[Tensor], scale: float, max_norm: float) -> bool:
    return _clipped_unless(torch.isnan)(gradients, scale, max_norm)


def clip_sees_no_nan(gradients: list[Tensor], scale: float, max_norm: float) -> bool:
    return _clipped_unless(torch.isinf)(gradients, scale, max_norm)


def clip_the_square(gradients: Any, scale: Any, max_norm: Any) -> Any:
    return clipped(gradients, scale, max_norm**2 / 2)


RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.update_scale: [scale_by_a_flag, scale_by_gathering, scale_by_the_largest, scale_in_tensors],
    checks.master_step: [masters_in_order, masters_cleared_after, masters_by_data, masters_all_at_once],
    checks.sum_gradients: [
        sum_by_stack,
        sum_by_a_mean_that_is_wide_inside,
        sum_in_float64,
        sum_divided_as_it_goes,
        sum_by_scatter,
    ],
    checks.unscale_and_clip: [clip_by_norms, clip_as_pytorch_does, clip_and_unscale_at_once, clip_with_a_flag],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.update_scale: {
        scale_returns_a_pair: "not even of the right type",
        scale_returns_nothing: "not even of the right type",
        scale_divided_by_ten: "5 times too small",
        scale_upside_down: "not what one process would have",
        scale_clears_gradients: "changes `steps[0][0]`",
        scale_with_a_largest_that_drops_nan: "A nan goes unseen",
        scale_without_asking: "Each rank decides alone",
    },
    checks.master_step: {
        masters_in_other_weights: "The model's weights stay",
        masters_not_used: "You update the model's weights themselves",
        masters_stepped_twice: "not what was asked for",
        masters_uphill: "not what was asked for",
        masters_averaged: "changes `gradients[0][0]`",
        masters_clear_gradients: "changes `gradients[0][0]`",
        masters_with_zeros_for_none: "not what was asked for",
        masters_rounded_down: "not what was asked for",
    },
    checks.sum_gradients: {
        sum_alone: "sends nothing",
        sum_in_place: "changes `micro_batches[0]`",
        sum_without_the_first: "not what one process would have",
        sum_in_bfloat16: "not what one process would have",
        sum_to_rank_0: "Only rank 0 has what it should have",
        sum_as_a_list: "not even of the right type",
        sum_for_two_ranks: "1.5 times too large",
    },
    checks.unscale_and_clip: {
        clip_nothing_returned: "`the result` is not even of the right type",
        clip_elsewhere: "Still as before: `gradients[0]`",
        clip_upside_down: "not what one process would have",
        clip_sees_no_inf: "A step is taken though a gradient is not finite",
        clip_sees_no_nan: "not what one process would have",
        clip_says_so_in_words: "`the result` is not even of the right type",
        clip_each_tensor: "not what one process would have",
        clip_each_number: "not what one process would have",
        clip_multiplied: "6.55e+04 times too large",
        clip_the_square: "times too",
        clip_above_the_square: "1.51 times too large",
        clip_in_other_tensors: "does not reach all places",
    },
}
