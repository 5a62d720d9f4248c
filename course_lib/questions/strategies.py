"""Questions about whole strategies: on a mesh of real ranks, and of what to buy, with the planner."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from course_lib.experiments.meshes import INSIDE, PER_MACHINE, HybridExperiment, MeshStep
from course_lib.figures import Timing, gantt, mesh_map, speed_up, step_time_by_part
from course_lib.figures.axis import duration, percent
from course_lib.planner import Cluster, Estimate, ModelSpec, Plan, estimate, search
from course_lib.questions.forms import Choice, Form, Number, Option, Reading
from course_lib.questions.open_cases import case
from course_lib.questions.outcome import Outcome
from course_lib.questions.question import Family
from course_lib.questions.units import TIMES, Slip

# Llama Team 2024, "The Llama 3 Herd of Models", table 3: the 70B model.
MODEL = ModelSpec(
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    ffn_hidden=28672,
    sequence=8192,
    vocab=128256,
    gated_mlp=True,
    tied_embeddings=False,
    flash_attention=True,
)
BATCH = 256
NODES = Cluster("A100-80GB", nodes=8, between="InfiniBand HDR")


# Which axis has to stay inside a machine? Each option lets one axis, and no other, reach across.

ACROSS = {"tp": (1, 1, 8), "pp": (1, 2, 4), "dp": (2, 1, 4)}
MUCH_LONGER = 1.5


def _ask_axis(_: None) -> tuple[str, Form]:
    text = (
        "Eight ranks are on two machines of four. Inside a machine links are fast, between the two there is one slow "
        "link. Four ranks of a machine can be tensor ranks in any case. Which axis must not be the one that reaches "
        "across?"
    )
    tensor = (
        "Tensor ranks add up hidden states twice forward and twice backward in every layer, for every micro-batch, and "
        "none of them can go on without the sum. Over the slow link that takes longer than computing does."
    )
    stages = (
        "Two stages pass hidden states on at one place in the model only, and while a message travels another "
        "micro-batch is there to work on. What the slow link costs is hardly seen."
    )
    replicas = (
        "Replicas send as much as there are gradients and weights, but once in a step, however many samples and "
        "layers' worth of hidden states there were. So they can be far from each other."
    )
    same = "The three differ in how often they talk, and in whether somebody waits meanwhile. It shows in every step."
    return text, Choice(
        (
            Option("stages of a pipeline", partial(_reach_across, "pp"), stages),
            Option("replicas", partial(_reach_across, "dp"), replicas),
            Option("tensor ranks", partial(_reach_across, "tp"), tensor),
            Option("it makes no difference", _compare_axes, same),
        )
    )


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
    whole = sum(HybridExperiment((1, 1, 1)).wire.held(0))
    held = max(sum(experiment.wire.held(rank)) for rank in range(experiment.ranks)) / whole
    return (
        f"{experiment.words}: {duration(timeline.makespan)} a step, busy for {percent(busy)} of it, each rank holds "
        f"{percent(held)} of weights, gradients and Adam's state"
    )


EVALUATE = case(
    "A team trains on two machines of four devices, with a slow link between them. Their strategy is tensor "
    "parallelism over all eight devices. They give three reasons: it is exact, it divides the memory by eight, and no "
    "device is ever idle for lack of micro-batches. A step takes far longer than a computation of its FLOPs says. "
    "Evaluate the strategy: which of the reasons hold, what was left out, what would you measure, and what do you "
    "propose?",
    _evaluate,
    "Exact it is, and so is every other experiment, so that is no reason to choose it. The memory is divided by "
    "nearly eight (norms and some biases are on every rank), which counts only if less would not do. There is no "
    "bubble, but devices are idle all the same, in 4 all-reduces for each layer and micro-batch, all of which cross "
    "the slow link while nobody can compute. What was left out is who talks to whom over which link. Measure three "
    "things: weights after a step against one process, the fullest device's memory, and the time of a step with the "
    "part in which devices compute. Then propose what keeps the tensor ranks inside a machine: two replicas of four "
    "tensor ranks, which with ZeRO-1 hold a quarter of weights and gradients and an eighth of the optimizer's state; "
    "if that does not fit, two stages of four tensor ranks, which hold an eighth of everything, for a small bubble.",
    "All arrangements are exact, so exactness does not decide.",
    "The memory falls to about an eighth, and that matters only if it is needed.",
    "All-reduces in every layer cross the slow link, and nobody computes meanwhile.",
    "It is judged by something measured: correctness, memory, time of a step.",
    "The proposal keeps tensor ranks inside a machine, with replicas or stages across.",
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


EFFICIENCY = case(
    "A model of 70 billion parameters is trained on 8 nodes of 8 A100 with 80 GB each; the network between nodes is a "
    "twelfth as fast as the links inside. Somebody made it fit in a hurry, with 16 tensor ranks, 4 stages, and all "
    "activations computed again in the backward pass. Now little more than a third of the memory is in use, and the "
    "devices reach 29% of their peak (MFU). What do you change, in which order, and how do you know that each change "
    "was worth it?",
    _ladder,
    "Begin with what the time goes into, not with what is easy to change. A third of each step is tensor traffic, as "
    "groups of 16 reach over two nodes: 8 tensor ranks and 8 stages put it back on the fast links, and a step takes "
    "125 s where it took 174. Next use the memory that lies idle: without recomputation the backward pass does not "
    "compute everything twice, and sequence parallelism keeps what has to be held small; 93 s. Then let replicas have "
    "what is left: 2 of 4 stages with ZeRO-1 send less through pipelines, and 89 s remain. After that, search: fewer "
    "tensor ranks and another schedule bring it to 78 s, more than twice as fast as at first, at 65% MFU. After each "
    "change look at three numbers: the time of a step with its parts, the fullest device, and the loss curve, which "
    "must not change.",
    "The largest loss comes first: tensor ranks that reach over two nodes.",
    "Memory that is free is spent on not computing twice.",
    "Replicas, stages and tensor ranks are chosen anew, not one at a time only.",
    "Each change is judged by time, memory, and a loss curve that stays the same.",
)


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


def _ask_replicas(_: None) -> tuple[str, Form]:
    text = (
        "A colleague takes the plan that is best on 64 GPUs and only raises the number of replicas, until 1,024 GPUs "
        "work on the same minibatch of 256 samples. What will the speed-up look like?"
    )
    ideal = "It would, if nothing in a step stayed as long as it was. But filling and draining a pipeline does."
    bubble = (
        "The minibatch is shared by more pipelines, so each has fewer micro-batches to fill it with, while filling and "
        "draining take as long as ever. (Planned anew, the larger cluster does better: the best plan for 64 is not the "
        "best for 1,024.)"
    )
    gradients = (
        "In a ring, a device sends less than twice its gradients however many replicas there are, and most of that "
        "goes on while the last micro-batches compute."
    )
    falls = "Every doubling still helps: each device computes for half as long. It only helps less each time."
    return text, Choice(
        (
            Option("it follows the ideal: replicas do not wait for each other", _follows_ideal, ideal),
            Option(
                "it bends away, because gradients travel between more and more replicas",
                partial(_blame, "data", "gradients"),
                gradients,
            ),
            Option(
                "it bends away, because each pipeline gets fewer micro-batches",
                partial(_blame, "bubble", "the bubble"),
                bubble,
            ),
            Option("it falls: from some number on, more GPUs are slower", _falls, falls),
        )
    )


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


def _blame(part: str, name: str) -> Outcome:
    """How much of what is lost against the ideal is the growth of one part of a step."""
    first, *_, last = _more_replicas()
    _, ideal = _speed_up()
    lost = last.step_time.total - first.step_time.total / ideal
    grown = getattr(last.step_time, part) - getattr(first.step_time, part) / ideal
    right = grown > lost / 2
    said = f"on 1,024 GPUs a step takes {duration(lost)} longer than in the ideal, and {percent(grown / lost)} of that"
    return _scaled(right, f"{said} is {name}.", shown=right == (part == "bubble"))


def _falls() -> Outcome:
    times = [one.step_time.total for one in _more_replicas()]
    right = times != sorted(times, reverse=True)
    return _scaled(right, f"a step takes {', '.join(map(duration, times))}.", shown=not right)


# A refresh: what the same plan gains, and where the money goes

H100 = Cluster("H100-80GB", nodes=8, between="InfiniBand HDR")


def _ask_same_plan(_: None) -> tuple[str, Form]:
    peak = H100.spec.peak["bf16"] / NODES.spec.peak["bf16"]
    text = (
        "Your 64 A100 are replaced by as many H100, on the same network. An H100 has "
        f"{peak:.2f} times the peak of an A100 and {H100.spec.bandwidth / NODES.spec.bandwidth:.2f} times the "
        "bandwidth of its memory. How many times as fast will the same plan be, if nobody plans anew?"
    )
    why = (
        "Less than the peak promises: matrix products get faster by more than everything else, so memory, links and "
        "the bubble take a larger share of a step."
    )
    true = _same_plan().value
    slips = (
        Slip(peak / true, "That is the ratio of the peaks. A step is not only matrix products."),
        Slip(H100.spec.bandwidth / NODES.spec.bandwidth / true, "That is the memory alone. Much of a step is faster."),
    )
    return text, Number(TIMES, _same_plan, why, slips, tolerance=0.15)


def _same_plan() -> Reading:
    before = best(NODES)
    carried = estimate(MODEL, H100, before.plan, BATCH)
    gain = before.step_time.total / carried.step_time.total
    picture = step_time_by_part({"A100": before, "H100, the same plan": carried}, title="What a step goes into")
    said = f"Modelled: {duration(before.step_time.total)} a step before, {duration(carried.step_time.total)} after"
    return Reading(gain, f"{said}, {gain:.2f} times as fast.", pictures=(picture,))


OFFERS = {
    "the network twice as fast": Cluster("A100-80GB", 8, between="InfiniBand NDR"),
    "as many H100, on the same network": H100,
    "half as many B200, on the same network": Cluster("B200-180GB", 4, between="InfiniBand HDR"),
    "twice as many A100, on the same network": Cluster("A100-80GB", 16, between="InfiniBand HDR"),
}


def _ask_offers(_: None) -> tuple[str, Form]:
    text = (
        "You train a model of 70 billion parameters on 64 A100, with the best plan there is. You can afford one of "
        "these, prices aside. After which is a step the fastest, if you plan anew for it?"
    )
    why = (
        "The plan was chosen so that little crosses the network. What is rarely used need not be faster.",
        "Over three times the peak, and less than that in a step: memory and links have not kept up.",
        "Fewer and larger devices: fewer share the model, so less is sent, and each has more memory for a better plan.",
        "Twice the devices are nearly twice as fast. Minibatches have to be shared by more of them, which costs a "
        "little.",
    )
    options = zip(OFFERS, why, strict=True)
    return text, Choice(tuple(Option(offer, partial(_buy, offer), words) for offer, words in options))


def _buy(offer: str) -> Outcome:
    before, gains = best(NODES), {name: _gain(cluster) for name, cluster in OFFERS.items()}
    after, right = best(OFFERS[offer]), gains[offer] == max(gains.values())
    peak = after.cluster.devices * after.cluster.spec.peak["bf16"]
    peak /= before.cluster.devices * before.cluster.spec.peak["bf16"]
    said = f"Modelled: {peak:.2f} times the peak, {gains[offer]:.2f} times as fast, {after.mfu:.0%} MFU."
    more = "No other offer gains more." if right else f"Another gains {max(gains.values()):.2f} times."
    picture = step_time_by_part({"before": before, "after": after}, title=f"A step with {offer}")
    return Outcome(right, f"{said} {more}", pictures=(picture,))


def _gain(cluster: Cluster) -> float:
    return best(NODES).step_time.total / best(cluster).step_time.total


# Training infrastructure strategy

# Llama Team 2024, table 3: the 405B model.
LARGER = replace(MODEL, layers=126, hidden=16384, heads=128, ffn_hidden=53248)
SITES = {
    "64 H100, fast network": Cluster("H100-80GB", 8, between="InfiniBand HDR"),
    "128 A100, slow network": Cluster("A100-80GB", 16, between="Ethernet 25"),
    "32 B200, fast network": Cluster("B200-180GB", 4, between="InfiniBand HDR"),
}


def _sites() -> Outcome:
    lines = [f"{name}: {_at(site, MODEL)} with 70B, {_at(site, LARGER)} with 405B" for name, site in SITES.items()]
    fitting = [name for name, site in SITES.items() if _fits(site, LARGER)]
    fastest = max(SITES, key=lambda name: best(SITES[name]).tokens_per_second)
    shown = fitting == ["128 A100, slow network"] and fastest == "32 B200, fast network"
    return Outcome(None, f"The planner says (modelled): {'; '.join(lines)}.", shown=shown)


def _at(site: Cluster, model: ModelSpec) -> str:
    if not _fits(site, model):
        return "no plan fits"
    return f"{best(site, model).tokens_per_second:,.0f} tokens/s"


@lru_cache(maxsize=16)
def _fits(site: Cluster, model: ModelSpec) -> bool:
    return any(one.fits for one in search(model, site, BATCH))


INFRASTRUCTURE = case(
    "Your company will train models of 70 billion parameters all year, and perhaps one of 405 billion after that. You "
    "are offered 64 H100 or 32 B200 with a fast network, or 128 A100 with a slow one (25 Gbit/s for each), for about "
    "the same money. One manager counts FLOPs, another wants the fastest network, a third the most devices. How do you "
    "decide, what do you recommend, and what would change your mind?",
    _sites,
    "Decide by tokens in a second for the models that will be trained, each with the plan that is best for it there, "
    "and not by any figure of a datasheet. For 70 billion parameters the 32 B200 win, though they are the fewest: each "
    "is fast and has room, so the model is cut among fewer of them and less is sent. The A100 are the slowest, but not "
    "for their network: a good plan keeps tensor ranks inside a node and sends little between nodes. They are the only "
    "ones with memory enough for 405 billion, though: 16 bytes for each parameter are 6.5 TB, more than 64 H100 or 32 "
    "B200 have. So: B200 now, with nodes to be added before the large model, which is a matter of memory in all. What "
    "changes the decision: the large model comes for certain, power or prices differ, software does not use the new "
    "device well. Measure a few steps on a rented node before signing, and keep spare nodes, since the planner knows "
    "no failures.",
    "The yardstick is the models to be trained, planned anew on each offer.",
    "FLOPs, network and number of devices each decide nothing alone.",
    "6.5 TB for 405 billion parameters rule two of the offers out for it.",
    "The recommendation says what would change it.",
    "Something is measured before money is spent.",
)


QUESTIONS: dict[str, Family] = {
    "which_axis_across": Family(None, _ask_axis),
    "evaluate_strategy": EVALUATE,
    "optimize_efficiency": EFFICIENCY,
    "more_replicas": Family(None, _ask_replicas),
    "same_plan": Family(None, _ask_same_plan),
    "which_offer": Family(None, _ask_offers),
    "infrastructure": INFRASTRUCTURE,
}
