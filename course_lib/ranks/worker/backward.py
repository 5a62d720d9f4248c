"""How far a backward pass is, for an emulated clock: a gradient cannot be sent before it was computed.

The matrix products of a backward pass grow with the parameters they belong to. So, when the operation begins that makes
the gradient of a parameter, the pass is as far as the numbers in all parameters for which that has happened, this one
included; one that is used twice counts twice. If a pass within the pass, as for a block that is computed again, comes
to parameters of which nothing was known, all of it counts as over: better too late than too early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def follow_all(progress: Callable[[float], None], is_wanted: Callable[[], bool]) -> None:
    """From now on, tell the fraction that is done at the begin of each backward pass, and before each gradient."""
    autograd: Any = torch.autograd
    run, passes = autograd._engine_run_backward, list[set[Any]]()  # under way, with the parameters of each

    def followed(roots: Any, *args: Any, **kwargs: Any) -> Any:
        uses = _uses(roots) if is_wanted() else []
        passes.append({parameter for _, parameter in uses})
        sizes, done = [parameter.numel() for _, parameter in uses], list[int]()

        def begins(size: int) -> None:
            if len(passes) == 1:
                done.append(size)
                progress(sum(done) / sum(sizes))

        pairs = zip(uses, sizes, strict=True)
        hooks = [node.register_prehook(lambda _, size=size: begins(size)) for (node, _), size in pairs]
        try:
            if passes[-1] - passes[0]:
                progress(1.0)
            elif uses:
                begins(0)
            return run(roots, *args, **kwargs)
        finally:
            passes.pop()
            for hook in hooks:
                hook.remove()

    autograd._engine_run_backward = followed


def _uses(roots: Any) -> list[tuple[Any, Any]]:
    """The parameters in the graph behind these tensors, each with the node that makes its gradient."""
    nodes = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    uses, seen = [], set(nodes)
    for node in nodes:  # which grows
        for after, _ in node.next_functions:
            if isinstance(getattr(after, "variable", None), nn.Parameter):
                uses.append((node, after.variable))
            elif after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    return uses
