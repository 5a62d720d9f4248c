"""course.py: what it does about each state that .venv, the network and the machine can be in."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import traitlets.config
from packaging.requirements import Requirement

from course_lib.classroom.journal import try_lock

ROOT = Path(__file__).parents[1]


class Course:
    """course.py in a folder of its own, with a .venv of empty files and a pip that only takes notes."""

    def __init__(self, module: ModuleType) -> None:
        self.module: Any = module
        self.made: list[str] = []
        self.installed: list[tuple[str, ...]] = []
        self.versions = {"torch": "2.13.0", "numpy": "2.2.6"}

    @property
    def packages(self) -> Path:
        return self.module.VENV / "lib" / "python3.0" / "site-packages"

    def make(self, reason: str) -> None:
        self.made.append(reason)
        for file in (self.module.STAMP, self.module.PYTHON):
            file.parent.mkdir(parents=True, exist_ok=True)
        self.module.STAMP.unlink(missing_ok=True)
        self.module.PYTHON.touch()

    def pip(self, lock: Any, *words: str) -> str | None:
        self.installed.append(words)
        for name, version in self.versions.items():
            for old in self.packages.glob(f"{name}-*"):
                self.remove(old)
            record = self.packages / f"{name}-{version}.dist-info" / "RECORD"
            record.parent.mkdir(parents=True)
            record.write_text(f"{name}.py,sha256=x,5\n{name}.pyc,,\n", encoding="utf-8")
            (self.packages / f"{name}.py").write_text("12345", encoding="utf-8")
        return None

    def remove(self, folder: Path) -> None:
        (folder / "RECORD").unlink()
        folder.rmdir()

    def did(self) -> tuple[list[str], int]:
        """Why .venv was made, and how often pip was called, since the last question."""
        made, calls = self.made, len(self.installed)
        self.made, self.installed = [], []
        return made, calls


def load(folder: Path) -> ModuleType:
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


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    (tmp_path / "requirements.lock").write_text("numpy==2.2.6\ntorch==2.13.0\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").touch()
    made = Course(load(tmp_path))
    monkeypatch.setattr(made.module, "make", made.make)
    monkeypatch.setattr(made.module, "pip", made.pip)
    monkeypatch.setattr(made.module, "prefers_cpu_wheels", lambda: False)
    return made


@pytest.fixture
def ready(course: Course) -> Course:
    course.module.prepare("authors")
    assert course.did() == (["there is none yet"], 2)
    return course


def test_a_whole_environment_is_left_alone(ready: Course) -> None:
    ready.module.prepare("authors")
    assert ready.did() == ([], 0)


def test_a_half_made_environment_is_made_anew(ready: Course) -> None:
    ready.module.STAMP.unlink()
    ready.module.prepare("authors")
    assert ready.did() == (["the one there is half-made"], 2)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_installation_counts_as_half_made(
    ready: Course, monkeypatch: pytest.MonkeyPatch, ending: type[BaseException]
) -> None:
    def interrupted(*_: Any) -> None:
        raise ending

    ready.module.LOCK.write_text("numpy==2.2.7\n", encoding="utf-8")
    with monkeypatch.context() as patch, pytest.raises(ending):
        patch.setattr(ready.module, "pip", interrupted)
        ready.module.prepare("authors")
    ready.module.prepare("authors")
    assert ready.did() == (["the one there is half-made"], 2)


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("123")])
def test_a_damaged_environment_is_made_anew(ready: Course, damage: Any) -> None:
    damage(ready.packages / "numpy.py")
    ready.module.prepare("authors")
    made, calls = ready.did()
    assert calls == 2 and len(made) == 1 and "numpy.py is missing or cut short" in made[0]


def test_a_file_that_somebody_added_to_is_not_damage(ready: Course) -> None:
    (ready.packages / "numpy.py").write_text("12345  # print('here')", encoding="utf-8")
    ready.module.prepare("authors")
    assert ready.did() == ([], 0)


def test_an_environment_of_another_python_is_made_anew(ready: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready.module, "made_by", lambda: ["3.99", "/elsewhere", "/here"])
    ready.module.prepare("authors")
    assert ready.did() == (["the one there belongs to another Python or another folder"], 2)


def test_a_python_that_is_gone_is_noticed(ready: Course) -> None:
    ready.module.PYTHON.unlink()
    ready.module.prepare("authors")
    assert ready.did()[0] == ["the one there belongs to another Python or another folder"]


@pytest.mark.parametrize("file", ["requirements.lock", "pyproject.toml"])
def test_new_requirements_are_installed_in_place(ready: Course, file: str) -> None:
    (ready.module.ROOT / file).write_text("# changed", encoding="utf-8")
    ready.module.prepare("authors")
    assert ready.did() == ([], 2)


def test_a_version_changed_by_hand_is_put_right_in_place(ready: Course) -> None:
    (ready.packages / "numpy-2.2.6.dist-info").rename(ready.packages / "numpy-1.0.dist-info")
    ready.module.prepare("authors")
    assert ready.did() == ([], 2)
    assert ready.module.packages() == ["numpy-2.2.6.dist-info", "torch-2.13.0.dist-info"]


def test_the_benchmark_peers_come_once_and_stay(ready: Course) -> None:
    ready.module.prepare("bench")
    assert ready.installed[-1][-1] == ".[authors,bench]"
    assert ready.did() == ([], 2)
    ready.module.prepare("authors")
    ready.module.prepare("bench")
    assert ready.did() == ([], 0)


def test_lessons_need_no_extras_and_take_none_away(course: Course) -> None:
    course.module.prepare()
    assert course.installed[-1][-1] == "."
    course.module.prepare("authors")
    assert course.installed[-1][-1] == ".[authors]"
    course.did()
    course.module.prepare()
    assert course.did() == ([], 0)


def test_a_plain_jupyter_lab_finds_the_settings_too(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "lessons" / "jupyterlab", tmp_path / "lessons" / "jupyterlab")
    program = "import setuptools.build_meta as backend; print(backend.build_editable('.'))"
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    places = zipfile.ZipFile(tmp_path / said.stdout.split()[-1]).namelist()
    for file in ("lab/settings/overrides.json", "jupyter/jupyter_server_config.py", "jupyter/custom/custom.css"):
        assert [place for place in places if place.endswith(file)]


def styles_alone(folder: Path) -> bool:
    return {path.suffix for path in folder.rglob("*")} == {".css"}


def test_whoever_has_no_token_gets_nothing_but_styles(lessons: Any, tmp_path: Path) -> None:
    """The server gives everything below `static_custom_path` to everybody."""
    config = traitlets.config.Config()
    settings = ROOT / "lessons" / "jupyterlab" / "jupyter_server_config.py"
    exec(settings.read_text(encoding="utf-8"), {"get_config": lambda: config, "__file__": str(settings)})
    assert styles_alone(Path(config.ServerApp.tornado_settings["static_custom_path"]))
    options = lessons.stage(tmp_path / "stage", lessons.ROOT / "notebooks" / "02_data_parallelism.ipynb")
    (given,) = (option.partition("static_custom_path=")[2] for option in options if "static_custom_path" in option)
    assert styles_alone(Path(given))


def test_changed_settings_are_installed_anew(ready: Course) -> None:
    (ready.module.SETTINGS).mkdir(parents=True)
    (ready.module.SETTINGS / "overrides.json").write_text("{}", encoding="utf-8")
    ready.module.prepare("authors")
    assert ready.did() == ([], 2)


def test_everything_is_held_to_the_locked_versions(course: Course) -> None:
    course.module.prepare("authors")
    assert all(words[:2] == ("--constraint", "requirements.lock") for words in course.installed)


def test_a_failed_installation_says_why_and_is_not_taken_for_whole(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course.module, "pip", lambda *_: "The disk is full.")
    with pytest.raises(SystemExit, match="The disk is full"):
        course.module.prepare("authors")
    assert not course.module.STAMP.exists()


def test_on_linux_without_a_gpu_torch_comes_first_and_alone_from_its_own_server(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course.module, "prefers_cpu_wheels", lambda: True)
    course.module.prepare("authors")
    first, *rest = course.installed
    assert first[-1] == "torch==2.13.0" and "--no-deps" in first
    assert course.module.TORCH_FOR_CPU in first and not any(course.module.TORCH_FOR_CPU in words for words in rest)


def test_when_torchs_server_is_away_the_ordinary_torch_is_installed(
    course: Course, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_that_server(lock: Any, *words: str) -> str | None:
        return "no connection" if course.module.TORCH_FOR_CPU in words else course.pip(lock, *words)

    monkeypatch.setattr(course.module, "prefers_cpu_wheels", lambda: True)
    monkeypatch.setattr(course.module, "pip", without_that_server)
    course.module.prepare("authors")
    assert course.module.STAMP.exists()
    assert "cannot be reached" in capsys.readouterr().out


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """course.py in a folder of its own, with this Python in the place of .venv's."""
    loaded: Any = load(tmp_path)
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
        ("Linux", None, None, True),
        ("Linux", "/usr/bin/nvidia-smi", None, False),
        ("Darwin", None, None, False),
        ("Windows", None, None, False),
        ("Linux", None, "PIP_INDEX_URL", False),
        ("Linux", None, "PIP_EXTRA_INDEX_URL", False),
        ("Linux", None, "PIP_FIND_LINKS", False),
        ("Linux", None, "PIP_NO_INDEX", False),
    ],
)
def test_the_cpu_build_is_for_linux_without_a_gpu_unless_pip_was_told_where_to_look(
    module: Any, monkeypatch: pytest.MonkeyPatch, system: str, gpu: str | None, setting: str | None, wanted: bool
) -> None:
    monkeypatch.setattr(module.platform, "system", lambda: system)
    monkeypatch.setattr(module.shutil, "which", lambda _: gpu)
    monkeypatch.setattr(module.Path, "exists", lambda _: False)
    if setting:
        monkeypatch.setenv(setting, "1")
    assert module.prefers_cpu_wheels() is wanted


