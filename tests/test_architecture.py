"""The house rules of the course, held against what the files really import.

Arrows point down: a room imports from rooms below it, never from above and never from its own floor.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS: list[set[str]] = [  # from the ground up; rooms that share a floor do not know each other
    {"timeline", "journal", "pages"},
    {"ranks"},
    {"model", "data", "schedules", "instruments"},
    {"mechanisms", "planner"},
    {"experiments", "scale_out"},
    {"figures"},
    {"checks"},
    {"questions"},
    {"scenarios"},
    {"widgets"},
]
LONGEST_FUNCTION = 40
STANDARD = sys.stdlib_module_names


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a file imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = file.with_suffix("").parts[: -node.level] if node.level else ()
            below = parents[parents.index("course_lib") :] if node.level else ()
            module = ".".join([*below, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(name: str) -> str | None:
    """The room of course_lib that a dotted name belongs to; None for names from elsewhere."""
    package, _, inside = name.partition(".")
    room = inside.split(".")[0]
    if package != "course_lib":
        return None
    if any(room in rooms for rooms in FLOORS):
        return room
    return "timeline" if room in ("Span", "Timeline") else "ranks"  # what the front door hands out


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def files_by_room(root: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted((root / "course_lib").rglob("*.py")):
        room = file.relative_to(root / "course_lib").parts[0].removesuffix(".py")
        if room != "__init__":  # the front door may open every room
            yield room, file


def broken_rules(root: Path) -> list[str]:
    """Every import under root/course_lib that a house rule forbids."""
    broken = []
    for room, file in files_by_room(root):
        if not any(room in rooms for rooms in FLOORS):
            broken.append(f"{file.relative_to(root)}: {room} is on no floor of the house; give it one in FLOORS")
            continue
        for line, name in imports(file):
            if complaint := forbidden(room, name):
                broken.append(f"{file.relative_to(root)}:{line}: {complaint}")
    return broken


def forbidden(room: str, name: str) -> str | None:
    """Why this room may not import this name, or None if it may."""
    package, target = name.split(".")[0], room_of(name)
    if target:
        if target != room and floor_of(target) >= floor_of(room):
            return f"{room} imports {target}, which is not below it"
        if room == "mechanisms" and target not in ("mechanisms", "schedules", "timeline"):
            return f"mechanisms import torch and timeline only, not {target}"
    elif room == "mechanisms" and package not in STANDARD | {"torch"}:
        return f"mechanisms import torch and timeline only, not {package}"
    elif room != "widgets" and package in ("ipywidgets", "anywidget"):
        return f"{room} imports {package}, which is for widgets alone"
    return None


def long_functions(root: Path) -> list[str]:
    """Every function under root/course_lib with too many lines, docstring included."""
    found = []
    for file in sorted((root / "course_lib").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found.append(f"{file.relative_to(root)}:{node.lineno}: {node.name} has {length} lines")
    return found


def test_arrows_point_down() -> None:
    assert broken_rules(ROOT) == []


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
    """A house in order, to break one rule of."""
    for room in ("ranks", "mechanisms", "planner", "figures", "widgets"):
        (tmp_path / "course_lib" / room).mkdir(parents=True)
        (tmp_path / "course_lib" / room / "__init__.py").touch()
    write(tmp_path, "__init__.py", "from course_lib.ranks import launch")
    write(tmp_path, "timeline.py", "import json")
    write(tmp_path, "mechanisms/batches.py", "import torch.nn as nn\nfrom course_lib.timeline import compute")
    write(tmp_path, "schedules.py", "import typing")
    write(tmp_path, "mechanisms/pipe.py", "from course_lib.schedules import Action")
    write(tmp_path, "mechanisms/ring.py", "from course_lib.mechanisms import batches\nfrom . import batches as b")
    write(tmp_path, "figures/gantt.py", "import plotly\nfrom course_lib.mechanisms import batches")
    write(tmp_path, "widgets/explorer.py", "import ipywidgets\nfrom course_lib.figures.gantt import draw")
    return tmp_path


def write(house: Path, file: str, text: str) -> None:
    (house / "course_lib" / file).write_text(text, encoding="utf-8")


def test_a_house_in_order_passes(house: Path) -> None:
    assert broken_rules(house) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("timeline.py", "from course_lib.ranks import launch", "timeline imports ranks, which is not below it"),
        ("timeline.py", "from .ranks import launch", "timeline imports ranks, which is not below it"),
        ("timeline.py", "from . import ranks", "timeline imports ranks, which is not below it"),
        ("planner/plan.py", "import course_lib.mechanisms.batches", "planner imports mechanisms, which is not below"),
        ("mechanisms/x.py", "def f():\n    from course_lib import planner", "mechanisms imports planner"),
        ("mechanisms/x.py", "from course_lib.ranks import launch", "torch and timeline only, not ranks"),
        ("mechanisms/x.py", "from ..ranks.pace import Pace", "torch and timeline only, not ranks"),
        ("mechanisms/x.py", "from course_lib import launch", "torch and timeline only, not ranks"),
        ("mechanisms/x.py", "import numpy as np", "torch and timeline only, not numpy"),
        ("figures/x.py", "from ipywidgets import HTML", "figures imports ipywidgets"),
        ("figures/x.py", "from course_lib.widgets import explorer", "figures imports widgets, which is not below it"),
        (
            "schedules.py",
            "from course_lib.mechanisms import batches",
            "schedules imports mechanisms, which is not below",
        ),
        ("timeline.py", "import course_lib", "timeline imports ranks, which is not below it"),
        ("attic.py", "", "attic is on no floor of the house"),
    ],
)
def test_a_broken_rule_is_found(house: Path, file: str, text: str, complaint: str) -> None:
    write(house, file, text)
    found = broken_rules(house)
    assert len(found) == 1
    assert f"course_lib/{file}" in found[0]
    assert complaint in found[0]


def test_a_long_function_is_found(house: Path) -> None:
    write(house, "timeline.py", "def fits():\n" + "    pass\n" * 39 + "def grows():\n" + "    pass\n" * 40)
    assert long_functions(house) == ["course_lib/timeline.py:41: grows has 41 lines"]


def test_no_lesson_uses_a_name_that_torch_is_about_to_drop() -> None:
    import torch.distributed as dist

    functions = {name: member for name, member in vars(dist).items() if callable(member) and name[0] != "_"}
    old = [name for name, function in functions.items() if hasattr(function, "__deprecated__")]
    assert "all_gather_into_tensor" in old  # so we do ask torch
    spelled = re.compile(rf"\b({'|'.join(old)})\b")
    rooms = ("course_lib", "sources", "exercises", "notebooks", "solutions")
    files = [file for room in rooms for end in ("py", "ipynb", "md") for file in (ROOT / room).rglob(f"*.{end}")]
    assert len(files) > 100
    assert [f"{file}: {name}" for file in files for name in spelled.findall(file.read_text(encoding="utf-8"))] == []
