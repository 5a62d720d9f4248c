"""How far a backward pass is, for an emulated clock: a gradient cannot be sent before it was computed.

The matrix products of a backward pass grow with the parameters they belong to. So, when the operation begins that makes
the gradient of a parameter, the pass is as far as the numbers in all parameters for which that has happened, this one
included; one that is used twice counts twice. If a pass within the pass, as for a block that is computed again, comes
to parameters of which nothing was known, all of it counts as over: better too late than too early.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge


def follow_all(progress: Callable[[float], None], is_wanted: Callable[[], bool]) -> None:
    """From now on, tell the fraction that is done at the begin of each backward pass, and before each gradient."""
    autograd: Any = torch.autograd
    run, passes = autograd._engine_run_backward, list[set[Any]]()  # under way, with the parameters of each

    def followed(roots: Any, *args: Any, **kwargs: Any) -> Any:
        uses = _uses(roots) if is_wanted() else []
        total, done = sum(parameter.numel() for _, parameter in uses), 0

        def begins(size: int, *_: Any) -> None:
            nonlocal done
            if len(passes) == 1:
                done += size
                progress(done / total)

        with contextlib.ExitStack() as stack:
            passes.append({parameter for _, parameter in uses})
            stack.callback(passes.pop)
            for node, parameter in uses:
                stack.enter_context(node.register_prehook(functools.partial(begins, parameter.numel())))
            if passes[-1]:
                begins(0)
            if passes[-1] - passes[0]:
                progress(1.0)
            return run(roots, *args, **kwargs)

    autograd._engine_run_backward = followed


def _uses(roots: Any) -> list[tuple[Any, Any]]:
    """The parameters in the graph behind these tensors, each with the node that makes its gradient."""
    ends = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    nodes = list(dict.fromkeys(node for node in ends if node is not None))
    uses, seen = [], set(nodes)
    for node in nodes:  # which grows
        for after, _ in node.next_functions:
            if isinstance(parameter := getattr(after, "variable", None), nn.Parameter):
                uses.append((node, parameter))
            elif after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return uses
