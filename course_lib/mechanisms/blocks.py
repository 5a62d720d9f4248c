"""Blocks: parts of a model that are whole only while they compute.

    modules      find  pieces         | whole parameters         | pieces
    memory       holds 1/N            | 1/N and the whole        | 1/N
                       ---- unshard --+------- computes ---------+-- reshard

What autograd saves of a whole parameter, a transposed weight for instance, shares its memory: freed by reshard, and
there again, with the same numbers, after the next unshard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from course_lib.mechanisms.shards import Shards


class Block:
    """Parameters of a module that come and go together.

    model, home: the whole model, and the module in it that computes with the parameters.
    wholes: for each parameter the whole tensor, in the forward and backward pass that is going on.
    """

    def __init__(self, model: nn.Module, home: nn.Module, parameters: list[nn.Parameter], **shards: Any) -> None:
        self.module, self.parameters, self.wholes = home, parameters, dict[Tensor, Tensor]()
        self.size, self.shards = sum(p.numel() for p in parameters), Shards(parameters, is_apart=True, **shards)
        for parameter, piece in zip(parameters, self.shards.pieces, strict=True):
            parameter.data, parameter.grad, parameter.is_shard = piece, None, True  # type: ignore[attr-defined]
        uses = [(vars(module), *named) for module in model.modules() for named in _own_parameters(module)]
        self._uses = [use for use in uses if use[-1] in set(parameters)]
        self._gathering: dist.Work | None = None
        self.reshard()

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters)

    def start_gather(self) -> dist.Work:
        if self._gathering is None:
            self.shards.whole.untyped_storage().resize_(self.shards.whole.nbytes)
            self._gathering = self.shards.all_gather()
        return self._gathering

    def unshard(self) -> None:
        """Let the modules find whole parameters."""
        self.start_gather().wait()
        for attributes, name, parameter in self._uses:
            attributes[name] = self.wholes[parameter]  # Python finds it before the module's own parameter
            attributes[name]._is_param = True  # for those who tell weights from activations

    def reshard(self) -> None:
        """Let the modules find this rank's pieces, and free the whole."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        for attributes, name, _ in self._uses:
            attributes.pop(name, None)
        self.shards.whole.untyped_storage().resize_(0)


def parameters_by_block(model: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Each block with the parameters that it alone uses; before them the model, with those of no block or of several.

    A block is there once for each dtype of its parameters, and once more for frozen ones.
    """
    homes = [model, *dict.fromkeys(_blocks(model))]
    home_of = {module: home for home in homes for module in home.modules()}
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for _, parameter in _own_parameters(module):
            users.setdefault(parameter, set()).add(home_of[module])
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter, used_by in users.items():
        home = next(iter(used_by)) if len(used_by) == 1 else model
        alike.setdefault((homes.index(home), parameter.dtype, parameter.requires_grad), []).append(parameter)
    return [(homes[kind[0]], alike[kind]) for kind in sorted(alike, key=lambda kind: kind[0])]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost lists of modules."""
    for child in module.children():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            yield child
        else:
            yield from _blocks(child)


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)
