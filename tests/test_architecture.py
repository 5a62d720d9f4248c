"""The house rules of the course, checked against the real imports of every file.

Arrows point down: a room imports from rooms below it, never from above, and no files import each other in a circle, be
it late or for type checking only. Lessons use the library, which knows none of them, not even by name; and no lesson
imports another.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS: list[set[str]] = [  # from the ground up; rooms on one floor do not import each other
    {"timeline", "preloading"},
    {"ranks"},
    {"model", "data", "schedules", "instruments"},
    {"mechanisms", "planner"},
    {"scale_out", "figures"},
    {"classroom"},
    {"lessons"},
]
CLASSROOM: list[set[str]] = [  # the same inside it
    {"answers", "journal", "pages", "presenting", "rooms"},
    {"grader"},
    {"runs", "checks", "questions"},
    {"progress", "scenarios"},
    {"widgets"},
]
LONGEST_FUNCTION = 40
STANDARD = sys.stdlib_module_names
WIDGETS = ("ipywidgets", "anywidget")


def modules(root: Path) -> dict[str, Path]:
    """The files of library and lessons by their dotted names; of a package, its __init__."""
    files = [file for package in ("course_lib", "lessons") for file in sorted((root / package).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each import of a file, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(without_magics(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = file.with_suffix("").parts[: -node.level] if node.level else ()
            below = parents[parents.index("course_lib") :] if node.level else ()
            module = ".".join([*below, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def without_magics(file: Path) -> str:
    """The text of a file without lines that begin with % or !, which in a page's cells are not Python."""
    return re.sub(r"(?m)^( *)[%!].*$", r"\1pass", file.read_text(encoding="utf-8"))


