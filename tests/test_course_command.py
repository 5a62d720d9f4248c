"""The behavior of course.py in each state of .venv, the network and the machine."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
WHOLE: list[str] = []
IN_PLACE, ANEW = ["installed authors"], ["made", "installed authors"]


def load(folder: Path) -> Any:
    """course.py as it would run in this folder."""
    library = ("__init__.py", "preloading.py", "classroom/__init__.py", "classroom/journal.py")
    for name in ("course.py", *(f"course_lib/{file}" for file in library)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    spec = importlib.util.spec_from_file_location("course_in_a_folder", folder / "course.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Making .venv again, and repairing it in place


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A course.py in a folder of its own, with a .venv of empty files. did: the environments made and installed."""
    for name in ("requirements.lock", "pyproject.toml", "lessons/jupyterlab/overrides.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    module = load(tmp_path)
    module.did = []

    def make() -> None:
        module.did.append("made")
        module.PYTHON.parent.mkdir(parents=True, exist_ok=True)
        module.PYTHON.touch()

    def install(extras: list[str]) -> None:
        module.did.append(f"installed {' '.join(extras)}")
        packages = module.VENV / "lib" / "python3.0" / "site-packages"
        shutil.rmtree(packages, ignore_errors=True)
        (packages / "numpy-2.2.6.dist-info").mkdir(parents=True)

    monkeypatch.setattr(module, "make", make)
    monkeypatch.setattr(module, "install", install)
    return module


@pytest.fixture
def ready(course: Any) -> Any:
    course.prepare("authors")
    assert course.did == ANEW
    course.did.clear()
    return course


def numpy(course: Any) -> Path:
    return next(course.VENV.glob("**/numpy-2.2.6.dist-info"))


def interrupted(course: Any) -> None:
    """An installation in place that Ctrl-C ends."""

    def install(_: list[str]) -> None:
        raise KeyboardInterrupt

    course.LOCK.write_text("numpy==2.2.7", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(course, "install", install)
        course.prepare("authors")


CHANGES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "nothing": (lambda course: None, WHOLE),
    "interrupted": (interrupted, ANEW),
    "stamp cut short": (lambda course: course.STAMP.write_text('{"place": ['), ANEW),
    "another Python": (lambda course: setattr(course, "VERSION", "3.99"), ANEW),
    "another place": (lambda course: setattr(course, "VENV", course.VENV / ".." / ".venv"), ANEW),
    "Python is gone": (lambda course: course.PYTHON.unlink(), ANEW),
    "lock changed": (lambda course: course.LOCK.write_text("numpy==2.2.7"), IN_PLACE),
    "requirements changed": (lambda course: (course.ROOT / "pyproject.toml").write_text("#"), IN_PLACE),
    "settings changed": (lambda course: (course.SETTINGS / "overrides.json").write_text("{}"), IN_PLACE),
    "settings added": (lambda course: (course.SETTINGS / "custom.css").write_text("a {}"), IN_PLACE),
    "version changed by hand": (lambda course: numpy(course).rename(numpy(course).parent / "n-1.dist-info"), IN_PLACE),
    "package deleted": (lambda course: numpy(course).rmdir(), IN_PLACE),
}


@pytest.mark.parametrize(("change", "wanted"), CHANGES.values(), ids=CHANGES)
def test_a_later_start_does_what_the_state_of_the_environment_asks_for(
    ready: Any, change: Callable[[Any], object], wanted: list[str]
) -> None:
    change(ready)
    ready.prepare("authors")
    assert ready.did == wanted
    ready.prepare("authors")
    assert ready.did == wanted  # and now it is whole


def test_extras_come_when_they_are_wanted_and_stay(course: Any) -> None:
    for extras in ([], [], ["authors"], ["bench"], [], ["authors"]):
        course.prepare(*extras)
    assert course.did == ["made", "installed ", "installed authors", "installed authors bench"]


# Real environments, of the smallest packages there are


def wheel(folder: str | Path, name: str, version: str, more: str = "") -> str:
    """A package that says who it is. more: of its metadata."""
    file = Path(folder) / f"{name}-{version}-py3-none-any.whl"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
        "RECORD": "",
    }
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}.py", f"print('This is {name} {version}')")
        for part, text in about.items():
            archive.writestr(f"{name}-{version}.dist-info/{part}", text)
    return file.name