@pytest.mark.usefixtures("plain_pip")
@pytest.mark.parametrize("package", ["nothing-that-is-installed", "torch==0.0"])
def test_without_a_network_one_sentence_says_what_to_do(
    module: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with module.alone() as lock:
        problem = module.pip(lock, "--dry-run", package)
    assert "could not be downloaded. Connect to the internet" in problem
    assert "\n" not in problem


@pytest.mark.usefixtures("plain_pip")
def test_a_missing_build_of_torch_is_not_taken_for_a_missing_network(module: Any, tmp_path: Path) -> None:
    with module.alone() as lock:
        problem = module.pip(lock, "--no-index", "--find-links", str(tmp_path), "--ignore-installed", "torch==0.0")
    assert "PyTorch has no build for this Python" in problem


def test_without_ensurepip_one_sentence_says_what_to_install(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else True)
    with pytest.raises(SystemExit, match=r"sudo apt install python3\.\d+-venv"):
        module.make("there is none yet")


def test_a_second_course_py_waits_for_the_first(module: Any) -> None:
    program = "import course; lock = course.alone(); lock.__enter__(); print('mine', flush=True)"
    with module.alone():
        second = subprocess.Popen([sys.executable, "-c", program], cwd=module.ROOT, stdout=subprocess.PIPE, text=True)
        assert second.stdout and "waiting for it" in second.stdout.readline()
        time.sleep(0.5)
        assert second.poll() is None
    assert second.stdout.readline() == "mine\n"
    assert second.wait(20) == 0


def test_a_killed_course_py_leaves_no_lock(module: Any) -> None:
    program = "import course, time; lock = course.alone(); lock.__enter__(); print('mine', flush=True); time.sleep(60)"
    first = subprocess.Popen([sys.executable, "-c", program], cwd=module.ROOT, stdout=subprocess.PIPE, text=True)
    assert first.stdout and first.stdout.readline() == "mine\n"
    first.kill()
    first.wait(20)
    with open(module.STATE / "lock", "a", encoding="utf-8") as file:
        assert try_lock(file)


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


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_four_pythons_will_do(module: Any, version: tuple[int, int]) -> None:
    assert module.unsupported(version) is None


@pytest.mark.parametrize("version", [(3, 8), (3, 9), (3, 14), (4, 0)])
def test_another_python_is_told_what_will(
    module: Any, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name == "python3.12" else None)
    assert f"this is {version[0]}.{version[1]}. Run it with python3.12" in module.unsupported(version)
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert "Install Python 3.12 from python.org" in module.unsupported(version)


def test_an_old_python_can_read_course_py_far_enough_to_say_so() -> None:
    ast.parse((ROOT / "course.py").read_text(encoding="utf-8"), feature_version=(3, 8))


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


def test_other_installations_stay_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    variables = module.environment()
    assert {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(variables)
    assert variables["PATH"].split(os.pathsep)[0] == str(module.BIN)


@pytest.fixture
def lessons(module: Any) -> Any:
    """course.py in a folder with two lessons, one of which has run."""
    text = ["# Title\n", "## 1. One\n", "text\n", "### Question"]
    prose = {"id": "a", "cell_type": "markdown", "metadata": {}, "source": text}
    code = {"id": "b", "cell_type": "code", "metadata": {}, "source": "1", "outputs": ["seen"], "execution_count": 1}
    for name in ("02_data_parallelism", "05_pipeline_parallelism"):
        file = module.ROOT / "notebooks" / f"{name}.ipynb"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"cells": [prose, code], "metadata": {}}), encoding="utf-8")
    (module.ROOT / "exercises").mkdir()
    shutil.copytree(ROOT / "lessons" / "jupyterlab", module.SETTINGS)
    return module


