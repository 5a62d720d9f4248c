"""Devices, links and clusters: what the data sheets say, and how much of it a program gets.

Two kinds of figures live here and are never mixed. *Peaks* are from data sheets, dense (vendors like to print twice
that, "with sparsity") and in one direction (vendors like to print the sum of both). *Fractions* say how much of a peak
large operations reach; they are measured or calibrated, and each names its origin. What a small operation loses on top
of that is a matter of shapes and latencies: see compute.py and communication.py.

    device   peak FLOP/s  x  fraction   ->  matrix products              node 0            node 1
             memory B/s   x  fraction   ->  everything else            [0 1 2 3]         [0 1 2 3]
    link     B/s one way  x  fraction   ->  collectives, messages        inside  <-between->
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

GiB = 2**30
# How far published steps lie from estimates: standard deviations of the logarithm (benchmarks/planner.py fits them).
SETUPS = 0.08  # between set-ups of one stack of software on one machine
STACKS = 0.09  # between stacks on one device, each with its own kernels and libraries
DEVICES_APART = 0.25  # between devices, for one that nothing is published about
NINETY_PERCENT = 1.645  # so many standard deviations to each side hold 90% of a normal distribution
LARGEST_CLUSTER = 16_384


@dataclass(frozen=True)
class Link:
    """A connection of one device: NVLink inside a node, or one network card.

    bandwidth: bytes per second in one direction.  fraction: what long collectives get of it.
    latency: seconds a step of a ring takes however little it carries.  launch: seconds to start a collective at all.
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

    def shared(self, bandwidth_factor: float) -> Link:
        """The same link with this many times the bandwidth: several cards for one device, or one for several."""
        return replace(self, bandwidth=self.bandwidth * bandwidth_factor)


