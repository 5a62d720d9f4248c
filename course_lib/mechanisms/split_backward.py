"""The two halves of a backward pass: gradients of the inputs now, gradients of the weights later.

A linear layer y = x w needs two products on its way back, and only the first one is urgent: the layers before, and
the pipeline stage before, wait for it. Nobody waits for the second one, except the optimizer at the very end.

    outputs                  grad ->  [node a] --> [node b] --> [node c] --> grad of inputs     I, a walk down the trunk
       |  trunk of the graph             |            |            |
    [node a] -- w_a                   keep grad    keep grad    keep grad
       |                                 |            |            |
    [node b] -- w_b                      v            v            v
       |                             grad of w_a  grad of w_b  grad of w_c                      W, one side step each
    inputs

The nodes where weights join the trunk are found in the graph that autograd has recorded, so this works for any
module. A weight that joins in several places (a layer used twice) gets its gradient in the first half: only there
do the parts meet.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ICLR.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(frozen=True)
class WeightGradients:
    """The second half of a backward pass, not done yet: it holds what the graph has saved until then."""

    steps: list[tuple[list[GradientEdge], list[Tensor], list[nn.Parameter]]]

    def accumulate(self) -> None:
        """Add the gradients to the parameters' `.grad`. Works once, as it frees the graph."""
        for edges, gradients, parameters in self.steps:
            torch.autograd.backward(edges, gradients, inputs=parameters)


def accumulators(parameters: Iterable[nn.Parameter]) -> dict[Node, nn.Parameter]:
    """The trainable ones of the parameters, by the nodes that end their branches in every graph."""
    return {get_gradient_edge(parameter).node: parameter for parameter in parameters if parameter.requires_grad}


def input_gradients(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: dict[Node, nn.Parameter],
) -> tuple[list[Tensor | None], WeightGradients]:
    """The gradients of the inputs, and what is left to do for those of the weights.

    outputs: what a module returned; all require a gradient.  gradients: those of the outputs, in the same shapes.
    inputs: what it was called with, as far as it requires a gradient.  None is returned for an input without use.
    weights: `accumulators(module.parameters())`; the same for all calls of the module.

    Both halves together add up to what `torch.autograd.backward(outputs, gradients)` does.
    """
    joints, urgent = _joints([get_gradient_edge(output) for output in outputs], weights)
    edges = [edge for joint in joints for edge in joint.edges]
    wanted = [*map(get_gradient_edge, inputs), *edges, *map(get_gradient_edge, urgent)]
    if not wanted:
        return [], WeightGradients([])
    found: Iterator[Tensor | None]  # None where the outputs do not depend on it
    found = iter(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
    of_inputs, kept = list(islice(found, len(inputs))), dict(zip(edges, islice(found, len(edges)), strict=True))
    for parameter, gradient in zip(urgent, found, strict=True):
        if gradient is not None:
            parameter.backward(gradient)  # of a leaf: adds to .grad
    return of_inputs, WeightGradients(list(_steps(joints, kept)))


class _Joint(NamedTuple):
    """A node of the trunk with the weights that join it, and the gradients that arrive at it."""

    edges: list[GradientEdge]
    parameters: list[nn.Parameter]


def _steps(
    joints: list[_Joint], kept: dict[GradientEdge, Tensor | None]
) -> Iterator[tuple[list[GradientEdge], list[Tensor], list[nn.Parameter]]]:
    for joint in joints:
        there = [(edge, gradient) for edge in joint.edges if (gradient := kept[edge]) is not None]
        if there:
            edges, gradients = map(list, zip(*there, strict=True))
            yield edges, gradients, joint.parameters


def _joints(roots: list[GradientEdge], weights: dict[Node, nn.Parameter]) -> tuple[list[_Joint], list[nn.Parameter]]:
    """Where weights join the trunk, and the weights that cannot wait.

    A weight reaches the trunk over a side branch of nodes with a single input each (a transpose, a change of dtype).
    """
    nodes = list(_inputs_first(root.node for root in roots))
    branch: dict[Node, nn.Parameter] = dict(weights)
    joining: dict[Node, set[nn.Parameter]] = {}
    for node in nodes:
        below = [child for child, _ in node.next_functions if child is not None]
        arriving = [branch[child] for child in below if child in branch]
        if arriving and len(below) == 1:
            branch[node] = arriving[0]
        elif arriving:
            joining[node] = set(arriving)
    places = Counter(weight for joined in joining.values() for weight in joined)
    urgent = {weight for weight, number in places.items() if number > 1}
    urgent.update(branch[root.node] for root in roots if root.node in branch)  # a branch that joins nowhere
    used = _used_outputs(nodes, roots)
    joints = [_Joint(used[node], list(later)) for node, joined in joining.items() if (later := joined - urgent)]
    return joints, list(urgent)


def _used_outputs(nodes: list[Node], roots: list[GradientEdge]) -> dict[Node, list[GradientEdge]]:
    """The outputs of each node that the graph goes on from; only there can a gradient arrive."""
    followed = {(child, index) for node in nodes for child, index in node.next_functions if child is not None}
    used: dict[Node, list[GradientEdge]] = defaultdict(list)
    for node, index in sorted(followed | {(root.node, root.output_nr) for root in roots}, key=lambda edge: edge[1]):
        used[node].append(GradientEdge(node, index))
    return used


def _inputs_first(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node of the graph once, after all nodes it leads to."""
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_complete = stack.pop()
        if is_complete:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