def test_a_lesson_to_project_is_named_by_its_number(lessons: Any) -> None:
    def chosen(words: list[str]) -> str:
        return lessons.chosen("lesson", lessons.ROOT.glob("notebooks/*.ipynb"), words).stem

    for words in (["5"], ["05"], ["05_pipe"]):
        assert chosen(words) == "05_pipeline_parallelism"
    pages = [Path("S02_night_call.ipynb"), Path("S10_memory_bound.ipynb"), Path("02_data_parallelism.ipynb")]
    saved_by_jupyterlab = Path(".ipynb_checkpoints/S02_night_call-checkpoint.ipynb")
    assert [lessons.chosen("lesson", [saved_by_jupyterlab, *pages], [word]) for word in ("S2", "S10", "2")] == pages
    assert chosen([]) == "02_data_parallelism"
    for words in (["9"], ["0"], ["2", "5"], ["pipelines"]):
        with pytest.raises(SystemExit, match=r"choose one of 02_data_parallelism, 05_pipeline_parallelism, or"):
            chosen(words)


def test_a_projected_lesson_unfolds_by_sections_and_shows_no_results(lessons: Any, tmp_path: Path) -> None:
    before = (lessons.ROOT / "notebooks" / "02_data_parallelism.ipynb").read_bytes()
    lessons.stage(tmp_path / "stage", lessons.ROOT / "notebooks" / "02_data_parallelism.ipynb")
    cells = json.loads((tmp_path / "stage" / "notebooks" / "02_data_parallelism.ipynb").read_bytes())["cells"]
    assert [cell["source"] for cell in cells] == ["# Title", "## 1. One", "text", "### Question", "1"]
    folded = [cell["metadata"].get("jp-MarkdownHeadingCollapsed", False) for cell in cells]
    assert folded == [False, True, False, True, False]
    assert len({cell["id"] for cell in cells}) == 5
    assert cells[-1]["outputs"] == [] and cells[-1]["execution_count"] is None
    assert (lessons.ROOT / "notebooks" / "02_data_parallelism.ipynb").read_bytes() == before


