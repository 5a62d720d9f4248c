"""What traffic costs: collectives by their algorithm, groups by where their members sit.

    ring           every member sends to the next, n - 1 times a 1/n of the data; an all-reduce goes round twice
    tree           up to a root and down again; few steps, each with everything
    hierarchical   reduce-scatter in every node, all-reduce between nodes on what is left, all-gather in every node

    seconds = launch + steps x latency + bytes that one member sends / bandwidth

A ring is the cheapest in bytes, a tree in steps; the cheaper of them is taken, as a communication library would.

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from course_lib.planner.hardware import Cluster, Link
from course_lib.planner.spec import Plan

ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # how often a ring goes round


class Group(NamedTuple):
    """Who talks to whom: `size` members, `per_node` of them in each node they are in."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return self.size // self.per_node


def groups(plan: Plan, devices_per_node: int) -> dict[str, Group]:
    """The groups that each kind of traffic stays in, if devices are numbered as spec.py says.

    "pipeline" is a device and the one that holds the next stage.
    """
    return {
        "tensor": group(plan.tp, 1, devices_per_node),
        "context": group(plan.cp, plan.tp, devices_per_node),
        "data": group(plan.cp * plan.dp, plan.tp, devices_per_node),  # context ranks hold the same parameters
        "pipeline": group(plan.pp, plan.tp * plan.cp * plan.dp, devices_per_node),
    }


@lru_cache(maxsize=4096)
def group(size: int, stride: int, devices_per_node: int) -> Group:
    per_node = max(1, min(size, devices_per_node // stride))
    while size % per_node:
        per_node -= 1
    return Group(size, per_node)


def bytes_sent(op: str, n_bytes: float, size: int) -> float:
    """What one member puts on the wire in a ring. n_bytes: the whole, before a scatter or after a gather."""
    return ROUNDS[op] * n_bytes * (size - 1) / size


def ring_seconds(op: str, n_bytes: float, size: int, link: Link) -> float:
    steps = ROUNDS[op] * (size - 1)
    return link.launch + steps * link.latency + bytes_sent(op, n_bytes, size) / link.achieved


def tree_seconds(n_bytes: float, size: int, link: Link) -> float:
    """An all-reduce over two trees at once, so that every member sends in both directions all the time."""
    return link.launch + 2 * math.ceil(math.log2(size)) * link.latency + 2 * n_bytes / link.achieved


def hierarchical_seconds(op: str, n_bytes: float, group: Group, cluster: Cluster) -> float:
    inside = ring_seconds(op, n_bytes, group.per_node, cluster.inside_link)
    return inside + ring_seconds(op, n_bytes / group.per_node, group.nodes, cluster.between_link)


@lru_cache(maxsize=65_536)
def collective_seconds(op: str, n_bytes: float, group: Group, cluster: Cluster) -> float:
    """The cheapest way to do it. A ring through several nodes uses the network cards of all its members at once."""
    if group.size == 1 or n_bytes == 0:
        return 0.0
    if group.nodes == 1:
        return ring_seconds(op, n_bytes, group.size, cluster.inside_link)
    link = cluster.between_link
    if group.per_node > 1:
        wide = min(group.per_node, cluster.inside_link.achieved / link.achieved)
        ring = ring_seconds(op, n_bytes, group.size, link.shared(wide))
        return min(ring, hierarchical_seconds(op, n_bytes, group, cluster))
    ring = ring_seconds(op, n_bytes, group.size, link)
    return min(ring, tree_seconds(n_bytes, group.size, link)) if op == "all_reduce" else ring


def message_seconds(n_bytes: float, link: Link) -> float:
    """One device to another."""
    return link.launch + link.latency + n_bytes / link.achieved
