"""Questions about plans: faster steps, more devices, and what to buy."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from course_lib.classroom.questions.asking import choice, each, number, open_case
from course_lib.classroom.questions.outcome import Outcome
from course_lib.classroom.questions.question import Seeded
from course_lib.classroom.questions.units import TIMES
from course_lib.figures import Timing, speed_up, step_time_by_part
from course_lib.figures.axis import duration
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, search
from course_lib.planner.models import LLAMA3

MODEL = LLAMA3["70B"]
BATCH = 256
NODES = Cluster("A100-80GB", nodes=8, between="InfiniBand HDR")


# Optimizing training efficiency for a large model

IMPROVEMENTS = {
    "as it is": Plan(tp=16, pp=4, recompute="full"),
    "8 tensor ranks, 8 stages": Plan(tp=8, pp=8, recompute="full"),
    "no recomputation, sequence parallelism": Plan(tp=8, pp=8, sequence_parallel=True),
    "2 replicas with ZeRO-1, 4 stages": Plan(dp=2, tp=8, pp=4, sequence_parallel=True, zero=1),
}


def _tried() -> dict[str, Estimate]:
    return {name: estimate(MODEL, NODES, plan, BATCH) for name, plan in IMPROVEMENTS.items()}


def _improve() -> Outcome:
    steps = _tried() | {"a search": best(NODES)}
    times = [one.step_time.total for one in steps.values()]
    lines = "; ".join(
        f"{name}: {duration(one.step_time.total)}, {one.mfu:.0%} MFU, {one.memory.total / 2**30:.0f} GiB"
        for name, one in steps.items()
    )
    shown = all(one.fits for one in steps.values()) and times == sorted(times, reverse=True)
    picture = step_time_by_part(steps, title="What the time of a step goes into")
    return Outcome(None, found={"lines": lines}, shown=shown, pictures=(picture,))


@lru_cache(maxsize=16)
def best(cluster: Cluster, model: ModelSpec = MODEL) -> Estimate:
    """The fastest plan that fits. Raises ValueError if none does."""
    return search(model, cluster, BATCH).best


# From 64 devices to 1,024

NUMBERS_OF_NODES = (8, 16, 32, 64, 128)
GPUS = NUMBERS_OF_NODES[-1] * NODES.devices_per_node


def _more_replicas(option: str) -> Outcome:
    """Give the smallest cluster's best plan more and more replicas: is the option's claim true?"""
    plan, clusters = best(NODES).plan, [replace(NODES, nodes=nodes) for nodes in NUMBERS_OF_NODES]
    plans = [replace(plan, dp=cluster.devices // (plan.tp * plan.pp)) for cluster in clusters]
    steps = [estimate(MODEL, *one, BATCH) for one in zip(clusters, plans, strict=True)]
    first, last, ideal = steps[0].step_time, steps[-1].step_time, NUMBERS_OF_NODES[-1] / NUMBERS_OF_NODES[0]
    lost, gained = last.total - first.total / ideal, first.total / last.total
    share = {name: (getattr(last, name) - getattr(first, name) / ideal) / lost for name in ("data", "bubble")}
    times = [step.step_time.total for step in steps]
    is_so = {
        "ideal": gained > 0.95 * ideal,
        "gradients": share["data"] > 1 / 2,
        "bubble": share["bubble"] > 1 / 2,
        "falls": times != sorted(times, reverse=True),
    }
    found = {"ideal": ideal, "gained": gained, "lost": lost, "share": share, "times": ", ".join(map(duration, times))}
    timings = [Timing.planned(step, "more replicas") for step in steps]
    timings += [Timing.planned(best(cluster), "planned anew") for cluster in clusters]
    picture = speed_up(timings, title="The same minibatch on more and more GPUs")
    return Outcome(is_so[option], found=found, shown=is_so[option] == (option == "bubble"), pictures=(picture,))


# A refresh: what the same plan gains, and where the money goes

H100 = Cluster("H100-80GB", nodes=8, between="InfiniBand HDR")


def _ratios() -> dict[str, float]:
    """The ratios of an H100's peak and memory bandwidth to an A100's."""
    new, old = H100.spec, NODES.spec
    return {"peak": new.peak["bf16"] / old.peak["bf16"], "bandwidth": new.bandwidth / old.bandwidth}


def _slips() -> dict[str, float]:
    return {name: ratio / _same_plan().measured for name, ratio in _ratios().items()}


def _same_plan() -> Outcome:
    before = best(NODES)
    carried = estimate(MODEL, H100, before.plan, BATCH)
    gain = before.step_time.total / carried.step_time.total
    picture = step_time_by_part({"A100": before, "H100, the same plan": carried}, title="What a step goes into")
    return Outcome(None, found={"before": before, "after": carried, "gain": gain}, pictures=(picture,), measured=gain)


FIRST = {
    "network": Cluster("A100-80GB", 8, between="InfiniBand NDR"),
    "h100": H100,
    "others": Cluster("RTX-4090", 48, between="InfiniBand HDR"),
    "a100": Cluster("A100-80GB", 12, between="InfiniBand HDR"),
}
CLOSE = {**FIRST, "others": Cluster("B200-180GB", 4, between="InfiniBand HDR")}


def _others(offers: dict[str, Cluster]) -> dict[str, object]:
    """The third offer, and the reason why it is not what its peak promises."""
    if offers is FIRST:
        why = "each has a third of the memory and no NVLink: the model is cut finer, and talks over slower links."
        return {"others": "six times as many RTX 4090", "because": why}
    why = "published steps on B200 use less of their peak than on H100. The two cannot be told apart: measure both."
    return {"others": "half as many B200", "because": why}


def _buy(offer: str, offers: dict[str, Cluster]) -> Outcome:
    """Take an offer: it is right if none is faster beyond what the intervals leave open."""
    before, after = best(NODES), best(offers[offer])
    steps = {name: best(one).step_time for name, one in offers.items()}
    fastest = min(steps, key=lambda name: steps[name].total)
    right = steps[offer].low < steps[fastest].high
    peak = _peak(after.cluster) / _peak(before.cluster)
    found = {"before": before, "after": after, "peak": peak, "right": right, "fastest": steps[fastest]}
    picture = step_time_by_part({"before": before, "after": after}, title="A step before and after")
    return Outcome(right, found=found, pictures=(picture,))


def _peak(cluster: Cluster) -> float:
    return cluster.devices * cluster.spec.peak["bf16"]


# Training infrastructure strategy

LARGER = LLAMA3["405B"]
SITES = {
    "64 H100, fast network": Cluster("H100-80GB", 8, between="InfiniBand HDR"),
    "128 A100, slow network": Cluster("A100-80GB", 16, between="Ethernet 25"),
    "32 B200, fast network": Cluster("B200-180GB", 4, between="InfiniBand HDR"),
}


def _sites() -> Outcome:
    lines = [f"{name}: {_at(site, MODEL)} with 70B, {_at(site, LARGER)} with 405B" for name, site in SITES.items()]
    fitting = [name for name, site in SITES.items() if _has_room(site, LARGER)]
    fastest, second, _ = sorted(SITES, key=lambda name: -best(SITES[name]).tokens_per_second)
    (least, _), (_, most) = (_likely(best(SITES[name])) for name in (fastest, second))
    shown = fitting == ["128 A100, slow network"] and least < most
    shown = shown and {fastest, second} == {"64 H100, fast network", "32 B200, fast network"}
    return Outcome(None, found={"lines": "; ".join(lines)}, shown=shown)


def _at(site: Cluster, model: ModelSpec) -> str:
    if not _has_room(site, model):
        return "no plan fits"
    plan = best(site, model)
    low, high = _likely(plan)
    return f"{plan.tokens_per_second:,.0f} tokens/s ({low:,.0f} to {high:,.0f})"


def _likely(plan: Estimate) -> tuple[float, float]:
    """The range of 90% of runs, in tokens per second."""
    return plan.step_time.around(plan.tokens_per_second)


def _has_room(site: Cluster, model: ModelSpec) -> bool:
    """Whether all devices together hold 16 bytes per parameter. No plan needs less: without room, no need to search."""
    return site.devices * site.spec.memory > 16 * model.parameters


QUESTIONS: dict[str, Seeded] = {
    "optimize_efficiency": Seeded(None, open_case(_improve), fields=lambda _: {"tried": [*_tried().values()]}),
    "more_replicas": Seeded(None, choice(each(_more_replicas, ("ideal", "gradients", "bubble", "falls")))),
    "same_plan": Seeded(None, number(TIMES, _same_plan, _slips, tolerance=0.15), fields=lambda _: {**_ratios()}),
    "which_offer": Seeded(FIRST, choice(each(_buy, FIRST)), [CLOSE], _others),
    "infrastructure": Seeded(None, open_case(_sites), fields=lambda _: {"sites": [*SITES.values()]}),
}
