"""Non-contiguous tensors: an operation works on contiguous copies, and what it writes is copied back.

gloo takes a tensor's numbers side by side from the first one on, whatever the strides. Of the column x[:, 0] it
would reduce one number, and then the neighbours of that number, without a word:

    x[:, 0]  --contiguous()-->  copy  --all_reduce-->  copy  --copy_ when it is waited for-->  x[:, 0]

On an emulated clock an asynchronous operation always works on copies. So whatever a program does to its tensors before
it waits is lost, where it would otherwise depend on who is first. Only another operation on the same tensors finds
what a collective before it has left there, as in the stream of a GPU. And where torch.empty gives nan, as in checks,
what a collective is about to fill is nan as well: for who reads it too early, or gathers into what is still in use. So
is what several messages were on their way to at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

OUTPUTS = {"all_gather", "all_to_all", "reduce_scatter"}  # which read nothing of what they write
Copies = list[tuple[torch.Tensor, torch.Tensor]]


def arguments(name: str, written: Any, *others: Any, always: bool = False) -> tuple[list[Any], Copies]:
    """Contiguous arguments for an operation that writes into the first, and pairs of a tensor and its copy.

    written, others: tensors, or lists of them.  always: copy contiguous tensors, too.
    Raises ValueError if two of the numbers that it writes share a place in memory.
    """
    tensors = flatten(written)
    _refuse_overlap(name, tensors)
    copies = copied(written, always)
    pairs = [pair for pair in zip(tensors, flatten(copies), strict=True) if pair[0] is not pair[1]]
    given = [copies, *(copied(other, always) for other in others)]
    if always and name in OUTPUTS and torch.are_deterministic_algorithms_enabled():
        _empty(tensors)
    return given, pairs


def _empty(tensors: Sequence[torch.Tensor]) -> None:
    """Put nan into what is on its way, so that reading it too early is wrong every time."""
    with _disable_current_modes():
        for tensor in tensors:
            tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 0)


def spoil(tensor: torch.Tensor) -> None:
    """Put nan into what several messages were on their way to: elsewhere it would depend on which one comes last."""
    if torch.are_deterministic_algorithms_enabled():
        _empty([tensor])


def flatten(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for item in tensors for tensor in flatten(item)]


def storages(value: Any) -> set[int]:
    """The addresses of the storages of all tensors among these arguments."""
    return {each.untyped_storage().data_ptr() for each in _strided(value)}


def share_numbers(value: Any, other: Any) -> bool:
    """Whether some contiguous tensors among these arguments and those have numbers in common, for certain."""
    ends = [
        [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in _strided(each) if t.is_contiguous()]
        for each in (value, other)
    ]
    return any(first < end and begin < last for first, last in ends[0] for begin, end in ends[1])


def _strided(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout == torch.strided else []
    return [each for item in value for each in _strided(item)] if isinstance(value, list | tuple) else []


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """A number that tells whether tensors that gloo sends in place hold something else now; it may miss a change."""
    in_place = [each for each in tensors if each.is_contiguous() and not each.is_complex()]
    with _disable_current_modes():
        return sum(int(each.detach().view(-1).view(torch.uint8).sum()) for each in in_place)


def copied(value: Any, always: bool = False) -> Any:
    """The same, with contiguous copies in place of tensors that are not contiguous, or of all."""
    if not isinstance(value, torch.Tensor):
        return [copied(item, always) for item in value] if isinstance(value, list) else value
    if not _has_gaps(value) and not (always and value.layout == torch.strided):
        return value
    with _disable_current_modes():  # the copy does not count as memory of the student's code
        return value.detach().clone(memory_format=torch.contiguous_format)


def _has_gaps(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_contiguous()


def _refuse_overlap(name: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if _has_gaps(tensor) and 0 in tensor.stride():
            raise ValueError(
                f"{name} would write into a tensor that shows the same numbers several times, as expand() makes them. "
                "Give it a tensor with a place for each: x = x.contiguous()."
            )
    starts = [tensor.data_ptr() for tensor in tensors if len(tensors) > 1 and tensor.numel()]
    if len(set(starts)) < len(starts):
        n = len(tensors)
        raise ValueError(
            f"{name} would write all its results into one tensor: [tensor] * {n} is {n} times the same. "
            f"Make {n} tensors: [torch.zeros(2) for _ in range({n})]."
        )
