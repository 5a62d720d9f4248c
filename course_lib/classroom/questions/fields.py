"""Fields in a text, and the words for their values.

    {bubble:percent} of the time            a field of a question: a Python expression, and how its value is said
    {{bubble:percent}} of the time          a field of a lesson, whose formulas have braces, too

A value is said in the words of `figures.axis` (`duration`, `percent`, `in_words`), as one of two texts for true and
false (`it fits|it does not fit`), or as Python formats it (`,`, `.2f`, or nothing).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from course_lib.figures import axis

FIELD = re.compile(r"\{\{(.+?)\}\}(?!\})", re.DOTALL)


def say(value: object, spec: str) -> str:
    """A value in words. spec: see above."""
    if "|" in spec:
        return spec.split("|")[not value]
    return str(getattr(axis, spec)(value)) if hasattr(axis, spec) else format(value, spec)


class Expressions(Formatter):
    """Fills fields that are Python expressions."""

    def get_field(self, field_name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        return eval(f"({field_name})", dict(kwargs)), field_name

    def format_field(self, value: Any, spec: str) -> str:
        return say(value, spec)


EXPRESSIONS = Expressions()


def fill(text: str, names: Mapping[str, object]) -> str:
    """The text of a lesson with the values of its fields. names: what the expressions may use.

    Raises ValueError, with the field, for one that has no value.
    """
    return FIELD.sub(lambda field: _value(field, names), text)


def _value(field: re.Match[str], names: Mapping[str, object]) -> str:
    try:
        return EXPRESSIONS.vformat(field[0][1:-1], (), names)
    except Exception as error:
        raise ValueError(f"{field[0]}: {type(error).__name__}: {error}") from error


def pattern(text: str) -> re.Pattern[str]:
    """A pattern that matches the text of a lesson with any values in its fields."""
    return re.compile(".*?".join(map(re.escape, FIELD.split(text)[::2])), re.DOTALL)
