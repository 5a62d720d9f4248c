"""A mesh: all ranks as a block of dp x pp x tp, with a number for each rank and a group to talk to on each axis.

                    replica 0                         replica 1
    stage 0     rank 0 ===== rank 1               rank 4 ===== rank 5         rank = (d x pp + p) x tp + t
                  |            |                    |            |
    stage 1     rank 2 ===== rank 3               rank 6 ===== rank 7         Mesh(dp=2, pp=2, tp=2)

The tensor axis is the last: its neighbors, the most talkative, have neighboring numbers and share a node.
"""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.mechanisms import guards

MeshAxis = Literal["dp", "pp", "tp"]
AXES: tuple[MeshAxis, ...] = ("dp", "pp", "tp")


class Mesh:
    """All ranks as a block of dp x pp x tp. All of them have to make it, with the same sizes.

    dp: replicas of the model.  pp: ranks of a pipeline.  tp: ranks among which each layer is cut.
    device: "cpu" or "cuda".

    way_back: on GPUs, a second group for the ranks of a pipeline, see `between_stages`; else None.

    Raises ValueError if the sizes do not multiply to the number of ranks.
    """

    def __init__(self, dp: int, pp: int, tp: int, device: str = "cpu") -> None:
        guards.sizes_make_all_ranks(dp, pp, tp)
        self.device_mesh = init_device_mesh(device, (dp, pp, tp), mesh_dim_names=AXES)
        pipelines = self.device_mesh.mesh.movedim(AXES.index("pp"), -1).reshape(-1, pp).tolist()
        self.way_back = dist.new_subgroups_by_enumeration(pipelines)[0] if device == "cuda" else None

    def group(self, axis: MeshAxis) -> dist.ProcessGroup:
        """The ranks that differ from this one in their number on this axis only, and this one."""
        return self.device_mesh.get_group(axis)

    def size(self, axis: MeshAxis) -> int:
        return dist.get_world_size(self.group(axis))

    def rank(self, axis: MeshAxis) -> int:
        """This rank's number on the axis, from 0 to size - 1."""
        return dist.get_rank(self.group(axis))

    def close(self) -> None:
        """Let the groups go, so that these processes can be used for another mesh."""
        for group in (*map(self.group, AXES), self.way_back):
            if group not in (None, dist.group.WORLD):
                dist.destroy_process_group(group)
