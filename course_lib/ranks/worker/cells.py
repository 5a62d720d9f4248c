"""Runs a %%ranks cell on a rank, among the variables of the cells before."""

from __future__ import annotations

import ast
import builtins
import linecache
from typing import Any

_variables: dict[str, Any] = {}


def run_cell(rank: int, source: str, filename: str) -> None:
    """Run the source of one cell on this rank; like a notebook, print the value of a last expression."""
    import torch
    import torch.distributed as dist

    remember_source(filename, source)
    body = ast.parse(source, filename).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    _variables.update(rank=rank, world_size=dist.get_world_size(), torch=torch, dist=dist)
    _variables.update(__builtins__=builtins, __name__="__main__")
    exec(compile(ast.Module(body, []), filename, "exec"), _variables)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), filename, "eval"), _variables)  # type: ignore[attr-defined]
        if value is not None:
            print(repr(value))


def remember_source(filename: str, source: str) -> None:
    """Keep the source of a cell, so that tracebacks show its lines."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
