"""The demands of every fault test on `launch`: a plain error, in time, and a machine as it was before.

`fault.of(...)` makes a mistake in this process; `kernel` is a real Jupyter kernel for the mistakes that need one.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_lib import RunError, launch
from course_lib.ranks.parent.monitor import RunMonitor

DEADLINE = 3.0  # seconds in which a mistake has to be reported, from the specification
BUSY = 10.0  # others may hold both cores: every deadline is this much longer here, and far below a limit of 60 s
JARGON = ("traceback", "gloo", "filestore", "errno", "unpickl", ".cpp", "processgroup", "multiprocessing", "brokenpipe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("linux") and sys.platform != "linux":
            item.add_marker(pytest.mark.skip(reason="looks into /proc, which only Linux has"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "linux: needs Linux's /proc or its signals")


class Fault:
    """A fault test: it makes mistakes one by one and looks for what each leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(
        self,
        expected: type[BaseException],
        fn: Callable[..., Any],
        world_size: int = 2,
        *,
        within: float = DEADLINE,
        names_all: bool = True,
        **options: Any,
    ) -> RunError:
        """Launch `fn`, which must end in `expected` within that many seconds and leave nothing behind."""
        with left_as_it_was(self.folder, world_size), pytest.raises(expected) as caught:
            begun = time.monotonic()
            try:
                launch(recorded(fn, self.folder), world_size, **options)
            finally:
                took = time.monotonic() - begun
        error = caught.value
        print(f"{took:.2f} s\n{error}")
        assert isinstance(error, RunError)
        assert took < within * BUSY
        assert_is_plain(first_line(error))
        if names_all:
            assert sorted(row.rank for row in error.report.rows) == list(range(world_size))
            assert str(error.report).strip() in str(error)
        return error


@pytest.fixture
def fault(tmp_path: Path) -> Fault:
    return Fault(tmp_path)


def others_wait(rank: int, name: str) -> None:
    """Wait until every other rank is blocked in the operation of this name, where its report will place it."""
    import torch.distributed as dist

    board, others = dist.group.WORLD.tracer.board, set(range(dist.get_world_size())) - {rank}
    while not all(any(op.name == name and op.is_blocked for op in board.operations(other)) for other in others):
        time.sleep(0.01)


@pytest.fixture
def judged_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., bool]], None]:
    """A function: `judged_when(holds)` delays the judgement of a run until `holds` is true of its ranks' activities.

    A rank may begin seconds after another one; the report at the time limit depends on it.
    """
    judge = RunMonitor._judge

    def wait(holds: Callable[..., bool]) -> None:
        monkeypatch.setattr(RunMonitor, "_judge", lambda run: judge(run) if holds(run.statuses()) else None)

    return wait


