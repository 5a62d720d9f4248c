"""Checkpoints: stop a run, and go on with it on the same ranks; or begin with its model on any other.

    4 ranks save                      on disk                         4 ranks load
    rank 0  model.*, rank.0  ----->  |the whole model   |  ----->  all have the model, and each the state that it
    rank 1  model.*, rank.1  ----->  |rank.0  rank.1 .. |          has saved
    ...                              |the metadata      |

A state is a dict of tensors by name. With torch.distributed.checkpoint, all ranks write some of the tensors at the same
time; a tensor that several ranks have is written by one of them. What starts with "model." is whole and fits any other
number of ranks and any other mesh. What belongs to one rank, as its part of the optimizer, is packed into "rank.NUMBER"
and fits the same mesh only: it is not put together and cut anew for others.

Nothing is rounded, so a run goes on bit for bit as if it had never stopped.

The metadata is written last, after everything else. A crash before leaves a folder without it, which is not taken for a
checkpoint, and leaves older checkpoints as they were.

    folder/step_00000010     folder/step_00000020     folder/step_00000030
           .metadata                .metadata                __0_0.distcp    (still being written)
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

Folder = str | os.PathLike[str]
WRITTEN_LAST = ".metadata"  # by torch.distributed.checkpoint, under another name until it is complete


class CheckpointError(ValueError):
    """Some ranks cannot see the checkpoint, or it is of another training."""


def save(state: Mapping[str, Tensor], folder: Folder, step: int) -> None:
    """Write the states of all ranks as one.

    folder: on a file system that all ranks share. A checkpoint of the same step is replaced.

    Raises the error of torch.distributed.checkpoint if it cannot write, on all ranks.
    """
    path = _path(folder, step)
    if dist.get_rank() == 0:  # which then tells the others what to write
        (path / WRITTEN_LAST).unlink(missing_ok=True)
    dcp.save(dict(state), checkpoint_id=path)


def load(folder: Folder) -> tuple[int, dict[str, Tensor]]:
    """The step of the newest checkpoint, and what this rank needs of its state; 0 and nothing if there is none.

    What belongs to other ranks is left out.

    Raises CheckpointError, on all ranks, if they do not see the same checkpoint.
    """
    newest = _agreed_newest(folder)
    if newest == 0:
        return 0, {}
    path = _path(folder, newest)
    stored: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if not name.startswith("rank.") or name == own_name()
    }
    dcp.load(state, checkpoint_id=path)
    return newest, state


def own_name() -> str:
    """The name of what belongs to this rank alone."""
    return f"rank.{dist.get_rank()}"


def packed(state: Any) -> Tensor:
    """Tensors and numbers within dicts and lists, as a tensor of bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpacked(state: Tensor) -> Any:
    """The reverse of `packed`, with all tensors on the CPU."""
    return torch.load(io.BytesIO(state.numpy().tobytes()), "cpu", weights_only=True)


def steps(folder: Folder) -> list[int]:
    """The steps of the complete checkpoints in the folder, oldest first; none if there is no folder."""
    complete = Path(folder).glob(f"step_{'[0-9]' * 8}/{WRITTEN_LAST}")
    return sorted(int(file.parent.name.removeprefix("step_")) for file in complete)


def _path(folder: Folder, step: int) -> Path:
    return Path(folder) / f"step_{step:08d}"


def _agreed_newest(folder: Folder) -> int:
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, max(steps(folder), default=0))
    if len(set(views)) > 1:
        seen = f"the newest steps that ranks see are {', '.join(map(str, views))}"
        raise CheckpointError(f"{seen}; give a folder={os.fspath(folder)!r} on a file system that all nodes share")
    return views[0]
