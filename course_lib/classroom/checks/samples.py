"""The samples behind a gradient: how much each counts in what the ranks have computed together."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import linear, mse_loss

from course_lib.classroom.checks.evidence import is_same
from course_lib.classroom.checks.part import Observed
from course_lib.classroom.checks.prose import TEXTS


def miscounted(observed: list[Observed], inputs: str = "inputs", targets: str = "targets") -> str:
    """A sentence about how much each sample counts in the gradients; "" if all count alike, or if no numbers fit.

    The ranks' stages, linear layers with a tanh behind each, are one model here, and each sample goes through it alone.
    """
    places = [(seen, name) for seen in observed for name in seen.before if name.endswith(("weight", "bias"))]
    parameters = [seen.before[name].clone().requires_grad_() for seen, name in places]  # type: ignore[union-attr]
    changes = [_less(seen.values[f"{name}.grad"], seen.before[f"{name}.grad"]) for seen, name in places]
    if any(one is None for one in changes):
        return ""
    got = torch.cat([one.flatten() for one in changes])  # type: ignore[union-attr]
    if not got.isfinite().all():
        return ""
    x, y = (_whole(observed[0], start) for start in (inputs, targets))
    alone = torch.stack([_gradient(parameters, *pair) for pair in zip(x, y, strict=True)], 1)
    counts, n = torch.linalg.lstsq(alone, got[:, None]).solution.flatten(), alone.shape[1]
    if not is_same(alone @ counts, got, 1e-9) or is_same(counts, counts.mean().expand_as(counts), 1e-9):
        return ""
    runs = groupby(enumerate(counts.tolist()), lambda one: f"{round(one[1], 9) + 0.0:.3g}")
    said = [f"{_named([i for i, _ in run])}: {count}" for count, run in runs]
    return TEXTS["samples"].format(counts=", ".join(said), n=n, share=f"{1 / n:.3g}")


def _whole(seen: Observed, start: str) -> Tensor:
    """A minibatch, which may lie in pieces, by the start of their names."""
    return torch.cat([one for name, one in seen.before.items() if name.startswith(start) and isinstance(one, Tensor)])


def _less(after: Tensor | str, before: Tensor | str) -> Tensor | None:
    """What was added to a gradient; None if there is none."""
    if not isinstance(after, Tensor):
        return None
    return after - before if isinstance(before, Tensor) else after


def _gradient(parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The gradient of one sample's loss, as a single vector."""
    layers = iter(parameters)
    for weight, bias in zip(layers, layers, strict=True):
        x = linear(x, weight, bias).tanh()
    return torch.cat([one.flatten() for one in torch.autograd.grad(mse_loss(x, y), parameters)])


def _named(run: list[int]) -> str:
    return f"sample {run[0]}" if len(run) == 1 else f"samples {run[0]} to {run[-1]}"
