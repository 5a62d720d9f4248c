"""The planner's accuracy against published figures (_published.py), and its time on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks import _mixtures, _published
from benchmarks.ranks import line
from course_lib.planner import Cluster, ModelSpec, search, simulate
from course_lib.schedules import SCHEDULES

TURNS = 5
LIMIT = 2.0  # seconds, for each
RANKS = 64
SCHEDULE = SCHEDULES["1f1b"](RANKS, 7813)
MODEL = ModelSpec(96, 12288, 96, 2048, 51200)  # GPT-3
CLUSTER = Cluster("A100-80GB", nodes=128)
BATCH = 1536


def main() -> None:
    """Print every published figure beside the planner's, the errors as a whole, and times with their targets."""
    print(_published.table(), _published.figure_table(), _mixtures.table(), sep="\n\n", end="\n\n")
    found = [(module.left_out(), module.after_one_row(), module.naive()) for module in (_published, _mixtures)]
    for title, kind in zip(("dense models", "mixtures of experts"), found, strict=True):
        print(f"{title}\n{_published.source_table(*kind)}\n")
    everything = [dense + mixed for dense, mixed in zip(*found, strict=True)]
    print(f"both\n{_published.source_table(*everything).splitlines()[-1]}\n")
    print(_published.report(), _mixtures.report(), sep="\n\n", end="\n\n")
    torch.set_num_threads(1)
    actions = sum(map(len, SCHEDULE.actions))
    report(f"{actions:,} actions of 1f1b on {RANKS} ranks", lambda: simulate(SCHEDULE, 1.0, 2.0))
    report("... and as many transfers between them", lambda: simulate(SCHEDULE, 1.0, 2.0, transfer=0.1))
    plans = len(search(MODEL, CLUSTER, BATCH))
    report(f"{plans:,} plans for GPT-3 on {CLUSTER.devices:,} GPUs", lambda: search(MODEL, CLUSTER, BATCH))


def report(what: str, call: Callable[[], object]) -> None:
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        made = call()
        seconds.append(time.perf_counter() - began)
        del made  # so it does not count in the next turn
    print(line(what, statistics.median(seconds), LIMIT, "s"), flush=True)


if __name__ == "__main__":
    main()
