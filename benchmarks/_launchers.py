"""Launchers: the same function on several ranks, in each way that a user would run it, one at a time.

This file is run as a script, so that the functions are in __main__, as in a notebook. It prints one line of JSON:
seconds from before the first import to the first result, seconds of each further run, and bytes of the ranks' memory.

    python benchmarks/_launchers.py NAME RANKS FURTHER_RUNS [memory]
    torchrun --nproc-per-node=RANKS benchmarks/_launchers.py torchrun [KERNEL'S PROCESS ID]
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "GLOO_SOCKET_IFNAME": "lo"}


def reduce_once(rank: int, *_: Any) -> float:
    """The function that every launcher runs: one all-reduce of a small tensor, on one thread."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return value.item()


def step_with_adamw(rank: int, *_: Any) -> None:
    """Take a step with an optimizer, as the first one in a process imports a great deal."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()


def memory_of_ranks(rank: int, kernel: int) -> int:
    """PSS in bytes of all processes that `kernel` has started: ranks, and processes that serve them.

    Proportional set size: a page that n processes share counts 1/n in each.
    """
    import torch.distributed as dist

    dist.barrier()
    total = 0
    if rank == 0:
        import psutil

        total = sum(process.memory_full_info().pss for process in psutil.Process(kernel).children(recursive=True))
    dist.barrier()
    return total


def in_a_new_group(rank: int, world_size: int, function: Callable[..., Any], answers: str, *args: Any) -> None:
    """Join a group, run, write rank 0's result, leave: for launchers that start processes for each call."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(rank, *args)
    if rank == 0:
        with open(answers, "w") as file:
            json.dump(result, file)
    dist.destroy_process_group()


def by_elastic_rank(*args: Any) -> None:
    in_a_new_group(int(os.environ["RANK"]), *args)


def _answer(call: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "answer")
        call(path)
        with open(path) as file:
            return json.load(file)


# The launchers. Each takes (function, ranks, *args) and returns what rank 0 returned.


def course() -> Callable[..., Any]:
    from course_lib import launch

    return lambda function, n, *args: launch(function, n, args).results[0]


def mp_spawn() -> Callable[..., Any]:
    import torch.multiprocessing as mp

    os.environ |= LOOPBACK
    return lambda function, n, *args: _answer(
        lambda path: mp.spawn(in_a_new_group, (n, function, path, *args), nprocs=n)
    )


def notebook_launcher() -> Callable[..., Any]:
    import contextlib
    import io

    from accelerate import notebook_launcher

    os.environ |= LOOPBACK

    def run(path: str, function: Callable[..., Any], n: int, *args: Any) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            notebook_launcher(by_elastic_rank, (n, function, path, *args), num_processes=n)

    return lambda function, n, *args: _answer(lambda path: run(path, function, n, *args))


def ipyparallel() -> Callable[..., Any]:
    import atexit
    import logging

    import ipyparallel

    started: dict[int, Any] = {}

    def start(n: int) -> Any:
        cluster = ipyparallel.Cluster(n=n, log_level=logging.ERROR)
        client = cluster.start_and_connect_sync(activate=False)
        atexit.register(cluster.stop_cluster_sync)
        client[:].use_cloudpickle()
        view = client[:]
        view.scatter("rank", range(n), flatten=True)
        view.execute(
            f"import os, torch.distributed; os.environ.update({LOOPBACK})\n"
            f"torch.distributed.init_process_group('gloo', rank=rank, world_size={n})",
            block=True,
        )
        return view

    def run(function: Callable[..., Any], n: int, *args: Any) -> Any:
        if n not in started:
            started[n] = start(n)
        arguments = [[rank, *args] for rank in range(n)]
        return started[n].map_sync(lambda given: function(*given), arguments)[0]

    return run


LAUNCHERS = {
    "course_lib.launch": course,
    "mp.spawn": mp_spawn,
    "notebook_launcher": notebook_launcher,
    "ipyparallel": ipyparallel,
}


def torchrun() -> None:
    """The program that torchrun starts on every rank. Given a process id, it prints the memory of its children."""
    import torch.distributed as dist

    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    assert reduce_once(rank) == n * (n - 1) / 2
    if len(sys.argv) > 2:
        memory = memory_of_ranks(rank, int(sys.argv[2]))
        if rank == 0:
            print(json.dumps({"memory": memory}))
    dist.destroy_process_group()


def seconds(call: Callable[..., Any], *args: Any) -> float:
    began = time.perf_counter()
    call(*args)
    return time.perf_counter() - began


def measure(name: str, n: int, further: int, with_memory: bool) -> dict[str, Any]:
    run = LAUNCHERS[name]()
    imported = time.perf_counter()
    assert run(reduce_once, n) == n * (n - 1) / 2
    ended = time.perf_counter()
    found: dict[str, Any] = {"first": ended - BEGAN, "first_call": ended - imported}
    found["further"] = [seconds(run, reduce_once, n) for _ in range(further)]
    if not with_memory:
        return found
    import torch  # noqa: F401  (a notebook has done so, and shares its code with the ranks)

    found["memory"] = run(memory_of_ranks, n, os.getpid())
    if name == "course_lib.launch":
        found["first_adamw"] = seconds(run, step_with_adamw, n)
        found["next_adamw"] = [seconds(run, step_with_adamw, n) for _ in range(5)]
        found["memory_adamw"] = run(memory_of_ranks, n, os.getpid())
    return found


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        torchrun()
    else:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["memory"])))
