"""What tells the culprit of a night: its form, a fingerprint, elimination, or the rules of the debrief?

Each guesser sees what a student sees, of 40 nights of each case or more. The first three name a culprit of the right
kind (it is slow, it learns less, it hangs), which the curves tell anybody; they may be right as often as chance, and
ten nights in a hundred more. The last one measures and acts by the rules of the debrief, and pays what that costs.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lessons  # noqa: F401  (it opens its rooms)
from course_lib.classroom.scenarios.jobs.culprits import CULPRITS
from course_lib.classroom.scenarios.jobs.faults import Incident

ROOMS = ("S02_night_call", "S06_postmortem", "S07_regression", "S08_two_clusters")
NIGHTS, CLOSE = 40, 300  # CLOSE: steps more than par that count as par
READ = range(2000, 2160)  # seeds of nights whose form is read, which costs little
DRAWS = 20  # rounds that a fingerprint is learned from, for each night
SLACK, ENOUGH = 0.1, 0.9  # above chance; of nights
SPOILS = ("together", "rate")  # what was learned since is worth less than nothing
Guess = tuple[str, Any]


def case_of(room: str) -> Incident:
    case: Incident = importlib.import_module(f"lessons.{room}.case").CASE
    return case


def kind(night: Incident) -> str:
    return night._drawn[0].kind.kind


def suspects(night: Incident) -> list[str]:
    return [name for name in night.culprits if CULPRITS[name].kind == kind(night)]


# Guessers that measure nothing


@cache
def form(night: Incident) -> set[str]:
    """Words, counts, order and lengths of what is written; no number of the job."""
    lines = [re.sub(r"[\d:,.]+", "", line) for line in [*night._settings(), *night._log()]]
    order = {f"{place} {line}" for place, line in enumerate(lines)}
    return {*lines, *order, f"{sum(map(len, lines)) // 20} long", f"{len(lines)} lines"}


@cache
def fingerprint(night: Incident) -> list[float]:
    """The numbers below the curves."""
    evidence = night.variant(night.seed).evidence()  # a copy, since whoever is kept here would keep all its weights
    found = re.findall(r"\d+\.\d+", evidence.outcome.pictures[0].summary)
    return list(map(float, found))


def nearest(night: Incident, seen: Sequence[Incident], distance: Callable[[Incident, Incident], float]) -> str:
    alike = [one for one in seen if kind(one) == kind(night)]
    return min(alike, key=lambda one: distance(one, night))._drawn[0].name if alike else suspects(night)[0]


def by_form(night: Incident, seen: Sequence[Incident]) -> str:
    return nearest(night, seen, lambda a, b: -len(form(a) & form(b)))


def by_fingerprint(night: Incident, seen: Sequence[Incident]) -> str:
    def apart(a: Incident, b: Incident) -> float:
        return sum(abs(x - y) / (abs(x) + abs(y)) for x, y in zip(fingerprint(a), fingerprint(b), strict=True))

    return nearest(night, seen, apart)


def of_two_rounds(nights: Sequence[Incident]) -> float:
    """How often a fingerprint is right that was learned from two rounds of these nights, over several such rounds."""
    random, right = Random("rounds"), 0
    for night in nights:
        others = [other for other in nights if other != night]
        for _ in range(DRAWS):
            right += by_fingerprint(night, random.sample(others, 2 * len(night.culprits))) == night._drawn[0].name
    return right / len(nights) / DRAWS


def by_elimination(night: Incident, seen: Sequence[Incident]) -> str:
    """The culprit that has not come for longest."""
    came = [one._drawn[0].name for one in seen]
    return min(suspects(night), key=lambda name: came[::-1].index(name) if name in came else -1, default="")


GUESSERS = {"form": by_form, "elimination": by_elimination}


def chance(nights: Sequence[Incident]) -> float:
    return sum(1 / len(suspects(night)) for night in nights) / len(nights)


# The diagnostician, written from the debrief


def facts(night: Incident, name: str) -> list[str]:
    """The readings of an instrument, in the order of ranks, replicas or nodes."""
    return list(readings(night, name).values())


def readings(night: Incident, name: str) -> dict[str, str]:
    """The table of an instrument's last picture."""
    rows = night.measure(name).outcome.pictures[-1].rows
    return {str(where): ", ".join(map(str, said)) for where, *said in (row.values() for row in rows)}


