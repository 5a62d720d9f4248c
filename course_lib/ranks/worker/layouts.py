"""Tensors with gaps in memory: an operation gets copies without gaps, and what it writes is brought back.

gloo takes numbers side by side from a tensor's first one on, whatever the strides. Of the column
x[:, 0] it would reduce one number, and then the neighbours of that number, without a word:

    x[:, 0]  --contiguous()-->  copy  --all_reduce-->  copy  --copy_ when it is waited for-->  x[:, 0]

On an emulated clock an asynchronous operation always gets copies. Whatever a program does to its tensors before it
waits is then lost, where it would otherwise depend on who is first. Only another operation on the same tensors finds
what a collective before it has left there, as in the stream of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def without_gaps(name: str, written: Any, *others: Any, apart: bool = False) -> tuple[list[Any], Pairs]:
    """The arguments for an operation that writes into the first, a tensor or lists of them; and what to bring back.

    apart: copy those without gaps, too.
    Raises ValueError if numbers that it writes would fall on the same place.
    """
    tensors = flatten(written)
    _refuse_shared_places(name, tensors)
    copies = packed(written, apart)
    pairs = [pair for pair in zip(tensors, flatten(copies), strict=True) if pair[0] is not pair[1]]
    return [copies, *(packed(other, apart) for other in others)], pairs


def flatten(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for item in tensors for tensor in flatten(item)]


def places(value: Any) -> set[int]:
    """Where in memory all tensors among these arguments lie."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()} if value.layout == torch.strided else set()
    return set().union(*map(places, value)) if isinstance(value, list | tuple) else set()


def version(tensors: Sequence[torch.Tensor]) -> int:
    """A number that grows when one of them is changed; of those that gloo sends from where they lie, and not a part."""
    whole = [each for each in tensors if each.is_contiguous() and each.nbytes == each.untyped_storage().nbytes()]
    return sum(each._version for each in whole if not each.is_inference())


def packed(value: Any, apart: bool = False) -> Any:
    """The same, with copies in place of tensors that have gaps, or of all."""
    if not isinstance(value, torch.Tensor):
        return [packed(item, apart) for item in value] if isinstance(value, list) else value
    if not _has_gaps(value) and not (apart and value.layout == torch.strided):
        return value
    with _disable_current_modes():  # a student's code holds no copy, whoever counts its memory
        return value.detach().clone(memory_format=torch.contiguous_format)


def _has_gaps(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_contiguous()


def _refuse_shared_places(name: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if _has_gaps(tensor) and 0 in tensor.stride():
            text = (
                f"{name} would write into a tensor that shows the same numbers several times, as expand() makes them."
            )
            raise ValueError(f"{text} Give it a tensor with a place for each: x = x.contiguous().")
    places = [tensor.data_ptr() for tensor in tensors if len(tensors) > 1 and tensor.numel()]
    if len(set(places)) < len(places):
        n = len(tensors)
        text = f"{name} would write all its results into one tensor: [tensor] * {n} is {n} times the same."
        raise ValueError(f"{text} Make {n} tensors: [torch.zeros(2) for _ in range({n})].")
