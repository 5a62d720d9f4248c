"""Every legal plan of a model on a cluster, and the few among them worth choosing from.

Plans are enumerated from the innermost dimension outwards: tensor ranks inside a node, then stages, and replicas for
what is left. A layer's cost depends on the first few choices only, so it is computed once for thousands of plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from course_lib.planner import alternatives
from course_lib.planner.estimate import Estimate, unchecked_estimate
from course_lib.planner.hardware import Cluster, half_width
from course_lib.planner.memory import FITS, Fit
from course_lib.planner.simulate import no_collection
from course_lib.planner.spec import RECOMPUTE, ModelSpec, Plan, divides_evenly, divisors, expert_ranks, shares_heads

MOST_TENSOR = 16  # ranks: no published run has more, most have 8, and beyond 16 models would repeat their key heads
ALIKE = math.exp(half_width(stacks=1, measured=1))  # plans within this factor cannot be told apart
LEAST_POSITIONS = 8192  # positions of a context rank at least: shorter sequences are better divided in other ways


@dataclass(frozen=True, repr=False)
class Found:
    """The result of a search: `estimates` of every legal plan, the fastest first: of those that fit, then that may fit.

    Printed, it shows the few plans worth choosing from, and the measurement that would decide.

    within: the share of a device's memory that a plan may need.
    """

    estimates: list[Estimate]
    within: float = 1.0

    def __len__(self) -> int:
        return len(self.estimates)

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.estimates)

    def __getitem__(self, index: int) -> Estimate:
        return self.estimates[index]

    def __repr__(self) -> str:
        few, n = alternatives.few(self.shapes), len(self.tied)
        said = f"The fastest plan that {_fit(self.best, self.within)} cannot be told apart from {n - 1} more"
        said = f"{said}. Of {len(self.shapes)} shapes, the fastest each:" if n > 1 else "One plan is the fastest:"
        return "\n".join([said, alternatives.table(few, self.within), alternatives.deciding(few)])

    @property
    def best(self) -> Estimate:
        """The fastest plan that fits, or else that may fit. Raises ValueError if none does, with what comes nearest."""
        if _fit(self.estimates[0], self.within) == "does not fit":
            nearest = min(self.estimates, key=lambda found: found.memory.total)
            raise ValueError(f"no plan fits; the smallest is {nearest.plan}: {nearest.why}")
        return self.estimates[0]

    @cached_property
    def tied(self) -> list[Estimate]:
        """The plans that cannot be told apart from the best, the simplest (fewest stages on a rank) first.

        Estimates of two set-ups on one machine differ as much by chance.
        """
        fit = _fit(self.best, self.within)
        limit = ALIKE * self.best.step_time.total
        alike = (one for one in self.estimates if _fit(one, self.within) == fit and one.step_time.total <= limit)
        return sorted(alike, key=lambda found: found.plan.virtual_stages)

    @cached_property
    def shapes(self) -> list[Estimate]:
        """The fastest of each shape among those tied with the best, the fastest shape first."""
        return alternatives.by_shape(self.tied)

    @cached_property
    def pareto(self) -> list[Estimate]:
        """The Pareto front: plans that no other beats in both memory and time, from the fastest to the smallest."""
        front: list[Estimate] = []
        for found in sorted(self.estimates, key=lambda found: (found.step_time.total, found.memory.total)):
            if not front or found.memory.total < front[-1].memory.total:
                front.append(found)
        return front


def search(
    model: ModelSpec, cluster: Cluster, global_batch: int, within: float = 1.0, fp32_gradients: bool = False
) -> Found:
    """Estimate every legal plan, best first: ranked by the middle of their intervals.

    It tries all tp within a node and over two, up to 16, pp, cp that leaves a rank at least 8,192 positions,
    micro-batches that are powers of two, ZeRO stages (3 without a pipeline, 2 without or with interleaving, as
    elsewhere they repeat their traffic for every micro-batch), sequence parallelism, recomputation in all layers, 1f1b,
    zb_h1 and interleaving. With experts it tries the three smallest ep that leave room for more than them, and shards
    the optimizer's state always.

    It computes in 16 bits, bf16 where the device has it.  within: the share of a device's memory that a plan may need.
    fp32_gradients: as for Plan. 16 bits are always faster, so the caller chooses, not the search.

    Raises ValueError if no plan is legal.
    """
    precision = "bf16" if "bf16" in cluster.spec.peak else "fp16"
    plans = legal_plans(model, cluster, global_batch, precision, fp32_gradients)
    with no_collection():
        estimates = [unchecked_estimate(model, cluster, plan, global_batch) for plan in plans]
    if not estimates:
        advice = f"make the batch a multiple of the number of replicas, for instance {cluster.devices}"
        raise ValueError(f"no plan divides {global_batch=} and this model among {cluster.devices} devices; {advice}")
    return Found(sorted(estimates, key=lambda found: (FITS.index(_fit(found, within)), found.step_time.total)), within)


def _fit(found: Estimate, within: float) -> Fit:
    return found.memory.fit(within * found.capacity)


def legal_plans(
    model: ModelSpec, cluster: Cluster, global_batch: int, precision: str, fp32_gradients: bool = False
) -> Iterator[Plan]:
    for dp, tp, pp, cp, micro_batch in _divisions(model, cluster, global_batch):
        where = itertools.product(
            _schedules(model, dp * cp, pp, global_batch // (dp * micro_batch)),
            (tp > 1,) if model.experts else (False, True) if tp > 1 and model.sequence % (tp * cp) == 0 else (False,),
            RECOMPUTE,
            _expert_ranks(model, cluster, dp * tp * cp, pp),
        )
        for (schedule, v, zero), sequence_parallel, recompute, ep in where:
            how = schedule, v, zero, sequence_parallel, recompute, precision, cp, fp32_gradients
            yield Plan(dp, tp, pp, micro_batch, *how, ep=ep)


def _expert_ranks(model: ModelSpec, cluster: Cluster, n_devices: int, pp: int) -> list[int]:
    """The three smallest ep with which weights and gradients of a stage's experts, in 16 bits, fit into a device."""
    possible, n_bytes = expert_ranks(model, n_devices), 4 * model.layer_parameters.routed * model.layers / pp
    return [ep for ep in possible if n_bytes / ep < cluster.spec.memory][:3] or possible[-1:]