def numbers(text: str) -> list[float]:
    return list(map(float, re.findall(r"\d+\.?\d*", text.replace(",", ""))))


def diagnose(night: Incident) -> tuple[str, Any]:
    """What to do, and where."""
    if night.story.scene.night.hung:
        return of_calls(night)
    reports = night.story.scene.night.reports(night.story.scene.now)
    before, now = (sum(one.seconds for one in part) / len(part) for part in (reports[40:60], reports[-10:]))
    return (None if 0.9 < now / before < 1.02 else of_time(night)) or of_numbers(night)


def of_calls(night: Incident) -> tuple[str, Any]:
    calls = facts(night, "recorder")
    heads = [call.split(";")[0] for call in calls]
    if len(set(heads)) == 1:
        return "cable", shared(night, [way == "no answer" for way in facts(night, "links")])
    odd = calls[min(range(len(calls)), key=lambda rank: heads.count(heads[rank]))]
    known = {"storage": ("setting", "patience"), "samples": ("restart", ""), "mean_loss": ("setting", "logging")}
    return next((act for word, act in known.items() if word in odd.split("stands at")[1]), ("setting", "empty"))


def shared(night: Incident, is_bad: Sequence[bool]) -> int:
    """The node at which the bad ways from each node to the next meet."""
    nodes = night.planned.nodes
    ends = [end for node, bad in enumerate(is_bad) if bad for end in (node, (node + 1) % nodes)]
    return max(range(nodes), key=ends.count)


def of_time(night: Incident) -> tuple[str, Any] | None:
    planned, job = night.planned, night.planned
    if planned.tp > 1 and "rank 1 (node 1" in str(readings(night, "profile")):
        return "setting", "in_turn"
    profile = facts(night, "profile")
    reads, computes, _ = zip(*(numbers(fact)[:3] for fact in profile), strict=True)
    if max(reads) > 0.2:
        return "node", job.node(reads.index(max(reads)))
    wanted = re.findall(r"rank 0 reads .* computes for ([\d.]+)", str(night.evidence()))[0]
    more = [one / float(wanted) for one in computes]
    if max(more) < 0.6:
        return "setting", "samples"
    high = [rank for rank, one in enumerate(more) if one > 1.03]
    if len(high) == 1:
        return "card", job.device(high[0])
    if high:
        return "setting", "layers"
    sent = numbers(profile[0].split("all-reduces: ")[1])
    if not sent:
        return "setting", "together"
    if planned.pp == 1 and sent[0] != planned.buckets:
        return "setting", "buckets"
    ways = [numbers(fact)[0] for fact in facts(night, "links")]
    slow = [way < 0.8 * planned.between.bandwidth / 1e6 for way in ways]
    if any(slow):
        return "cable", shared(night, slow)
    if numbers(profile[0])[2] != planned.micro_batches:
        return "setting", "micro_batches"
    return ("setting", "overlap") if "overlap" in night.culprits else None


