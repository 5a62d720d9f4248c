#!/usr/bin/env python3
"""The one command of this course. It needs Python 3.10 to 3.13 and nothing else.

    python3 course.py lab               open the lessons in JupyterLab
    python3 course.py present [LESSON]  project a lesson to a room
    python3 course.py test [STEP ...]   check everything: code, notebooks and the pages in a browser
    python3 course.py start EXERCISE    work on your own copy of an exercise
    python3 course.py progress          show what you have answered and solved, and how it went
    python3 course.py hand-out FOLDER   make a copy for students, without solutions
    python3 course.py build [NAME ...]  make notebooks, exercises and solutions from lessons/
    python3 course.py site [FOLDER]     make pages for the web, which need no installation
    python3 course.py serve [FOLDER]    show them on this machine
    python3 course.py bench [NAME ...]  compare with what you would use instead, and print the tables

The first time it makes .venv beside this file and installs the exact versions of requirements.lock
into it. Later it looks whether that still fits, which takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
LOCK = ROOT / "requirements.lock"
STAMP = VENV / "course.json"  # written last, removed first: while it is missing, .venv is half-made
STATE = ROOT / ".course"
SETTINGS = ROOT / "lessons" / "jupyterlab"

OLDEST, NEWEST = (3, 10), (3, 13)
VERSION = "{}.{}".format(*sys.version_info)
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
INTERRUPTED = 130

WHAT_TO_DO = {
    r"No space left on device|Errno 28": "The disk is full. Free about 3 GB and run the same command again.",
    r"connection broken|Connection refused|timed out|name resolution|ProxyError|SSLError|Max retries": (
        "The packages could not be downloaded. Connect to the internet (behind a proxy, set HTTPS_PROXY) "
        "and run the same command again; what has already arrived is kept."
    ),
    r"No matching distribution found for torch|not a supported wheel": (
        f"PyTorch has no build for this Python on this machine ({platform.platform()}, {platform.machine()}). "
        "It needs a 64-bit Python on 64-bit Linux, Windows, or a Mac with an Apple chip."
    ),
    r"Permission denied|Access is denied|WinError 5": (
        f"{VENV} cannot be written. Close programs that use it, or copy this folder to a place of your own."
    ),
}


def main() -> int:
    arguments = parse(sys.argv[1:])
    if complaint := unsupported(sys.version_info[:2]):
        stop(complaint)
    if arguments.run in (test, build, site, bench, hand_out) and not (ROOT / "tests").is_dir():
        stop("This copy of the course is for students: it came without tests and solutions.")
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        print("\nStopped. Run the same command again to go on.")
        return INTERRUPTED


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, argument) in COMMANDS.items():
        command = commands.add_parser(name, description=run.__doc__)
        command.set_defaults(run=run)
        if argument:
            command.add_argument("names", metavar=argument, nargs="*")
        if run is build:
            command.add_argument("--check", action="store_true", help="change nothing; fail if out of step")
            command.add_argument("--all", action="store_true", help="also run what has not changed")
    return parser.parse_args(words)


# What each command does


def lab(arguments: argparse.Namespace) -> int:
    """Open the lessons in JupyterLab, or print the address where there is no display."""
    prepare()
    return open_lab("notebooks/00_start_here.ipynb")


def open_lab(page: str) -> int:
    print("Starting JupyterLab. To end it, press Ctrl-C here.", flush=True)
    return jupyterlab(f"--ServerApp.root_dir={ROOT}", f"--LabApp.default_url=/lab/tree/{page}")


def start(arguments: argparse.Namespace) -> int:
    """Open your own copy of an exercise, named by its number; it is made the first time, and never overwritten."""
    exercises = sorted(ROOT.glob("exercises/*/[0-9]*.ipynb"))
    if not arguments.names:
        stop("\n".join(["Name an exercise, or only its number. There are:", *(page.stem for page in exercises)]))
    copy = own_copy(chosen("exercise", exercises, arguments.names))
    prepare()
    return open_lab(copy.relative_to(ROOT).as_posix())


def present(arguments: argparse.Namespace) -> int:
    """Project a lesson or scenario, named by its number (5, S2): large type, sections unfold, questions for a room."""
    page = chosen("lesson", ROOT.glob("notebooks/**/[0-9S]*.ipynb"), arguments.names)
    prepare()
    print(f"Starting JupyterLab with {page.stem}, on a copy: what you change here is not kept.")
    print("Right arrow or Page Down: to the next section, and open it. Left arrow or Page Up: back.")
    print("Shift-Enter: run a cell. Space: play what the selected cell shows, or stop it.")
    print("Alt and arrow up or down: larger or smaller text and pictures; ten times down shows an explorer whole.")
    print("To end it, press Ctrl-C here.", flush=True)
    os.environ["COURSE_POLL"] = "1"
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        presenting = importlib.import_module("course_lib.classroom.presenting")  # it needs nothing of .venv
        return jupyterlab(*presenting.stage(ROOT, SETTINGS, Path(folder), page))


def jupyterlab(*words: str) -> int:
    command = [*words, "--log-level=ERROR"]
    if not has_display():
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    return run("-m", "jupyterlab", *command)


def test(arguments: argparse.Namespace) -> int:
    """Run every check, or only the steps you name, and sum up what passed and what failed."""
    steps = only("step", test_steps(), arguments.names)
    prepare("authors")
    os.environ["COURSE_STATE"] = str(STATE / "tests")  # not solved by the student
    return in_turn(steps, beside={"mypy": "tests", "faults": "tests"})  # these ranks mostly wait


def test_steps() -> dict[str, list[str]]:
    cores = os.cpu_count() or 1
    # In the order of tests/conftest.py, long tests first, not by the number of tests in a file.
    in_files = ["--dist", "loadfile", "--no-loadscope-reorder"]
    few, many = (["-n", str(n), *in_files] for n in (min(4, cores), min(4, cores + 1)))
    notebooks = [folder for folder in ("notebooks", "solutions") if (ROOT / folder).is_dir()]
    forks = ["-p", "tests.one_fork_server"]
    kernels = [*forks, "-p", "tests.forked_kernels"]
    nbval = ["-p", "tests.notebooks.filled", "--nbval", "--nbval-kernel-name=python3", "--nbval-cell-timeout=120"]
    nbval += ["--nbval-sanitize-with=tests/notebooks/sanitize.cfg"]
    elsewhere = ("tests/faults", "tests/browser", "tests/notebooks", "tests/exercises")
    # Importing the readers of notebooks, nbval too, takes seconds: only the steps that need them pay for it.
    others = ["-p", "no:nbval", *(f"--ignore={folder}" for folder in elsewhere)]
    return {
        "ruff": ["-m", "ruff", "check", "."],
        "format": ["-m", "ruff", "format", "--check", "."],
        "mypy": ["-m", "mypy"],
        "build": ["lessons/build.py", "--check"],
        # Ranks wait more than they compute.
        "tests": ["-m", "pytest", *forks, "tests", *others, *many],
        "faults": ["-m", "pytest", "-p", "no:nbval", "tests/faults", *few],
        "notebooks": ["-m", "pytest", *kernels, *nbval, *few, "tests/exercises", *notebooks, "tests/notebooks"],
        "browser": ["-m", "pytest", *kernels, "-p", "no:nbval", "tests/browser", *few],
    }


def progress(arguments: argparse.Namespace) -> int:
    """Show which questions you have answered and which exercises you have solved, how it went, and what comes next."""
    # It needs only the standard library, so it works before .venv is made.
    os.environ.setdefault("COURSE_STATE", str(STATE))
    importlib.import_module("lessons")  # it says where its rooms are
    answers = importlib.import_module("course_lib.classroom.progress")
    answers.show(ROOT / "exercises")
    importlib.import_module("lessons.site.net").advise()
    return 0


def hand_out(arguments: argparse.Namespace) -> int:
    """Copy what students get into a new folder: everything but solutions, hidden tests and the tests of the course."""
    if len(arguments.names) != 1 or Path(arguments.names[0]).exists():
        stop("Name one folder that does not exist yet: python3 course.py hand-out FOLDER")
    prepare("authors")
    if run("lessons/build.py", "--check"):
        stop("Students would get something else than what is in lessons/, so nothing was copied.")
    folder = Path(arguments.names[0])
    for name in HANDED_OUT:
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns(*LEFT_OUT, *(FOR_AUTHORS if name == "lessons" else ()))
            shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    print(f"{folder.resolve()} is what students get. There, python3 course.py lab opens the course.")
    return 0


def build(arguments: argparse.Namespace) -> int:
    """Make notebooks, exercises and solutions from lessons/: those that changed, or those you name."""
    prepare("authors")
    os.environ["COURSE_STATE"] = str(STATE / "build")
    flags = [flag for flag in ("check", "all") if getattr(arguments, flag)]
    return run("lessons/build.py", *(f"--{flag}" for flag in flags), *arguments.names)


def site(arguments: argparse.Namespace) -> int:
    """Make a folder of pages that open from any web server, and from a disk; names after it choose lessons."""
    prepare("authors")
    os.environ["COURSE_STATE"] = str(STATE / "build")
    folder, *names = arguments.names or ["site"]
    return run("-m", "lessons.site", str(Path(folder).resolve()), *names)


def serve(arguments: argparse.Namespace) -> int:
    """Show the pages that `site` has made, on this machine alone."""
    folder, *_ = arguments.names or ["site"]
    prepare()
    print("To end it, press Ctrl-C here.", flush=True)
    return run("-m", "http.server", "--bind", "127.0.0.1", "--directory", str(Path(folder).resolve()))


def bench(arguments: argparse.Namespace) -> int:
    """Run the benchmarks, or only those you name; each one prints a table."""
    scripts = {path.stem: [str(path)] for path in sorted((ROOT / "benchmarks").glob("[!_]*.py"))}
    wanted = only("benchmark", scripts, arguments.names)
    prepare("authors", "bench")
    return in_turn(wanted)


HANDED_OUT = [
    *("README.md", "course.py", "pyproject.toml", "setup.py", "requirements.lock", "environment.yml", ".gitignore"),
    *("notebooks", "exercises", "course_lib", "lessons"),
]
LEFT_OUT = (".*", "__pycache__", "*.egg-info")
FOR_AUTHORS = ("lesson.py", "page.py", "exercise.py", "build.py", "nbgrader_config.py", "instructors")
COMMANDS = {
    "lab": (lab, None),
    "present": (present, "LESSON"),
    "start": (start, "EXERCISE"),
    "test": (test, "STEP"),
    "progress": (progress, None),
    "hand-out": (hand_out, "FOLDER"),
    "build": (build, "NAME"),
    "site": (site, "FOLDER"),
    "serve": (serve, "FOLDER"),
    "bench": (bench, "NAME"),
}


# The page, and the student's own copy of it


def chosen(kind: str, pages: Iterable[Path], names: list[str]) -> Path:
    """The page whose name begins like the one given: 5 and 05 stand for 05_pipeline_parallelism, S2 for S02_night_call.

    None: the first.
    """
    known = {page.stem: page for page in sorted(pages) if page.parent.name != ".ipynb_checkpoints"}
    asked = re.sub(r"\d+", lambda number: number[0].zfill(2), names[0], count=1) if names else next(iter(known))
    found = [page for name, page in known.items() if name.startswith(asked)]
    if len(names) > 1 or len(found) != 1:
        stop(f"There is no {kind} {' '.join(names)!r}; choose one of {', '.join(known)}, or only its number.")
    return found[0]


def own_copy(exercise: Path) -> Path:
    """The student's copy of an exercise, in work/, which git ignores. An existing copy is kept."""
    copy = ROOT / "work" / exercise.relative_to(ROOT / "exercises")
    if copy.exists():
        print(f"Going on with {copy.relative_to(ROOT)}. To begin anew, rename it and run the same command again.")
        return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(exercise, copy)
    print(f"Your own copy is {copy.relative_to(ROOT)}.")
    return copy


