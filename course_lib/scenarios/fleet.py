"""Defaults for many teams (S4): a policy makes a plan for whoever comes, and is tried on a dozen models and clusters.

    def policy(model, cluster, global_batch):
        return Plan(dp=cluster.devices)

    from course_lib.scenarios import fleet
    fleet.trial(policy)             where it fits, and how far it is from the best plan there; the worst first

The best plans are those that `search` finds; a test searches again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from math import inf, isfinite
from statistics import geometric_mean
from typing import Any, NamedTuple

from course_lib import journal
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, ModelSpec, Plan, estimate

Policy = Callable[[ModelSpec, Cluster, int], Any]
GOOD, FAIR = 1.1, 1.5  # times the best plan's time: what a default may cost, and what it may cost at worst


class Pair(NamedTuple):
    """A model on a cluster, and the fastest plan there."""

    model: ModelSpec
    cluster: Cluster
    batch: int
    best: Plan


def _gpt(layers: int, hidden: int, heads: int, sequence: int = 2048) -> ModelSpec:
    return ModelSpec(layers, hidden, heads, sequence, vocab=51_200, flash_attention=True)


def _llama(layers: int, hidden: int, heads: int, sequence: int) -> ModelSpec:
    """In the shape of Llama 3 (Llama Team 2024, table 3)."""
    shape: dict[str, Any] = {"kv_heads": 8, "ffn_hidden": 7 * hidden // 2, "gated_mlp": True, "tied_embeddings": False}
    return ModelSpec(layers, hidden, heads, sequence, vocab=128_256, flash_attention=True, **shape)


_A100, _V100 = (
    Cluster("A100-80GB", 4, between="Ethernet 100"),
    Cluster("V100-32GB", 4, between="InfiniBand EDR", nics_per_node=4),
)
_SLOW, _H100 = Cluster("A100-40GB", 4, between="Ethernet 25"), Cluster("H100-80GB", 4, between="InfiniBand NDR")
_AGAIN: dict[str, Any] = {"recompute": "selective"}
_CUT: dict[str, Any] = {"sequence_parallel": True, "zero": 1}
FLEET: dict[str, Pair] = {
    "0.35B on 4 RTX 4090": Pair(_gpt(24, 1024, 16, 1024), Cluster("RTX-4090", 1, 4), 64, Plan(4, 1, 1, 16, zero=1)),
    "1.3B on 8 RTX 4090": Pair(_gpt(24, 2048, 16), Cluster("RTX-4090"), 64, Plan(8, 1, 1, 4, zero=1, **_AGAIN)),
    "1.3B on 8 A100": Pair(_gpt(24, 2048, 16), Cluster("A100-40GB"), 64, Plan(8, 1, 1, 8, zero=3)),
    "6.7B on 8 A100": Pair(_gpt(32, 4096, 32), Cluster(), 128, Plan(8, 1, 1, 4, zero=1)),
    "6.7B on 32 V100": Pair(_gpt(32, 4096, 32), _V100, 128, Plan(32, 1, 1, 2, zero=2, precision="fp16", **_AGAIN)),
    "8B on 8 H100": Pair(_llama(32, 4096, 32, 8192), Cluster("H100-80GB"), 32, Plan(8, 1, 1, 1, zero=1, **_AGAIN)),
    "8B on 32 H100, 131,072 tokens": Pair(
        _llama(32, 4096, 32, 131_072), _H100, 8, Plan(4, 1, 1, 1, zero=3, cp=8, **_AGAIN)
    ),
    "13B on 32 A100, slow network": Pair(_gpt(40, 5120, 40), _SLOW, 128, Plan(4, 2, 4, 2, "zb_h1", **_CUT)),
    "13B on 16 A100": Pair(_gpt(40, 5120, 40), Cluster(nodes=2), 128, Plan(8, 2, 1, 8, **_CUT, **_AGAIN)),
    "30B on 32 A100": Pair(_gpt(48, 7168, 56), _A100, 128, Plan(8, 2, 2, 4, "interleaved_1f1b", 8, **_CUT, **_AGAIN)),
    "70B on 8 B200": Pair(
        _llama(80, 8192, 64, 4096),
        Cluster("B200-180GB"),
        32,
        Plan(1, 4, 2, 1, "interleaved_1f1b", 10, sequence_parallel=True, **_AGAIN),
    ),
    "70B on 16 H200": Pair(
        _llama(80, 8192, 64, 4096),
        Cluster("H200-141GB", 2, between="InfiniBand NDR"),
        64,
        Plan(2, 2, 4, 1, "zb_h1", **_CUT, **_AGAIN),
    ),
}


class Trial(NamedTuple):
    """times: a step takes of the best plan's; infinite where it does not run.  said: the plan, or what is wrong."""

    pair: str
    times: float
    said: str


@dataclass(frozen=True)
class Trials:
    """All of a policy, the worst first. Shows itself in a notebook."""

    trials: list[Trial]

    @property
    def running(self) -> list[Trial]:
        return [one for one in self.trials if isfinite(one.times)]

    @property
    def typical(self) -> float:
        """The geometric mean of the times where it runs."""
        return geometric_mean([one.times for one in self.running]) if self.running else inf

    def __str__(self) -> str:
        good = sum(one.times <= GOOD for one in self.running)
        said = f"It runs on {len(self.running)} of {len(self.trials)}."
        if not self.running:
            return said
        typical = f"it takes {self.typical:.2f} times as long as the best plan in the mean"
        return f"{said} Where it runs, {typical}, and at most {GOOD} times as long on {good}."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        rows = [
            (one.pair, f"{one.times:.2f}" if isfinite(one.times) else "does not run", one.said) for one in self.trials
        ]
        cells = ("".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) for row in rows)
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "".join(
            f"<th style='text-align:left'>{name}</th>"
            for name in ("model and cluster", "times the best", "plan (modelled)")
        )
        html = f"<p>{escape(str(self))}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return {"text/plain": "\n".join([str(self), *map("  ".join, rows)]), "text/html": html}


def trial(policy: Policy) -> Trials:
    """What becomes of a student's policy; it is kept, as an answer is. Right: it runs everywhere, and nowhere badly."""
    found = tried(policy)
    with suppress(OSError):  # as where nothing can be written
        journal.record("ran", "S4_policy", 0, str(found), found.trials[0].times <= FAIR)
    return found


def tried(policy: Policy) -> Trials:
    """Ask the policy for a plan for each model and cluster. What it raises becomes a sentence."""
    return Trials(sorted(_trials(policy), key=lambda one: -one.times))


def _trials(policy: Policy) -> Iterator[Trial]:
    for name, (model, cluster, batch, best) in FLEET.items():
        try:
            plan = policy(model, cluster, batch)
        except Exception as error:
            yield Trial(name, inf, f"The policy raised {type(error).__name__}: {error}")
            continue
        if not isinstance(plan, Plan):
            yield Trial(name, inf, f"A Plan is asked for, and this is of type {type(plan).__name__}.")
            continue
        try:
            found = estimate(model, cluster, plan, batch)
        except (ValueError, TypeError) as error:
            yield Trial(name, inf, f"There can be no such plan: {error}")
            continue
        seconds = estimate(model, cluster, best, batch).step_time.total
        if found.fits:
            yield Trial(name, found.step_time.total / seconds, plan_in_words(plan))
        else:
            yield Trial(name, inf, f"{plan_in_words(plan)}. {found.why}")
