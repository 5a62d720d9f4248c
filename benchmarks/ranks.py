"""Launching a function on several ranks: latency, repeated runs and memory, against the launchers a user might pick.

Everything is measured in this run, the launchers taking turns, and every time is a median of at least five. A first
run is a fresh Python process, from before its first import to the first result; a further run is the next one in it.

    python benchmarks/ranks.py [TURNS]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

HERE = Path(__file__).parent
SIZES = (2, 4, 8)
MOST = SIZES[-1]
PEERS = ("course_lib.launch", "mp.spawn", "torchrun", "notebook_launcher", "ipyparallel")
STARTS_ANEW = ("mp.spawn", "torchrun")  # every call repeats the work of the first
FURTHER = {"course_lib.launch": 20, "notebook_launcher": 5, "ipyparallel": 20}
PATIENCE = 40  # seconds, several times the slowest launcher's; a launcher that takes longer hangs
MB, MS, MICROSECOND = 1e6, 1e-3, 1e-6

Found = dict[tuple[str, int, str], list[float]]  # (launcher, ranks, what) -> measurements


# In separate processes


def python(*words: str) -> str:
    """The output of a fresh Python. Raises subprocess.TimeoutExpired if it hangs, after killing all its processes."""
    # Let Python write bytecode, whatever the environment says: a user's launcher is compiled before it is started.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        printed, _ = process.communicate(timeout=PATIENCE)
    except BaseException:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and ranks whose parent is gone
        process.wait()  # and not for the end of its output, which a survivor may hold open
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return printed


def import_torch() -> float:
    """Seconds that `import torch` takes in a fresh process."""
    return float(python("-c", "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"))


def with_torchrun(n: int, with_memory: bool) -> dict[str, Any]:
    program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", str(HERE / "_launchers.py")]
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    began = time.perf_counter()
    python(*program, "torchrun")
    found: dict[str, Any] = {"first": time.perf_counter() - began}
    found["further"] = [found["first"]]
    if with_memory:
        found |= json.loads(python(*program, "torchrun", str(os.getpid())))
    return found


def with_launcher(name: str, n: int, with_memory: bool) -> dict[str, Any]:
    words = [str(HERE / "_launchers.py"), name, str(n), str(FURTHER.get(name, 0)), *(["memory"] if with_memory else [])]
    found = json.loads(python(*words).splitlines()[-1])
    if name in STARTS_ANEW:
        found["further"] = [found["first_call"]]
    return found


def measure(name: str, n: int, with_memory: bool) -> dict[str, Any]:
    try:
        return with_torchrun(n, with_memory) if name == "torchrun" else with_launcher(name, n, with_memory)
    except subprocess.TimeoutExpired:
        print(f"{name} hung with {n} ranks", file=sys.stderr, flush=True)
        return {"hung": 1.0}


def compare(turns: int) -> Found:
    """Let all launchers take turns, so that other load on the machine hits all of them."""
    measured: Found = defaultdict(list)
    for turn in range(turns):
        measured["import torch", 1, "first"].append(import_torch())
        for n in SIZES:
            for name in PEERS:
                if measured[name, n, "hung"]:  # waiting for it once is enough
                    continue
                with_memory = n == MOST and (turn == 0 or name not in STARTS_ANEW)
                for what, value in measure(name, n, with_memory).items():
                    measured[name, n, what] += value if isinstance(value, list) else [value]
        print(f"turn {turn + 1} of {turns} done", file=sys.stderr, flush=True)
    return measured


# In this process


def overhead(rank: int, rounds: int, operations: int) -> list[float]:
    """Seconds that tracing adds to an all_reduce: traced and plain gloo take turns in blocks of operations."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if hasattr(os, "SCHED_BATCH"):  # schedule the plain group's threads as the traced one's are
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    plain = dist.new_group(backend="gloo")
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    value, seconds = torch.ones(4), {True: 0.0, False: 0.0}
    differences = []
    for turn in range(rounds):
        for traced in (True, False) if turn % 2 else (False, True):
            group = None if traced else plain
            dist.barrier(group)
            began = time.perf_counter()
            for _ in range(operations):
                dist.all_reduce(value, group=group)
            seconds[traced] = (time.perf_counter() - began) / operations
        differences.append(seconds[True] - seconds[False])
    return differences[2:]


def reduce_once(rank: int) -> float:
    import torch
    import torch.distributed as dist

    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


class Footprint(NamedTuple):
    """The resources of this process and all its descendants.

    memory: mean RSS per process, in bytes. A page shared with the fork server until a run wrote on it counts before
        that write, too.
    """

    memory: float
    files: float
    processes: float
    threads: float


def footprint() -> Footprint:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    memory = sum(process.memory_info().rss for process in processes) / len(processes)
    files = sum(process.num_fds() for process in processes)
    return Footprint(memory, files, len(processes), sum(process.num_threads() for process in processes))