def of_numbers(night: Incident) -> tuple[str, Any]:
    planned = re.findall("rank 0 (.+)", str(night.evidence()))[0]
    if "kept" in night.culprits and held(facts(night, "profile")[0]) != held(planned):
        return "setting", "master_weights"
    if any(numbers(fact)[0] for fact in facts(night, "replicas")):
        return "setting", "together"
    read = facts(night, "samples")
    if "sorted" in night.culprits and (len(set(read)) == 1 or all(map(follows, read))):
        return "setting", "order"
    tops = [max(numbers(fact), default=0.0) if "inf" not in fact else 1e9 for fact in facts(night, "gradients")]
    if max(tops) > 3 * sorted(tops)[len(tops) // 2 - (len(tops) == 2)]:
        worst = tops.index(max(tops))
        alike = [numbers(fact)[0] for fact in facts(night, "same")]
        odd = [place for place, one in enumerate(alike) if abs(one - sorted(alike)[len(alike) // 2]) > 0.01]
        if len(set(alike)) == 1:
            return "shard", worst
        replica = worst if len(alike) == 2 else odd[0]
        return "card", night.planned.device(replica * night.planned.pp * night.planned.tp)
    (_, _, _, well), (_, skipped, _, lately) = map(numbers, facts(night, "updates"))
    if lately > 2 * well:
        return "setting", "rate"
    if night.planned.fixed is None and skipped > 2:
        return "setting", "fixed"
    if "sums" in night.culprits and not facts(night, "profile")[0].endswith(planned.split(": ")[1]):
        return "setting", "sums"
    return "wait", ""


def held(profile: str) -> str:
    return re.findall(r"holds ([\d.]+)", profile)[0]


def follows(read: str) -> bool:
    """Whether the second sample is one of the next after the first."""
    first, second, *_ = numbers(read)
    return 0 <= second - first < 40


def best(night: Incident) -> int:
    """The checkpoint with the lowest loss, of those whose replicas are equal."""
    equal = {saved: numbers(fact.split(",")[0]) for saved, fact in readings(night, "checkpoints").items()}
    return int(min((saved for saved in equal if equal[saved]), key=equal.__getitem__))


def play(night: Incident) -> tuple[bool, int, int]:
    """Diagnose, act, and again if there is more; whether it is well then, its cost, and par."""
    right = False
    for _ in range(3):
        what, place = diagnose(night)
        is_sorted = place == "order" and len(set(facts(night, "samples"))) > 1
        spoils = what == "shard" or place in SPOILS or is_sorted or (what == "card" and "same" in night.story.used)
        right = bool(night.act(what, place, best(night) if spoils else None).outcome.right)
        if right:
            break
    scene, stands, *_ = night.story
    return right, night.cost(scene.night, stands)[0], night.par()[0]


def nights_of(room: str, seeds: Sequence[int]) -> list[Incident]:
    return [case_of(room).variant(seed) for seed in seeds]


def limits(room: str) -> dict[str, tuple[float, str, float]]:
    """What each reaches, and what it may reach at most or has to reach at least."""
    nights, seen, read = (nights_of(room, seeds) for seeds in (range(NIGHTS), range(1000, 1000 + NIGHTS), READ))
    most, found, played = chance(nights) + SLACK, {}, []
    for night in nights:
        fingerprint(night)
        played.append(play(night.variant(night.seed)))
    for name, guess in GUESSERS.items():
        right = sum(guess(night, seen) == night._drawn[0].name for night in read)
        found[name] = (right / len(read), "at most", most)
    found["fingerprint"] = (of_two_rounds([*nights, *seen]), "at most", most)
    found["diagnostician"] = (sum(right for right, *_ in played) / len(nights), "at least", ENOUGH)
    at_par = sum(right and cost <= par + CLOSE for right, cost, par in played)
    found["at par"] = (at_par / len(nights), "at least", ENOUGH)
    return found


def is_within(share: float, how: str, limit: float) -> bool:
    return share <= limit if how == "at most" else share >= limit


def main() -> None:
    os.environ["COURSE_STATE"] = tempfile.mkdtemp()
    for room in sys.argv[1:] or ROOMS:
        began = time.monotonic()
        print(f"{room}, {NIGHTS} nights", flush=True)
        for name, (share, how, limit) in limits(room).items():
            verdict = "" if is_within(share, how, limit) else "  <- outside"
            print(f"    {name:14} {share:5.0%}   {how} {limit:.0%}{verdict}")
        print(f"    in {(time.monotonic() - began) / 60:.0f} minutes", flush=True)


if __name__ == "__main__":
    main()
