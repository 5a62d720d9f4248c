"""The map of what leads to what holds together, and says what is worth doing next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from course_lib.classroom.questions.catalog import pages
from lessons.site import net
from lessons.site.pages import address_of

ROOT = Path(__file__).parents[3]
IDEAS = net.ideas()


def flaws(found: Mapping[str, net.Idea], places: set[str]) -> Iterator[str]:
    """What is wrong with a map, one sentence each. places: pages, and headings on them, that there are."""
    asked = [question for idea in found.values() for question in idea.asked]
    _, *others = found.values()
    yield from (f"{one.name} needs nothing, so nothing leads to it" for one in others if not one.before)
    yield from (
        f"{one.name} needs {need}, which is not there"
        for one in found.values()
        for need in one.before
        if need not in found
    )
    yield from (
        f"{one.name} is taught in {one.place}, which is not there" for one in found.values() if one.place not in places
    )
    for page in pages().values():
        if page.name != page.room and asked.count(page.name) != 1:
            yield f"{page.name} is asked about {asked.count(page.name)} ideas and should be about one"
    yield from (f"{question} is no question" for question in asked if question not in pages())
    try:
        TopologicalSorter({one.name: one.before for one in found.values()}).prepare()
    except CycleError as error:
        yield f"{' needs '.join(error.args[1])}: a circle"


@pytest.fixture(scope="module")
def places() -> set[str]:
    """The pages, and every heading in them."""
    found = set()
    for file in ROOT.glob("notebooks/**/[0-9S]*.ipynb"):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        lines = [
            line for cell in cells if cell["cell_type"] == "markdown" for line in "".join(cell["source"]).split("\n")
        ]
        headings = [line.lstrip("# ") for line in lines if line.startswith("#")]
        found |= {file.stem, *(f"{file.stem}#{address_of(heading)}" for heading in headings)}
    return found


def test_it_has_every_mechanism_scenario_and_question_once(places: set[str]) -> None:
    assert list(flaws(IDEAS, places)) == []
    assert set(IDEAS) == {f"M{n}" for n in range(1, 14)} | {f"S{n}" for n in range(1, 11)}


@pytest.mark.parametrize(
    ("name", "change", "flaw"),
    [
        ("M2", {"before": ["M3"]}, "a circle"),
        ("M2", {"before": ["M0"]}, "M2 needs M0, which is not there"),
        ("M2", {"before": []}, "nothing leads to it"),
        ("M2", {"asked": ["Q4"]}, "find_the_flaw is asked about 0 ideas"),
        ("M2", {"asked": [*IDEAS["M2"].asked, "Q1"]}, "Q1 is asked about 2 ideas"),
        ("M2", {"asked": [*IDEAS["M2"].asked, "Q99"]}, "Q99 is no question"),
        ("M2", {"place": "02_data_parallelism#few-hands"}, "#few-hands, which is not there"),
    ],
)
def test_a_flaw_is_found(places: set[str], name: str, change: dict[str, object], flaw: str) -> None:
    broken = {**IDEAS, name: IDEAS[name]._replace(**change)}  # type: ignore[arg-type]
    assert any(flaw in one for one in flaws(broken, places))


def test_every_idea_is_drawn_below_all_that_it_needs() -> None:
    row = {one.name: place for place, line in enumerate(net.rows(IDEAS)) for one in line}
    assert set(row) == set(IDEAS)
    assert all(row[need] < row[one.name] for one in IDEAS.values() for need in one.before)


def test_what_comes_next_has_its_ground_laid() -> None:
    assert net.worth_doing(IDEAS, set()) == ["Q5", "Q4", "Q6"]
    replicas = {"Q5", "one_machine", *IDEAS["M2"].asked, *IDEAS["M3"].asked}
    assert net.worth_doing(IDEAS, replicas) == ["Q3", "stage_3_sends", "Q6"]
    assert net.worth_doing(IDEAS, {question for one in IDEAS.values() for question in one.asked}) == []


def test_whoever_follows_it_is_asked_everything() -> None:
    done: set[str] = set()
    while following := net.worth_doing(IDEAS, done):
        assert not done & set(following)
        done |= set(following)
    assert done == {page.name for page in pages().values() if page.name != page.room}


def test_the_map_says_what_was_answered_and_leads_there() -> None:
    html = net.draw({"Q5", "Q4"}, lambda page, place: f"{page}!{place}")
    assert 'data-asks="Q5 one_machine" data-state="begun"' in html
    assert '"02_data_parallelism!Q4"' in html and '"02_data_parallelism!many-hands"' in html
    assert html.count("1 of ") == 2
