"""How far a backward pass is, for an emulated clock: a gradient cannot be sent before it was computed.

The matrix products of a backward pass grow with the parameters they belong to. So, when the operation begins that makes
the gradient of a parameter, the pass is as far as the numbers in all parameters for which that has happened, this one
included; one that is used twice counts twice. A block that is computed again within the pass, as a function of autograd
that holds the module, counts whole when that begins. If a pass within the pass comes to parameters of which nothing was
known, all of it counts as over: better too late than too early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_Use = tuple[Any, Tensor]  # a node of autograd's graph, and a tensor of which it makes the gradient


def follow_all(progress: Callable[[float], None], is_wanted: Callable[[], bool]) -> None:
    """From now on, tell the fraction that is done at the begin of each backward pass, and before each gradient."""
    autograd: Any = torch.autograd
    run, passes = autograd._engine_run_backward, list[set[Tensor]]()  # under way, with what each makes gradients of

    def followed(roots: Any, *args: Any, **kwargs: Any) -> Any:
        uses = _uses(roots) if is_wanted() else []
        inner = bool(passes)
        passes.append({tensor for _, tensor in uses})
        hooks = [] if inner else _tell(uses, lambda done: progress(done) if len(passes) == 1 else None)
        if inner and any(isinstance(tensor, nn.Parameter) for tensor in passes[-1] - passes[0]):
            progress(1.0)
        try:
            return run(roots, *args, **kwargs)
        finally:
            passes.pop()
            for hook in hooks:
                hook.remove()

    autograd._engine_run_backward = followed


def _tell(uses: list[_Use], progress: Callable[[float], None]) -> list[Any]:
    """Tell it now, and from hooks, which are returned."""
    sizes = Counter[Any]()
    for node, tensor in uses:
        sizes[node] += tensor.numel()
    left, total = sizes.copy(), sizes.total()

    def begins(node: Any) -> None:
        del left[node]
        progress(1 - left.total() / total)

    if uses:
        progress(0.0)
    return [node.register_prehook(lambda _, node=node: begins(node)) for node in sizes]


def _uses(roots: Any) -> list[_Use]:
    """The parameters behind these tensors, or leaves of any kind where there are none, each with where it is used."""
    nodes = list(dict.fromkeys(root.grad_fn for root in roots if root.grad_fn is not None))
    seen, uses = set(nodes), list[_Use]()
    for node in nodes:  # which grows
        for after, _ in node.next_functions:
            if isinstance(after, torch._C._functions.AccumulateGrad):
                uses.append((node, after.variable))
            elif after is not None and after not in seen:
                seen.add(after)
                nodes.append(after)
    visible = {tensor for _, tensor in uses}
    uses += [(node, tensor) for node in nodes for tensor in _held(node) if tensor not in visible]
    return [use for use in uses if isinstance(use[1], nn.Parameter)] or uses


def _held(node: Any) -> Iterator[Tensor]:
    """The parameters of modules that a function of autograd, written in Python, holds for its backward pass."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        for value in vars(node).values():
            if isinstance(module := getattr(value, "__self__", value), nn.Module):
                yield from (parameter for parameter in module.parameters() if parameter.requires_grad)
