"""The group of ranks that a mechanism talks to."""

from __future__ import annotations

import torch.distributed as dist

Group = dist.ProcessGroup | None  # None: all ranks


def rank_in(group: Group) -> int:
    """This rank's number within the group. Raises ValueError on a rank that is not in it."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"group does not contain rank {dist.get_rank()}; only its members may call this")
    return rank