@pytest.mark.parametrize("file", sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")), ids=lambda file: file.stem)
def test_what_answers_a_prediction_waits_in_a_room_until_its_code_has_run(module: Any, file: Path) -> None:
    cells = json.loads(file.read_bytes())["cells"]
    predictions = [number for number, cell in enumerate(cells) if "*Predict" in "".join(cell["source"])]
    for number in predictions:
        code = next(place for place, cell in enumerate(cells) if place > number and cell.get("outputs"))
        text = next(place for place in range(code, len(cells)) if cells[place]["cell_type"] == "markdown")
        (answer, *others) = module.projected(cells[text], cells[text - 1])
        assert answer["source"].endswith(module.AFTER_A_RUN) or answer["source"].startswith("##")
        assert not any(module.AFTER_A_RUN in other["source"] for other in others)
    assert predictions


def test_what_a_lesson_has_folded_is_in_sight_in_a_room_once_it_has_run_but_its_code_is_not(module: Any) -> None:
    folds = {"outputs_hidden": True, "source_hidden": True}
    code = {"id": "a", "cell_type": "code", "metadata": {"jupyter": folds}, "source": "1", "outputs": ["seen"]}
    (shown,) = module.projected(code, None)
    assert shown["metadata"]["jupyter"] == {"outputs_hidden": False, "source_hidden": True}


def test_only_text_below_results_waits_for_them(module: Any) -> None:
    text = {"id": "a", "cell_type": "markdown", "metadata": {}, "source": "So it is.\n## 2. Two\nNext"}
    for outputs, first in ((["seen"], f"So it is.\n\n\n{module.AFTER_A_RUN}"), ([], "So it is.")):
        code = {"id": "b", "cell_type": "code", "metadata": {}, "source": "1", "outputs": outputs}
        assert [part["source"] for part in module.projected(text, code)] == [first, "## 2. Two", "Next"]


def test_presenting_keeps_the_settings_of_the_lab_and_adds_its_own(lessons: Any, tmp_path: Path) -> None:
    options = lessons.stage(tmp_path / "stage", lessons.ROOT / "notebooks" / "02_data_parallelism.ipynb")
    assert "--LabApp.default_url=/doc/tree/notebooks/02_data_parallelism.ipynb" in options
    lab = tmp_path / "stage" / "lab"
    for file, source in {"lab/overrides.json": "overrides.json", "custom/lab.css": "custom/custom.css"}.items():
        assert (tmp_path / "stage" / file).read_bytes() == (lessons.SETTINGS / source).read_bytes()
    themes = json.loads((lab / "@jupyterlab" / "apputils-extension" / "themes.jupyterlab-settings").read_bytes())
    assert themes["overrides"]["content-font-size1"] == "20px"


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


def test_an_unknown_name_is_refused_before_anything_is_installed(course: Course) -> None:
    with pytest.raises(SystemExit, match="There is no step 'nbvla'; choose from ruff, format, mypy,"):
        course.module.test(course.module.parse(["test", "nbvla"]))
    with pytest.raises(SystemExit, match="There is no benchmark 'speed'"):
        course.module.bench(course.module.parse(["bench", "speed"]))
    assert course.did() == ([], 0)


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
