"""The state of a training as a dict of tensors by name, whichever ranks hold them.

    model.blocks.1.mlp.up.weight                   what `state_dict` has of the model
    optimizer.blocks.1.mlp.up.weight.exp_avg       what the optimizer remembers of this parameter

Where ranks hold parts, the names stay; what was cut is made whole on the way out, and cut anew on the way in. So a
state fits other ranks, and one process with a plain model and optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_lib.mechanisms.mesh import Mesh
from course_lib.mechanisms.shards import Shards
from course_lib.mechanisms.tensor_parallel import placements


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh | None = None) -> dict[str, Any]:
    """The tensors of a model and of its optimizer by name, whole and on the CPU: "model.NAME" and "optimizer.NAME.KEY".

    mesh: on which the model is a rank's part of one. All ranks call it then, and get the state of the whole model.
    A tied parameter is there under each of its names, so that pipeline stages that hold copies of it find theirs.
    The optimizer's settings, as its learning rate, are not there; they come with the program.
    """
    where, tensor_group = placements(model), mesh.group("tp") if mesh else None
    state = {f"model.{name}": where[name].gather(own, tensor_group) for name, own in model.state_dict().items()}
    memory = optimizer.state_dict()["state"]
    for name, (number, parameter) in _numbered(model, optimizer).items():
        for key, value in memory.get(number, {}).items():
            is_alike = isinstance(value, Tensor) and value.shape == parameter.shape  # unlike a count of steps
            state[f"optimizer.{name}.{key}"] = where[name].gather(value, tensor_group) if is_alike else value
    on_cpu = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
    of_stages: list[dict[str, Any]] = [on_cpu] * (mesh.size("pp") if mesh else 1)
    if mesh:
        dist.all_gather_object(of_stages, on_cpu, group=mesh.group("pp"))
    return {key: value for held in of_stages for key, value in held.items() if value is not None}


def load_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], mesh: Mesh | None = None
) -> None:
    """Take over a `training_state`, whichever mesh it comes from; where there is a mesh, this rank's part of it.

    Raises KeyError for a state that lacks one of the model's tensors.
    """
    where, tensor_group = placements(model), mesh.group("tp") if mesh else None
    model.load_state_dict({name: where[name].shard(state[f"model.{name}"], tensor_group) for name in where})
    memory: dict[int, dict[str, Any]] = {}
    for name, (number, parameter) in _numbered(model, optimizer).items():
        prefix, shape = f"optimizer.{name}.", state[f"model.{name}"].shape
        for entry in (entry for entry in state if entry.startswith(prefix)):
            value = state[entry]
            if isinstance(value, Tensor) and value.shape == shape:  # a count of steps stays on the CPU
                value = where[name].shard(value, tensor_group).to(parameter.device)
            memory.setdefault(number, {})[entry.removeprefix(prefix)] = value
    optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, int]:
    """The number under which each parameter stands in the optimizer's state_dict."""
    return {p: number for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}


def _numbered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, nn.Parameter]]:
    """Each trained parameter by all of its names, with its number in the optimizer."""
    numbers = numbers_of(optimizer)
    named = model.named_parameters(remove_duplicate=False)
    return {name: (numbers[parameter], parameter) for name, parameter in named if parameter in numbers}


# The state of an optimizer that works on shards


def gather_states(shards: Shards, states: Mapping[Any, Mapping[str, Any]]) -> dict[nn.Parameter, dict[str, Any]]:
    """The optimizer's state of each whole parameter, masters included, put together from the ranks' pieces.

    All ranks call it.
    """
    own = [dict(states.get(piece, {})) for piece in shards.pieces]
    for state, piece in zip(own, shards.pieces, strict=True):
        state |= {"master": piece.detach()} if shards.has_master else {}
        state |= {name: value.cpu() for name, value in state.items() if _is_piece(value)}
    everyone: list[Any] = [None] * shards.n
    dist.all_gather_object(everyone, own, group=shards.group)
    wholes = {}
    for parameter, *parts in zip(shards.parameters, *everyone, strict=True):
        wholes[parameter] = whole = dict(parts[0])
        for name in [name for name, value in whole.items() if _is_piece(value)]:  # a count of steps is not cut
            joined = torch.cat([part[name] for part in parts])[: parameter.numel()]
            whole[name] = joined.view(parameter.shape).to(parameter.device, copy=True)
    return wholes


@torch.no_grad()
def cut_states(shards: Shards, wholes: Sequence[Mapping[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The reverse of `gather_states`. A parameter may have no state, or one with other entries than the others."""
    cut: dict[Tensor, dict[str, Any]] = {}
    for whole, parameter, piece, own in zip(wholes, shards.parameters, shards.pieces, shards.local_ranges, strict=True):
        cut[piece] = state = copy.deepcopy(dict(whole))
        for name, value in state.items():
            # For a parameter of shape [] the shape alone does not tell a count of steps.
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step":
                part = value.reshape(-1)[own.start : own.stop]
                state[name] = F.pad(part, (0, len(piece) - len(part))).to(piece.device)
        piece.copy_(state.pop("master", piece))
    return cut


def _is_piece(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
