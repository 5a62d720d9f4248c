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

from dataclasses import dataclass
from functools import cached_property

GiB = 2**30
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
        return Link(
            self.name, self.bandwidth * bandwidth_factor, self.fraction, self.latency, self.launch, self.source, self.origin
        )


@dataclass(frozen=True)
class Device:
    """One accelerator.

    peak: dense FLOP/s by precision.  memory: bytes.  bandwidth: bytes per second of its memory.
    cores: streaming multiprocessors, among which a matrix product is dealt out in tiles.  link: inside its node.
    matmul: fraction of the peak that large matrix products reach.  streaming: fraction of the memory bandwidth that
    element-wise kernels reach.  attention: fraction of the peak that a fused attention kernel reaches.
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


_PER_DIRECTION = "the vendor prints both directions together; this is one"
_NVLINK3 = (
    "78%: 16 GiB all-reduce on 8 A100, 235 of 300 GB/s (stas00/ml-engineering, network); "
    "launch and latency: all-reduce of 1 MiB on 2, 4 and 8 A100 in 44, 51 and 93 microseconds (vTrain, trace/a100)"
)
_NVLINK4 = "82%: 16 GiB ring all-reduce on 8 H200, 368 of 450 GB/s (stas00/ml-engineering, network); latency as NVLink 3"
_NETWORK = "calibrated: see validate.py"
_ASSUMED = "assumed, like the generation before"

LINKS = {
    link.name: link
    for link in (
        Link("NVLink 2", 150e9, 0.78, 5e-6, 25e-6, f"V100 data sheet: 300 GB/s, {_PER_DIRECTION}", _ASSUMED),
        Link("NVLink 3", 300e9, 0.78, 5e-6, 25e-6, f"A100 data sheet: 600 GB/s, {_PER_DIRECTION}", _NVLINK3),
        Link("NVLink 4", 450e9, 0.82, 5e-6, 25e-6, f"H100 data sheet: 900 GB/s, {_PER_DIRECTION}", _NVLINK4),
        Link("NVLink 5", 900e9, 0.82, 5e-6, 25e-6, f"B200 data sheet: 1,800 GB/s, {_PER_DIRECTION}", _ASSUMED),
        Link("PCIe 3", 15.75e9, 0.8, 10e-6, 25e-6, "PCI-SIG: x16, one direction", "assumed"),
        Link("PCIe 4", 31.5e9, 0.8, 10e-6, 25e-6, "PCI-SIG: x16, one direction", "assumed"),
        Link("PCIe 5", 63e9, 0.8, 10e-6, 25e-6, "PCI-SIG: x16, one direction", "assumed"),
        Link("Omni-Path 100", 12.5e9, 0.8, 10e-6, 30e-6, "Intel Omni-Path 100 brief: 100 Gbit/s a port", _NETWORK),
        Link("InfiniBand EDR", 12.5e9, 0.8, 10e-6, 30e-6, "IBTA roadmap: 100 Gbit/s a port", _NETWORK),
        Link("InfiniBand HDR", 25e9, 0.8, 10e-6, 30e-6, "IBTA roadmap: 200 Gbit/s a port", _NETWORK),
        Link("InfiniBand NDR", 50e9, 0.8, 10e-6, 30e-6, "IBTA roadmap: 400 Gbit/s a port", _NETWORK),
        Link("RoCE 400", 50e9, 0.8, 10e-6, 30e-6, "IEEE 802.3: 400 Gbit/s Ethernet", _NETWORK),
        Link("Ethernet 100", 12.5e9, 0.8, 20e-6, 50e-6, "IEEE 802.3: 100 Gbit/s", "assumed"),
        Link("Ethernet 25", 3.125e9, 0.8, 30e-6, 50e-6, "IEEE 802.3: 25 Gbit/s", "assumed"),
        Link("Ethernet 10", 1.25e9, 0.8, 50e-6, 50e-6, "IEEE 802.3: 10 Gbit/s", "assumed"),
        Link("shared memory", 10e9, 0.5, 20e-6, 100e-6, "about the speed of one core's copy", "assumed"),
    )
}

_TFLOPS = 1e12


def _peak(bf16: float, fp32: float, fp8: float = 0, fp16: float = 0) -> dict[str, float]:
    peaks = {"bf16": bf16, "fp16": fp16 or bf16, "fp32": fp32, "fp8": fp8}
    return {precision: value * _TFLOPS for precision, value in peaks.items() if value}


DEVICES = {
    device.name: device
    for device in (
        Device(
            "V100-32GB", _peak(0, 15.7, fp16=125), 32 * GiB, 900e9, 80, "NVLink 2", 0.7, 0.85, 0.4,
            "NVIDIA V100 data sheet, January 2020 (SXM2)", "",
        ),
        Device(
            "A100-40GB", _peak(312, 19.5), 40 * GiB, 1555e9, 108, "NVLink 3", 0.8, 0.85, 0.55,
            "NVIDIA A100 data sheet, June 2021 (SXM, dense)", "",
        ),
        Device(
            "A100-80GB", _peak(312, 19.5), 80 * GiB, 2039e9, 108, "NVLink 3", 0.8, 0.85, 0.55,
            "NVIDIA A100 data sheet, June 2021 (SXM, dense)", "",
        ),
        Device(
            "H100-80GB", _peak(989.4, 66.9, 1978.9), 80 * GiB, 3350e9, 132, "NVLink 4", 0.7, 0.85, 0.5,
            "NVIDIA H100 data sheet, 2023 (SXM; printed with sparsity, halved here)", "",
        ),
    )
}
