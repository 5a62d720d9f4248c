"""The parts of a collective, one for each rank: wrong ones are refused in plain words before gloo is called."""

from __future__ import annotations

from typing import Any

import torch

NAMES = frozenset({"all_gather", "all_to_all", "reduce_scatter", "gather", "scatter"})


def check(name: str, args: tuple, place: int, n: int) -> str:
    """The rows that a rank takes from each of the n ranks and gives to each, if they are rows: "2,2>1,3".

    place: of the rank in the group.
    Raises ValueError for a list of another length, parts that do not fit, or splits that do not add up.
    """
    written, given, *splits = args
    if isinstance(written, list) and isinstance(given, list):
        _check_lists(name, [written, given], n)
    elif isinstance(written, torch.Tensor) and isinstance(given, torch.Tensor):
        if name == "all_to_all":
            taken, sent = _splits("output", written, splits[0], n), _splits("input", given, splits[1], n)
            if taken[place] != sent[place]:
                text = f"{sent[place]} of its own rows, and room for {taken[place]}"
                raise ValueError(f"all_to_all_single would give this rank {text}.")
            rows = ">".join(",".join(map(str, each)) for each in (taken, sent))
            return rows if len(rows) < 192 else ""  # the most that the board can hold
        part, whole = sorted(tensor.numel() for tensor in (written, given))
        if whole != n * part:
            raise ValueError(f"{name} of {part} numbers on each of {n} ranks has {n * part} in all, and not {whole}.")
    return ""


def _check_lists(name: str, sides: list[Any], n: int) -> None:
    lists = sides if name == "all_to_all" else [parts for side in sides for parts in side if isinstance(parts, list)]
    for parts in lists:
        if len(parts) != n:
            raise ValueError(f"{name} needs a list with a tensor for each of the {n} ranks, and this has {len(parts)}.")
    own = [tensor for side in sides for tensor in side if isinstance(tensor, torch.Tensor)]
    shapes = {str(tuple(part.shape)): part for parts in [own, *lists] for part in parts}
    if lists and len(shapes) > 1 and own[0].is_cpu:  # NCCL takes them
        raise ValueError(f"{name} needs tensors of one shape, and these have {' and '.join(shapes)}.")


def _splits(side: str, tensor: torch.Tensor, splits: list[int], n: int) -> list[int]:
    rows = len(tensor) if tensor.dim() else 1
    if splits and (len(splits) != n or sum(splits) != rows):
        needed = f"{n} numbers that add up to {rows}, the length of the {side}"
        raise ValueError(f"{side}_split_sizes={splits} of all_to_all_single must be {needed}.")
    return splits or [rows // n] * n
