"""Every legal plan of a model on a cluster, and the few among them worth choosing from.

Plans are counted out from the fewest devices that must work together to the most: tensor ranks inside a node, then
stages, and replicas for what is left. What a layer costs depends on the first few choices alone, so it is computed
once for thousands of plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from course_lib.planner.estimate import Estimate, unchecked_estimate
from course_lib.planner.hardware import Cluster
from course_lib.planner.spec import RECOMPUTE, ModelSpec, Plan, divides_evenly, divisors, shares_heads


@dataclass(frozen=True)
class Found:
    """What a search found: `estimates` of every legal plan, those that fit first, the fastest first."""

    estimates: list[Estimate]

    def __len__(self) -> int:
        return len(self.estimates)

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.estimates)

    def __getitem__(self, index: int) -> Estimate:
        return self.estimates[index]

    @property
    def best(self) -> Estimate:
        """The fastest plan that fits. Raises ValueError if none does, with what comes nearest."""
        if not self.estimates[0].fits:
            nearest = min(self.estimates, key=lambda found: found.memory.total)
            raise ValueError(f"no plan fits; the smallest is {nearest.plan}: {nearest.why}")
        return self.estimates[0]

    @cached_property
    def pareto(self) -> list[Estimate]:
        """The plans that no other beats in both memory and time, from the fastest to the smallest."""
        front: list[Estimate] = []
        for found in sorted(self.estimates, key=lambda found: (found.step_time.total, found.memory.total)):
            if not front or found.memory.total < front[-1].memory.total:
                front.append(found)
        return front


def search(model: ModelSpec, cluster: Cluster, global_batch: int, precision: str | None = None) -> Found:
    """Estimate every legal plan, best first.

    Tried are all tp within a node, pp, micro-batches, ZeRO stages (2 and 3 without a pipeline, where they would
    repeat their traffic for every micro-batch), sequence parallelism, recomputation, 1f1b, zb_h1 and interleaving.

    precision: None for 16 bits, bf16 where the device has it.

    Raises ValueError if no plan is legal.
    """
    precision = precision or ("bf16" if "bf16" in cluster.spec.peak else "fp16")
    plans = legal_plans(model, cluster, global_batch, precision)
    estimates = [unchecked_estimate(model, cluster, plan, global_batch) for plan in plans]
    if not estimates:
        raise ValueError(
            f"no plan divides global_batch={global_batch} and this model among {cluster.devices} devices; "
            f"make the batch a multiple of the number of replicas, for instance {cluster.devices}"
        )
    return Found(sorted(estimates, key=lambda found: (not found.fits, found.step_time.total)))


def legal_plans(model: ModelSpec, cluster: Cluster, global_batch: int, precision: str) -> Iterator[Plan]:
    for tp, pp, micro_batch in _divisions(model, cluster, global_batch):
        dp = cluster.devices // (tp * pp)
        where = itertools.product(
            _schedules(model, pp, global_batch // (dp * micro_batch)),
            _zero_stages(dp, pp),
            (False, True) if tp > 1 and model.sequence % tp == 0 else (False,),
            RECOMPUTE,
        )
        for (schedule, v), zero, sequence_parallel, recompute in where:
            yield Plan(dp, tp, pp, micro_batch, schedule, v, zero, sequence_parallel, recompute, precision)


def _divisions(model: ModelSpec, cluster: Cluster, global_batch: int) -> Iterator[tuple[int, int, int]]:
    """tp, pp and micro-batch, with dp what remains."""
    for tp in divisors(cluster.devices_per_node):
        if not shares_heads(model, tp) or model.ffn_width % tp:
            continue
        for pp in divisors(cluster.devices // tp):
            dp = cluster.devices // (tp * pp)
            if pp <= model.layers and global_batch % dp == 0:
                for micro_batch in divisors(global_batch // dp):
                    yield tp, pp, micro_batch


def _schedules(model: ModelSpec, pp: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    if pp == 1:
        return
    yield "zb_h1", 1
    if micro_batches % pp == 0:
        for virtual_stages in range(2, model.layers // pp + 1):
            if divides_evenly(model.layers, pp * virtual_stages):
                yield "interleaved_1f1b", virtual_stages


def _zero_stages(dp: int, pp: int) -> tuple[int, ...]:
    if dp == 1:
        return (0,)
    return (0, 1, 2, 3) if pp == 1 else (0, 1)
