"""Fields in a text, and the words for their values.

    {{bubble:percent}} of the time          a field of a lesson: a Python expression, and how its value is said

A value is said in the words of `figures.axis` (`duration`, `percent`, `in_words`), as one of two texts for true and
false (`it fits|it does not fit`), or as Python formats it (`,`, `.2f`, or nothing).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import CodeType

from course_lib.figures import axis

FIELD = re.compile(r"\{\{(.+?)\}\}(?!\})", re.DOTALL)


def say(value: object, spec: str) -> str:
    """A value in words. spec: see above."""
    if "|" in spec:
        return spec.split("|")[not value]
    return str(getattr(axis, spec)(value)) if hasattr(axis, spec) else format(value, spec)


def fill(text: str, names: Mapping[str, object]) -> str:
    """The text with the values of its fields. names: what the expressions may use.

    Raises ValueError, with the field, for one that has no value.
    """
    return FIELD.sub(lambda field: _value(field, names), text)


def pattern(text: str) -> re.Pattern[str]:
    """A pattern that matches the text with any values in its fields."""
    return re.compile(".*?".join(map(re.escape, FIELD.split(text)[::2])), re.DOTALL)


def _value(field: re.Match[str], names: Mapping[str, object]) -> str:
    try:
        expression, spec = _parts(field[1])
        return say(eval(expression, dict(names)), spec)
    except Exception as error:
        raise ValueError(f"{field[0]}: {type(error).__name__}: {error}") from error


def _parts(field: str) -> tuple[CodeType, str]:
    """The expression and its format, separated by the first colon that is not inside the expression."""
    for end in (*(colon.start() for colon in re.finditer(":", field)), len(field)):
        try:
            return compile(f"({field[:end]})", "<field>", "eval"), field[end + 1 :]
        except SyntaxError as error:
            flaw = error
    raise flaw
