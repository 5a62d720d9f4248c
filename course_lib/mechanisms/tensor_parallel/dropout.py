"""Dropout on tensor ranks: the same mask where they hold the same hidden states, masks of their own where they differ.

Where all ranks hold the same hidden states they have to drop the same numbers, or they would go on with different ones;
where each holds a share, their masks have to differ, or distant units would be dropped together.

    between f and g                                        own
    outside                                                same
    outside, with sequence parallelism                     own
    in the embedding, before the sequence is split         same
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.groups import Group
from course_lib.mechanisms.tensor_parallel.linear import RowParallelLinear
from course_lib.mechanisms.tensor_parallel.vocab import VocabParallelEmbedding


class DropoutGenerators:
    """Two random number generators on each rank of a tensor group, one of which all share, and the one now in use.

    seed: the same on all ranks.
    """

    def __init__(self, seed: int, group: Group, sequence_parallel: bool, device: torch.device) -> None:
        self.same = _generator(f"{seed}", device)
        self.own = _generator(f"{seed} on rank {dist.get_rank(group)}", device)
        self.outside = self.own if sequence_parallel else self.same
        self.current = self.outside

    def use(self, generator: torch.Generator) -> Callable[..., None]:
        """A hook that changes over to it."""

        def change(*_: Any) -> None:
            self.current = generator

        return change


class Dropout(nn.Module):
    """nn.Dropout that takes its mask from the generator now in use."""

    def __init__(self, p: float, generators: DropoutGenerators) -> None:
        super().__init__()
        self.p, self.generators = p, generators

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generators.current)
        return x * kept / (1 - self.p) if self.p < 1 else x * kept


def replace_dropout(model: nn.Module, generators: DropoutGenerators) -> None:
    """Give every nn.Dropout of a cut model the right masks, wherever it stands."""
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Dropout):
                setattr(module, name, Dropout(layer.p, generators))
            if isinstance(layer, RowParallelLinear):
                module.register_forward_pre_hook(generators.use(generators.own))
                layer.register_forward_hook(generators.use(generators.outside))
            if isinstance(layer, VocabParallelEmbedding):
                module.register_forward_pre_hook(generators.use(generators.same))
                module.register_forward_hook(generators.use(generators.outside))


def _generator(seed: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(random.Random(seed).getrandbits(63))  # near seeds, distant numbers
