"""The checks for gradients of the whole minibatch on every rank: after the backward pass, and during it.

average_gradients(model, samples)               shares of any size
backward_in_buckets(model, loss, bucket_size)   messages that leave as soon as a bucket is full
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_lib import data
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.messages import on_one_link, sent_more
from course_lib.classroom.checks.part import Budget, Case, Observed, effect, normal, on_the_clock
from course_lib.instruments.watch import Watch
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Link, Pace
from course_lib.timeline import compute, now

PACE = Pace(device={"forward": 0.05, "backward": 0.1}, link=Link(latency=0.002, bandwidth=1.5e6))
TINIEST = GPTConfig(hidden=8, heads=2, tied_embeddings=True)  # so one parameter has two uses
FROZEN = "one parameter is frozen, so nobody computes a gradient for it and its `.grad` is None"
UNEQUAL = "a gradient is a mean over 5 samples on rank 0, and over 3 on rank 1"


_all_problems = cache(data.train_test_split)


def right(model: nn.Module, samples: int) -> None:
    """Average the gradients with one message, which carries the number of samples, too."""
    each = gradients(model)
    message = torch.cat([*map(torch.flatten, each), each[0].new_ones(1)]) * samples
    dist.all_reduce(message)
    message /= message[-1].clone()
    for gradient, part in zip(each, message[:-1].split([*map(Tensor.numel, each)]), strict=True):
        gradient.copy_(part.view_as(gradient))


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _case(samples: tuple, seed: int, new: str = "", has_frozen: bool = True, config: GPTConfig = TINIEST) -> Case:
    text = f"{len(samples)} ranks with {', '.join(map(str, samples[:-1]))} and {samples[-1]} samples"
    arguments = partial(_arguments, samples, seed, has_frozen, config)
    return Case(text + ", one parameter frozen" * has_frozen, len(samples), arguments, new)


def _arguments(samples: tuple[int, ...], seed: int, has_frozen: bool, config: GPTConfig, rank: int) -> tuple[Any, int]:
    """A model after the backward pass over this rank's share, and the number of samples in the share."""
    model = TinyGPT(config, seed=seed, dtype=torch.float64)
    if config == TINIEST:
        del model.blocks[1:-1]  # embedding and head are enough to show mistakes
    model.get_parameter("blocks.0.position.weight").requires_grad_(not has_frozen)
    start, stop = list(pairwise(accumulate(samples, initial=0)))[rank]
    problems, _ = _all_problems(seed)
    inputs, targets = data.examples(problems[:: len(problems) // sum(samples)][start:stop])
    with compute("forward"):
        loss = data.answer_loss(model(inputs), targets)
    with compute("backward"):
        loss.backward()
    return model, samples[rank]


def _cases(seed: int) -> list[Case]:
    two = [_case((6, 6), seed, has_frozen=False), _case((6, 6), seed, FROZEN), _case((5, 3), seed, UNEQUAL)]
    return [*two, _case((4, 3, 3), seed + 1), _case((3, 3, 2, 2), seed + 2)]


mean_price = _case((3, 3, 2, 2), 0, config=GPTConfig(hidden=16))
# A share's weight may be rounded to float32; every mistake is 1,000 times farther off than that.
average_gradients = Exercise("average_gradients", right, effect, _cases, mean_price, PACE, memory=0, rounding=1e-5)


def _total(samples: int) -> int:
    total = torch.tensor(samples)
    dist.all_reduce(total)
    return int(total)


def plain_sum(model: nn.Module, samples: int) -> None:
    factor, divisor = 1, 1
    for gradient in gradients(model):
        gradient *= factor
        dist.all_reduce(gradient)
        gradient /= divisor


# Buckets


def in_buckets(model: nn.Module, loss: Tensor, bucket_size: int) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bucket: list[nn.Parameter] = []
    in_flight: list[tuple[Any, Tensor, list[nn.Parameter]]] = []

    def send() -> None:
        message = torch.cat([one.grad.flatten() for one in bucket])  # type: ignore[union-attr]
        in_flight.append((dist.all_reduce(message, async_op=True), message, [*bucket]))
        bucket.clear()

    def ready(parameter: nn.Parameter) -> None:
        bucket.append(parameter)
        if sum(one.numel() for one in bucket) >= bucket_size:
            send()

    hooks = [one.register_post_accumulate_grad_hook(ready) for one in trained]
    loss.backward()
    for hook in hooks:
        hook.remove()
    if bucket:
        send()
    for handle, message, sent in in_flight:
        handle.wait()
        message /= dist.get_world_size()
        for one, part in zip(sent, message.split([one.numel() for one in sent]), strict=True):
            one.grad = part.view_as(one)


def _layers(
    n: int, layers: int, bucket_size: int, seed: int, new: str = "", steps: int = 1, frozen: int = -1, width: int = 4
) -> Case:
    text = f"{n} ranks, {layers} layers of {width**2 + width} parameters"
    text += f", buckets of {bucket_size}" * bool(bucket_size)
    text += f", {steps} steps" * (steps > 1) + ", one bias frozen" * (frozen >= 0)
    return Case(text, n, partial(_layers_arguments, layers, width, bucket_size, seed, steps, frozen), new)


def _layers_arguments(layers: int, width: int, bucket_size: int, seed: int, steps: int, frozen: int, rank: int) -> Any:
    common, own = normal(seed), normal(100 + 10 * seed + rank)
    model = nn.Sequential(*(nn.Linear(width, width, dtype=torch.float64) for _ in range(layers)))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = common(parameter.shape)
        parameter.requires_grad_(number != frozen)
    return model, [(own(3, width), own(3, width)) for _ in range(steps)], bucket_size


def _all_layers(seed: int) -> list[Case]:
    rest, again = "parameters are left over for a bucket that does not get full", "a second step with the same model"
    two = [_layers(2, 3, 20, seed), _layers(2, 3, 30, seed, rest), _layers(2, 3, 30, seed, again, steps=2)]
    frozen = _layers(3, 4, 30, seed, "a frozen parameter, which gets no gradient", frozen=3)
    slow = _layers(3, 3, 500, seed, "a message takes longer than the backward pass of a layer", width=24)
    return [*two, _layers(3, 3, 25, seed), frozen, slow, _layers(4, 4, 30, seed + 1)]


def _play_layers(fn: Callable, model: nn.Sequential, minibatches: list, bucket_size: int) -> dict[str, Tensor]:
    """Count the backward passes that keep a full bucket until the next layer, that wait, or that leave hooks behind."""
    staying = waiting = hooks = 0
    behind = [sum(one.numel() for one in layer.parameters() if one.requires_grad) for layer in reversed(model)]
    for x, targets in minibatches:
        model.zero_grad()
        notes: list[tuple[int, float]] = []
        with Watch() as watch:
            for layer in model:
                x = on_the_clock(layer(x))
                x.register_hook(lambda _, w=watch, n=notes: n.append((sum(s.content.numel() for s in w.sent), now())))
            loss, times = mse_loss(x, targets), [now()]
            fn(model, loss, bucket_size)
        pairs = zip(accumulate(behind, initial=0), notes, strict=False)
        staying += any(computed - left >= bucket_size for computed, (left, _) in pairs)
        times += [time for _, time in notes]
        seconds = [end - start for start, end in pairwise(times)]
        waiting += max(seconds, default=0) > min(seconds, default=0) + 1e-9
        hooks += _take_hooks_off(model)
    kinds = "with a full bucket that stays", "that wait for a message", "whose hooks are still there"
    counts = zip(kinds, (staying, waiting, hooks), strict=True)
    return {f"backward passes {kind}": torch.tensor(count) for kind, count in counts}


def _take_hooks_off(model: nn.Module) -> bool:
    """Remove all hooks; return whether there were any: in the next step they would send unwanted messages."""
    kinds = "_backward_hooks", "_post_accumulate_grad_hooks"
    of_all = [getattr(one, kind, None) or {} for one in (*model.modules(), *model.parameters()) for kind in kinds]
    found = any(of_all)
    for hooks in of_all:
        hooks.clear()
    return found


def _few(observed: list[Observed]) -> str:
    arguments = observed[0].before
    steps = len([name for name in arguments if name.endswith("][0]")])
    size = sum(one.numel() for name, one in arguments.items() if f"{name}.grad" in arguments)  # type: ignore[misc, union-attr]
    most = steps * (-(-size // int(arguments["bucket_size"]))), steps * size
    return sent_more(observed, most, "The gradients are")


price = _layers(4, 6, 500, 0, width=16)
SLOW_PACE = Pace({"forward": 0.05, "backward": 0.1}, Link(latency=0.002, bandwidth=5e4))
backward_in_buckets = Exercise(
    "backward_in_buckets", in_buckets, _play_layers, _all_layers, price, SLOW_PACE, rounding=1e-12, breach=_few
)

# Any buckets


def each_alone(model: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def _play_any(fn: Callable, model: nn.Sequential, minibatches: list, bucket_size: int) -> dict[str, Tensor]:
    for x, targets in minibatches:
        model.zero_grad()
        for layer in model:
            x = on_the_clock(layer(x))
        fn(model, mse_loss(x, targets))
    return {"models whose hooks are still there": torch.tensor(int(_take_hooks_off(model)))}


def _any_cases(seed: int) -> list[Case]:
    return [_layers(2, 3, 0, seed), _layers(3, 4, 0, seed), _layers(3, 4, 0, seed, FROZEN, 2, frozen=1)]


price, pace = _layers(4, 8, 0, 0, width=16), Pace({"forward": 0.05, "backward": 0.1}, Link(0.015, 108_800))
levels = Budget("emulated milliseconds", 1500, 1410, lambda model, loss: in_buckets(model, loss, 544), 1275)
any_buckets = partial(Exercise, rounding=1e-12, budget=levels, breach=on_one_link)
faster_backward = any_buckets("faster_backward", each_alone, _play_any, _any_cases, price, pace)
