"""Plans as students write them: `dp=4 tp=8 pp=1 micro_batch=1 zero=1 recompute=selective schedule=1f1b`.

Omitted fields are as in `Plan()`. A plan copied from code, `Plan(dp=4, recompute="selective")`, can be read, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from course_lib.planner import Plan

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Plan)}
ALWAYS = ("dp", "tp", "pp", "micro_batch")  # written even where they are as in Plan()
READ: dict[type, Callable[[str], Any]] = {bool: {"true": True, "false": False}.__getitem__, float: float}
_PAIR = re.compile(r"(\w+)\s*=\s*(\([^()]*\)|[^\s,()]+)")
_EXAMPLE = "dp=2 tp=4 zero=1 recompute=full"


def parse(text: str) -> Plan:
    """Parse a plan. Raises ValueError, saying what would work, for a text that is no plan."""
    return Plan(**{name: _value(name, value.strip("'\"")) for name, value in pairs(text).items()})


def pairs(text: str) -> dict[str, str]:
    """The fields of a plan in a text, by name. Raises ValueError as `parse` does."""
    inside = re.sub(r"^\s*Plan\((.*)\)\s*$", r"\1", text, flags=re.DOTALL)
    if rest := _PAIR.sub("", inside).strip(" ,;\n\t"):
        raise ValueError(f"{rest[:40]!r} is no part of a plan; write for instance {_EXAMPLE!r}")
    written = [(name.lower(), value) for name, value in _PAIR.findall(inside)]
    found = dict(written)
    if len(found) < len(written):
        raise ValueError(f"{inside.strip()!r} has a field twice; write each once")
    for name in found.keys() - DEFAULTS.keys():
        raise ValueError(f"{name!r} is nothing that a plan has; it has {', '.join(DEFAULTS)}")
    return found


def write(plan: Plan) -> str:
    """The one written form of a plan, for `parse`, without the fields that are as in `Plan()`."""
    values = {name: getattr(plan, name) for name in DEFAULTS}
    said = {name: value for name, value in values.items() if name in ALWAYS or value != DEFAULTS[name]}
    return " ".join(f"{name}={_written(value)}" for name, value in said.items())


def _written(value: Any) -> str:
    return f"({','.join(value)})" if isinstance(value, tuple) else str(value)


def _value(name: str, text: str) -> Any:
    default = DEFAULTS[name]
    if isinstance(default, str):
        return text.lower()
    if isinstance(default, tuple):
        return tuple(re.findall(r"\w+", text))
    try:
        return default if text == str(default) else READ.get(type(default), int)(text.lower())
    except (KeyError, ValueError):
        raise ValueError(f"{name}={text} is no value for it; write for instance {name}={default}") from None
