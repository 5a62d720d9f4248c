"""A plugin for pytest: kernels are forked from one process that has imported what takes each of them seconds.

They are Jupyter's own kernels, in processes of their own, found under the usual name. In place of a kernel Jupyter
starts this file as a program. It asks for a fork, which takes over its environment, folder, output and process id;
either ends when the other does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_DIGITS = 16  # of a process id on its way


def kernel_in_our_place(address: str, *arguments: str) -> int:
    """Have a kernel started with these arguments, and wait for its end. Returns 0, or 1 if it was killed."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps([arguments, os.getcwd(), dict(os.environ), os.getpid()])
        socket.send_fds(server, [request.encode() + b"\n"], [0, 1, 2])
        kernel = int(server.recv(_DIGITS, socket.MSG_WAITALL))
        signal.signal(signal.SIGINT, lambda *_: os.kill(kernel, signal.SIGINT))  # the Stop button
        return 0 if server.recv(1) else 1


def serve(number: int) -> None:
    """Fork a kernel for each request that arrives on the socket of this number, until this process is ended.

    ipywidgets registers with a notebook when it is imported there, or else as an extension of it.
    """
    from ipykernel.kernelapp import IPKernelApp  # first, as it says how widgets are to talk

    for name in ("ipywidgets", "anywidget", "plotly.graph_objects", "torch"):
        importlib.import_module(name)

    sys.path.remove("")  # the course's folder, which a kernel finds as an installed package
    with socket.socket(fileno=number) as listener:
        while True:
            asking, _ = listener.accept()
            if os.fork() == 0:
                break
            asking.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    arguments = take_the_place_of(asking)
    own = ["--IPKernelApp.parent_handle=1", "--IPKernelApp.extensions=ipywidgets"]  # it need not look for its parent
    IPKernelApp.launch_instance([*arguments, *own])


def take_the_place_of(asking: socket.socket) -> list[str]:
    """Have this process live as the one that asks, and as long. Returns the arguments of its kernel."""
    os.setsid()
    text, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += asking.recv(1 << 20)
    arguments, folder, variables, process = json.loads(text)
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    own, os.getpid = os.getpid(), lambda: process  # the server knows by it whose widgets a reloaded page may show
    asking.sendall(f"{own:{_DIGITS}}".encode())
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    atexit.register(asking.sendall, b".")  # first, so that it runs last

    def end_with_it() -> None:
        asking.recv(1)
        os.kill(own, signal.SIGKILL)

    threading.Thread(target=end_with_it, daemon=True).start()
    return arguments


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Serve kernels to this process, and to those that it starts."""
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address, kernel = str(Path(folder) / "socket"), Path(folder) / "kernels" / "python3"
        listener.bind(address)
        listener.listen(64)
        kernel.mkdir(parents=True)
        command = [sys.executable, "-IS", __file__, address, "-f", "{connection_file}"]
        named = {"argv": command, "display_name": "Python 3 (ipykernel)", "language": "python"}
        (kernel / "kernel.json").write_text(json.dumps({**named, "interrupt_mode": "message"}), encoding="utf-8")
        program = f"from tests.forked_kernels import serve; serve({listener.fileno()})"
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, pass_fds=[listener.fileno()])
        os.environ["JUPYTER_PATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("JUPYTER_PATH")])])
        try:
            yield
        finally:
            process.kill()
            process.wait()


_ending = contextlib.ExitStack()


def pytest_configure() -> None:
    if sys.platform == "linux" and "PYTEST_XDIST_WORKER" not in os.environ:  # workers use their starter's
        _ending.enter_context(server())


def pytest_unconfigure() -> None:
    _ending.close()


if __name__ == "__main__":
    sys.exit(kernel_in_our_place(*sys.argv[1:]))