@dataclass(frozen=True, eq=False)
class Device:
    """One accelerator.

    peak: dense FLOP/s by precision.  memory: bytes.  bandwidth: bytes per second of its memory.
    cores: streaming multiprocessors, among which a matrix product is dealt out in tiles.  link: inside its node.
    matmul: fraction of the peak that large matrix products reach.  streaming: fraction of the memory bandwidth that
    element-wise kernels reach.  attention: fraction of the peak that a fused attention kernel reaches.
    stacks: how many published stacks of software on this device `matmul` was fitted to.  largest: devices of the
    largest of those runs.
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


_BOTH = "the vendor prints the sum of both directions; this is one"
_MEASURED_NVLINK3 = (
    "78%: 16 GiB all-reduce on 8 A100, 235 of 300 GB/s (stas00/ml-engineering, network/README.md); "
    "launch and latency: 1 MiB all-reduce on 2, 4 and 8 A100 in 44, 51 and 93 microseconds (vTrain, trace/a100)"
)
_MEASURED_NVLINK4 = "82%: 16 GiB ring all-reduce on 8 H200, 368 of 450 GB/s (stas00/ml-engineering, network/README.md)"
_NETWORK = "assumed: protocol and routing cost a fifth; latency about that of a network card and two switches"
_ASSUMED = "assumed: like NVLink 3 and 4"

# fmt: off
LINKS = {link.name: link for link in (
    Link("NVLink 2", 150e9, 0.78, 5e-6, 25e-6, f"NVIDIA V100 data sheet: 300 GB/s; {_BOTH}", _ASSUMED),
    Link("NVLink 3", 300e9, 0.78, 5e-6, 25e-6, f"NVIDIA A100 data sheet: 600 GB/s; {_BOTH}", _MEASURED_NVLINK3),
    Link("NVLink 4", 450e9, 0.82, 5e-6, 25e-6, f"NVIDIA H100 data sheet: 900 GB/s; {_BOTH}", _MEASURED_NVLINK4),
    Link("NVLink 5", 900e9, 0.82, 5e-6, 25e-6, f"NVIDIA DGX B200 data sheet: 1,800 GB/s; {_BOTH}", _ASSUMED),
    Link("PCIe 3", 15.75e9, 0.8, 10e-6, 25e-6, "PCI-SIG, 3.0 x16, one direction", "assumed"),
    Link("PCIe 4", 31.5e9, 0.8, 10e-6, 25e-6, "PCI-SIG, 4.0 x16, one direction", "assumed"),
    Link("PCIe 5", 63e9, 0.8, 10e-6, 25e-6, "PCI-SIG, 5.0 x16, one direction", "assumed"),
    Link("Omni-Path 100", 12.5e9, 0.8, 10e-6, 30e-6, "Intel Omni-Path 100 product brief: 100 Gbit/s", _NETWORK),
    Link("InfiniBand EDR", 12.5e9, 0.8, 10e-6, 30e-6, "InfiniBand Trade Association roadmap: 100 Gbit/s", _NETWORK),
    Link("InfiniBand HDR", 25e9, 0.8, 10e-6, 30e-6, "InfiniBand Trade Association roadmap: 200 Gbit/s", _NETWORK),
    Link("InfiniBand NDR", 50e9, 0.8, 10e-6, 30e-6, "InfiniBand Trade Association roadmap: 400 Gbit/s", _NETWORK),
    Link("RoCE 400", 50e9, 0.8, 10e-6, 30e-6, "IEEE 802.3bs: 400 Gbit/s", _NETWORK),
    Link("Ethernet 100", 12.5e9, 0.8, 20e-6, 50e-6, "IEEE 802.3bj: 100 Gbit/s", _NETWORK),
    Link("Ethernet 25", 3.125e9, 0.8, 30e-6, 50e-6, "IEEE 802.3by: 25 Gbit/s", _NETWORK),
    Link("Ethernet 10", 1.25e9, 0.8, 50e-6, 50e-6, "IEEE 802.3ae: 10 Gbit/s", _NETWORK),
    Link("shared memory", 10e9, 0.5, 20e-6, 100e-6, "about what one core copies", "assumed"),
)}
# fmt: on


def _peak(**tflops: float) -> dict[str, float]:
    return {precision: value * 1e12 for precision, value in tflops.items()}


_SPARSE = "printed with sparsity, halved here"
_MATMUL = "matmul: median of the published stacks of software on this chip (benchmarks/published.json)"
_STREAMING = "streaming: assumed, about what copies in a loop reach on all of these"
_A100_USE = f"{_MATMUL}; {_STREAMING}; attention: FlashAttention-2 (Dao 2023) reaches 50 to 73% forward"
_VOLTA_USE = f"{_MATMUL}; streaming, attention: as A100"
_HOPPER_USE = (
    f"{_MATMUL}; streaming: as A100; attention: between FlashAttention-2 (35%) and -3 (75%) in Shah et al. 2024"
)
_BLACKWELL_USE = f"{_MATMUL}, which is one; streaming, attention: as H100"
_LIKE_H100 = "assumed: as H100"
_A100_SHEET = "NVIDIA A100 data sheet, June 2021: SXM, dense"


_HOPPER = _peak(bf16=989.4, fp16=989.4, fp32=66.9, fp8=1978.9)
_AMPERE = _peak(bf16=312, fp16=312, fp32=19.5)

# fmt: off
# name, peak, memory, bandwidth, cores, link; fractions of matmul, streaming, attention; source, origin
DEVICES = {device.name: device for device in (
    Device("V100-32GB", _peak(fp16=125, fp32=15.7), 32 * GiB, 900e9, 80, "NVLink 2", 0.943, 0.8, 0.5,
           "NVIDIA V100 data sheet, January 2020: SXM2", _VOLTA_USE, 2, 512),
    Device("A100-40GB", _AMPERE, 40 * GiB, 1555e9, 108, "NVLink 3", 0.773, 0.8, 0.55, _A100_SHEET, _A100_USE, 7, 3360),
    Device("A100-80GB", _AMPERE, 80 * GiB, 2039e9, 108, "NVLink 3", 0.773, 0.8, 0.55, _A100_SHEET, _A100_USE, 7, 3360),
    Device("H100-80GB", _HOPPER, 80 * GiB, 3350e9, 132, "NVLink 4", 0.753, 0.8, 0.5,
           f"NVIDIA H100 data sheet, 2023: SXM; {_SPARSE}", _HOPPER_USE, 2, 16_384),
    Device("H200-141GB", _HOPPER, 141e9, 4800e9, 132, "NVLink 4", 0.753, 0.8, 0.5,
           f"NVIDIA H200 data sheet, 2024: SXM; {_SPARSE}", _LIKE_H100),
    Device("B200-180GB", _peak(bf16=2250, fp16=2250, fp32=75, fp8=4500), 180e9, 8000e9, 148, "NVLink 5",
           0.472, 0.8, 0.5, f"NVIDIA DGX B200 data sheet, 2025, an eighth of it; {_SPARSE}", _BLACKWELL_USE, 1, 8),
    Device("RTX-4090", _peak(bf16=165.2, fp16=165.2, fp32=82.6, fp8=330.3), 24 * GiB, 1008e9, 128, "PCIe 4",
           0.8, 0.8, 0.5, "NVIDIA Ada GPU architecture white paper, appendix A: dense, sums in 32 bits", "assumed"),
    Device("laptop-CPU", _peak(fp32=0.845, bf16=1.69), 16 * GiB, 89.6e9, 8, "shared memory", 0.7, 0.5, 0.3,
           "AMD Ryzen 7 7840U product page: 8 cores at 3.3 GHz, DDR5-5600 on two channels; 32 FLOPs a cycle and core "
           "in fp32, 64 in bf16", "assumed"),
)}
# fmt: on


@dataclass(frozen=True, eq=False)
class Cluster:
    """Equal nodes of equal devices.

    device: a name of DEVICES.  inside, between: names of LINKS, for one device's link inside its node (None: the
    device's own) and for one network card.  nics_per_node: network cards of a node, None: one for each device.
    matmul, network: the fractions of the peaks that matrix products and the network reach; None: the catalogue's.
    measured: steps of this very machine that these two were fitted to, see calibrate.py; they narrow the interval.

    Raises ValueError for an unknown device or link (listing the known ones) and for a size out of range.
    """

    device: str = "A100-80GB"
    nodes: int = 1
    devices_per_node: int = 8
    inside: str | None = None
    between: str = "InfiniBand HDR"
    nics_per_node: int | None = None
    matmul: float | None = None
    network: float | None = None
    measured: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        _known("device", self.device, DEVICES)
        _known("between", self.between, LINKS)
        if self.inside is not None:
            _known("inside", self.inside, LINKS)
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} has to be at least 1")
        if self.devices > LARGEST_CLUSTER:
            raise ValueError(
                f"nodes={self.nodes} x devices_per_node={self.devices_per_node} makes {self.devices} devices; "
                f"choose 1 to {LARGEST_CLUSTER:,}"
            )

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def spread(self) -> float:
        """How far a step may lie from its estimate to each side, with 90%: a difference of logarithms."""
        return half_width(self.spec.stacks, len(self.measured))

    @property
    def spread_from(self) -> str:
        """What the interval rests on."""
        if self.measured:
            return f"{_counted(len(self.measured), 'measured step')} of this machine"
        if not self.spec.stacks:
            return f"how far devices are apart, as no published step on {self.device} was found"
        return f"published steps of {_counted(self.spec.stacks, 'stack')} of software on {self.device}"

    @cached_property
    def spec(self) -> Device:
        device = DEVICES[self.device]
        return device if self.matmul is None else replace(device, matmul=self.matmul, origin="given by hand")

    @cached_property
    def inside_link(self) -> Link:
        return LINKS[self.inside or self.spec.link]

    @cached_property
    def between_link(self) -> Link:
        """What one device has of its node's network cards."""
        link = LINKS[self.between].shared((self.nics_per_node or self.devices_per_node) / self.devices_per_node)
        return link if self.network is None else replace(link, fraction=self.network, origin="given by hand")


def half_width(stacks: int, measured: int = 0) -> float:
    """Of an interval around an estimate: what one set-up differs from another, and what is not known of the machine."""
    if measured:
        return NINETY_PERCENT * SETUPS * math.sqrt(1 + 1 / measured)
    unknown = STACKS**2 * (1 + 1 / stacks) if stacks else 2 * STACKS**2 + DEVICES_APART**2
    return NINETY_PERCENT * math.sqrt(SETUPS**2 + unknown)


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' if n > 1 else ''}"


def _known(name: str, value: str, catalogue: dict) -> None:
    if value not in catalogue:
        raise ValueError(f"{name}={value!r} is not in the catalogue; it has {', '.join(catalogue)}")