BACKEND = f"""
from __future__ import annotations
import time, zipfile
from pathlib import Path

{inspect.getsource(wheel)}

def build_editable(folder, *_):
    end = time.monotonic() + 300  # no test that fails leaves it for ever
    while Path("wait").exists() and time.monotonic() < end:
        Path("waiting").touch()
        time.sleep(0.05)
    return wheel(folder, "course_lib", "1.0", "Requires-Dist: jupyterlab")
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


class Small:
    """A course that needs one package, in two versions. While it has a file `wait`, its installation does not end."""

    def __init__(self, folder: Path) -> None:
        load(folder)
        self.folder, self.wait = folder, folder / "wait"
        self.lock("1.0")
        (folder / "backend.py").write_text(BACKEND, encoding="utf-8")
        (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
        for name, version in (("setuptools", "84.0"), ("jupyterlab", "1.0"), ("jupyterlab", "2.0")):
            wheel(folder, name, version)

    def lock(self, version: str) -> None:
        (self.folder / "requirements.lock").write_text(f"jupyterlab=={version}\nsetuptools==84.0", encoding="utf-8")

    def begin(self, *command: str) -> subprocess.Popen[str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": os.devnull}
        out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        words = command or (sys.executable, "course.py", "lab")
        return subprocess.Popen(words, cwd=self.folder, env={**others, **pip}, **out)

    def lab(self) -> str:
        return self.begin().communicate()[0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """One for all tests: to make an environment takes seconds."""
    return Small(tmp_path_factory.mktemp("small"))


@pytest.mark.skipif(os.name == "nt", reason="there, pip cannot share the lock")
def test_after_a_kill_two_starts_at_once_wait_for_what_still_runs_and_one_makes_it_anew(small: Small) -> None:
    shutil.rmtree(small.folder / ".venv", ignore_errors=True)
    small.wait.touch()
    killed = small.begin()
    while not (small.folder / "waiting").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    left = small.folder / ".venv" / "left"
    left.touch()
    both = [small.begin(), small.begin()]
    for start in both:
        assert start.stdout and "waiting for it" in start.stdout.readline()  # pip lives on
    small.wait.unlink()
    said = [start.communicate()[0] for start in both]
    assert all("This is jupyterlab 1.0" in one for one in said), said
    assert sum("Making .venv" in one for one in said) == 1 and not left.exists()


def test_later_starts_find_the_environment_or_put_it_right_in_place(small: Small) -> None:
    assert "This is jupyterlab 1.0" in small.lab()
    later = small.lab()
    assert "This is jupyterlab 1.0" in later and "Making" not in later and "Installing" not in later
    small.lock("2.0")
    updated = small.lab()
    assert "This is jupyterlab 2.0" in updated and "Making" not in updated
    small.begin(str(load(small.folder).PYTHON), "-m", "pip", "install", "jupyterlab==1.0").wait()
    put_right = small.lab()
    assert "This is jupyterlab 2.0" in put_right and "Making" not in put_right


def test_a_plain_jupyter_lab_finds_the_settings_too(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "lessons" / "jupyterlab", tmp_path / "lessons" / "jupyterlab")
    program = "import setuptools.build_meta as backend; print(backend.build_editable('.'))"
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    places = zipfile.ZipFile(tmp_path / said.stdout.split()[-1]).namelist()
    for file in ("lab/settings/overrides.json", "jupyter/jupyter_config.py", "jupyter/custom/custom.css"):
        assert [place for place in places if place.endswith(file)]


# Which PyTorch it takes


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """course.py in a folder of its own, with this Python in the place of .venv's."""
    loaded = load(tmp_path)
    monkeypatch.setattr(loaded, "PYTHON", Path(sys.executable))
    return loaded


