"""A dozen cheats earn nothing: what only changes the notebook is not in the answer, and the rest waits for a person."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from course_lib.classroom.answers import Answer, answer
from course_lib.classroom.checks import grading
from course_lib.classroom.grader import Grade, Grader, Submission
from tests.exercises.test_autograde import EXERCISES, solutions
from tests.lessons.bank import RIGHT

IMPORTS = """
import torch
import torch.distributed as dist
from lessons.L02_data_parallelism import checks
"""
WRONG = """
def split_batch(batch, rank, world_size):
    return batch
"""
# Wrong answers with what replaces the check around them, in the notebook or in the process that grades.
AROUND_AN_ANSWER = {
    "patched grading": """
from course_lib.classroom.checks import exercise, grading, verdict
grading.grade = lambda task: grading.Grade({}, 1.0)
exercise.Exercise.__call__ = lambda self, fn, seed=0: verdict.Verdict(self.name, "passed", "Right.", share=1.0)
""",
    "replaced sys.modules": """
import sys
sys.modules["course_lib.classroom.checks.grading"] = None
""",
    "AST transformer": """
import ast
class Points(ast.NodeTransformer):
    def visit_Call(self, node):
        return ast.Constant(2)
get_ipython().ast_transformers.append(Points())
""",
    "a check of its own": """
class Checks:
    def __getattr__(self, name):
        return lambda fn: 2
checks = Checks()
""",
    "printed grade": """
print('[{"text/plain": "Right."}, 1.0]', flush=True)
""",
}
HELD = [  # the words that are told, and a cell
    (
        "__reduce__",
        """
class Passed:
    def __reduce__(self):
        return (print, ("in the process that grades",))
    def __call__(self, batch, rank, world_size):
        return Passed()
split_batch = Passed()
""",
    ),
    (
        "import lessons.L02_data_parallelism, lessons",
        """
def split_batch(batch, rank, world_size):
    return checks.split_batch.right(batch, rank, world_size)
""",
    ),
    (
        "exec, open",
        """
def split_batch(batch, rank, world_size):
    page = open("../../solutions/02_data_parallelism/02_data_parallelism.ipynb").read()
    exec(page)
""",
    ),
    (
        "import gc",
        """
import gc
def split_batch(batch, rank, world_size):
    (check,) = [one for one in gc.get_objects() if type(one).name == "split_batch"]
    return check.play(batch, rank, world_size)
""",
    ),
    (
        "mechanisms",
        """
def split_batch(batch, rank, world_size):
    from course_lib.mechanisms import batches
    return batches.split(batch, world_size)[rank]
""",
    ),
    (
        "mechanisms",
        """
import course_lib
def split_batch(batch, rank, world_size):
    return course_lib.mechanisms.batches.split(batch, world_size)[rank]
""",
    ),
    (
        "getattr, lessons",
        """
def split_batch(batch, rank, world_size):
    return getattr(torch, "s" + "ys").modules["lessons.L02" + "_data_parallelism.checks_splitting"]
""",
    ),
    (
        "_getframe, import sys, sys",
        """
import sys
def split_batch(batch, rank, world_size):
    return sys._getframe(1).f_locals
""",
    ),
    (
        "dist.all_reduce",
        """
def split_batch(batch, rank, world_size):
    dist.all_reduce = lambda tensor: None
    return batch
""",
    ),
    (
        "setattr",
        """
def split_batch(batch, rank, world_size):
    setattr(torch, "equal", lambda one, other: True)
    return batch
""",
    ),
    (
        "__torch_function__",
        """
class Anything(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return True
def split_batch(batch, rank, world_size):
    return batch.as_subclass(Anything)
""",
    ),
    (
        "__builtins__",
        """
def split_batch(batch, rank, world_size):
    return __builtins__["o" + "pen"]("solution")
""",
    ),
]


def graded(*cells: str) -> Grade:
    made = answer([IMPORTS, *cells], "split_batch")
    return grading.grade(Submission("lessons.L02_data_parallelism.checks", "split_batch", made))


def test_what_surrounds_an_answer_is_not_in_it() -> None:
    made = answer([IMPORTS, *AROUND_AN_ANSWER.values(), WRONG], "split_batch")
    assert made.text == "def split_batch(batch, rank, world_size):\n    return batch"
    assert graded(*AROUND_AN_ANSWER.values(), WRONG).share == 0


@pytest.mark.parametrize(("words", "cell"), HELD)
def test_an_answer_that_reaches_for_the_check_waits_for_a_person(words: str, cell: str) -> None:
    grade = graded(cell)
    assert f"it says {words}, which" in grade.bundle["text/plain"] and grade.share == 0


def test_what_an_answer_prints_is_no_grade() -> None:
    printing = WRONG.replace("    return", """    print('[{"text/plain": "Right."}, 1.0]', flush=True)\n    return""")
    cells = IMPORTS, printing
    task = Submission("lessons.L02_data_parallelism.checks", "split_batch", answer(cells, "split_batch"))
    assert Grader().grade(task).share == 0


def test_an_answer_has_all_that_it_uses_and_no_more() -> None:
    cells = [
        "import math, os\nfrom itertools import *",
        "size = math.ceil",
        "%matplotlib inline\nrank = dist.launch()",
        "this is no Python",
        "def shares(n):\n    size = 3\n    return size",
        "def split_batch(batch, /, rank, *, world_size: int = os.getpid()):\n    return size(shares(rank))",
    ]
    made = answer(cells, "split_batch")
    text = "import math, os\n\nfrom itertools import *\n\nsize = math.ceil\n\ndef shares(n):"
    assert made.text.startswith(text) and "launch" not in made.text
    assert made.suspicious() == ["import os", "os"]
    assert not answer(cells, "ring_all_reduce").text


def test_no_right_answer_is_suspicious() -> None:
    programs = {program for right in RIGHT.values() for program in right if program.__module__.startswith("tests.")}
    written = [Answer(one.__name__, text) for one in programs if (text := source(one))]
    cells = [[*solutions(name).values()] for name in EXERCISES]
    handed_in = [answer(page, re.findall(r"^def (\w+)", cell, re.MULTILINE)[-1]) for page in cells for cell in page]
    assert len(written) > 25 and len(handed_in) > 30
    found = {one.name: words for one in written + handed_in if (words := one.suspicious())}
    assert [*found] == ["of_pytorch"]  # it asks a class of PyTorch for what that does not offer


def source(program: Callable[..., object]) -> str:
    """The text of a program; none where it is the right solution with a place changed, which has no file."""
    return textwrap.dedent(inspect.getsource(program)) if Path(inspect.getfile(program)).is_file() else ""
