"""The pace of a run: the speed of its emulated devices and links; `clock` has the rules by which time passes."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from course_lib.timeline import COMPUTE_KINDS

# Steps of each ring or chain algorithm, and how much of the tensor each step carries, for n ranks.
# Thakur et al. 2005, "Optimization of collective communication operations in MPICH".
_ALGORITHM_STEPS: dict[str, Any] = {
    "all_reduce": lambda n: (2 * (n - 1), 1 / n),
    "all_gather": lambda n: (n - 1, 1.0),
    "reduce_scatter": lambda n: (n - 1, 1.0),
    "all_to_all": lambda n: (n - 1, 1 / n),
    "broadcast": lambda n: (math.ceil(math.log2(n)), 1.0),
    "reduce": lambda n: (math.ceil(math.log2(n)), 1.0),
    "gather": lambda n: (n - 1, 1.0),
    "scatter": lambda n: (n - 1, 1.0),
    "barrier": lambda n: (2 * (n - 1), 0.0),
}
_RINGS = {"all_reduce", "all_gather", "reduce_scatter", "barrier"}  # each step is a message to the next rank


def _require_positive(name: str, value: Any, zero_is_fine: bool, most: float = sys.float_info.max) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most or (value == 0 and not zero_is_fine):
        raise ValueError(f"{name}={value!r} must be a {'number of at least' if zero_is_fine else 'number above'} 0")


def _require_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")


@dataclass(frozen=True)
class Link:
    """A connection between two devices. latency: seconds; bandwidth: bytes per second, one direction."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _require_positive("latency", self.latency, zero_is_fine=True)
        _require_positive("bandwidth", self.bandwidth, zero_is_fine=False, most=math.inf)

    def seconds(self, n_bytes: float) -> float:
        """Time for one message of n_bytes."""
        return self.latency + n_bytes / self.bandwidth


_FREE = Link()


@functools.lru_cache(maxsize=1000)
def _ring_seconds(steps: int, n_bytes: float, links: tuple[Link, ...]) -> float:
    """Seconds until pieces of n_bytes have moved on by so many steps. links: from each rank to the next.

    In each step a rank passes on the piece that it received in the step before, as soon as its link is free.
    """
    there = free = [0.0] * len(links)
    for _ in range(steps):
        free = [max(times) + n_bytes / link.bandwidth for *times, link in zip(there, free, links, strict=True)]
        arrived = [at + link.latency for at, link in zip(free, links, strict=True)]
        there = [arrived[-1], *arrived[:-1]]
    return max(there)


@dataclass(frozen=True)
class Pace:
    """The emulated devices and links of a run: its processes, messages and results are real, its clock is emulated.

    device: seconds for one unit of `work` of a compute mark; one number for all kinds, or a mapping from
        kind to number ({"forward": 0.02, "backward": 0.04}). Other kinds, and code without a mark, take no time.
    link: between devices of one node; None: messages take no time.
    inter_node: between nodes of `devices_per_node` devices each; None means the same as `link`.
    slow: for each rank with a slow device, how many times as long it takes.
    nodes: the number of nodes, if ranks are dealt out to them in turn; None: a node is filled before the next one.
    of_nodes: for each node whose link to the others is not like inter_node, its link. The slower end of a way counts.

    Every device has links of its own, one inside its node and one between nodes, as with a network card for each.
    Nothing is shared: neither a cable that all messages between two nodes would go through, nor the way into a
    receiver. If devices of a node share a card, give each its part of the bandwidth.

    The rules of the clock are in `course_lib.ranks.worker.clock`.

    Raises ValueError for times or bandwidths that are not positive numbers, for numbers of nodes and ranks that are
    not whole, and for unknown kinds.
    """

    device: float | Mapping[str, float] | None = None
    link: Link | None = None
    inter_node: Link | None = None
    devices_per_node: int = 8
    slow: Mapping[int, float] = field(default_factory=dict)
    nodes: int | None = None
    of_nodes: Mapping[int, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.device, Mapping):
            for kind, seconds in self.device.items():
                if kind not in COMPUTE_KINDS:
                    raise ValueError(f"device has the kind {kind!r}; the kinds are {', '.join(COMPUTE_KINDS)}")
                _require_positive(f"device[{kind!r}]", seconds, zero_is_fine=True)
        elif self.device is not None:
            _require_positive("device", self.device, zero_is_fine=True)
        for name in ("link", "inter_node"):
            if not isinstance(getattr(self, name), Link | None):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a Link(latency=..., bandwidth=...)")
        _require_whole("devices_per_node", self.devices_per_node, 1)
        if self.nodes is not None:
            _require_whole("nodes", self.nodes, 1)
        for rank, times in self.slow.items():
            _require_whole("a rank in slow", rank, 0)
            _require_positive(f"slow[{rank}]", times, zero_is_fine=False)

    def compute_seconds(self, kind: str, work: float, includes: str = "") -> float | None:
        """The seconds that the emulated device takes for this work; None if the pace does not have this kind."""
        if not isinstance(self.device, Mapping):
            return None if self.device is None else self.device * work
        return (self.device[kind] + self.device.get(includes, 0.0)) * work if kind in self.device else None

    def node(self, rank: int) -> int:
        return rank // self.devices_per_node if self.nodes is None else rank % self.nodes

    def links_among(self, ranks: list[int]) -> list[Link]:
        """The links that these ranks use among themselves: inside a node, between nodes, or both; two ranks use one."""
        inside = self.link or _FREE
        nodes = set(map(self.node, ranks))
        ends = (self.of_nodes.get(node, self.inter_node or inside) for node in nodes)
        between = [min(ends, key=lambda link: link.bandwidth)] if len(nodes) > 1 else []
        return [*between, inside] if len(ranks) > len(nodes) else between

    def collective_seconds(self, name: str, n_bytes: int, ranks: list[int]) -> float:
        """Seconds of a collective on n_bytes per rank once all have arrived: around a ring, or by the slowest link."""
        if len(ranks) == 1:
            return 0.0
        steps, share = _ALGORITHM_STEPS[name](len(ranks))
        links = self.links_among(ranks)
        if name in _RINGS and len(links) > 1:
            pairs = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
            return _ring_seconds(steps, n_bytes * share, tuple(self.links_among([*pair])[0] for pair in pairs))
        return steps * max(link.seconds(n_bytes * share) for link in links)