# Running steps


def only(kind: str, known: dict[str, list[str]], names: list[str]) -> dict[str, list[str]]:
    """The steps with these names, or all if there are none."""
    if unknown := [name for name in names if name not in known]:
        stop(f"There is no {kind} {unknown[0]!r}; choose from {', '.join(known)}.")
    return {name: words for name, words in known.items() if name in (names or known)}


def in_turn(steps: dict[str, list[str]], beside: dict[str, str] | None = None) -> int:
    """Run all steps, even after a failure; print a summary. Returns 1 if any failed, else 0.

    beside: steps that run at the same time as another, which they name, if that one is run at all.
    """
    beside = {name: other for name, other in (beside or {}).items() if other in steps}
    codes, seconds = {}, {}
    for name, step in steps.items():
        if name in beside:
            continue
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            others = {one: stack.enter_context(meanwhile(*steps[one])) for one in steps if beside.get(one) == name}
            codes[name] = run(*step)
            if codes[name] == INTERRUPTED:
                raise KeyboardInterrupt
            seconds[name] = f"{time.monotonic() - start:8.1f} s"
            for one, finish in others.items():
                print(f"\n== {one}", flush=True)
                codes[one], seconds[one] = finish(), f"  beside {name}"
    failed = [name for name in steps if codes[name]]
    summary = [f"{name:<14} {'FAILED' if codes[name] else 'passed'} {seconds[name]}" for name in steps]
    print("", *summary, "", sep="\n")
    print(f"Failed: {', '.join(failed)}." if failed else f"All {len(steps)} passed.")
    return 1 if failed else 0


