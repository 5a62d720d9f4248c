"""The rooms of a course: one folder for each lesson or case, with its pages and their code.

    rooms.open_all("lessons", Path("lessons"))    a course says where its rooms are, when it is imported
    rooms.files("questions.md")                   this page of every room that has one, in the order of their names

Nothing in this library knows a lesson by its name. (Standard library only; see `progress`.)
"""

from __future__ import annotations

import os
from pathlib import Path

from course_lib import preloading

_courses: dict[str, Path] = {}


def open_all(package: str, folder: Path) -> None:
    """Open the rooms of a package, the folders in this one."""
    _courses[package] = folder
    preloading.library(f"{folder}{os.sep}")


def files(*names: str) -> list[Path]:
    """The files of these names in all rooms. Raises LookupError if no room has one."""
    folders = [room for course in _courses.values() for room in sorted(course.iterdir())]
    if not (found := [room / name for room in folders for name in names if (room / name).is_file()]):
        raise LookupError(f"no room has {' or '.join(names)}; import the package of the lessons first")
    return found


def module_of(page: Path) -> str:
    """The full name of the module that stands beside a page."""
    package = next(name for name, folder in _courses.items() if folder == page.parents[1])
    return f"{package}.{page.parent.name}.{page.stem}"
