"""Nothing is told by its form: readers who know nothing of the subject guess no better than chance.

Each reader looks at one thing, and takes the option with the most of it; options with equally much share a guess. Over
all questions its hits may not exceed what nine of ten readers reach who guess at random. `test_every_answer`,
`test_plans`, `test_fleet` and `test_faults` run the answers that are listed here as right.

Cards with a culprit that a seed draws have the same options for all seeds, and S5 asks about a student's own plan.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from course_lib.classroom import questions, rooms
from tests.lessons.asked import ASKED
from tests.lessons.test_every_answer import RIGHT
from tests.lessons.test_plans import CASES, case, right_letter

OF_CASES = {"S4_unfit": "d", "S4_costly": "a", "S8_scaling": "b"}
NAMES = [*RIGHT, *OF_CASES, *(f"{case}_limit" for case in CASES)]
DRAWN = 40  # seeds; all numbers of most questions


class Asked(NamedTuple):
    """A question as it is shown. before: the words of its page above it.  right: places of the right options."""

    stem: str
    before: str
    options: tuple[str, ...]
    right: frozenset[int]


def words(text: str) -> set[str]:
    """The words of a text that say something, by their beginnings."""
    return {word[:5] for word in re.findall(r"[a-z]{4,}|\d[\d,.]*", text.lower())}


@cache
def above(name: str) -> str:
    """The prose of the page above the card."""
    room = ASKED[name].file.parent
    (page,) = (page for page in (room / "lesson.py", room / "page.py") if page.exists())
    head, card, _ = page.read_text(encoding="utf-8").partition(f'Card("{name}"')
    assert card, f"{page} does not show {name}"
    return "\n".join(line for line in head.splitlines() if line.startswith("# "))


def asked(name: str, seed: int) -> Asked:
    question = questions.load(name, seed)
    texts = tuple(option.text for option in question.form.options)
    if name.endswith("_limit"):
        right = {"abcdefgh".index(right_letter(name.partition("_")[0], seed))}
    else:
        right = {"abcdefgh".index(letter) for letter in OF_CASES.get(name) or RIGHT[name][0]}
    return Asked(f"{question.entry.title} {question.text}", above(name), texts, frozenset(right))


@cache
def variants(name: str) -> frozenset[Asked]:
    """A question with the numbers of the lesson, and with all others that it is shown with."""
    if name.endswith("_limit"):
        return frozenset(asked(name, seed) for seed in range(len(case(name.partition("_")[0]).tasks)))
    seeded = importlib.import_module(rooms.module_of(ASKED[name].file)).QUESTIONS[name]
    return frozenset(asked(name, seed) for seed in range(DRAWN if getattr(seeded, "others", ()) else 1))


Reader = Callable[[Asked], Sequence[float]]


def of_each(measure: Callable[[str], float]) -> Reader:
    return lambda one: [measure(option) for option in one.options]


def shared(text: Callable[[Asked], str]) -> Reader:
    """The share of an option's words that stand in a text, too."""
    return lambda one: [len(words(option) & words(text(one))) / len(words(option)) for option in one.options]


def like_the_others(one: Asked) -> list[float]:
    return [
        sum(len(words(option) & words(other)) for other in one.options) - len(words(option)) for option in one.options
    ]


def at(place: int) -> Reader:
    return lambda one: [float(option == place % len(one.options)) for option in range(len(one.options))]


READERS: dict[str, Reader] = {
    "longest": of_each(len),
    "shortest": of_each(lambda option: -len(option)),
    "most words": of_each(lambda option: len(option.split())),
    "most detailed": of_each(
        lambda option: len(re.findall(r"[,:;()]|\d|\b(?:and|which|that|since|because)\b", option))
    ),
    "plainest": of_each(lambda option: -len(re.findall(r"\b(?:no|none|nothing|never|all|every|always)\b", option))),
    "in the words of the lesson": shared(lambda one: one.before),
    "in the words of the stem": shared(lambda one: one.stem),
    "in other words than the stem": lambda one: [-share for share in shared(lambda asked: asked.stem)(one)],
    "like the others": like_the_others,
    "unlike the others": lambda one: [-likeness for likeness in like_the_others(one)],
    **{f"place {'abcd'[place]}": at(place) for place in range(4)},
    "last": at(-1),
}


def hit(reader: Reader, one: Asked) -> float:
    """The chance that the reader's guess is right."""
    marks = np.asarray(reader(one))
    best = np.flatnonzero(np.isclose(marks, marks.max()))
    return len(one.right.intersection(best.tolist())) / len(best)


def mean_hit(reader: Reader, name: str) -> float:
    return float(np.mean([hit(reader, one) for one in variants(name)]))


def most_by_chance(share: float = 0.9) -> int:
    """The hits that this share of random readers do not exceed."""
    hits: Any = np.ones(1)  # the chance of 0, 1, 2 ... hits
    for name in NAMES:
        one = asked(name, 0)
        chance = len(one.right) / len(one.options)
        hits = np.convolve(hits, [1 - chance, chance])
    return int(np.searchsorted(hits.cumsum(), share))


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_forms_alone_guesses_no_better_than_chance(reader: str) -> None:
    found = {name: mean_hit(READERS[reader], name) for name in NAMES}
    told = sorted(name for name, share in found.items() if share > 0.5)
    assert sum(found.values()) <= most_by_chance(), f"{sum(found.values()):.1f} of {len(NAMES)}, such as {told}"


def test_every_question_with_one_right_answer_is_read() -> None:
    """Cards with drawn culprits, and those of S5, are the only ones left out."""
    choices = {name for name, page in ASKED.items() if any(heading.startswith("option") for heading in page.sections)}
    steps = {"symptom", "suspect", "measure", "change", "bottleneck", "mitigation"}
    assert {name for name in choices if name.rpartition("_")[2] not in steps} == set(NAMES)


def test_a_reader_who_knows_the_answers_would_be_noticed() -> None:
    assert len(NAMES) > 2 * most_by_chance()
    told = Asked("", "", ("short", "the longest of them", "middle one"), frozenset({1}))
    assert [hit(READERS[reader], told) for reader in ("longest", "shortest", "place a")] == [1, 0, 0]