@pytest.fixture
def plain_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.mark.usefixtures("plain_pip")
@pytest.mark.parametrize(
    ("system", "gpu", "setting", "wanted"),
    [
        ("Linux", None, "PIP_TIMEOUT", True),
        ("Linux", "/usr/bin/nvidia-smi", "PIP_TIMEOUT", False),
        ("Darwin", None, "PIP_TIMEOUT", False),
        ("Linux", None, "PIP_INDEX_URL", False),
        ("Linux", None, "PIP_EXTRA_INDEX_URL", False),
        ("Linux", None, "PIP_FIND_LINKS", False),
        ("Linux", None, "PIP_NO_INDEX", False),
    ],
)
def test_the_cpu_build_is_for_linux_without_a_gpu_unless_pip_was_told_where_to_look(
    module: Any, monkeypatch: pytest.MonkeyPatch, system: str, gpu: str | None, setting: str, wanted: bool
) -> None:
    monkeypatch.setattr(module.platform, "system", lambda: system)
    monkeypatch.setattr(module.shutil, "which", lambda _: gpu)
    monkeypatch.setattr(module.Path, "exists", lambda _: False)
    monkeypatch.setenv(setting, "1")
    assert module.prefers_cpu_wheels() is wanted


@pytest.mark.parametrize("answer", [None, "no connection"])
def test_the_cpu_build_comes_first_and_alone_from_its_own_server_or_else_from_where_the_rest_does(
    module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str | None
) -> None:
    commands: list[tuple[str, ...]] = []

    def attempt(*command: str) -> str | None:
        commands.append(command)
        return answer if module.TORCH_FOR_CPU in command else None

    monkeypatch.setattr(module, "attempt", attempt)
    monkeypatch.setattr(module, "prefers_cpu_wheels", lambda: True)
    module.LOCK.write_text("numpy==2.2.6\ntorch==2.13.0\n", encoding="utf-8")
    module.install(["authors"])
    first, *rest = commands
    assert first[-1] == "torch==2.13.0" and "--no-deps" in first and module.TORCH_FOR_CPU in first
    assert [command[-1] for command in rest] == ["setuptools", ".[authors]"]
    for command in rest:
        assert "--constraint requirements.lock" in " ".join(command) and module.TORCH_FOR_CPU not in command
    assert ("cannot be reached" in capsys.readouterr().out) is bool(answer)


# Messages about missing programs


def pip_says(module: Any, *words: str) -> str:
    said = module.attempt(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", *words)
    assert "\n" not in said
    return said


@pytest.mark.usefixtures("plain_pip")
def test_without_a_network_one_sentence_says_what_to_do(module: Any) -> None:
    said = pip_says(module, "--index-url", "http://127.0.0.1:9/", "--retries", "1", "torch==0.0")
    assert "could not be downloaded. Connect to the internet" in said


@pytest.mark.usefixtures("plain_pip")
def test_a_missing_build_of_torch_is_not_taken_for_a_missing_network(module: Any) -> None:
    assert "PyTorch has no build for this Python" in pip_says(module, "--no-index", "torch==0.0")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.usefixtures("plain_pip")
def test_on_a_full_disk_one_sentence_says_how_much_it_needs(module: Any, tmp_path: Path) -> None:
    wheel(tmp_path, "tiny", "1.0")
    said = pip_says(module, "--no-index", "--find-links", str(tmp_path), "--report", "/dev/full", "tiny")
    assert "The disk is full. Free about 3 GB" in said


def test_another_failure_shows_the_last_words_and_stops(module: Any) -> None:
    with pytest.raises(SystemExit, match="The last words were:\nnobody knows"):
        module.carry_out(sys.executable, "-c", "import sys; sys.exit('nobody knows')")


def test_without_ensurepip_one_sentence_says_what_to_install(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else True)
    with pytest.raises(SystemExit, match=r"sudo apt install python3\.\d+-venv"):
        module.make()


def test_another_python_is_told_what_will(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(3, 8), (3, 9), (3, 14), (4, 0)]
    assert [module.unsupported((3, minor)) for minor in (10, 11, 12, 13)] == [None] * 4
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name == "python3.12" else None)
    for version in others:
        assert f"this is {version[0]}.{version[1]}. Run it with python3.12" in module.unsupported(version)
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert all("Install Python 3.12 from python.org" in module.unsupported(version) for version in others)


