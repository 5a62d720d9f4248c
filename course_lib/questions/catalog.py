"""Which questions there are, in the order of the lessons. (Standard library only; see `progress`.)"""

from __future__ import annotations

from course_lib.questions.prose import Page, read

CATALOG: dict[str, Page] = read()
