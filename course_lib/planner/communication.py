"""The cost of communication: collectives by their algorithm, groups by the placement of their members.

    ring           every member sends to the next, n - 1 times a 1/n of the data; an all-reduce goes round twice
    tree           up to a root and down again; few steps, each with everything
    hierarchical   reduce-scatter in every node, all-reduce between nodes on what is left, all-gather in every node

    seconds = launch + steps x latency + bytes that one member sends / bandwidth

Across nodes the bandwidth of a ring of n members is divided by 1 + n / LONG_RING. A ring is the cheapest in bytes, a
tree in steps; the faster of the two is taken, as a communication library would.

Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from course_lib.planner.hardware import Cluster, Interconnect

# Members that halve the bandwidth of a ring through nodes. Fitted to ZeRO-3 on 384, 768 and 1,536 devices (Narayanan et
# al. 2021, table 2), the only published rings of that length; llm-foundry's FSDP on up to 512 agrees.
LONG_RING = 200
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # passes around the ring


class Spread(NamedTuple):
    """The spread of a process group over nodes: `size` members, `per_node` of them in each node it spans."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return self.size // self.per_node


@lru_cache(maxsize=4096)
def group(size: int, stride: int, devices_per_node: int) -> Spread:
    """The spread of so many devices, each `stride` after the one before, numbered as in spec.py."""
    per_node = max(1, min(size, devices_per_node // stride))
    while size % per_node:
        per_node -= 1
    return Spread(size, per_node)


def bytes_sent(op: str, n_bytes: float, size: int) -> float:
    """Bytes that one member sends in a ring. n_bytes: the whole tensor, before a scatter or after a gather."""
    return ROUNDS[op] * n_bytes * (size - 1) / size


def ring_seconds(op: str, n_bytes: float, size: int, link: Interconnect) -> float:
    steps = ROUNDS[op] * (size - 1)
    return link.launch + steps * link.latency + bytes_sent(op, n_bytes, size) / link.achieved


def tree_seconds(n_bytes: float, size: int, link: Interconnect) -> float:
    """The time of an all-reduce over a double binary tree: every member sends in both directions all the time."""
    return link.launch + 2 * math.ceil(math.log2(size)) * link.latency + 2 * n_bytes / link.achieved


def hierarchical_seconds(op: str, n_bytes: float, group: Spread, cluster: Cluster) -> float:
    inside = ring_seconds(op, n_bytes, group.per_node, cluster.inside_link)
    return inside + ring_seconds(op, n_bytes / group.per_node, group.nodes, cluster.between_link)


@lru_cache(maxsize=65_536)
def collective_seconds(op: str, n_bytes: float, group: Spread, cluster: Cluster) -> float:
    """The time of the fastest algorithm of a communication library; all-gather and reduce-scatter have rings only."""
    if group.size == 1 or n_bytes == 0:
        return 0.0
    if group.nodes == 1:
        return ring_seconds(op, n_bytes, group.size, cluster.inside_link)
    ring = ring_through_nodes(op, n_bytes, group, cluster)
    if op != "all_reduce":
        return ring
    if group.per_node > 1:
        return min(ring, hierarchical_seconds(op, n_bytes, group, cluster))
    return min(ring, tree_seconds(n_bytes, group.size, cluster.between_link))


def ring_through_nodes(op: str, n_bytes: float, group: Spread, cluster: Cluster) -> float:
    """The time around a ring that crosses nodes, using the network cards of all members at once.

    In each step every member waits for the slowest, and all share the network: the more members, the less bandwidth is
    left for each.
    """
    link, inside = cluster.between_link, cluster.inside_link
    wide = min(group.per_node, inside.achieved / link.achieved)
    seconds = ring_seconds(op, n_bytes, group.size, link.shared(wide / (1 + group.size / LONG_RING)))
    return seconds - ROUNDS[op] * (group.size - group.nodes) * (link.latency - inside.latency)


def all_to_all(n_bytes: float, copies: int, ranks: Spread, cluster: Cluster, once: bool) -> tuple[float, float]:
    """Bytes that one member sends in an all-to-all and its seconds, with n_bytes of tokens for `copies` experts each.

    If `once`, a token travels once to each node and there once to each device with one of its experts, as in DeepEP
    (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.2); else once for each expert, by the same way. All
    experts are equally likely. Both links are in use at once.
    """
    reached = [n * (1 - (1 - 1 / n) ** copies) if once else copies for n in (ranks.size, ranks.nodes)]  # by one token
    inside, across = (n_bytes * (1 - 1 / n) * to for n, to in zip((ranks.per_node, ranks.nodes), reached, strict=True))
    links = (inside, cluster.inside_link), (across, cluster.between_link)
    return inside + across, max([0.0, *(message_seconds(sent, link) for sent, link in links if sent)])


def message_seconds(n_bytes: float, link: Interconnect) -> float:
    """The time of a message from one device to another."""
    return link.launch + link.latency + n_bytes / link.achieved