def test_an_old_python_can_read_course_py_far_enough_to_say_so() -> None:
    ast.parse((ROOT / "course.py").read_text(encoding="utf-8"), feature_version=(3, 8))


def test_other_installations_stay_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = module.environment()
    assert {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(variables)
    assert variables["PATH"].split(os.pathsep)[0] == str(module.BIN)


# Commands that it runs


def test_every_step_is_run_and_any_failure_counts(module: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code = module.in_turn({"one": ["-c", "1"], "two": ["-c", "1/0"], "three": ["-c", "print('three ran')"]})
    said = capfd.readouterr().out
    assert code == 1
    assert "three ran" in said and "Failed: two." in said
    assert re.search(r"^one +passed", said, re.MULTILINE) and re.search(r"^two +FAILED", said, re.MULTILINE)


def test_when_nothing_fails_the_code_is_zero(module: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert module.in_turn({"one": ["-c", "1"]}) == 0
    assert "All 1 passed." in capfd.readouterr().out


def test_a_step_beside_another_runs_at_the_same_time_and_shows_its_output_whole(
    module: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    meets = (
        "import pathlib, time\n"
        "pathlib.Path({!r}).touch()\n"
        "while not pathlib.Path({!r}).exists(): time.sleep(0.01)\n"
        "print({!r}, 'was there')\n"
        "raise SystemExit({})"
    )
    steps = {
        "types": ["-c", meets.format("types", "waits", "waits", 1)],
        "waits": ["-c", meets.format("waits", "types", "types", 0)],
        "last": ["-c", "1"],
    }
    assert module.in_turn(steps, beside={"types": "waits"}) == 1
    said = capfd.readouterr().out
    assert re.search(r"== waits\ntypes was there\n\n== types\nwaits was there\n\n== last", said)
    assert re.search(r"types +FAILED +beside waits\nwaits +passed +\d+\.\d s\nlast +passed", said)
    assert "Failed: types." in said


def test_a_step_that_would_run_beside_another_runs_alone_without_it(
    module: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert module.in_turn({"types": ["-c", "print('types ran')"]}, beside={"types": "waits"}) == 0
    assert "types ran" in capfd.readouterr().out


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_a_step_beside_another_ends_with_it(module: Any, ending: type[BaseException]) -> None:
    forever = "import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)"
    with pytest.raises(ending), module.meanwhile("-c", forever):
        while not (module.ROOT / "pid").exists() or not (module.ROOT / "pid").read_text():
            time.sleep(0.01)
        raise ending
    assert not psutil.pid_exists(int((module.ROOT / "pid").read_text()))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal that only asks")
def test_ending_course_py_ends_what_it_runs(tmp_path: Path) -> None:
    load(tmp_path)
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = f"import course, sys; course.PYTHON = sys.executable; sys.exit(course.run('-c', {child!r}))"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.terminate()
    assert process.wait(20) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal that only asks")
def test_ending_course_py_while_it_starts_something_ends_that_too(tmp_path: Path) -> None:
    load(tmp_path)
    program = """
import course, signal, subprocess, sys

def told_before_it_returns(*words, start=subprocess.Popen, **options):
    process = start(*words, **options)
    print(process.pid, flush=True)
    signal.raise_signal(signal.SIGTERM)
    return process

course.PYTHON, subprocess.Popen = sys.executable, told_before_it_returns
sys.exit(course.run("-c", "import time; time.sleep(60)"))
"""
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 130, said.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.stdout), 0)


@pytest.mark.parametrize(
    ("system", "variables", "shows"),
    [
        ("Linux", {}, False),
        ("Linux", {"DISPLAY": ":0"}, True),
        ("Linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("Linux", {"DISPLAY": ":0", "SSH_CONNECTION": "1"}, False),
        ("Darwin", {}, True),
        ("Windows", {}, True),
    ],
)
def test_a_browser_is_opened_only_where_somebody_sees_it(
    module: Any, monkeypatch: pytest.MonkeyPatch, system: str, variables: dict[str, str], shows: bool
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module.platform, "system", lambda: system)
    assert module.has_display() is shows


# Arguments


def test_a_lesson_to_project_is_named_by_its_number(module: Any) -> None:
    names = ("S02_night_call", "S10_memory_bound", "02_data_parallelism", "05_pipeline_parallelism")
    pages = [Path(".ipynb_checkpoints/S02_night_call-checkpoint.ipynb"), *(Path(f"{name}.ipynb") for name in names)]

    def chosen(*words: str) -> str:
        return module.chosen("lesson", pages, list(words)).stem

    assert [chosen(word) for word in ("S2", "S10", "2", "05_pipe")] == list(names)
    assert chosen("5") == chosen("05") == "05_pipeline_parallelism"
    assert chosen() == "02_data_parallelism"
    for words in (["9"], ["0"], ["2", "5"], ["pipelines"]):
        with pytest.raises(SystemExit, match=r"choose one of 02_data_parallelism, 05_pipeline_parallelism, S02"):
            chosen(*words)


def test_a_students_copy_of_an_exercise_is_made_once_and_never_overwritten(
    module: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = module.ROOT / "exercises" / "02_data_parallelism" / "02_data_parallelism.ipynb"
    page.parent.mkdir(parents=True)
    page.write_text("as handed out", encoding="utf-8")
    copy = module.own_copy(page)
    assert copy == module.ROOT / "work" / "02_data_parallelism" / page.name
    assert copy.read_text(encoding="utf-8") == "as handed out"
    copy.write_text("hours of work", encoding="utf-8")
    assert module.own_copy(page) == copy
    assert copy.read_text(encoding="utf-8") == "hours of work"
    assert "To begin anew, rename it" in capsys.readouterr().out
    assert "work/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("words", [["tset"], [], ["lab", "--nonsense"]])
def test_a_slip_of_the_pen_explains_the_commands(module: Any, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        module.parse(words)


def test_an_unknown_name_is_refused_before_anything_is_installed(course: Any) -> None:
    with pytest.raises(SystemExit, match="There is no step 'nbvla'; choose from ruff, format, mypy,"):
        course.test(course.parse(["test", "nbvla"]))
    with pytest.raises(SystemExit, match="There is no benchmark 'speed'"):
        course.bench(course.parse(["bench", "speed"]))
    assert course.did == []


# The content of requirements.lock


def locked() -> Iterator[Requirement]:
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield Requirement(line)


def required() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = text[text.index("[project]") : text.index("[tool.")]
    return re.findall(r'"([\w-]+(?:[~=<>]=[\w.]+)(?:,[<>=\w.]+)*)"', project[project.index("dependencies") :])


def test_the_lock_names_no_server_and_no_place_on_a_machine() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert re.search(r"[/\\@]|^-", text, re.MULTILINE) is None


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize(("system", "platform"), [("linux", "Linux"), ("darwin", "Darwin"), ("win32", "Windows")])
def test_the_lock_has_one_version_of_everything_required(version: str, system: str, platform: str) -> None:
    where = {
        "python_version": version,
        "python_full_version": f"{version}.9",
        "sys_platform": system,
        "platform_system": platform,
        "os_name": "nt" if system == "win32" else "posix",
    }
    pins: dict[str, str] = {}
    for pin in locked():
        if pin.marker is None or pin.marker.evaluate(where):
            assert pin.name not in pins, f"{pin.name} is locked twice"
            pins[pin.name] = next(iter(pin.specifier)).version
    wanted = [Requirement(text) for text in required()]
    assert len(wanted) > 15
    assert [str(want) for want in wanted if not want.specifier.contains(pins.get(want.name, "0"))] == []
