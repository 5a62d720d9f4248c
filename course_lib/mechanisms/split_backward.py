"""The two halves of a backward pass: the gradient of the input now, the gradients of the weights later.

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

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Step = tuple[list[GradientEdge], list[Tensor], list[nn.Parameter]]


@dataclass(frozen=True)
class WeightGradients:
    """The second half of a backward pass, not done yet: it holds what the graph has saved until then.

    Each step is a backward pass from a joint, with the gradients kept there, to the weights that join there.
    """

    steps: list[Step]

    def accumulate(self) -> None:
        """Add the gradients to the parameters' `.grad`. Works once, as it frees the graph."""
        for joint, gradients, weights in self.steps:
            torch.autograd.backward(joint, gradients, inputs=weights)


def accumulators(parameters: Iterable[nn.Parameter]) -> dict[Node, nn.Parameter]:
    """The trainable ones of the parameters, by the nodes that end their branches in every graph."""
    return {get_gradient_edge(parameter).node: parameter for parameter in parameters if parameter.requires_grad}


def input_gradient(
    output: Tensor, gradient: Tensor | None, x: Tensor, weights: dict[Node, nn.Parameter]
) -> tuple[Tensor | None, WeightGradients]:
    """The gradient of a module's input, and what is left to do for those of its weights.

    output: what the module returned for the input x.  gradient: of the output; None is a scalar's 1.
    weights: `accumulators(module.parameters())`; the same for all calls of the module.

    Returns None for an input that requires no gradient or is not used. Both halves together add up to what
    `output.backward(gradient)` does for the input and for these weights; any other tensor that the module uses, such
    as a parameter of another stage, gets no gradient (nor does it in torch.distributed.pipelining).
    """
    if not output.requires_grad:
        return None, WeightGradients([])
    joints, urgent = _joints(get_gradient_edge(output), weights)
    inputs = [get_gradient_edge(x)] if x.requires_grad else []
    edges = [GradientEdge(node, index) for node, joint in joints.items() for index in joint.used]
    wanted = [*inputs, *edges, *(GradientEdge(node, 0) for node in urgent)]
    if not wanted:
        return None, WeightGradients([])
    found: Iterator[Tensor | None]  # None where the output does not depend on it
    found = iter(torch.autograd.grad([output], wanted, [gradient], retain_graph=True, allow_unused=True))
    of_input = next(found) if inputs else None
    kept = dict(zip(edges, islice(found, len(edges)), strict=True))
    for node, of_weight in zip(urgent, found, strict=True):
        if of_weight is not None:
            weights[node].backward(of_weight)  # of a leaf: adds to .grad
    steps: list[Step] = []
    for node, joint in joints.items():
        there = [GradientEdge(node, index) for index in joint.used]
        starts = {edge: gradient for edge in there if (gradient := kept[edge]) is not None}
        if starts:
            steps.append((list(starts), list(starts.values()), [weights[end] for end in joint.ends]))
    return of_input, WeightGradients(steps)


class _Joint(NamedTuple):
    """A node where weights join the trunk.

    ends: of the branches that join here.  used: the numbers of its outputs that the graph goes on from; only there can
    a gradient arrive.
    """

    ends: set[Node]
    used: set[int]


def _joints(root: GradientEdge, weights: Iterable[Node]) -> tuple[dict[Node, _Joint], set[Node]]:
    """Where weights join the trunk, and the weights that cannot wait.

    A weight reaches the trunk over a side branch of nodes with a single input each (a transpose, a change of dtype).
    """
    branch = {node: node for node in weights}
    joints: dict[Node, _Joint] = {}
    for node, below in _inputs_first(root.node):
        arriving = {branch[child] for child, _ in below if child in branch}
        if arriving and len(below) == 1:
            branch[node] = arriving.pop()
        elif arriving:
            joints[node] = _Joint(arriving, set())
        for child, index in below:
            if child in joints:
                joints[child].used.add(index)
    if root.node in joints:
        joints[root.node].used.add(root.output_nr)
    places = Counter(end for joint in joints.values() for end in joint.ends)
    urgent = {end for end, number in places.items() if number > 1}
    urgent |= {branch[root.node]} if root.node in branch else set()  # a branch that joins nowhere
    for joint in joints.values():
        joint.ends.difference_update(urgent)
    return {node: joint for node, joint in joints.items() if joint.ends}, urgent


def _inputs_first(root: Node) -> Iterator[tuple[Node, list[tuple[Node, int]]]]:
    """Every node of the graph once, with the outputs of other nodes that it leads to; these nodes come before it."""
    seen: set[Node] = set()
    stack: list[tuple[Node, list[tuple[Node, int]] | None]] = [(root, None)]
    while stack:
        node, below = stack.pop()
        if below is not None:
            yield node, below
        elif node not in seen:
            seen.add(node)
            below = [(child, index) for child, index in node.next_functions if child is not None]
            stack.append((node, below))
            stack.extend((child, None) for child, _ in below if child not in seen)