def _divisions(model: ModelSpec, cluster: Cluster, global_batch: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Every dp, tp, pp, cp and micro-batch."""
    groups = [tp for tp in divisors(2 * cluster.devices_per_node) if tp <= MOST_TENSOR]
    for tp, cp in itertools.product(groups, divisors(model.sequence)):
        too_short = cp > 1 and model.sequence // cp < LEAST_POSITIONS
        uneven = model.experts and model.sequence % (tp * cp)
        if too_short or uneven or cluster.devices % (tp * cp) or not shares_heads(model, tp) or model.mlp_width % tp:
            continue
        for pp in divisors(cluster.devices // (tp * cp)):
            dp = cluster.devices // (tp * cp * pp)
            if pp <= model.layers and global_batch % dp == 0:
                batch = global_batch // dp
                for micro_batch in divisors(batch & -batch):  # all powers of two that divide it
                    yield dp, tp, pp, cp, micro_batch


def _schedules(model: ModelSpec, replicas: int, pp: int, micro_batches: int) -> Iterator[tuple[str, int, int]]:
    """Every schedule, number of stages on a rank, and ZeRO stage."""
    first, end = (int(model.experts > 0), 4) if replicas > 1 else (0, 1)
    if pp == 1:
        yield from (("1f1b", 1, zero) for zero in range(first, end))
        return
    yield from itertools.product(("1f1b", "zb_h1"), (1,), range(first, min(end, 2)))
    if micro_batches % pp == 0:
        stages = [v for v in range(2, model.layers // pp + 1) if divides_evenly(model.layers, pp * v)]
        larger = [v for v in stages if pp * v < model.layers]  # one layer a stage only where nothing else is left
        yield from itertools.product(("interleaved_1f1b",), larger or stages, range(first, min(end, 3)))