def growth(runs: int) -> Footprint:
    """The growth of the footprint over `runs` runs, one after another."""
    from course_lib import launch

    for _ in range(100):
        launch(reduce_once, MOST)
    before = footprint()
    for _ in range(runs):
        launch(reduce_once, MOST)
    return Footprint(*(b - a for a, b in zip(before, footprint(), strict=True)))


def endless(rank: int) -> None:
    while True:
        pass


def blocked(rank: int) -> None:
    import torch
    import torch.distributed as dist

    if rank == 0:
        time.sleep(60)
    dist.recv(torch.zeros(1), 0)


def interrupted(turns: int) -> list[float]:
    """Seconds from Ctrl-C in the middle of a run to the result of the next one."""
    from course_lib import launch

    return [recovery(launch, state) for _ in range(turns) for state in (endless, blocked)]


def recovery(launch: Any, state: Any) -> float:
    pressed = []

    def press() -> None:
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    launch(reduce_once, MOST)
    timer = threading.Timer(0.5, press)
    timer.start()
    try:
        launch(state, MOST)
    except KeyboardInterrupt:
        assert launch(reduce_once, MOST).results == [MOST * (MOST - 1) / 2] * MOST
    return time.perf_counter() - pressed[0]


# Tables


def table(measured: Found) -> Iterator[str]:
    yield f"{'':<22}{'first run, s':^27}{'further run, ms':^27}{'memory, MB':>12}"
    columns = "".join(f"{f'{n} ranks':>9}" for n in SIZES)
    yield f"{'':<22}{columns}{columns}{f'{MOST} ranks':>12}"
    for name in PEERS:
        first = "".join(f"{median(measured[name, n, 'first']):>9.2f}" for n in SIZES)
        further = "".join(f"{median(measured[name, n, 'further']) / MS:>9.1f}" for n in SIZES)
        hung = [str(n) for n in SIZES if measured[name, n, "hung"]]
        remark = f"  hung with {', '.join(hung)} ranks" if hung else ""
        yield f"{name:<22}{first}{further}{median(measured[name, MOST, 'memory']) / MB:>12.0f}{remark}"


def median(measurements: list[float]) -> float:
    return statistics.median(measurements) if measurements else float("nan")


NOTES = f"""
One all_reduce of a small tensor in a function defined in __main__, one thread for each rank, gloo.
mp.spawn and torchrun start anew for each call; a further mp.spawn is a call without the notebook's own imports.
Memory: the sum of the proportional set sizes (PSS) of all processes that the notebook has started (ranks, fork
server, resource tracker, controllers), for {MOST} ranks, while the notebook itself holds an imported torch.
"""


def targets(measured: Found, turns: int) -> Iterator[str]:
    from course_lib import launch

    def typical(what: str, name: str = "course_lib.launch", n: int = MOST) -> float:
        return median(measured[name, n, what])

    ratio = typical("first") / typical("first", "import torch", 1)
    faster = typical("further", "mp.spawn") / typical("further")
    yield line(f"first run at {MOST} ranks, over import torch", ratio, 1.7, "")
    yield line(f"further run at {MOST} ranks", typical("further") / MS, 6, "ms")
    yield line("times faster than mp.spawn", faster, 1000, "", at_least=True)
    yield line(f"memory of {MOST} ranks after AdamW", typical("memory_adamw") / MB, 400, "MB")
    first_costs = typical("first_adamw") - typical("next_adamw")
    yield line("first AdamW, more than the next", first_costs, 0.7, "s")
    for n in (1, 2):
        added = launch(overhead, n, (41, 50)).results[0]
        yield line(f"tracing an operation, {n} rank{'s' if n > 1 else ''}", median(added) / MICROSECOND, 20, "us")
    left = growth(1000)
    yield line("left by 1,000 runs: memory of a process", left.memory / MB, 1, "MB")
    yield line("  open files", left.files, 0, "")
    yield line("  processes", left.processes, 0, "")
    yield line("  threads", left.threads, 0, "")
    yield line("Ctrl-C to the next result", median(interrupted(max(turns, 3))), 0.5, "s")


def line(name: str, value: float, limit: float, unit: str, at_least: bool = False) -> str:
    met = value >= limit if at_least else value <= limit
    bound = f"{'at least' if at_least else 'at most'} {limit:g} {unit}"
    return f"{name:<42}{value:>10.4g} {unit:<3} target: {bound:<16}{'met' if met else 'MISSED'}"


def main() -> None:
    """Print the figures of each launcher, and this one beside its targets."""
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    cores, load = os.cpu_count(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    print(f"{cores} cores, load {load:.1f} before the first measurement, medians of at least {turns}\n")
    measured = compare(turns)
    print(*table(measured), sep="\n")
    print(f"{'import torch':<22}{median(measured['import torch', 1, 'first']):>9.2f}\n{NOTES}")
    for text in targets(measured, turns):
        print(text, flush=True)


if __name__ == "__main__":
    main()
