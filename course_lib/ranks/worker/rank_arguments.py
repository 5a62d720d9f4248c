"""The rank arguments of an operation (src, dst, group_dst): an invalid one is refused, where gloo would wait for it."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from course_lib.ranks.errors import listing
from course_lib.ranks.worker.tracer import torch_calls

c10d: Any = dist.distributed_c10d
_MESSAGES = {"send", "isend", "recv", "irecv", "send_object_list", "recv_object_list", "P2POp", "__init__"}  # P2POp's
_RING = "The neighbours in a ring are (rank + 1) % world_size and (rank - 1) % world_size"
_ROOT = "The root is one of them, the same on every rank"
_RING_IN_GROUP = "A ring in a group closes with group ranks: (dist.get_rank(group) + 1) % dist.get_world_size(group)"


def check(group: Any, operation: str, rank: Any, group_rank: Any) -> None:
    """Raise ValueError unless the group has this rank (or group rank) and a message goes to another rank."""
    ranks = group.ranks
    named, choices = (group_rank, range(len(ranks))) if rank is None else (rank, ranks)
    is_own = named == choices[group.place]
    if named in choices and not (is_own and operation in _MESSAGES):
        return
    called = [operation, *torch_calls()][-1]  # recv calls irecv
    operation = "P2POp" if called == "__init__" else called
    is_world = len(ranks) == dist.get_world_size()
    kind = "rank" if choices is ranks or is_world else "group rank"
    why = f"but {'the world' if is_world else 'its group'} has only {listing([*choices])}"
    if is_own:
        why = "the one that calls it. A message needs two ranks" + ", and there is only one here" * (len(ranks) == 1)
    advice = (_RING if is_world else _RING_IN_GROUP) if operation in _MESSAGES else _ROOT
    raise ValueError(f"{operation} names {kind} {named!r}, {why}. {advice}.")


def check_before_torch() -> None:
    """Check the ranks before torch does, whose error says little."""
    canonicalize = c10d._canonicalize_group_rank

    def checked(group: Any, rank: Any = None, group_rank: Any = None, return_global: bool = False) -> int:
        if hasattr(group, "ranks") and (rank is None) != (group_rank is None):
            check(group, sys._getframe(1).f_code.co_name, rank, group_rank)
        return canonicalize(group, rank, group_rank, return_global)

    c10d._canonicalize_group_rank = checked
