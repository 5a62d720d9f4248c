"""The two halves of a backward pass: the gradients of the inputs now, the gradients of the weights later.

A linear layer y = x w needs two products on its way back, and only the first one is urgent: the layers before, and
the pipeline stage before, wait for it. Nobody waits for the second one, except the optimizer at the very end.

    outputs      grad ->  [layer c] --> [layer b] --> [layer a] --> grad of inputs           I, grad @ w in each layer
                             |             |             |
                         keep grad     keep grad     keep grad
                             |             |             |
                             v             v             v
                        grad of w_c   grad of w_b   grad of w_a                              W, x^T @ grad in each layer

Only linear layers are split: their weights are nearly all of a Transformer's, and so is their work. Whatever else is
trained (biases, norms, embeddings, layers of other kinds) gets its gradient in the first half.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", ICLR.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WeightGradients(TorchFunctionMode):
    """The second half of a backward pass, left for later by the linear layers that compute in its `with` block.

        with WeightGradients() as later:
            y = module(x)
        y.backward(gradient)       # the first half: x.grad, and everything but the weights of linear layers
        later.accumulate()         # the second half

    Both add up to what `backward` does alone. A layer that is used twice adds one gradient after the other, where
    autograd adds their sum. Recomputed activations and autocast are not supported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []  # a weight, the gradient of its output, its input

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._linear if function is F.linear else function)(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_split = weight.is_leaf and weight.requires_grad
        return _SplitLinear.apply(self.products, x, weight, bias) if is_split else F.linear(x, weight, bias)

    def accumulate(self) -> None:
        """Add the gradients to the weights' `.grad`."""
        while self.products:
            weight, gradient, x = self.products.pop(0)
            weight.backward(gradient.reshape(-1, len(weight)).t() @ x.reshape(-1, weight.shape[1]))


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: list[Any], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products = products
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        ctx.products.append((weight, gradient, x))
        of_input = gradient @ weight if ctx.needs_input_grad[1] else None
        return None, of_input, None, gradient.sum_to_size(weight.shape[:1]) if ctx.needs_input_grad[3] else None
