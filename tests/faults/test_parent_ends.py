"""The kernel restarts, is killed, or its server crashes: soon nothing of ours is running."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import assert_gone, eventually, is_running

pytestmark = pytest.mark.linux

STATES = {
    "idle": None,
    "in a deadlock": "time.sleep(10) if rank == 0 else dist.barrier()",
    "in a long operation": "torch.linalg.svd(torch.rand(4000, 4000))",
}


def bring_to(kernel, state: str) -> list[psutil.Process]:
    """The processes of a kernel in this state, with four workers and their server among them."""
    if STATES[state] is not None:
        kernel.launch(STATES[state])
    found = kernel.processes()
    assert len(found) >= 6
    return found


def files_in(folder: Path) -> set[str]:
    """Temporary files, without those of the tests and torch's folder of compiled code."""
    return {path.name for path in folder.iterdir() if path.name != "ready" and "torchinductor" not in path.name}


@pytest.mark.parametrize("state", ["idle", "in a long operation"])  # one in a deadlock is killed below
def test_a_kernel_killed_leaves_nothing_running(fresh_kernel, state):
    processes = bring_to(fresh_kernel, state)
    fresh_kernel.kill()
    assert_gone(processes)
    eventually(lambda: not files_in(fresh_kernel.folder), "files are left", lambda: files_in(fresh_kernel.folder))


def test_a_kernel_restarted_leaves_nothing_running_and_starts_clean(fresh_kernel):
    processes = bring_to(fresh_kernel, "in a deadlock")
    fresh_kernel.client.stop_channels()
    fresh_kernel.manager.restart_kernel()
    assert_gone(processes)
    fresh_kernel.connect()
    fresh_kernel.run("from course_lib import launch")
    assert "[0, 1]" in fresh_kernel.run("print(launch(lambda rank: rank, 2).results)")


def test_a_kernel_shut_down_leaves_no_process_and_no_file(fresh_kernel):
    processes = bring_to(fresh_kernel, "idle")
    fresh_kernel.manager.shutdown_kernel()
    assert_gone(processes)
    assert files_in(fresh_kernel.folder) == set()


def test_temporary_files_swept_away_by_the_system_are_made_again(shared_kernel):
    import shutil

    for path in shared_kernel.folder.iterdir():
        if path.name != "ready":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "[10, 10, 10, 10]" in shared_kernel.run("print(launch(total, 4).results)")
    assert "[0, 1, 2]" in shared_kernel.run("print(launch(lambda rank: rank, 3).results)")


def test_a_crash_of_the_notebook_server_leaves_nothing_running(tmp_path):
    with notebook_server(tmp_path) as server:
        kernel = psutil.Process(start_kernel_with_workers(tmp_path))
        processes = [server, *server.children(recursive=True)]
        assert kernel in processes and len(processes) >= 7
        server.kill()
        # a kernel looks for its server once a second, and only then do our two seconds begin
        assert_gone([kernel])
        assert_gone(processes)


SLOW_IMPORT = """
import os, sys, time
class SlowTorch:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            open(os.path.join(os.environ["TMPDIR"], f"importing-{os.getpid()}"), "w").close()
            time.sleep(60)
sys.meta_path.insert(0, SlowTorch)
"""
FIRST_CELL = {
    "forkserver": "import time; from course_lib import launch; time.sleep(60)",
    "spawn": "from course_lib import launch; launch(lambda rank: rank, 2)",
}


@pytest.mark.parametrize("method", FIRST_CELL)
def test_who_still_imports_torch_goes_with_a_notebook_that_is_killed(tmp_path, method):
    """Importing torch takes a minute here, so no process ends because its import ended."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": paths, "COURSE_LIB_START_METHOD": method, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", FIRST_CELL[method]], env=os.environ | environment) as notebook:
        wait_for(lambda: len([*tmp_path.glob("importing-*")]) == (2 if method == "spawn" else 1))
        helpers = psutil.Process(notebook.pid).children()
        notebook.kill()
    assert len(helpers) == (3 if method == "spawn" else 2)  # one is multiprocessing's resource tracker
    assert_gone(helpers)


@contextlib.contextmanager
def notebook_server(folder: Path):
    environment = os.environ | {"TMPDIR": str(folder), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    options = [
        "--allow-root",
        "--no-browser",
        "--port=0",
        "--IdentityProvider.token=secret",
        f"--notebook-dir={folder}",
    ]
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", *options], env=environment, stdout=log, stderr=log
        )
    server = psutil.Process(process.pid)
    try:
        yield server
    finally:
        for each in [*(server.children(recursive=True) if is_running(server) else []), server]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def start_kernel_with_workers(folder: Path) -> int:
    """Ask the server for a kernel, launch four ranks in it, and return its process id."""
    from jupyter_client import BlockingKernelClient

    record = wait_for(lambda: next((folder / "runtime").glob("jpserver-*.json"), None))
    url = json.loads(record.read_text())["url"]
    request = urllib.request.Request(
        f"{url}api/kernels",
        b'{"name": "python3"}',
        {"Authorization": "token secret", "Content-Type": "application/json"},
    )
    wait_for(lambda: answers(request))
    client = BlockingKernelClient(connection_file=str(next((folder / "runtime").glob("kernel-*.json"))))
    client.load_connection_file()
    client.hb_channel.time_to_dead = 60.0  # seconds; on a busy machine, a missing heartbeat is no death
    client.start_channels()
    client.wait_for_ready(timeout=60)
    note = folder / "kernel-pid"
    client.execute_interactive(
        "import os, time\nfrom course_lib import launch\nlaunch(lambda rank: rank, 4)\n"
        f"open({str(note)!r}, 'w').write(str(os.getpid()))",
        timeout=60,
    )
    client.execute("launch(lambda rank: time.sleep(60), 4)")
    time.sleep(0.3)
    client.stop_channels()
    return int(note.read_text())


def answers(request: urllib.request.Request) -> bool:
    try:
        urllib.request.urlopen(request, timeout=30).read()
    except urllib.error.URLError:
        return False
    return True


def wait_for(look, within: float = 90.0):
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline, "the notebook server did not start"
        time.sleep(0.1)
    return found
