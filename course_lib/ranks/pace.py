"""Pace: real processes and real messages at an emulated speed.

Eight ranks on two cores cannot compute at the same time, so a laptop cannot show what overlaps on eight
devices. A paced run computes for real and then sleeps until the emulated device would have finished;
a message is sent for real and delivered when the emulated link would have delivered it. Order,
dependencies and results stay real; only the clock is arranged.

Eight processes that wake up at the same moment on two cores are a millisecond or two late. What one is late, the next
sleep is shorter, and times are noted as those of the emulated device, as long as no process is more than `SLACK`
behind it. A machine that cannot keep up shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.timeline import COMPUTE_KINDS

# Steps of each ring or chain algorithm, and how much of the tensor each step carries, for n ranks.
# Thakur et al. 2005, "Optimization of collective communication operations in MPICH".
_STEPS: dict[str, Any] = {
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


SLACK = 0.05  # seconds


def _require_positive(name: str, value: Any, zero_is_fine: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or math.isnan(value) or value < 0 or (value == 0 and not zero_is_fine):
        raise ValueError(f"{name}={value!r} must be a {'number of at least' if zero_is_fine else 'number above'} 0")


@dataclass(frozen=True)
class Link:
    """A connection between two devices. latency: seconds; bandwidth: bytes per second, one direction."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _require_positive("latency", self.latency, zero_is_fine=True)
        _require_positive("bandwidth", self.bandwidth, zero_is_fine=False)

    def seconds(self, n_bytes: float) -> float:
        """Time for one message of n_bytes."""
        return self.latency + n_bytes / self.bandwidth


@dataclass(frozen=True)
class Pace:
    """The emulated devices and links of a paced run.

    device: seconds for one unit of `work` of a compute mark; one number for all kinds, or a mapping from
        kind to number ({"forward": 0.02, "backward": 0.04}). Kinds left out run at real speed.
        What is not marked takes no time, within SLACK.
    link: between devices of one node; None leaves messages at real speed, within SLACK if `device` is given.
    inter_node: between nodes of `devices_per_node` devices each; None means the same as `link`.

    Two cores can keep eight emulated devices honest if a paced operation lasts 10 to 50 ms.

    Raises ValueError for times or bandwidths that are not positive numbers and for unknown kinds.
    """

    device: float | Mapping[str, float] | None = None
    link: Link | None = None
    inter_node: Link | None = None
    devices_per_node: int = 8

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
        if not isinstance(self.devices_per_node, int) or self.devices_per_node < 1:
            raise ValueError(f"devices_per_node={self.devices_per_node!r} must be a whole number of at least 1")

    def compute_seconds(self, kind: str, work: float, includes: str = "") -> float | None:
        """How long the emulated device takes for this work; None if this kind is not paced."""
        if not isinstance(self.device, Mapping):
            return None if self.device is None else self.device * work
        return (self.device[kind] + self.device.get(includes, 0.0)) * work if kind in self.device else None

    @property
    def slack(self) -> float:
        """Seconds by which a process may be behind its emulated device; none where the process is the device."""
        return 0.0 if self.device is None else SLACK

    def link_between(self, ranks: list[int]) -> Link:
        """The slowest link that these ranks use among themselves."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        chosen = self.inter_node if len(nodes) > 1 and self.inter_node is not None else self.link
        return chosen or Link()

    def collective_seconds(self, name: str, n_bytes: int, ranks: list[int]) -> float:
        """Time of a collective on n_bytes per rank once all have arrived, over the slowest link."""
        if len(ranks) == 1:
            return 0.0
        steps, share = _STEPS[name](len(ranks))
        return steps * self.link_between(ranks).seconds(n_bytes * share)