def module_of(name: str, known: dict[str, Path]) -> str | None:
    """The module of an imported name, which may be the module itself; None for a name from elsewhere."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def floor_of(module: str) -> tuple[int, int]:
    """The floor of a module in the house, and in the classroom. Raises LookupError for a room without a floor."""
    package, room, inside, *_ = *module.split("."), "", ""
    room = package if package == "lessons" else room or "ranks"  # the front door exports ranks
    floors = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    inner = [number for number, rooms in enumerate(CLASSROOM) if inside in rooms] if room == "classroom" else [0]
    if not floors or (inside and not inner):
        raise LookupError(f"{inside or room} is on no floor of the house; give it one")
    return floors[0], inner[0] if inner else -1


def room_of(module: str) -> str:
    """The room of a module; files in a room may import each other."""
    package, room, inside, *_ = *module.split("."), "", ""
    return f"{room}.{inside}" if room == "classroom" else package if package == "lessons" else room or "ranks"


def broken_rules(root: Path) -> list[str]:
    """Every import under root that a house rule forbids."""
    broken, known = [], modules(root)
    for module, file in known.items():
        if module in ("course_lib", "lessons"):  # a front door may import from every room
            continue
        try:
            floor_of(module)
        except LookupError as error:
            broken.append(f"{file.relative_to(root)}: {error.args[0]}")
            continue
        for line, name in imports(file):
            if complaint := forbidden(module, name, known):
                broken.append(f"{file.relative_to(root)}:{line}: {complaint}")
    return broken


def forbidden(module: str, name: str, known: dict[str, Path]) -> str | None:
    """The reason why this module may not import this name; None if it may."""
    target, room = module_of(name, known), room_of(module)
    if name in ("course_lib.Span", "course_lib.Timeline"):
        target = "course_lib.timeline"
    if target:
        below = room_of(target)
        if below != room and floor_of(target) >= floor_of(module):
            return f"{room} imports {below}, which is not below it"
        if room == below == "lessons" and lesson_of(target) not in ("", lesson_of(module)):
            return (
                f"{module.split('.')[1]} imports {target.split('.')[1]}; what two lessons share goes into the library"
            )
        if room == "mechanisms" and below not in ("mechanisms", "schedules", "timeline"):
            return f"mechanisms import torch, timeline and schedules only, not {below}"
    elif room == "mechanisms" and name.split(".")[0] not in STANDARD | {"torch"}:
        return f"mechanisms import torch, timeline and schedules only, not {name.split('.')[0]}"
    elif room != "classroom.widgets" and name.split(".")[0] in WIDGETS:
        return f"{room} imports {name.split('.')[0]}, which is for widgets alone"
    return None


def lesson_of(module: str) -> str:
    """The folder of a lesson or case that a module stands in, or "" beside them."""
    return module.split(".")[1] if re.match(r"lessons\.[LS]\d\d_", module) else ""


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle; empty if there is none."""
    known = modules(root)
    arrows = {module: {module_of(name, known) for _, name in imports(file)} for module, file in known.items()}
    doors = {"course_lib", "lessons", None}  # they import rooms on demand, not when they are imported
    try:
        TopologicalSorter({module: those - doors - {module} for module, those in arrows.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def names_of_lessons(root: Path) -> list[str]:
    """Every place in the library's code that names a lesson, except docstrings and comments."""
    found = []
    for file in sorted((root / "course_lib").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        prose = {id(node.body[0].value) for node in ast.walk(tree) if is_documented(node)}  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in prose else ""
            if isinstance(text, str) and re.search(r"\blessons\b[./]|\b[LS]\d\d_\w+", text):
                found.append(f"{file.relative_to(root)}:{node.lineno}: {text!r}")  # type: ignore[attr-defined]
    return found


def is_documented(node: ast.AST) -> bool:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


def long_functions(root: Path) -> list[str]:
    """Every function under root with too many lines, docstring included."""
    found = []
    for module, file in modules(root).items():
        if (
            file.name == "exercise.py" and room_of(module) == "lessons"
        ):  # its longest functions are contracts for students
            continue
        for node in ast.walk(ast.parse(without_magics(file))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found.append(f"{file.relative_to(root)}:{node.lineno}: {node.name} has {length} lines")
    return found


def test_arrows_point_down() -> None:
    assert broken_rules(ROOT) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(ROOT) == []


def test_the_library_knows_no_lesson_by_name() -> None:
    assert names_of_lessons(ROOT) == []


def test_no_function_is_longer_than_forty_lines() -> None:
    assert long_functions(ROOT) == []


def test_course_py_needs_nothing_but_the_standard_library() -> None:
    assert [name for _, name in imports(ROOT / "course.py") if name.split(".")[0] not in STANDARD] == []


def test_course_py_starts_on_every_system() -> None:
    only_somewhere = {"fcntl", "msvcrt", "pwd", "grp", "resource", "termios", "winreg"}
    top_level = ast.parse((ROOT / "course.py").read_text(encoding="utf-8")).body
    names = {alias.name for node in top_level if isinstance(node, ast.Import) for alias in node.names}
    assert names & only_somewhere == set()


def test_importing_course_lib_does_not_import_torch() -> None:
    program = "import sys, course_lib; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A house in order; each test breaks one of its rules."""
    write(tmp_path, "course_lib/__init__.py", "from course_lib.ranks import launch")
    write(tmp_path, "course_lib/ranks/__init__.py", "from course_lib.ranks.run import launch")
    write(tmp_path, "course_lib/ranks/run.py", "import torch")
    write(tmp_path, "course_lib/timeline.py", "import json")
    write(tmp_path, "course_lib/schedules.py", "import typing")
    write(tmp_path, "course_lib/planner/__init__.py", "")
    write(tmp_path, "course_lib/planner/plan.py", "from course_lib import schedules")
    write(
        tmp_path, "course_lib/mechanisms/batches.py", "import torch.nn as nn\nfrom course_lib.timeline import compute"
    )
    write(tmp_path, "course_lib/mechanisms/pipe.py", "from course_lib.schedules import Action")
    write(
        tmp_path, "course_lib/mechanisms/ring.py", "from course_lib.mechanisms import batches\nfrom . import pipe as b"
    )
    write(tmp_path, "course_lib/figures/gantt.py", "import plotly\nfrom course_lib.mechanisms import batches")
    write(tmp_path, "course_lib/classroom/rooms.py", "from pathlib import Path")
    write(tmp_path, "course_lib/classroom/questions/load.py", "from course_lib.classroom import rooms")
    write(
        tmp_path,
        "course_lib/classroom/widgets/cards.py",
        "import ipywidgets\nfrom course_lib.figures.gantt import draw",
    )
    write(tmp_path, "lessons/__init__.py", "from course_lib.classroom import rooms")
    write(tmp_path, "lessons/L01_one/runs.py", "from course_lib import launch")
    write(tmp_path, "lessons/L02_two/runs.py", "from course_lib import launch")
    write(
        tmp_path,
        "lessons/L02_two/lesson.py",
        "%load_ext course_lib\nfrom lessons.L02_two.runs import step\nfrom lessons import Card",
    )
    return tmp_path


def write(house: Path, file: str, text: str) -> None:
    (house / file).parent.mkdir(parents=True, exist_ok=True)
    (house / file).write_text(text, encoding="utf-8")


def test_a_house_in_order_passes(house: Path) -> None:
    assert broken_rules(house) == circle(house) == names_of_lessons(house) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("timeline.py", "from course_lib.ranks import launch", "timeline imports ranks, which is not below it"),
        ("timeline.py", "from .ranks import launch", "timeline imports ranks, which is not below it"),
        ("timeline.py", "from . import ranks", "timeline imports ranks, which is not below it"),
        ("timeline.py", "import course_lib", "timeline imports ranks, which is not below it"),
        ("planner/plan.py", "import course_lib.mechanisms.batches", "planner imports mechanisms, which is not below"),
        ("mechanisms/x.py", "def f():\n    from course_lib import planner", "mechanisms imports planner"),
        ("mechanisms/x.py", "from course_lib.ranks import launch", "schedules only, not ranks"),
        ("mechanisms/x.py", "from ..ranks.run import launch", "schedules only, not ranks"),
        ("mechanisms/x.py", "from course_lib import launch", "schedules only, not ranks"),
        ("mechanisms/x.py", "import numpy as np", "schedules only, not numpy"),
        ("figures/x.py", "from ipywidgets import HTML", "figures imports ipywidgets"),
        ("figures/x.py", "from course_lib.classroom.widgets import cards", "figures imports classroom.widgets"),
        ("classroom/questions/x.py", "from course_lib.classroom.widgets.cards import Card", "which is not below it"),
        ("classroom/questions/x.py", "import lessons.L01_one.runs", "classroom.questions imports lessons"),
        ("schedules.py", "from course_lib.mechanisms import batches", "schedules imports mechanisms"),
        ("attic.py", "", "attic is on no floor of the house"),
        ("classroom/attic.py", "", "attic is on no floor of the house"),
        (
            "../lessons/L02_two/x.py",
            "from lessons.L01_one.runs import x",
            "L02_two imports L01_one; what two lessons share",
        ),
    ],
)
def test_a_broken_rule_is_found(house: Path, file: str, text: str, complaint: str) -> None:
    write(house, f"course_lib/{file}", text)
    (found,) = broken_rules(house)
    assert Path(file).name in found
    assert complaint in found


@pytest.mark.parametrize("line", ["import {}", "def f():\n    import {}", "if TYPE_CHECKING:\n    from {} import x"])
def test_a_circle_is_found_however_late_its_imports_are(house: Path, line: str) -> None:
    write(house, "course_lib/figures/bars.py", "from course_lib.figures import gantt")
    assert not circle(house)
    write(house, "course_lib/figures/gantt.py", line.format("course_lib.figures.bars"))
    assert set(circle(house)) == {"course_lib.figures.bars", "course_lib.figures.gantt"}


@pytest.mark.parametrize("text", ['HOME = "lessons.L01_one.runs"', 'LAST = ["L09_planning"]', 'PAGE = "lessons/x.md"'])
def test_a_lesson_that_the_library_names_is_found(house: Path, text: str) -> None:
    write(house, "course_lib/schedules.py", f'"""As lessons.L01_one has it."""\n{text}')
    assert len(names_of_lessons(house)) == 1


def test_a_long_function_is_found(house: Path) -> None:
    write(house, "course_lib/timeline.py", "def fits():\n" + "    pass\n" * 39 + "def grows():\n" + "    pass\n" * 40)
    assert long_functions(house) == ["course_lib/timeline.py:41: grows has 41 lines"]


def test_no_lesson_uses_a_name_that_torch_is_about_to_drop() -> None:
    import torch.distributed as dist

    functions = {name: member for name, member in vars(dist).items() if callable(member) and name[0] != "_"}
    old = [name for name, function in functions.items() if hasattr(function, "__deprecated__")]
    assert "all_gather_into_tensor" in old  # so we do ask torch
    spelled = re.compile(rf"\b({'|'.join(old)})\b(?!` for)")  # a page may say once: the old name `x` for `y`
    rooms = ("course_lib", "lessons", "exercises", "notebooks", "solutions")
    files = [file for room in rooms for end in ("py", "ipynb", "md") for file in (ROOT / room).rglob(f"*.{end}")]
    assert len(files) > 100
    assert [f"{file}: {name}" for file in files for name in spelled.findall(file.read_text(encoding="utf-8"))] == []
