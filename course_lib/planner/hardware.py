"""Devices, links and clusters: the peaks of data sheets, and the fractions of them that programs reach.

Two kinds of figures live here and are never mixed. *Peaks* are from data sheets, dense (vendors like to print twice
that, "with sparsity") and in one direction (vendors like to print the sum of both). *Fractions* say how much of a peak
large operations reach; they are measured or calibrated, and each names its origin. The figures are in catalogue.json.
What a small operation loses on top of that is a matter of shapes and latencies: see compute.py and communication.py.

    device   peak FLOP/s  x  fraction   ->  matrix products              node 0            node 1
             memory B/s   x  fraction   ->  everything else            [0 1 2 3]         [0 1 2 3]
    link     B/s one way  x  fraction   ->  collectives, messages        inside  <-between->
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

GiB = 2**30
# How far published steps lie from estimates: standard deviations of the logarithm (benchmarks/planner.py fits them).
SETUPS = 0.05  # between set-ups of one stack of software on one machine
STACKS = 0.09  # between stacks on one device, each with its own kernels and libraries
DEVICES_APART = 0.15  # between devices, for a device without published steps
NINETY_PERCENT = 1.645  # 90% of a normal distribution lie within this many standard deviations
LARGEST_CLUSTER = 16_384


@dataclass(frozen=True)
class Interconnect:
    """A link of one device: NVLink inside a node, or one network card.

    bandwidth: bytes per second in one direction.  fraction: the part that long collectives reach.
    latency: seconds of a ring's step, however few bytes it carries.  launch: seconds to start a collective.
    """

    name: str
    bandwidth: float
    fraction: float
    latency: float
    launch: float
    source: str
    origin: str

    @property
    def achieved(self) -> float:
        """Bytes per second, one way, of a long transfer."""
        return self.bandwidth * self.fraction

    def shared(self, bandwidth_factor: float) -> Interconnect:
        """The same link with this many times the bandwidth: several cards for one device, or one for several."""
        return replace(self, bandwidth=self.bandwidth * bandwidth_factor)


@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator.

    peak: dense FLOP/s by precision.  memory: bytes.  bandwidth: bytes per second of its memory.
    cores: streaming multiprocessors, over which a matrix product is distributed in tiles.  link: inside its node.
    matmul: fraction of the peak that large matrix products reach.  streaming: fraction of the memory bandwidth that
    element-wise kernels reach.  attention: fraction of the peak that a fused attention kernel reaches.
    stacks: how many published stacks of software on this device `matmul` was fitted to.  largest: devices of the
    largest of those runs.  precisions: that they computed in.  sizes: parameters of their smallest and largest model.
    mixtures: active parameters of the smallest and largest mixture of experts that was published on it.
    host: its link to the memory of its host.
    """

    name: str
    peak: dict[str, float]
    memory: float
    bandwidth: float
    cores: int
    link: str
    matmul: float
    streaming: float
    attention: float
    source: str
    origin: str
    stacks: int = 0
    largest: int = 0
    precisions: Sequence[str] = ()
    sizes: Sequence[float] = ()
    mixtures: Sequence[float] = ()
    host: str = "PCIe 5"


_CATALOGUE = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))
LINKS = {row["name"]: Interconnect(**row) for row in _CATALOGUE["links"]}
DEVICES = {row["name"]: Device(**row) for row in _CATALOGUE["devices"]}


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    device: a name of DEVICES.  inside, between: names of LINKS, for one device's link inside its node (None: the
    device's own) and for one network card.  nics_per_node: network cards of a node, None: one for each device.
    matmul: the fraction of the peak that matrix products reach; None: the catalogue's.
    measured: steps of this very machine that it was fitted to, see calibrate.py; they narrow the interval.

    Raises ValueError for an unknown device or link (listing the known ones) and for a size out of range.
    """

    device: str = "A100-80GB"
    nodes: int = 1
    devices_per_node: int = 8
    inside: str | None = None
    between: str = "InfiniBand HDR"
    nics_per_node: int | None = None
    matmul: float | None = None
    measured: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, catalogue in (("device", DEVICES), ("between", LINKS), ("inside", LINKS)):
            value = getattr(self, name)
            if value not in catalogue and (name, value) != ("inside", None):
                raise ValueError(f"{name}={value!r} is not in the catalogue; it has {', '.join(catalogue)}")
        if min(self.nodes, self.devices_per_node) < 1 or self.devices > LARGEST_CLUSTER:
            made = f"nodes={self.nodes} x devices_per_node={self.devices_per_node} makes {self.devices} devices"
            raise ValueError(f"{made}; choose 1 to {LARGEST_CLUSTER:,}")

    def __hash__(self) -> int:
        """A hash of the fields that calibrating and planning vary; a search computes it a hundred thousand times."""
        return hash((self.device, self.nodes, self.devices_per_node, self.matmul or 0))

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def spread(self) -> float:
        """How far a step may lie from its estimate to each side, with 90%: a difference of logarithms."""
        return half_width(self.spec.stacks, len(self.measured))

    @property
    def spread_from(self) -> str:
        """The origin of the interval, in words."""
        if self.measured:
            return f"{_counted(len(self.measured), 'measured step')} of this machine"
        if not self.spec.stacks:
            return "how far devices are apart"
        return f"published steps of {_counted(self.spec.stacks, 'stack')} of software on {self.device}"

    @cached_property
    def spec(self) -> Device:
        device = DEVICES[self.device]
        return device if self.matmul is None else replace(device, matmul=self.matmul, origin="given by hand")

    @cached_property
    def inside_link(self) -> Interconnect:
        return LINKS[self.inside or self.spec.link]

    @cached_property
    def between_link(self) -> Interconnect:
        """The share of its node's network cards that one device has, as a link."""
        return LINKS[self.between].shared((self.nics_per_node or self.devices_per_node) / self.devices_per_node)


def half_width(stacks: int, measured: int = 0) -> float:
    """The half width of an interval around an estimate: the spread between set-ups, and that between machines."""
    if measured:
        return NINETY_PERCENT * SETUPS * math.sqrt(1 + 1 / measured)
    unknown = STACKS**2 * (1 + 1 / stacks) if stacks else 2 * STACKS**2 + DEVICES_APART**2
    return NINETY_PERCENT * math.sqrt(SETUPS**2 + unknown)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n > 1 else ''}"
