"""Idle ranks: they take no time, and no other user can reach them."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from course_lib import launch

pytestmark = pytest.mark.linux


def total(rank):
    import torch
    import torch.distributed as dist

    value = torch.tensor(rank + 1)
    dist.all_reduce(value)
    return int(value), os.getpid()


@pytest.fixture
def pool() -> list[psutil.Process]:
    """Eight idle workers, and the server that forked them."""
    workers = [psutil.Process(pid) for _, pid in launch(lambda rank: total(rank), 8).results]
    server = workers[0].parent()
    assert server is not None
    return [*workers, server]


def test_eight_idle_ranks_use_no_core(pool):
    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in pool)

    time.sleep(0.3)
    before, begun = used(), time.monotonic()
    time.sleep(2)
    # gloo's threads poll 100 times a second; a spinning one would take all of the time
    assert used() - before < 0.25 * (time.monotonic() - begun)


def test_the_kernel_that_owns_idle_ranks_uses_no_core():
    code = """
import time
from course_lib import launch
launch(lambda rank: rank, 4)
time.sleep(0.5)
before = time.process_time(); time.sleep(2); print(time.process_time() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert float(done.stdout) < 0.05 * 2


def test_nothing_listens_beyond_this_machine_after_a_new_group():
    def listens(rank):
        import torch.distributed as dist

        group = dist.new_group([0, 1])
        dist.barrier(group)
        found = psutil.Process().net_connections("inet")
        return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN]

    assert {ip for ips in launch(listens, 2).results for ip in ips} <= {"127.0.0.1", "::1"}


OPEN_TO_ALL = """
import os, sys
os.umask(0)
from course_lib import launch
def total(rank):
    import torch, torch.distributed as dist
    t = torch.tensor(rank + 1); dist.all_reduce(t); return int(t)
print(launch(total, 4).results, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    """A program whose files are open to all unless made otherwise: its processes, and its temporary folder."""
    folder = tmp_path_factory.mktemp("careless")
    with subprocess.Popen(
        [sys.executable, "-c", OPEN_TO_ALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "[10, 10, 10, 10]\n"
            kernel = psutil.Process(process.pid)
            yield [kernel, *kernel.children(recursive=True)], folder
        finally:
            process.communicate("\n", timeout=30)


def is_private(path: Path, folder: Path) -> bool:
    """Whether only its owner can reach a file, by its own mode or that of a folder around it, up to `folder`."""
    for place in [path, *path.parents]:
        if place == folder:
            return False
        with contextlib.suppress(FileNotFoundError, PermissionError):
            status = place.lstat()
            if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
                return True
    return False


def test_files_on_disk_are_their_owners_alone(careless):
    _, folder = careless
    ours = [path for path in folder.rglob("*") if "torchinductor" not in str(path.relative_to(folder))]  # torch's own
    assert [path for path in ours if not is_private(path, folder)] == []


def test_nothing_listens_beyond_this_machine(careless):
    processes, _ = careless
    connections = [c for process in processes for c in process.net_connections("inet")]
    assert connections, "the ranks' own connections are not seen: this test looks at nothing"
    # a datagram socket has no state, and receives as soon as it is bound
    open_to = {c.laddr.ip for c in connections if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and c.laddr}
    assert open_to <= {"127.0.0.1", "::1"}


def test_shared_memory_and_open_files_are_their_owners_alone(careless):
    """Files without a name count, too: others could have opened them while they had one."""
    processes, folder = careless
    seen = 0
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            target, status = os.readlink(descriptor), descriptor.stat()
            if target.startswith(("/dev/shm/", str(folder))) and stat.S_ISREG(status.st_mode):
                seen += 1
                place = Path(target.removesuffix(" (deleted)"))
                assert not stat.S_IMODE(status.st_mode) & 0o077 or is_private(place.parent, folder), target
    assert seen, "no file is open: this test looks at nothing"


def test_shared_memory_has_no_name_that_could_outlive_a_kill(careless):
    processes, _ = careless
    mapped = {
        line.split(maxsplit=5)[5].strip()
        for process in processes
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    }
    assert {path for path in mapped if os.path.exists(path)} == set()


def test_local_sockets_lie_in_a_private_folder(careless):
    """An abstract socket, or one in an open folder, would let another user send us something to unpickle."""
    processes, folder = careless
    addresses = {str(c.laddr) for process in processes for c in process.net_connections("unix") if c.laddr}
    for address in addresses:
        assert not address.startswith(("@", "\0")), f"an abstract socket: {address!r}"
        assert is_private(Path(address), folder), address
