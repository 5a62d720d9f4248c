"""Mixed precision: compute and send in 16 bits, add up and remember in 32.

Half the bytes, and on a GPU many times the arithmetic in a second. What is lost, and what brings it back:

    format      next after 1    smallest    largest
    float32     1 + 2^-23       2^-149      3e38
    bfloat16    1 + 2^-7        2^-133      3e38        two to three digits, and float32's range
    float16     1 + 2^-10       2^-24       65504       three digits, and a narrow range

    A small update rounds away:     1 + 0.001 = 1 in bfloat16         master weights in float32
    A small gradient becomes zero:  1e-8 = 0 in float16               the loss is scaled, the gradients unscaled
    A long sum stalls:              256 + 1 = 256 in bfloat16         sums in float32

    16 bits     weights ----- forward, backward of loss x scale -----> gradients
                   ^                                                       | collect
    32 bits        | round       optimizer         all finite?             v
                master weights <----------- yes <------------- gradients / scale
                                            no: no update, on any rank, and a smaller scale

Micikevicius et al. 2018, "Mixed Precision Training", ICLR; Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning
Training", arXiv:1905.12322.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.shards import master_dtype

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
SMALLEST_SCALE = 2.0**-24


class MasterWeights:
    """An optimizer for a model in 16 bits, which works on a copy of its weights in 32.

        model = TinyGPT(dtype=torch.float16)
        scaler = LossScaler()
        master = MasterWeights(model.parameters(), torch.optim.AdamW, scaler=scaler, lr=1e-3)
        for inputs, targets in minibatches:
            loss = loss_fn(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            master.step()

    The copies start as the parameters are when it is made, so make it after `DataParallel` or `load_state_dict` has
    set them. A parameter of 32 or 64 bits has a copy of its own dtype; a frozen one has none.

    optimizer_cls: called with the copies and with **kwargs.
    scaler: the one that scales the loss, or None, as bfloat16 can do without.

    (A sharded optimizer needs none of this: it has its own shard of the copies, for `LossScaler.unscale` to unscale.)

    Raises ValueError for one tensor in place of a list, and what the optimizer does, as where nothing is to be trained.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_cls: Callable[..., Any],
        scaler: LossScaler | None = None,
        **kwargs: Any,
    ) -> None:
        self.rounded = [parameter for parameter in _listed(parameters) if parameter.requires_grad]
        copies = (weight.detach().to(master_dtype(weight.dtype), copy=True) for weight in self.rounded)
        self.parameters = [nn.Parameter(copy) for copy in copies]
        self.optimizer = optimizer_cls(self.parameters, **kwargs)
        self.scaler = scaler

    @torch.no_grad()
    def step(self, clip: Callable[[list[nn.Parameter]], Any] | None = None) -> bool:
        """Update the copies and round them into the parameters, unless a gradient overflowed; clear all gradients.

        clip: called with the copies before the update, when their gradients are complete and unscaled.

        Returns whether there was an update: the same on all ranks of the scaler's groups, all of which have to call.
        """
        self.collect()
        is_finite = self.scaler is None or self.scaler.unscale(self.parameters)
        if is_finite:
            if clip is not None:
                clip(self.parameters)
            self.optimizer.step()
            for parameter, copy in zip(self.rounded, self.parameters, strict=True):
                parameter.copy_(copy)
        self.zero_grad()
        return is_finite

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameters' gradients to those of their copies, in 32 bits, and clear them.

        `step` does it. Call it after each micro-batch's backward pass to add up micro-batches in 32 bits; without,
        `backward` adds them up in the parameters' own dtype.
        """
        for parameter, copy in zip(self.rounded, self.parameters, strict=True):
            if parameter.grad is None:
                continue
            if copy.grad is None:
                copy.grad = parameter.grad.to(copy.dtype, copy=True)
            else:
                copy.grad += parameter.grad
            parameter.grad = None

    def zero_grad(self) -> None:
        """Forget all gradients, in 16 bits and in 32."""
        for tensor in (*self.rounded, *self.parameters):
            tensor.grad = None


class LossScaler:
    """Multiplies the loss, and with it every gradient, out of the range where float16 has only zeros.

    Dynamic, the scale goes up until a gradient overflows; that step is skipped and the scale goes down. Static, it
    stays, and steps are skipped all the same. A power of two changes no bit of what neither under- nor overflows.

    scale: what the loss is multiplied by, at first.
    dynamic: double the scale after growth_interval steps without an overflow, and halve it at one.
    groups: process groups over which ranks skip together. One covers data parallelism; with pipeline or tensor
        parallelism, give one group for each of the axes. None: all ranks, where there are some.

        scaler.scale(loss).backward()
        if scaler.unscale(parameters):      # MasterWeights.step does this
            optimizer.step()

    The rules and the numbers are those of torch.amp.GradScaler, which agrees step for step.

    Raises ValueError for a scale or an interval that cannot work.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        dynamic: bool = True,
        growth_interval: int = 2000,
        groups: Sequence[dist.ProcessGroup] | None = None,
    ) -> None:
        if not 0 < _in_float32(scale) < math.inf:
            raise ValueError(f"scale={scale} cannot work; give a positive number that float32 can hold, as 2.0**16 is")
        if growth_interval < 1:
            raise ValueError(f"growth_interval={growth_interval} cannot work; give 1 step or more, for instance 2000")
        self.scale_factor = _in_float32(scale)
        self.dynamic = dynamic
        self.growth_interval = growth_interval
        self.groups = groups
        self._finite_in_a_row = 0

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, to call `backward` on.

        Raises ValueError for a loss that is not finite, which no scale can help, and for one in 16 bits, which the
        scale itself may carry over the edge.
        """
        _check_loss(loss, self.scale_factor)
        return loss * self.scale_factor

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor], in_16_bits: bool = False) -> bool:
        """Divide the parameters' gradients by the scale, in place, then choose the scale of the next step.

        in_16_bits: also gradients in 16 bits, which lose again what scaling has saved.

        Returns whether all gradients are finite, on all ranks of all groups. If not, skip the update.

        Raises ValueError for gradients in 16 bits, unless they are asked for, and for a scale so small that the
        overflow is not its doing.
        """
        parameters = _listed(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not in_16_bits:
            _check_gradients(gradients)
        # A GPU is asked for one answer, not for one for each gradient.
        finite = [gradient.isfinite().all() for gradient in gradients]
        for gradient in gradients:
            gradient *= 1 / self.scale_factor
        device = parameters[0].device if parameters else torch.device("cpu")
        is_finite = self._on_all_ranks(torch.stack([torch.ones((), dtype=torch.bool, device=device), *finite]).all())
        if self.dynamic:
            self._adapt(is_finite)
        return is_finite

    def _on_all_ranks(self, is_finite: Tensor) -> bool:
        """Whether it is true on all ranks of all groups."""
        everyone: list[dist.ProcessGroup | None] = [None] if dist.is_initialized() else []
        is_finite = is_finite.int()
        # One axis after the other: after the first, all ranks of a row know; after the second, all rows.
        for group in everyone if self.groups is None else self.groups:
            dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=group)
        return bool(is_finite)

    def _adapt(self, is_finite: bool) -> None:
        self._finite_in_a_row = self._finite_in_a_row + 1 if is_finite else 0
        if not is_finite:
            self.scale_factor = _in_float32(self.scale_factor / 2)
        elif self._finite_in_a_row == self.growth_interval:
            grown = _in_float32(self.scale_factor * 2)
            self.scale_factor = grown if grown < math.inf else self.scale_factor
            self._finite_in_a_row = 0
        if self.scale_factor < SMALLEST_SCALE:
            raise ValueError(
                f"gradients are not finite even with scale={self.scale_factor:g}, so it is not the scale that makes "
                "them overflow; look for inf or nan in the data, the weights and the forward pass"
            )


# What cannot work


def _check_loss(loss: Tensor, scale: float) -> None:
    if loss.dtype in SIXTEEN_BITS:
        raise ValueError(
            f"loss is a {_name(loss.dtype)}, which has no room for a scale of {scale:g}; "
            "compute it in float32, as in loss_fn(logits.float(), targets)"
        )
    if not loss.isfinite().all():
        raise ValueError(
            f"loss={loss.tolist()} before any scaling, so the forward pass overflowed or the weights are broken; "
            "look for numbers above 65504 in float16, use bfloat16 or take a smaller learning rate"
        )


def _check_gradients(gradients: Iterable[Tensor]) -> None:
    for gradient in gradients:
        if gradient.dtype in SIXTEEN_BITS:
            raise ValueError(
                f"parameters have gradients in {_name(gradient.dtype)}, where unscaling loses what scaling has "
                "saved; give parameters in float32, as MasterWeights has them"
            )


def _listed(parameters: Iterable[Any]) -> list[Any]:
    if isinstance(parameters, Tensor):  # whose rows have no gradients
        raise ValueError(f"parameters is one tensor, {list(parameters.shape)}; give a list, for instance [parameter]")
    return list(parameters)


def _in_float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
