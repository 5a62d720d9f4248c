"""Checkpoints: stop a run on some ranks, go on with it on others.

Every rank writes what it holds, at the same time, into files of its own. A description beside them says which part
of which tensor lies where, so that ranks that are more, fewer or cut otherwise find what they need.

    4 ranks save                 on disk                          2 ranks load
    rank 0  rows 0-1  --------> |rows 0-1|  ---------------\\
    rank 1  rows 2-3  --------> |rows 2-3|  -----------------> rank 0  rows 0-3
    rank 2  rows 4-5  --------> |rows 4-5|  ---------------\\
    rank 3  row  6    --------> |row  6  |  -----------------> rank 1  rows 4-6

A state is a dict of tensors by name. A plain tensor is whole: where several ranks have one of this name, one of them
writes it. A DTensor is a shard, see `sharded`. Ranks may have different names, as the stages of a pipeline do.

Nothing is rounded, so a run goes on bit for bit as if it had never stopped, provided that it goes on with the same
layout. With another number of ranks it starts from the same bits and then adds up in another order.

A checkpoint is written under another name and renamed when it is complete: a crash on the way leaves a folder that
nobody takes for a checkpoint, and the older ones as they were.

    folder/step_00000010     folder/step_00000020     folder/step_00000030.writing

This is torch.distributed.checkpoint, with questions asked first: missing names, other shapes and dtypes are refused
on all ranks at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from course_lib.mechanisms.state import Convert, training_state

State = Mapping[str, Tensor]
Folder = str | os.PathLike[str]


class CheckpointError(ValueError):
    """A checkpoint that is not there, or that does not fit what it is to be loaded into."""


def save(state: State, folder: Folder, step: int, group: dist.ProcessGroup | None = None) -> Path:
    """Write the state of all ranks of the group, and return the checkpoint's own folder inside `folder`.

    folder: on a file system that all ranks share. A checkpoint of the same step is replaced.

    Raises TypeError if something in the state is not a tensor, and what torch.distributed.checkpoint raises when it
    cannot write, on all ranks.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"state[{name!r}] is a {type(value).__name__}; a state holds tensors: torch.tensor(...)")
    done = _path(folder, step)
    writing = done.with_name(done.name + ".writing")
    if _is_first(group):
        shutil.rmtree(writing, ignore_errors=True)  # what a crash has left
        writing.mkdir(parents=True)
    _gather(None, group)  # all wait for the first
    with _in_one_process_too():
        dcp.save(dict(state), checkpoint_id=writing, process_group=group)
    if _is_first(group):
        _publish(writing, done)
    _gather(None, group)  # nobody returns before it is there
    return done


def load(
    state: State,
    folder: Folder,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
    part: bool = False,
) -> int:
    """Fill the state's tensors, in place, from the checkpoint of this step, or of the newest; return its step.

    part: names in the checkpoint for which no rank has a tensor are skipped; otherwise they are an error.

    Raises CheckpointError, on all ranks, if there is no such checkpoint, or if it lacks a name, has one too many, or
    holds a tensor of another shape or dtype. The state is then as it was.
    """
    step = _choose(folder, step, group)
    stored = _stored(folder, step)
    found = _gather((_misfits(state, stored), list(state)), group)
    left = [] if part else sorted(set(stored).difference(*(names for _, names in found)))
    misfits = [f"rank {rank}: {text}" for rank, (texts, _) in enumerate(found) for text in texts]
    misfits += [f"{name} {list(stored[name].size)} has no tensor on any rank to go to" for name in left]
    if misfits:
        more = f"; and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        raise CheckpointError(f"{_path(folder, step)} does not fit the state: {'; '.join(misfits[:3])}{more}")
    with _in_one_process_too():
        dcp.load(dict(state), checkpoint_id=_path(folder, step), process_group=group)
    return step


def steps(folder: Folder) -> list[int]:
    """The steps of the complete checkpoints in the folder, oldest first; none if there is no folder."""
    names = [path.name for path in Path(folder).iterdir()] if Path(folder).is_dir() else []
    return sorted(int(name.removeprefix("step_")) for name in names if re.fullmatch(r"step_\d+", name))


