"""Solutions as students write them: right ones in many ways, and wrong ones without a single misconception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import changed
from course_lib.mechanisms.collectives import all_reduce_in
from lessons.L07_mixed_precision import checks
from lessons.L07_mixed_precision.checks import adapted, clipped, mean_of_all, updated
from tests.lessons.changes import told, ways

# update_scale

asks, agree = "torch.tensor(all(gradient.isfinite().all() for gradient in gradients))", "dist.all_reduce(is_finite"
least, most = f"{agree}, dist.ReduceOp.MIN)", f"{agree}, dist.ReduceOp.MAX)"
overflows = "torch.tensor(sum(not gradient.isfinite().all() for gradient in gradients))"
worst = "torch.tensor(int(any((one.isnan() | one.isinf()).any() for one in gradients)))"
gathered = "everyone = [None] * dist.get_world_size(); dist.all_gather_object(everyone, bool(is_finite))"
last = "return True, scale, good_steps"
in_tensors = last, "return is_finite == 1, torch.tensor(scale), torch.tensor(good_steps)"
# MAX over ranks may swallow a nan, depending on the backend.
without_nan = ".nan_to_num(0, torch.inf, torch.inf).max().float()"
largest = asks, f"torch.stack([torch.zeros(()), *(one{without_nan} for one in gradients)]).max()"
upside_down = "return False, scale / 2", "return True, scale / 2", "return True, scale * 2", "return False, scale * 2"

# master_step

wide, step, narrow = "None if gradient is None else gradient.float()", "optimizer.step()", "weight.copy_(master)"
each_weight = f"for weight, master in zip(weights, masters, strict=True):\n        {narrow}"
added_to_zeros = "None if gradient is None else torch.zeros_like(master).add_(gradient)"
other_weights = "weights[:] = [master.to(weight.dtype) for weight, master in zip(weights, masters)]"
lower = f"{narrow}; weight.copy_(torch.where(weight > master, weight.nextafter(torch.zeros_like(weight)), weight))"
# Ranks have different parameters here; there is nothing to average.
averaged = "[dist.all_reduce(one) for one in gradients if one is not None]; optimizer.step()"

# sum_gradients


def sum_by_scatter(micro_batches: Any) -> Any:
    """Send in 16 bits, add up and divide in 32, on one rank for each chunk, and round once: the exact mean."""
    n = dist.get_world_size()
    mean = sum(gradient.float() for gradient in micro_batches) / len(micro_batches)
    padded = torch.nn.functional.pad(mean, (0, -len(mean) % n)).half()
    chunks = [torch.empty_like(padded[: len(padded) // n]) for _ in range(n)]
    dist.all_to_all(chunks, list(padded.chunk(n)))
    own = torch.stack(chunks).float().mean(0).half()
    whole = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(whole, own)
    return torch.cat(whole)[: len(mean)].float()


def mean_by_all_reduce_in(micro_batches: Any) -> Any:
    """Send in 16 bits, as the notebook recommends for many ranks."""
    mean = torch.stack(micro_batches).float().mean(0) / dist.get_world_size()
    return all_reduce_in(torch.float16, accumulate=torch.float32)(mean)


add, divide, reduce = "total += gradient", "total /= n * len(micro_batches)", "dist.all_reduce(message)"
gathered_sum = "parts = [message.clone() for _ in range(n)]; dist.all_gather(parts, message); message = sum(parts)"
as_it_goes = add, "total += gradient.float() / (n * len(micro_batches))", divide, "pass"
into_the_first = "torch.zeros_like(micro_batches[0], dtype=torch.float32)", "micro_batches[0]"

# unscale_and_clip

unscale, square, done = "gradient /= scale", "gradient.square().sum()", "return True"
over_ranks, skip, clip = "dist.all_reduce(total)", "if not total.isfinite()", "gradient *= factor.clamp(max=1)"
flag = "finite = total.isfinite().float(); dist.all_reduce(finite, dist.ReduceOp.MIN)"
with_a_flag = over_ranks, f"{flag}; {over_ranks}", skip, "if not finite", done, "return finite > 0"
clip_with_a_flag = changed(clipped, "clip_with_a_flag", *with_a_flag)
as_pytorch = f"    {skip}:\n        return False\n", "", done, "return bool(total.isfinite())"
last_of_all = unscale, "pass", "zeros(())", "zeros(1).double()", square, "(gradient.double() / scale).square().sum()"

RIGHT: dict[Exercise, list[Callable[..., object]]] = {
    checks.update_scale: ways(
        adapted,
        counting_overflows=(asks, overflows, least, f"{agree}); is_finite = is_finite == 0"),
        by_gathering=(least, f"{gathered}; is_finite = all(everyone)"),
        by_the_largest=(asks, worst, least, f"{most}; is_finite = is_finite == 0"),
        in_tensors=(asks, f"{asks}.int()", "MIN", "PRODUCT", *in_tensors),
    ),
    checks.master_step: ways(
        updated,
        cleared_after=(step, f"{step}; optimizer.zero_grad()", narrow, "weight[:] = master"),
        added_to_zeros=(wide, added_to_zeros),
        by_data=(narrow, "weight.data.copy_(master.data.to(weight.dtype))"),
        all_at_once=(each_weight, "torch._foreach_copy_(weights, masters)"),
    ),
    checks.sum_gradients: [
        sum_by_scatter,
        mean_by_all_reduce_in,
        *ways(
            mean_of_all,
            # One operation of PyTorch adds up in 32 bits, and rounds once.
            by_a_mean_that_is_wide_inside=(divide, "total = torch.stack(micro_batches).mean(0) / n"),
            in_float64=("torch.float32", "torch.float64"),
            divided_as_it_goes=(*as_it_goes, reduce, "dist.all_reduce(message, async_op=True).wait()"),
        ),
    ],
    checks.unscale_and_clip: [
        clip_with_a_flag,
        *ways(
            clipped,
            by_norms=(unscale, "gradient.mul_(1 / scale)", square, "torch.linalg.vector_norm(gradient) ** 2"),
            as_pytorch_does=(*as_pytorch, "total.sqrt()", "(total.sqrt() + 1e-6)"),
            unscaled_last=(*last_of_all, clip, f"{clip} / scale"),
        ),
    ],
}

WRONG: dict[Exercise, dict[Callable[..., object], str]] = {
    checks.update_scale: told(
        adapted,
        scale_returns_a_pair=("`the result[is the step taken]` is missing", last, "return True, scale"),
        scale_returns_nothing=("`the result[is the step taken]` is missing", last, "pass"),
        scale_divided_by_ten=("not what was asked for", "scale / 2", "scale / 10"),
        scale_upside_down=(
            "Every number that is wrong is 0. Wrong: `the result[is the step taken]`",
            *upside_down,
            last,
            "return False, scale, good_steps",
        ),
        scale_clears_gradients=("changes `steps[0][0]`", least, f"{least}; [one.zero_() for one in gradients]"),
        scale_drops_nan=("A nan goes unseen", *largest, least, f"{most}; is_finite = is_finite.isfinite()"),
    ),
    checks.master_step: told(
        updated,
        masters_in_other_weights=("The model's weights stay", each_weight, other_weights),
        masters_averaged=("changes `gradients[0][0]`", step, averaged),
        masters_rounded_down=("nearly right, off by 0.004", narrow, lower),
    ),
    checks.sum_gradients: told(
        mean_of_all,
        sum_by_gathering=("a rank sends 80 bytes, where 53 would do", reduce, gathered_sum),
        sum_alone=("sends nothing", reduce, "pass"),
        sum_in_place=("changes `micro_batches[0]`", *into_the_first, "in micro_batches:", "in micro_batches[1:]:"),
        sum_in_bfloat16=("nearly right, off by 0.005", "total.half()", "total.bfloat16()"),
        sum_to_rank_0=("on rank 1. Right on rank 0.", reduce, "dist.reduce(message, 0)"),
        sum_as_a_list=("than it should have", "message.float()", "message.tolist()"),
        sum_for_two_ranks=("1.5 times too large", divide, "total /= 2 * len(micro_batches)"),
    ),
    checks.unscale_and_clip: told(
        clipped,
        clip_nothing_returned=("`the result` is None", done, "pass"),
        clip_sees_no_inf=("A step is taken though a gradient is not finite", skip, "if total.isnan()"),
        clip_with_a_wrong_norm=("You leave one of 0.952, as if it had been 20.9", "total.sqrt()", "(total.sqrt() + 1)"),
        clip_above_the_square=("1.51 times too large", clip, "gradient *= factor if total > max_norm else 1"),
    ),
}
