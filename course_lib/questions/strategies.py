"""Questions about whole strategies: on a mesh of real ranks, and of what to buy, with the planner."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from course_lib.experiments.meshes import INSIDE, PER_MACHINE, HybridExperiment, MeshStep
from course_lib.figures import Timing, gantt, mesh_map, speed_up, step_time_by_part
from course_lib.figures.axis import duration, percent
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, search
from course_lib.questions.asking import choice, each, number, open_case
from course_lib.questions.forms import Reading
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import TIMES

# Llama Team 2024, "The Llama 3 Herd of Models", table 3: layers, hidden, heads and sequence of the 70B model.
LLAMA = partial(ModelSpec, kv_heads=8, vocab=128256, gated_mlp=True, tied_embeddings=False, flash_attention=True)
MODEL = LLAMA(80, 8192, 64, 8192, ffn_hidden=28672)
BATCH = 256
NODES = Cluster("A100-80GB", nodes=8, between="InfiniBand HDR")


# Which axis has to stay inside a machine? Each option lets one axis, and no other, reach across.

ACROSS = {"tp": (1, 1, 8), "pp": (1, 2, 4), "dp": (2, 1, 4)}
MUCH_LONGER = 1.5


def _slow_down(axis: str) -> tuple[float, MeshStep]:
    """By which factor a slow link makes a step longer if this axis crosses it, and the step."""
    experiment = HybridExperiment(ACROSS[axis])
    slow, fast = experiment.run(), experiment._replace(between=INSIDE).run()
    return slow.timeline.makespan / fast.timeline.makespan, slow


def _reach_across(axis: str) -> Outcome:
    factor, step = _slow_down(axis)
    experiment, is_much = HybridExperiment(ACROSS[axis]), factor > MUCH_LONGER
    effect = "the slow link makes a step much longer" if is_much else "the slow link hardly costs a thing"
    return Outcome(
        is_much,
        f"Run on 8 ranks as {experiment.words}: {effect}. A step takes {factor:.2f} times as long as with a fast link "
        "between the machines.",
        shown=is_much == (axis == "tp") and experiment.is_right(step),
        pictures=(
            mesh_map(experiment.sizes, step.sent, None, step.timeline.origin, PER_MACHINE, title="Who talks to whom?"),
            gantt(step.timeline, title="With the slow link"),
        ),
    )


def _compare_axes() -> Outcome:
    factors = {HybridExperiment(sizes).words: _slow_down(axis)[0] for axis, sizes in ACROSS.items()}
    differ = max(factors.values()) > MUCH_LONGER > min(factors.values())
    lines = "; ".join(f"{words}: {factor:.2f} times" for words, factor in factors.items())
    said = (
        f"Run on 8 ranks, with each axis in turn across: it makes {'a' if differ else 'no'} difference. "
        f"With the slow link a step takes as long as with a fast one, {lines}."
    )
    return Outcome(not differ, said, shown=differ)


# Evaluating a training strategy

PROPOSALS = ((1, 1, 8), (1, 2, 4), (2, 1, 4), (8, 1, 1))


def _evaluate() -> Outcome:
    runs = {HybridExperiment(sizes): HybridExperiment(sizes).run() for sizes in PROPOSALS}
    lines = [_evaluated(experiment, step) for experiment, step in runs.items()]
    right = all(experiment.is_right(step) for experiment, step in runs.items())
    slowest = max(runs, key=lambda experiment: runs[experiment].timeline.makespan)
    said = (
        f"Run on 8 ranks, 4 to a machine: {'all' if right else 'not all'} arrangements update the weights as one "
        f"process does, and the slowest is {slowest.words}. {'; '.join(lines)}."
    )
    picture = gantt(runs[slowest].timeline, title=f"A step of the proposed strategy, {slowest.words}")
    is_shown = right and slowest.sizes == PROPOSALS[0]
    return Outcome(None, said, shown=is_shown, pictures=(picture,))


def _evaluated(experiment: HybridExperiment, step: MeshStep) -> str:
    timeline = step.timeline
    busy = sum(map(timeline.busy, range(experiment.ranks))) / (experiment.ranks * timeline.makespan)
    whole = sum(HybridExperiment((1, 1, 1)).predicted.held(0))
    held = max(sum(experiment.predicted.held(rank)) for rank in range(experiment.ranks)) / whole
    return (
        f"{experiment.words}: {duration(timeline.makespan)} a step, busy for {percent(busy)} of it, each rank holds "
        f"{percent(held)} of weights, gradients and Adam's state"
    )


# Optimizing training efficiency for a large model

LADDER = {
    "as it is": Plan(tp=16, pp=4, recompute="full"),
    "8 tensor ranks, 8 stages": Plan(tp=8, pp=8, recompute="full"),
    "no recomputation, sequence parallelism": Plan(tp=8, pp=8, sequence_parallel=True),
    "2 replicas with ZeRO-1, 4 stages": Plan(dp=2, tp=8, pp=4, sequence_parallel=True, zero=1),
}


def _ladder() -> Outcome:
    steps = {name: estimate(MODEL, NODES, plan, BATCH) for name, plan in LADDER.items()} | {"a search": best(NODES)}
    times = [one.step_time.total for one in steps.values()]
    lines = "; ".join(
        f"{name}: {duration(one.step_time.total)}, {one.mfu:.0%} MFU, {one.memory.total / 2**30:.0f} GiB"
        for name, one in steps.items()
    )
    shown = all(one.fits for one in steps.values()) and times == sorted(times, reverse=True)
    picture = step_time_by_part(steps, title="What the time of a step goes into")
    return Outcome(None, f"The planner says (modelled): {lines}.", shown=shown, pictures=(picture,))


@lru_cache(maxsize=16)
def best(cluster: Cluster, model: ModelSpec = MODEL) -> Estimate:
    """The fastest plan that fits. Raises ValueError if none does."""
    return search(model, cluster, BATCH).best


# From 64 devices to 1,024

NUMBERS_OF_NODES = (8, 16, 32, 64, 128)


@lru_cache(maxsize=1)
def _more_replicas() -> list[Estimate]:
    """The plan that is best on the smallest cluster, with more and more replicas."""
    plan, steps = best(NODES).plan, []
    for nodes in NUMBERS_OF_NODES:
        more = replace(NODES, nodes=nodes)
        steps.append(estimate(MODEL, more, replace(plan, dp=more.devices // (plan.tp * plan.pp)), BATCH))
    return steps


def _speed_up() -> tuple[float, float]:
    """From the smallest cluster to the largest: what was gained, and the ideal."""
    first, *_, last = _more_replicas()
    return first.step_time.total / last.step_time.total, last.cluster.devices / first.cluster.devices


def _scaled(right: bool, happened: str, shown: bool) -> Outcome:
    timings = [Timing.planned(one, "more replicas") for one in _more_replicas()]
    timings += [Timing.planned(best(one.cluster), "planned anew") for one in _more_replicas()]
    picture = speed_up(timings, title="The same minibatch on more and more GPUs")
    return Outcome(right, f"Modelled: {happened}", shown=shown, pictures=(picture,))


def _follows_ideal() -> Outcome:
    gained, ideal = _speed_up()
    right = gained > 0.95 * ideal
    return _scaled(right, f"{ideal:.0f} times as many GPUs are {gained:.1f} times as fast.", shown=not right)


PARTS = {"gradients": ("data", "gradients"), "bubble": ("bubble", "the bubble")}  # of a step, and in words


def _blame(option: str) -> Outcome:
    """How much of what is lost against the ideal is the growth of one part of a step."""
    first, *_, last = _more_replicas()
    (part, name), (_, ideal) = PARTS[option], _speed_up()
    lost = last.step_time.total - first.step_time.total / ideal
    grown = getattr(last.step_time, part) - getattr(first.step_time, part) / ideal
    right = grown > lost / 2
    said = f"on 1,024 GPUs a step takes {duration(lost)} longer than in the ideal, and {percent(grown / lost)} of that"
    return _scaled(right, f"{said} is {name}.", shown=right == (option == "bubble"))


def _falls() -> Outcome:
    times = [one.step_time.total for one in _more_replicas()]
    right = times != sorted(times, reverse=True)
    return _scaled(right, f"a step takes {', '.join(map(duration, times))}.", shown=not right)


# A refresh: what the same plan gains, and where the money goes

H100 = Cluster("H100-80GB", nodes=8, between="InfiniBand HDR")


def _ratios() -> dict[str, float]:
    """How many times an A100 an H100 is."""
    new, old = H100.spec, NODES.spec
    return {"peak": new.peak["bf16"] / old.peak["bf16"], "bandwidth": new.bandwidth / old.bandwidth}


def _slips() -> dict[str, float]:
    return {name: ratio / _same_plan().value for name, ratio in _ratios().items()}


def _same_plan() -> Reading:
    before = best(NODES)
    carried = estimate(MODEL, H100, before.plan, BATCH)
    gain = before.step_time.total / carried.step_time.total
    picture = step_time_by_part({"A100": before, "H100, the same plan": carried}, title="What a step goes into")
    said = f"Modelled: {duration(before.step_time.total)} a step before, {duration(carried.step_time.total)} after"
    return Reading(gain, f"{said}, {gain:.2f} times as fast.", pictures=(picture,))


# In words, and what it is.
OFFERS = {
    "network": ("the network twice as fast", Cluster("A100-80GB", 8, between="InfiniBand NDR")),
    "h100": ("as many H100, on the same network", H100),
    "b200": ("half as many B200, on the same network", Cluster("B200-180GB", 4, between="InfiniBand HDR")),
    "a100": ("twice as many A100, on the same network", Cluster("A100-80GB", 16, between="InfiniBand HDR")),
}


def _buy(offer: str) -> Outcome:
    words, cluster = OFFERS[offer]
    before, gains = best(NODES), {name: _gain(cluster) for name, (_, cluster) in OFFERS.items()}
    after, right = best(cluster), gains[offer] == max(gains.values())
    peak = after.cluster.devices * after.cluster.spec.peak["bf16"]
    peak /= before.cluster.devices * before.cluster.spec.peak["bf16"]
    said = f"Modelled: {peak:.2f} times the peak, {gains[offer]:.2f} times as fast, {after.mfu:.0%} MFU."
    more = "No other offer gains more." if right else f"Another gains {max(gains.values()):.2f} times."
    picture = step_time_by_part({"before": before, "after": after}, title=f"A step with {words}")
    return Outcome(right, f"{said} {more}", pictures=(picture,))


def _gain(cluster: Cluster) -> float:
    return best(NODES).step_time.total / best(cluster).step_time.total


# Training infrastructure strategy

LARGER = LLAMA(126, 16384, 128, 8192, ffn_hidden=53248)  # the 405B model of the same table
SITES = {
    "64 H100, fast network": Cluster("H100-80GB", 8, between="InfiniBand HDR"),
    "128 A100, slow network": Cluster("A100-80GB", 16, between="Ethernet 25"),
    "32 B200, fast network": Cluster("B200-180GB", 4, between="InfiniBand HDR"),
}


def _sites() -> Outcome:
    lines = [f"{name}: {_at(site, MODEL)} with 70B, {_at(site, LARGER)} with 405B" for name, site in SITES.items()]
    fitting = [name for name, site in SITES.items() if _fits(site, LARGER)]
    fastest, second, _ = sorted(SITES, key=lambda name: -best(SITES[name]).tokens_per_second)
    (least, _), (_, most) = (best(SITES[name]).tokens_per_second_range for name in (fastest, second))
    shown = fitting == ["128 A100, slow network"] and least < most
    shown = shown and (fastest, second) == ("64 H100, fast network", "32 B200, fast network")
    return Outcome(None, f"The planner says (modelled): {'; '.join(lines)}.", shown=shown)


def _at(site: Cluster, model: ModelSpec) -> str:
    if not _fits(site, model):
        return "no plan fits"
    plan = best(site, model)
    low, high = plan.tokens_per_second_range
    return f"{plan.tokens_per_second:,.0f} tokens/s ({low:,.0f} to {high:,.0f})"


@lru_cache(maxsize=16)
def _fits(site: Cluster, model: ModelSpec) -> bool:
    try:
        return best(site, model).fits
    except ValueError:
        return False


QUESTIONS: dict[str, Family] = {
    "which_axis_across": Family(None, choice({**each(_reach_across, ACROSS), "none": _compare_axes})),
    "evaluate_strategy": Family(None, open_case(_evaluate)),
    "optimize_efficiency": Family(None, open_case(_ladder)),
    "more_replicas": Family(None, choice({"ideal": _follows_ideal, **each(_blame, PARTS), "falls": _falls})),
    "same_plan": Family(None, number(TIMES, _same_plan, _slips, tolerance=0.15), fields=lambda _: {**_ratios()}),
    "which_offer": Family(None, choice(each(_buy, OFFERS))),
    "infrastructure": Family(None, open_case(_sites)),
}
