"""Mixed precision: compute and send in 16 bits, add up and remember in 32.

Half the bytes, and on a GPU many times the arithmetic in a second. What is lost, and what brings it back:

    format      next after 1    smallest    largest
    float32     1 + 2^-23       2^-149      3e38
    bfloat16    1 + 2^-7        2^-133      3e38        two to three digits, and float32's range
    float16     1 + 2^-10       2^-24       65504       three digits, and a narrow range

    A small update rounds away:     1 + 0.001 = 1 in bfloat16         master weights in float32
    A small gradient becomes zero:  1e-8 = 0 in float16               the loss is scaled, see `loss_scaling`
    A long sum stalls:              256 + 1 = 256 in bfloat16         sums in float32

    16 bits     weights ----- forward, backward of loss x scale -----> gradients
                   ^                                                       | accumulate
    32 bits        | round       optimizer         all finite?             v
                master weights <----------- yes <------------- gradients / scale
                                            no: no update, on any rank, and a smaller scale

Micikevicius et al. 2018, "Mixed Precision Training", ICLR; Kalamkar et al. 2019, "A Study of BFLOAT16 for Deep Learning
Training", arXiv:1905.12322.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from course_lib.mechanisms import guards
from course_lib.mechanisms.loss_scaling import LossScaler
from course_lib.mechanisms.shards import master_dtype


class MasterWeights:
    """An optimizer for a model in 16 bits, which works on a copy of its weights in 32, the master parameters.

        model = TinyGPT(dtype=torch.float16)
        scaler = LossScaler()
        master = MasterWeights(model.parameters(), torch.optim.AdamW, scaler=scaler, lr=1e-3)
        for inputs, targets in minibatches:
            loss = loss_fn(model(inputs).float(), targets)
            scaler.scale(loss).backward()
            master.step()

    The masters begin as the parameters are, so make it after `DataParallel` has made the replicas equal. A model whose
    parameters are set later, by `load_state_dict` for instance, sets the masters too, rounded to 16 bits; to resume a
    training, load `state_dict` of this as well. A parameter of 32 or 64 bits has a master of its own dtype; a frozen
    one has none.

    optimizer_cls: called with the masters and with **kwargs.
    scaler: the one that scales the loss, or None, as bfloat16 can do without.

    (A sharded optimizer needs none of this: its shards are in 32 bits, for `LossScaler.unscale_and_update`.)

    Raises ValueError for one tensor in place of a list, and what the optimizer does, as where nothing is to be trained.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer_cls: Any, scaler: LossScaler | None = None, **kwargs: Any
    ) -> None:
        self.model_parameters = [p for p in parameters if p.requires_grad]
        copies = (weight.detach().to(master_dtype(weight.dtype), copy=True) for weight in self.model_parameters)
        self.master_parameters = [nn.Parameter(copy) for copy in copies]
        self.optimizer = optimizer_cls(self.master_parameters, **kwargs)
        self.scaler = scaler
        self._versions = [weight._version for weight in self.model_parameters]  # counts changes of a tensor's values

    @torch.no_grad()
    def step(self, *, clip: Callable[[list[nn.Parameter]], Any] | None = None) -> bool:
        """Update the masters and round them into the model, unless a gradient overflowed; clear all gradients.

        clip: called with the masters before the update, when their gradients are complete and unscaled. (Unscaled by
            hand, they would be unscaled twice.)

        Returns whether there was an update: the same on all ranks of the scaler's group, all of which have to call.

        Raises RuntimeError if no loss was scaled since the last step.
        """
        self.accumulate()
        self._follow_model()
        guards.loss_was_scaled(self.scaler)
        is_finite = self.scaler is None or self.scaler.unscale_and_update(self.master_parameters)
        if is_finite:
            if clip is not None:
                clip(self.master_parameters)
            self.optimizer.step()
            self._round_into_model()
        self.zero_grad()
        return is_finite

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the model's gradients to those of the masters, in 32 bits, and clear them.

        `step` does it. Call it after each micro-batch's backward pass to add up micro-batches in 32 bits; without,
        `backward` adds them up in the model's own dtype.
        """
        for parameter, master in self._pairs():
            if (gradient := parameter.grad) is not None:
                sum_before = master.grad
                master.grad = gradient.to(master.dtype, copy=True) if sum_before is None else sum_before.add_(gradient)
                parameter.grad = None

    def zero_grad(self) -> None:
        """Forget all gradients, in 16 bits and in 32."""
        for tensor in (*self.model_parameters, *self.master_parameters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state to resume a training from: the masters, the optimizer's state and the scaler's."""
        return {
            "master_parameters": [master.detach() for master in self.master_parameters],
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a `state_dict`, and round its masters into the model."""
        for master, saved in zip(self.master_parameters, state["master_parameters"], strict=True):
            master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._round_into_model()

    def _round_into_model(self) -> None:
        for parameter, master in self._pairs():
            parameter.copy_(master)
        self._versions = [weight._version for weight in self.model_parameters]

    def _follow_model(self) -> None:
        """Copy parameters into their masters where somebody else has changed the model's."""
        for (parameter, master), version in zip(self._pairs(), self._versions, strict=True):
            if parameter._version != version and not torch.equal(parameter, master.to(parameter.dtype)):
                master.copy_(parameter)

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.model_parameters, self.master_parameters, strict=True)