@contextlib.contextmanager
def meanwhile(*words: str) -> Iterator[Callable[[], int]]:
    """Run .venv's Python with these words during the block, and end it with the block, however that ends.

    The yielded function waits for it, shows its output, and returns its exit code.
    """
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as said:
        command = [str(PYTHON), *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=subprocess.STDOUT)

        def finish() -> int:
            code = process.wait()
            said.seek(0)
            print(said.read(), end="", flush=True)
            return code

        try:
            yield finish
        finally:
            process.kill()
            process.wait()


def run(*words: str) -> int:
    """Run .venv's Python with these words to its end. Returns its exit code, or INTERRUPTED after Ctrl-C."""
    process: subprocess.Popen[bytes] | None = None
    interrupted = False

    def terminate(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        if process:  # otherwise it is just being started, and interrupted below
            process.terminate()
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    process = subprocess.Popen([str(PYTHON), *words], cwd=ROOT, env=environment())
    if interrupted:
        process.terminate()
    while True:
        try:
            code = process.wait()
            return INTERRUPTED if interrupted else code
        except KeyboardInterrupt:  # the terminal told the command too, and it may have a question (JupyterLab does)
            interrupted = True


# The environment


def prepare(*extras: str) -> None:
    """Make .venv, or bring it up to date with requirements.lock, unless it is.

    extras: of pyproject.toml, beside those installed already. Lessons and exercises need none of them.

    An incomplete or moved .venv, or one of another Python, is made again; other versions are repaired in place.
    """
    with alone():
        left: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            left = json.loads(STAMP.read_text(encoding="utf-8"))
        wanted = sorted({*extras, *left.get("extras", [])})
        if left == (found := state(wanted)):
            return
        STAMP.unlink(missing_ok=True)
        if left.get("place") != found["place"]:
            make()
        install(wanted)
        STAMP.write_text(json.dumps(state(wanted)), encoding="utf-8")


def state(extras: list[str]) -> dict[str, Any]:
    """The state that .venv depends on. It is complete if this has not changed since the last installation."""
    files = [LOCK, ROOT / "pyproject.toml", *sorted(SETTINGS.glob("**/*.*"))]
    packages = [path.name for lib in ("lib/python*", "Lib") for path in VENV.glob(f"{lib}/site-packages/*.dist-info")]
    return {
        "place": [VERSION, sys.base_prefix, str(VENV), PYTHON.exists()],
        "files": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
        "packages": sorted(packages),
        "extras": extras,
    }


def make() -> None:
    """Make an empty .venv in place of any other one."""
    if not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        stop(
            "This Python cannot make virtual environments. On Debian and Ubuntu: sudo apt install "
            f"python{VERSION}-venv; elsewhere install Python from python.org. Then run the same command again."
        )
    print(f"Making .venv with Python {platform.python_version()}.", flush=True)
    python = getattr(sys, "_base_executable", None) or sys.executable  # .venv's own may have started course.py
    carry_out(python, "-m", "venv", "--clear", str(VENV))


def install(extras: list[str]) -> None:
    """Install this project, in place, with these extras of pyproject.toml, all in the versions of requirements.lock."""
    print("Installing what requirements.lock names. The first time, this takes some minutes.", flush=True)
    # Python compiles modules on import, a fifth of all: the first start comes sooner.
    pip = [str(PYTHON), "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    torch = re.search(r"^torch==\S+", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if torch and prefers_cpu_wheels():
        quickly = ["--no-deps", "--index-url", TORCH_FOR_CPU, "--timeout", "10", "--retries", "1"]
        if attempt(*pip, *quickly, torch[0]):
            print("PyTorch's own server cannot be reached: taking its large build, with CUDA, from PyPI.")
    here = f".[{','.join(extras)}]" if extras else "."
    for what in (["setuptools"], ["--no-build-isolation", "-e", here]):
        carry_out(*pip, "--constraint", LOCK.name, *what)


def prefers_cpu_wheels() -> bool:
    """Whether this is Linux without a GPU, where plain torch brings gigabytes of CUDA, and pip has no other index."""
    if platform.system() != "Linux" or shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return False
    command = [str(PYTHON), "-m", "pip", "config", "list"]
    settings = subprocess.run(command, env=environment(), capture_output=True, text=True).stdout
    return not re.search(r"(index-url|find-links|no-index)=", settings)


def carry_out(*command: str) -> None:
    """Run a command, or stop with a sentence that says why it failed."""
    if problem := attempt(*command):
        stop(problem)


def attempt(*command: str) -> str | None:
    """Run a command, naming its large downloads. Returns None, or a sentence about its failure."""
    log = ""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    # It shares the lock of alone(), so that, if course.py is killed, the next one waits until this too has ended.
    with subprocess.Popen(command, cwd=ROOT, env=environment(), close_fds=False, **options) as process:
        for line in process.stdout or ():
            log += line
            if step := re.search(r"Downloading \S+ \([\d.]+ MB\)|Installing collected packages", line):
                print(f"  {step[0]}", flush=True)
    if process.returncode == 0:
        return None
    known = (sentence for pattern, sentence in WHAT_TO_DO.items() if re.search(pattern, log))
    return next(known, f"The course could not be installed. The last words were:\n{log[-2000:]}")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock that keeps two course.py from working on .venv at once. The system frees it if we are killed."""
    STATE.mkdir(exist_ok=True)
    with open(STATE / "lock", "a", encoding="utf-8") as file:
        os.set_inheritable(file.fileno(), True)
        if not try_lock(file):
            print("Another course.py is setting up .venv; waiting for it.", flush=True)
            while not try_lock(file):
                time.sleep(0.2)
        yield


def try_lock(file: IO[str]) -> bool:
    """Take the lock if nobody else has it; return whether it was taken."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks: go on rather than wait for ever
        return True
    return True


def environment() -> dict[str, str]:
    """The variables for everything that runs in .venv: `python` is ours, other installations stay out.

    Bytecode is written even where it is not wanted elsewhere: else every rank compiles what it imports, in every run.
    A process computes with one thread, as every rank does, unless you have set another number: a model of the course is
    no faster with two, and where something else keeps a core busy, thirty times slower.
    """
    foreign = {"PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__", "PYTHONDONTWRITEBYTECODE"}
    return {
        "OMP_NUM_THREADS": "1",
        **{name: value for name, value in os.environ.items() if name not in foreign},
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        "VIRTUAL_ENV": str(VENV),
        "PIP_USER": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "JUPYTER_PREFER_ENV_PATH": "1",
    }


def unsupported(version: tuple[int, ...]) -> str | None:
    """A sentence about a Python that is not supported, and those that are; None for a supported one."""
    if OLDEST <= version <= NEWEST:
        return None
    wanted = [f"3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = next((f"python{name}" for name in wanted if shutil.which(f"python{name}")), None)
    remedy = f"Run it with {found}, which you have" if found else "Install Python 3.12 from python.org and use that"
    return f"This course needs Python 3.10 to 3.13, and this is {version[0]}.{version[1]}. {remedy}."


def has_display() -> bool:
    """Whether a browser started here would show up in front of the user."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    return platform.system() != "Linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def stop(sentence: str) -> NoReturn:
    sys.exit(sentence)


if __name__ == "__main__":
    sys.exit(main())