def recorded(fn: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`fn`, with each rank writing its process id first, so that dead processes can be counted."""
    place = str(folder)

    def body(rank: int, *args: Any) -> Any:
        with open(os.path.join(place, f"pid-{os.getpid()}"), "w"):
            pass
        return fn(rank, *args)

    return body


def recorded_workers(folder: Path) -> list[psutil.Process]:
    return with_numbers([int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")])


@contextlib.contextmanager
def left_as_it_was(folder: Path, world_size: int) -> Iterator[None]:
    """Inside, a launch fails. After it the next one works, and nothing of the failed one is left."""
    good_run(world_size)
    before, processes, files = state_of_this_process(), len(descendants()), len(files_of_this_process())
    yield
    failed = recorded_workers(folder)
    begun = time.monotonic()
    pool = good_run(world_size)
    assert time.monotonic() - begun < 2.0 * BUSY
    assert state_of_this_process() == before
    assert_gone([worker for worker in failed if worker.pid not in pool])
    eventually(lambda: len(descendants()) <= processes, "a process more than before the mistake", descendants)
    assert len(files_of_this_process()) <= files, files_of_this_process()


def good_run(world_size: int) -> list[int]:
    """One collective on every rank, checked; returns the pool's process ids."""

    def sum_of_ranks(rank: int) -> tuple[int, int]:
        import torch
        import torch.distributed as dist

        total = torch.tensor(rank + 1)
        dist.all_reduce(total)
        return int(total), os.getpid()

    results = launch(sum_of_ranks, world_size).results
    assert [total for total, _ in results] == [world_size * (world_size + 1) // 2] * world_size
    return [pid for _, pid in results]


def state_of_this_process() -> dict[str, Any]:
    """The state of the calling process that a run must not change."""
    seen: dict[str, Any] = {
        "environment": dict(os.environ) | {"PYTEST_CURRENT_TEST": ""},
        "directory": os.getcwd(),
        "output": (sys.stdout, sys.stderr),
        "random numbers": random.getstate(),
        "threads": sorted(t.name for t in threading.enumerate() if not t.daemon),
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
    }
    if hasattr(signal, "SIGCHLD"):
        seen["signals"].append(signal.getsignal(signal.SIGCHLD))
    if "torch" in sys.modules:
        import torch

        seen["torch"] = (torch.initial_seed(), torch.get_num_threads(), torch.distributed.is_initialized())
    return seen


def files_of_this_process() -> list[str]:
    """Temporary files with our process id, and shared memory with a name: other processes run beside this one."""
    found = [name for name in os.listdir(tempfile.gettempdir()) if f"-{os.getpid()}-" in name]
    if sys.platform == "linux":
        for process in (psutil.Process(), *descendants()):
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                found += {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
    return found


def descendants() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if is_running(p)]


def with_numbers(pids: list[int]) -> list[psutil.Process]:
    """The processes with these ids that still exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(processes: list[psutil.Process]) -> None:
    def running() -> list[psutil.Process]:
        return [p for p in processes if is_running(p)]

    eventually(lambda: not running(), "still running", running)


def eventually(
    holds: Callable[[], bool], otherwise: str, detail: Callable[[], Any] = lambda: "", within: float = 2.0
) -> None:
    deadline = time.monotonic() + within * BUSY
    while not holds():
        assert time.monotonic() < deadline, f"{otherwise} after {within * BUSY} s: {detail()}"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def kill() -> Callable[[psutil.Process], None]:
    """`kill(process)` returns once the process is dead: a zombie if it is our own child, and otherwise gone."""

    def end(process: psutil.Process) -> None:
        assert process.pid != os.getpid()
        is_own = process.ppid() == os.getpid()
        process.kill()
        eventually(lambda: not (is_running(process) if is_own else psutil.pid_exists(process.pid)), "not dead")

    return end


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def assert_is_plain(line: str) -> None:
    """A sentence for a first-year student: not empty, not a screenful, no names of our machinery."""
    assert 10 < len(line) < 500, line
    assert not [word for word in JARGON if word in line.lower()], line


def line_number(fn: Callable[..., Any], marker: str) -> int:
    """The number of the line of `fn` that carries this comment."""
    lines, first = inspect.getsourcelines(fn)
    (number,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith("# " + marker)]
    return number


@pytest.fixture(scope="session")
def row_at() -> Callable[..., Any]:
    """`row_at(error, rank, fn, marker)`: that rank's row, which must name the marked line of `fn`."""

    def look(error: RunError, rank: int, fn: Callable[..., Any], marker: str) -> Any:
        (row,) = [row for row in error.report.rows if row.rank == rank]
        expected = f"{Path(inspect.getfile(fn)).name}, line {line_number(fn, marker)}:"
        assert expected in row.line, f"rank {rank}: {row.line!r} instead of {expected!r}"
        return row

    return look


class Kernel:
    """A real Jupyter kernel, as of a notebook, with temporary files of its own."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        self.folder = folder
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=os.environ | {"TMPDIR": str(folder), "READY": str(folder / "ready")}, cwd=folder)
        self.connect()
        self.run(HELLO)

    def connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.manager.provisioner.process.pid)

    def launch(self, body: str) -> None:
        """Start a cell in which four ranks run `body`, once they have reported with `here()`."""
        head = "def body(rank):\n    import torch, torch.distributed as dist\n    here()\n"
        self.start(f"{head}    {body.strip()}\nlaunch(body, 4)")
        self.ready(4)

    def start(self, code: str) -> None:
        """Run a cell and do not wait for it."""
        self.asked = self.client.execute(code, store_history=False)

    def reply(self, timeout: float = 60.0) -> str:
        """The output of the started cell, and the name and text of its error, if there was one."""
        seen, deadline = [], time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != self.asked:
                continue
            if kind == "stream":
                seen.append(content["text"])
            elif kind == "error":
                seen.append(f"{content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(seen)

    def run(self, code: str, timeout: float = 60.0) -> str:
        self.start(code)
        return self.reply(timeout)

    def ready(self, ranks: int) -> None:
        """Wait until that many ranks have called `here()`, and reset the count."""
        place = self.folder / "ready"
        eventually(lambda: len(list(place.glob("*"))) >= ranks, "the ranks did not start", within=20)
        for path in place.glob("*"):
            path.unlink()

    def kill(self) -> None:
        process = self.manager.provisioner.process
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Press Stop: send SIGINT to the kernel's whole process group."""
        self.manager.interrupt_kernel()

    def processes(self) -> list[psutil.Process]:
        """The processes of the kernel and of everything that it started."""
        return [self.process, *self.process.children(recursive=True)]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


# only ranks import torch, and they have it already: the kernel starts sooner without it
HELLO = """
import os, time
from course_lib import launch
os.makedirs(os.environ["READY"], exist_ok=True)
def here():
    open(os.path.join(os.environ["READY"], str(os.getpid())), "w").close()
def total(rank):
    import torch, torch.distributed as dist
    t = torch.tensor(rank + 1)
    dist.all_reduce(t)
    return int(t)
kept = [1, 2, 3]
print(launch(total, 4).results)
"""


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()