def sharded(local: Tensor, mesh: DeviceMesh, dim: int, length: int | None = None) -> DTensor:
    """This rank's shard, described so that it can be saved and loaded; it shares the numbers of `local`.

    mesh: one-dimensional, of the ranks among which the whole is cut: the tensor ranks of a larger mesh, for instance.
    dim: the dimension that is cut, in pieces as `torch.chunk` cuts them: all of the same length but the last ones.
    length: of the whole along dim; by default the ranks times the length of `local`.

    Raises ValueError if `local` is not the piece that torch.chunk would give this rank.
    """
    n, rank, dim = mesh.size(), mesh.get_local_rank(), dim % local.dim()
    if length is None:
        length = n * local.shape[dim]
    piece = -(-length // n)
    mine = min(piece, max(0, length - rank * piece))
    if local.shape[dim] != mine:
        raise ValueError(
            f"local has length {local.shape[dim]} along dim={dim}; of length={length} cut in pieces of {piece} "
            f"for {n} ranks, rank {rank} holds {mine}"
        )
    whole = torch.empty(*local.shape[:dim], length, *local.shape[dim + 1 :], device="meta")
    return DTensor.from_local(
        local.detach(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Folder,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
    describe: Convert | None = None,
) -> int:
    """Load what `save(training_state(model, optimizer, describe), folder, step)` has written; return its step.

    The optimizer may be new: the state that its first step would have made is made here.
    Raises CheckpointError as `load` does.
    """
    step = _choose(folder, step, group)
    stored = _stored(folder, step)
    # As in PyTorch's own optimizers: counters of steps stay on the CPU unless a GPU's kernel reads them.
    fused = any(settings.get("fused") or settings.get("capturable") for settings in optimizer.param_groups)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole = (describe(name, parameter.detach()) if describe else parameter).shape
        prefix = f"optimizer.{name}."
        for entry in (entry for entry in stored if entry.startswith(prefix)):
            shape = parameter.shape if stored[entry].size == whole else stored[entry].size
            device = parameter.device if shape or fused else "cpu"
            empty = torch.zeros(shape, dtype=stored[entry].properties.dtype, device=device)
            optimizer.state[parameter].setdefault(entry.removeprefix(prefix), empty)
    return load(training_state(model, optimizer, describe), folder, step, group)


def _publish(writing: Path, done: Path) -> None:
    replaced = done.with_name(done.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if done.exists():
        done.rename(replaced)  # removed last: a folder half removed would still look complete
    writing.rename(done)
    shutil.rmtree(replaced, ignore_errors=True)


def _path(folder: Folder, step: int) -> Path:
    return Path(folder) / f"step_{step:08d}"


def _choose(folder: Folder, step: int | None, group: dist.ProcessGroup | None) -> int:
    """The step to load, on which all ranks agree. A rank that cannot see it stops all of them."""
    views = _gather(steps(folder), group)
    wanted = step if step is not None else max(views[0], default=None)
    blind = [rank for rank, view in enumerate(views) if wanted not in view]
    if wanted is None or blind:
        complete = f"complete there: {', '.join(map(str, views[0]))}" if views[0] else "there is none"
        where = f" that rank {', '.join(map(str, blind))} can see" if views[0] and wanted in views[0] else ""
        what = "checkpoint" if step is None else f"checkpoint of step={step}"
        raise CheckpointError(f"folder={os.fspath(folder)!r} holds no {what}{where}; {complete}")
    return wanted


def _stored(folder: Folder, step: int) -> dict[str, TensorStorageMetadata]:
    return dict(dcp.FileSystemReader(_path(folder, step)).read_metadata().state_dict_metadata)  # type: ignore[arg-type]


def _misfits(state: State, stored: Mapping[str, TensorStorageMetadata]) -> list[str]:
    """Why this rank cannot load its state, in words."""
    texts = []
    for name, tensor in state.items():
        if name not in stored:
            texts.append(f"{name} is not in the checkpoint")
        elif (shape := stored[name].size) != tensor.shape:
            texts.append(f"{name} is {list(tensor.shape)} here and {list(shape)} in the checkpoint")
        elif (dtype := stored[name].properties.dtype) != tensor.dtype:
            texts.append(f"{name} is {tensor.dtype} here and {dtype} in the checkpoint")
    return texts


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


@contextlib.contextmanager
def _in_one_process_too() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
