"""The check for `average_gradients(model, samples)`: after it, every rank holds the gradient of the whole minibatch.

The judge is one process with the whole minibatch. To tell what went wrong, each misconception is also computed from
the ranks' own gradients: if what the student's function left is what that misconception gives, it is the one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from course_lib import data
from course_lib.checks.examine import Exercise, Explanation, contains, examine
from course_lib.checks.verdict import Cost, Idle, Verdict
from course_lib.instruments.watch import Watch
from course_lib.model import GPTConfig, TinyGPT
from course_lib.ranks import Deadlock, Link, Pace, Run, RunError
from course_lib.timeline import compute

LINK = Link(latency=0.002, bandwidth=20e6)
TINIEST = GPTConfig(layers=1, hidden=8, heads=2, tied_embeddings=True)
PACE = Pace(device={"forward": 0.05, "backward": 0.1}, link=LINK)


def average_gradients(fn: Callable[..., Any], seed: int = 0) -> Verdict:
    """Check a student's average_gradients on 2, 3 and 4 ranks. seed: another model and other problems."""
    return examine(AVERAGING, fn, seed)


@dataclass(frozen=True)
class StepCase:
    """One training step. samples: the share of each rank."""

    samples: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    config: GPTConfig = TINIEST

    @property
    def world_size(self) -> int:
        return len(self.samples)

    def __str__(self) -> str:
        return f"{self.world_size} ranks with {', '.join(map(str, self.samples[:-1]))} and {self.samples[-1]} samples"

    def model(self) -> TinyGPT:
        """With two uses of one tied parameter, and a frozen one."""
        model = TinyGPT(self.config, seed=self.seed, dtype=self.dtype)
        model.get_parameter("blocks.0.position.weight").requires_grad_(False)
        return model

    def minibatch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of all ranks' samples."""
        problems, _ = data.train_test_split(self.seed)
        total = sum(self.samples)
        return data.examples(problems[:: len(problems) // total][:total])


def _cases(seed: int) -> list[StepCase]:
    return [
        StepCase((6, 6), torch.float32, seed),
        StepCase((4, 3, 3), torch.float64, seed + 1),
        StepCase((3, 3, 2, 2), torch.float64, seed + 2),
    ]


def backward(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Forward and backward pass; leaves in every `.grad` that of the mean loss over these samples."""
    with compute("forward"):
        loss = data.answer_loss(model(inputs), targets)
    with compute("backward"):
        loss.backward()


# On a rank


@dataclass(frozen=True)
class Step:
    """What one rank held before and after the student's function: gradients by name, those that exist."""

    own: dict[str, Tensor]
    after: dict[str, Tensor]
    parameters_changed: bool
    parameters_communicated: bool
    memory: int


def _play(rank: int, fn: Callable[..., Any], case: StepCase) -> Step:
    model = case.model()
    start, stop = list(pairwise(accumulate(case.samples, initial=0)))[rank]
    inputs, targets = case.minibatch()
    backward(model, inputs[start:stop], targets[start:stop])
    own = _gradients(model)
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    with Watch() as watch:
        fn(model, case.samples[rank])
    changed = not all(map(torch.equal, parameters, model.parameters()))
    communicated = any(watch.communicated(parameter.detach()) for parameter in model.parameters())
    return Step(own, _gradients(model), changed, communicated, watch.peak)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


# In the notebook


@dataclass(frozen=True)
class Averaged:
    """The steps of all ranks. Gradients are vectors: those of all parameters, one after the other."""

    case: StepCase
    run: Run

    @property
    def steps(self) -> list[Step]:
        return self.run.results

    @cached_property
    def right(self) -> Tensor:
        """The gradient of one process that has the whole minibatch."""
        model = self.case.model()
        backward(model, *self.case.minibatch())
        return _vector(_gradients(model))

    @cached_property
    def own(self) -> Tensor:
        """[ranks, parameters]: what each rank had computed."""
        return torch.stack([_vector(step.own) for step in self.steps])

    @cached_property
    def after(self) -> Tensor:
        """[ranks, parameters]: what each rank held in the end; NaN where the gradient is gone or of another shape."""
        return torch.stack([_vector(self._kept(step)) for step in self.steps])

    def _kept(self, step: Step) -> dict[str, Tensor]:
        lost = {name: torch.full_like(tensor, math.nan) for name, tensor in step.own.items()}
        fitting = {name: g for name, g in step.after.items() if name in lost and g.shape == lost[name].shape}
        return {name: fitting.get(name, lost[name]).to(self.case.dtype) for name in lost}

    @property
    def samples(self) -> Tensor:
        """[ranks, 1]: the size of each share."""
        return torch.tensor(self.case.samples, dtype=self.case.dtype).unsqueeze(1)

    @property
    def total(self) -> int:
        return sum(self.case.samples)

    def is_near(self, a: Tensor, b: Tensor) -> bool:
        """Whether two gradients differ by rounding alone."""
        return bool(((a - b).abs() <= self.tolerance).all())

    @property
    def tolerance(self) -> float:
        """A share's weight may be a float32 number, as `samples / total` is for a tensor; wrong ideas are 1,000 times
        farther off."""
        return 1e-5 * float(self.own.abs().max())

    def left(self, prediction: Tensor) -> bool:
        """Whether the student's function left this on the ranks; one row for each, or one row for all."""
        return self.is_near(self.after, prediction.expand_as(self.after))

    @cached_property
    def parts(self) -> dict[str, slice]:
        """Where each parameter's gradient lies in the vectors."""
        ends = accumulate((tensor.numel() for tensor in self.steps[0].own.values()), initial=0)
        return {name: slice(*ends) for name, ends in zip(self.steps[0].own, pairwise(ends), strict=True)}

    def first_difference(self, rank: int, wanted: Tensor) -> str:
        """The first number on a rank that is not as wanted, in words."""
        place = int(((self.after[rank] - wanted).abs() > self.tolerance).nonzero()[0])
        name = next(name for name, part in self.parts.items() if place < part.stop)
        return f"{name}, number {place - self.parts[name].start}"


def _vector(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def _is_right(found: Averaged) -> bool:
    untouched = not any(step.parameters_changed or step.after.keys() - step.own.keys() for step in found.steps)
    return untouched and found.left(found.right)


# Runs that do not end


def frozen_parameter_forgotten(error: RunError) -> Explanation:
    """A frozen parameter has no gradient: its .grad is None."""
    if not contains(error, "NoneType"):
        return None
    return (
        "One of the model's parameters is frozen (`requires_grad` is False), so nobody computes a gradient for it and "
        "its `.grad` is None. Leave out every parameter whose `.grad` is None."
    )


def only_some_ranks_call(error: RunError) -> Explanation:
    """`if rank == 0: dist.all_reduce(...)`."""
    if not isinstance(error, Deadlock) or not contains(error, "already returned without that"):
        return None
    return (
        "Some ranks call a collective that others never come to. A collective such as `all_reduce` is something "
        "that all ranks do together: each has to call it, as often and in the same order, or the others wait for ever."
    )


# Results


def nothing_sent(found: Averaged) -> Explanation:
    if not any(span.kind == "transfer" for span in found.run.timeline.spans):
        return (
            "Your function sends nothing, so no rank can know what the others have computed. The ranks have to add "
            "up their gradients: `dist.all_reduce` does that, in place."
        )
    return None


def parameters_averaged(found: Averaged) -> Explanation:
    """The numbers reduced were the parameters, not their gradients."""
    if found.left(found.own) and any(step.parameters_communicated for step in found.steps):
        return (
            "You average the parameters, and the gradients stay what they were. The replicas start equal, so their "
            "parameters need no averaging now; it is the gradients, `parameter.grad`, in which they differ. They "
            "are small at the end of each step, and the optimizer needs the right ones before it moves anything."
        )
    return None


def parameters_changed(found: Averaged) -> Explanation:
    if any(step.parameters_changed for step in found.steps):
        return (
            "Your function changes the parameters. That is the optimizer's part, in the line after; change "
            "`parameter.grad` alone."
        )
    return None


def result_not_stored(found: Averaged) -> Explanation:
    """All-reduced a copy, or divided one, and left .grad as it was."""
    if found.left(found.own):
        return (
            "Your ranks talk to each other, but in the end every `.grad` is what it was before. `parameter.grad * 2` "
            "makes a new tensor, and what happens to that one does not reach the model: work in place "
            "(`parameter.grad *= ...`, `dist.all_reduce(parameter.grad)`), or assign the result to `parameter.grad`."
        )
    return None


def gradients_gone(found: Averaged) -> Explanation:
    if found.after.isnan().any():
        return (
            "After your function some parameters have no gradient any more, or one of another shape. The optimizer "
            "needs each `.grad` in the shape of its parameter."
        )
    return None


def frozen_parameter_trained(found: Averaged) -> Explanation:
    """A gradient was made up for a parameter that had none."""
    made_up = [name for step in found.steps for name in step.after if name not in step.own]
    if not made_up:
        return None
    return (
        f"The frozen parameter {made_up[0]} has a gradient now. An optimizer touches whatever has one, and with weight "
        "decay even a gradient of zeros moves the parameter: leave `.grad` at None where it is None."
    )


def right_on_one_rank_only(found: Averaged) -> Explanation:
    """`reduce` instead of `all_reduce`."""
    right = [rank for rank, gradient in enumerate(found.after) if found.is_near(gradient, found.right)]
    if len(right) != 1:
        return None
    return (
        f"Rank {right[0]} has the right gradient and the others do not, so after one step the replicas would differ. "
        "`dist.reduce` and `dist.gather` bring a result to one rank; `dist.all_reduce` brings it to all."
    )


def sum_without_division(found: Averaged) -> Explanation:
    if found.left(found.own.sum(0)):
        return (
            "Your result is the sum of the ranks' gradients. The loss is a mean over samples, so its gradient is a "
            f"mean too: with {found.case.world_size} ranks your steps are about {found.case.world_size} times too "
            "long, and more ranks would make it worse."
        )
    return None


def weighted_sum_without_division(found: Averaged) -> Explanation:
    if found.left((found.samples * found.own).sum(0)):
        return (
            "You weight each gradient by its samples and add, which is right, and then the division is missing. "
            f"The sum now counts all {found.total} samples of the minibatch; divide by their number."
        )
    return None


def shares_counted_alike(found: Averaged) -> Explanation:
    """The plain mean over ranks, right as long as all shares have the same size."""
    if found.left(found.own.mean(0)):
        return (
            "With shares of equal size your result is right. Here they differ: rank 0's gradient is a mean over "
            f"{found.case.samples[0]} samples, the last rank's over {found.case.samples[-1]}, and a plain mean over "
            "the ranks lets a sample in a small share count for more. Weight each gradient by `samples`, and divide "
            "the sum by the samples of all ranks together."
        )
    return None


def weighted_and_divided_by_ranks(found: Averaged) -> Explanation:
    if found.left((found.samples * found.own).mean(0)):
        return (
            "You weight each gradient by its samples, and then divide by the number of ranks. The weights add up to "
            f"the {found.total} samples of the minibatch, not to {found.case.world_size}: divide by that."
        )
    return None


def divided_twice(found: Averaged) -> Explanation:
    ranks = found.case.world_size
    if found.left(found.right / ranks) or found.left(found.own.mean(0) / ranks):
        return (
            f"Your result is {ranks} times too small: it was divided twice. Perhaps once before the all-reduce and "
            "once after, or `ReduceOp.AVG` did it the first time. One of the two has to go."
        )
    return None


def divided_by_samples(found: Averaged) -> Explanation:
    """The sum over ranks divided by a number of samples, though each gradient is a mean over samples already."""
    total = found.own.sum(0)
    if found.left(total / found.total) or found.left(total / found.samples) or found.left(found.own / found.samples):
        return (
            "You divide by a number of samples, but nothing was multiplied by one: each rank's gradient is already a "
            "mean over its share. Either multiply it by `samples` first and divide by the samples of all ranks, or, "
            "where all shares are equal, divide by the number of ranks."
        )
    return None


def divided_by_own_samples(found: Averaged) -> Explanation:
    """Right as long as every rank has as many samples as this one."""
    if found.left((found.samples * found.own).mean(0) / found.samples):
        return (
            "You divide by this rank's own `samples`, as if all ranks had as many. The sum counts the samples of all "
            f"ranks, {found.total} here. They can be added up as gradients are: "
            "`dist.all_reduce(torch.tensor(samples))`."
        )
    return None


def some_left_out(found: Averaged) -> Explanation:
    """Some parameters are right, and others were never touched."""
    wrong = [name for name, part in found.parts.items() if not found.is_near(found.after[:, part], found.right[part])]
    if len(wrong) == len(found.parts) or not all(
        found.is_near(found.after[:, found.parts[name]], found.own[:, found.parts[name]]) for name in wrong
    ):
        return None
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"Some gradients are right, and others still are each rank's own: {wrong[0]}{more}. Go through "
        "`model.parameters()` to its end; there are weights, biases and norms in it."
    )


def too_large(found: Averaged) -> Explanation:
    """Right up to one factor, whatever its reason."""
    factor = float(found.after[0].norm() / found.right.norm())
    if not found.left(found.right * factor) and not found.left(found.own.mean(0) * factor):
        return None
    amount = f"{factor:.3g} times too large" if factor > 1 else f"{1 / factor:.3g} times too small"
    return f"All your gradients are {amount}. Write down by what you multiply and by what you divide, on paper."


def ranks_disagree(found: Averaged) -> Explanation:
    if found.left(found.after[0]):
        return None
    other = next(rank for rank, gradient in enumerate(found.after) if not found.is_near(gradient, found.after[0]))
    return (
        f"Ranks 0 and {other} end with different gradients (the first difference: "
        f"{found.first_difference(other, found.after[0])}), so their replicas would drift apart. After the exchange "
        "every rank has to hold the same numbers."
    )


def wrong_numbers(found: Averaged) -> Explanation:
    return (
        "All ranks agree, and the gradient is not that of the whole minibatch (the first difference: "
        f"{found.first_difference(0, found.right)}). It should be the sum over ranks of `samples` times gradient, "
        "divided by the samples of all ranks."
    )


# The price


def _weigh(found: Averaged, verdict: Verdict) -> Verdict:
    ranks, size = found.case.world_size, found.own[0].nbytes
    message = size + found.own.element_size()  # with one number: the samples, which ranks have to add up as well
    sent, least = max(map(found.run.timeline.bytes_sent, range(ranks))), _ring_bytes(message, ranks)
    memory = max(step.memory for step in found.steps)
    costs = (
        Cost(f"bytes a rank sends, of {size:,} bytes of gradients", f"{sent:,}", f"{least:,}"),
        Cost("bytes of extra memory on a rank", f"{memory:,}", "0"),
    )
    remarks = tuple(filter(None, [_too_many_bytes(sent, least), _pays_latency_often(found), _rounded(found)]))
    return replace(verdict, costs=costs, remarks=remarks, idle=Idle(found.run.timeline, _least_idle(message, ranks)))


def _ring_bytes(size: int, ranks: int) -> int:
    """Patarasuk and Yuan 2009: no all-reduce sends less."""
    return 2 * (ranks - 1) * size // ranks


def _least_idle(size: int, ranks: int) -> float:
    """Share of idle time of a step that exchanges everything in one message, after the backward pass."""
    computing = sum(seconds for kind in ("forward", "backward") if (seconds := PACE.compute_seconds(kind, 1.0)))
    exchanging = PACE.collective_seconds("all_reduce", size, list(range(ranks)))
    return exchanging / (computing + exchanging)


def _too_many_bytes(sent: int, least: int) -> Explanation:
    if sent < 1.5 * least:
        return None
    return (
        f"Your ranks send {sent / least:.1f} times the bytes that are needed. `dist.all_reduce` adds up on the way and "
        "sends each number about twice, however many ranks there are."
    )


def _pays_latency_often(found: Averaged) -> Explanation:
    exchanges = len([span for span in found.run.timeline.of(0) if span.kind == "transfer" and span.bytes])
    if exchanges < len(found.parts):
        return None
    return (
        f"You exchange gradients in {exchanges} separate operations, and each pays the latency of the link anew. "
        "One large message would pay it once, for a copy in memory: `DistributedDataParallel` gathers gradients "
        "in buckets for this reason."
    )


def _rounded(found: Averaged) -> Explanation:
    """In float64 another order of the additions changes the 15th digit, a weight in float32 the 7th."""
    error = float((found.after - found.right).abs().max() / found.right.abs().max())
    if error < 1e-11:
        return None
    return (
        "Your gradients are right to seven digits, though the model's numbers have fifteen: a division of tensors of "
        "whole numbers gives float32. With `total.item()` the weight is a Python number and nothing is lost."
    )


AVERAGING = Exercise(
    name="average_gradients",
    arguments=("model", "samples"),
    cases=_cases,
    priced=StepCase((3, 3, 2, 2), torch.float64, 0, GPTConfig()),
    pace=PACE,
    play=_play,
    gather=Averaged,
    is_right=_is_right,
    accidents=(frozen_parameter_forgotten, only_some_ranks_call),
    ideas=(
        nothing_sent,
        parameters_averaged,
        parameters_changed,
        gradients_gone,
        frozen_parameter_trained,
        result_not_stored,
        right_on_one_rank_only,
        sum_without_division,
        weighted_sum_without_division,
        weighted_and_divided_by_ranks,
        divided_twice,
        divided_by_samples,
        divided_by_own_samples,
        some_left_out,
        shares_counted_alike,
        too_large,
        ranks_disagree,
        wrong_numbers,
    ),
    weigh=_weigh,
)
