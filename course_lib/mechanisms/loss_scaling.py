"""Loss scaling: multiply the loss, and with it every gradient, out of the range where float16 has only zeros.

    what float16 holds                zero <-- 2^-24 |                                  | 65504 --> inf
    gradients of the loss                  . : ::::::|:::: : .                          |
    gradients of the loss x 2^16                     |           . : :::::::::: : .     |

The chain rule carries the factor through to every gradient, and dividing by it, in float32, takes it out again. A power
of two changes no bit of what neither under- nor overflows.

Micikevicius et al. 2018, "Mixed Precision Training", ICLR (section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.mechanisms.groups import Group


@dataclass
class LossScaler:
    """The loss scale of a training. Dynamic, it goes up until a gradient overflows; that step is skipped, and it goes
    down. Static, it stays, and steps are skipped all the same.

    scale_factor: what the loss is multiplied by, at first.
    dynamic: double the scale after growth_interval steps without an overflow, and halve it at one.
    group: the ranks that skip together; None: all ranks, where there are some.

        scaler.scale(loss).backward()
        if scaler.unscale_and_update(parameters):      # MasterWeights.step does this
            optimizer.step()

    The rules and the numbers are those of torch.amp.GradScaler, which agrees step for step.
    """

    scale_factor: float = 2.0**16
    dynamic: bool = True
    growth_interval: int = 2000
    group: Group = None
    has_scaled: bool = field(default=False, init=False)  # was a loss scaled since the last unscale_and_update()?
    finite_in_a_row: int = field(default=0, init=False)  # steps since the scale has changed

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, in 32 bits, times the scale, to call `backward` on; in 16 bits the product might overflow."""
        self.has_scaled = True
        return loss * self.scale_factor

    @torch.no_grad()
    def unscale_and_update(self, parameters: Iterable[Tensor]) -> bool:
        """Divide the parameters' gradients by the scale, in place, then choose the scale of the next step.

        Call it once in a step: gradients do not show whether they were divided already.

        Give gradients in 32 bits, as `MasterWeights` has them: in 16 they lose again what scaling has saved.

        Returns whether all gradients are finite, on all ranks of the group. If not, skip the update.
        """
        parameters = list(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # A GPU is asked for one answer, not for one for each gradient.
        finite = [gradient.isfinite().all() for gradient in gradients]
        for gradient in gradients:
            gradient *= 1 / self.scale_factor
        device = parameters[0].device if parameters else torch.device("cpu")
        is_finite = torch.stack([torch.ones((), dtype=torch.bool, device=device), *finite]).all().int()
        if dist.is_initialized():
            dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=self.group)
        self.has_scaled = False
        if self.dynamic:
            self._adapt(bool(is_finite))
        return bool(is_finite)

    def _adapt(self, is_finite: bool) -> None:
        self.finite_in_a_row = self.finite_in_a_row + 1 if is_finite else 0
        if not is_finite:
            self.scale_factor /= 2
        elif self.finite_in_a_row == self.growth_interval:
            self.scale_factor, self.finite_in_a_row = 2 * self.scale_factor, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale_factor": self.scale_factor, "finite_in_a_row": self.finite_in_a_row}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.scale_factor, self.finite_in_a_row = float(state["scale_factor"]), int(state["finite_in_a_row"])
