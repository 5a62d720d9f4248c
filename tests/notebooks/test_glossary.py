"""The glossary has a sentence or two for each term, and the lesson it names says the term."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.notebooks.lesson import NOTEBOOKS, lesson

TEXT = (NOTEBOOKS / "glossary.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.+) \((\[.+\))\)$", TEXT, re.MULTILINE)
TERMS = [term for term, _, _ in ENTRIES]
LINKS = [(term, *link) for term, _, links in ENTRIES for link in re.findall(r"\[(\d\d)\]\(([^)]+)\)", links)]

FIRST = sorted(NOTEBOOKS.glob("0[0-5]_*.ipynb"))
AT_ONCE = {  # explained well enough in the sentence that uses them
    "00": {"bubble", "micro-batch"},
    "01": {"minibatch", "mixed precision"},
    "03": {"margin", "micro-batch", "mixed precision", "stage"},
}


def test_every_line_of_the_list_is_an_entry() -> None:
    assert len(ENTRIES) == len(re.findall(r"^- ", TEXT, re.MULTILINE)) == len(set(TERMS)) > 60


def test_the_terms_are_in_alphabetical_order() -> None:
    assert sorted(TERMS, key=str.casefold) == TERMS


@pytest.mark.parametrize(("term", "number", "target"), LINKS)
def test_the_lesson_that_a_term_names_says_it(term: str, number: str, target: str) -> None:
    assert target.startswith(number) and (NOTEBOOKS / target).exists()
    source = lesson(Path(target).stem[3:]).product.source.read_text(encoding="utf-8")
    assert said(term, source.replace("_", "-"))  # a name in code says it, too: all_to_all


def said(term: str, text: str) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(term)}s?(?!\w)", text.replace("*", ""), re.IGNORECASE))


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.stem)
def test_a_lesson_uses_no_term_that_a_later_one_explains(path: Path) -> None:
    """Exceptions: terms with a link or a source, or explained in the same sentence."""
    text = re.sub(r"\[[^]]*\]\([^)]*\)|### Further reading.*|`[^`]*`|\{\{.*?\}\}", "", lesson(path.stem[3:]).prose)
    known = {term for term, number, _ in LINKS if number <= path.stem[:2]} | AT_ONCE.get(path.stem[:2], set())
    assert [term for term in TERMS if term not in known and said(term, text)] == []


@pytest.mark.parametrize("sentence", [sentence for _, sentence, _ in ENTRIES])
def test_a_term_has_one_sentence_or_two(sentence: str) -> None:
    assert re.findall(r"[.?!](?= |$)", sentence) in (["."], [".", "."]) and sentence.endswith(".")


def test_what_no_lesson_explains_has_a_page_of_its_own() -> None:
    others = [link for _, _, links in ENTRIES for link in re.findall(r"\[[a-z]+\]\(([^)]+)\)", links)]
    assert others and all((NOTEBOOKS / link).exists() for link in others)


def test_memory_is_in_gib_alone() -> None:
    assert not re.search(r"\b[kMGT]B\b", TEXT)


@pytest.mark.parametrize("page", ["README.md", "lessons/L00_start_here/lesson.py"])
def test_where_a_reader_begins_there_is_a_link(page: str) -> None:
    assert "glossary.md)" in (NOTEBOOKS.parent / page).read_text(encoding="utf-8")
