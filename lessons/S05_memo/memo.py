"""The memo (S5): a plan for 32 GPUs with its reasons, its numbers beside the planner's, and the page to hand in.

    S5_plan                        the plan that was chosen
    S5_memory ... S5_precision     four sections of prose; each number is compared with the plan's (numbers, facts)
    S5_bottleneck, S5_mitigation   the largest loss of speed-up, and the change to try first

All answers are in the student's journal, as they were typed, and nowhere else; `export` makes a page of the latest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

from course_lib.classroom import journal, questions
from course_lib.classroom.questions import plan_text
from course_lib.classroom.questions.markup import to_html
from course_lib.classroom.questions.outcome import Outcome
from course_lib.figures import Picture, Timing, devices, memory_by_part, speed_up, step_time_by_part
from course_lib.figures.axis import listed, memory_size, percent
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, Estimate, ModelSpec, estimate, search
from lessons.S05_memo.facts import facts
from lessons.S05_memo.numbers import AGREES, DIFFERS, NOT_CHECKED, Remark, remarks


class Brief(NamedTuple):
    """A case for a memo. expected: the share of the ideal speed-up that all nodes should reach against one."""

    model: ModelSpec
    cluster: Cluster
    batch: int
    expected: float


CASE = Brief(
    ModelSpec(layers=40, hidden=5120, heads=80, sequence=2048, vocab=51200, flash_attention=True),
    Cluster("A100-40GB", nodes=4, between="Ethernet 25"),
    batch=256,
    expected=0.8,
)
PLAN, SECTIONS = "S5_plan", ("S5_memory", "S5_gradients", "S5_pipeline", "S5_precision")
PARTS = (PLAN, *SECTIONS, "S5_bottleneck", "S5_mitigation")
NO_PLAN = "Decide on a plan first, in the card of section 1; then your numbers can be compared with it."


@cache
def one_node(case: Brief = CASE) -> Estimate:
    """The best plan for a single node and the same minibatch, with which all nodes together are compared.

    It may fit with lean software only: a slower node would flatter the scaling.
    """
    found = search(case.model, replace(case.cluster, nodes=1), case.batch)
    return min((one for one in found if one.memory.total <= one.capacity), key=lambda one: one.step_time.total)


def demands(case: Brief, plan: Estimate) -> list[tuple[bool, str]]:
    """The demands on a plan: for each, whether it is met, and a sentence."""
    ideal, gained = case.cluster.nodes, one_node(case).step_time.total / plan.step_time.total
    is_inside = plan.plan.tp * plan.plan.cp <= case.cluster.devices_per_node
    need, has = memory_size(plan.memory.total), memory_size(plan.capacity)
    where = "stay inside a node" if is_inside else "reach over several nodes"
    faster = f"{gained:.2f} times as fast as the best plan on one node, {percent(gained / ideal)} of the ideal"
    return [
        (plan.fits, f"Memory: the fullest device needs {need} of {has}, so the plan {plan.fit}."),
        (gained >= case.expected * ideal, f"Scaling: {faster}; {percent(case.expected)} are expected."),
        (is_inside, f"Links: groups that talk in every layer {where}."),
    ]


def decided() -> Estimate | None:
    """The plan that the student chose last."""
    found = [note for note in journal.notes() if note.question == PLAN and note.what in ("committed", "ran")]
    return estimate(*CASE[:2], plan_text.parse(found[-1].answer), CASE.batch) if found else None


def figures(plan: Estimate) -> tuple[Picture, Picture, Picture]:
    steps = {"one node, the best plan": one_node(), "all nodes, this plan": plan}
    return (
        memory_by_part(devices(plan), plan.capacity, title="What each device of a pipeline holds"),
        step_time_by_part(steps, title="What the time of a step goes into"),
        speed_up([Timing.planned(one) for one in steps.values()], title="From one node to all of them"),
    )


def check(text: str, plan: Estimate) -> list[Remark]:
    """The remarks on the numbers in a section."""
    return remarks(text, facts(plan, one_node(), CASE.expected))


def in_words(found: list[Remark]) -> str:
    """Remarks in words: a line for each number that differs, one for all that agree, one for all not checked."""
    wrong = [f"- {one.number}: {one.text}" for one in found if one.verdict == DIFFERS]
    said = ["Look at these again:", "\n".join(wrong)] if wrong else []
    for verdict, words in {AGREES: "As the planner has them", NOT_CHECKED: "Not checked"}.items():
        numbers = [f"{one.number} ({one.text})" if one.text else one.number for one in found if one.verdict == verdict]
        said += [f"{words}: {listed(numbers)}."] if numbers else []
    return "\n\n".join(said) or "There is no number in it. One or two would make it stronger."


def read_section(figure: int, case: Brief, text: str) -> Outcome:
    """Compare a section with the plan. figure: the number of its figure."""
    if (plan := decided()) is None:
        return Outcome(None, NO_PLAN)
    said = f"Your plan (modelled): {plan_in_words(plan.plan)}.\n\n{in_words(check(text, plan))}"
    return Outcome(None, said, pictures=(figures(plan)[figure],))


# The page to hand in

STYLE = """
body { font: 11pt/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 46em; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 0.4em; break-after: avoid; }
figure { margin: 1em 0; break-inside: avoid; } figcaption, .numbers { font-size: 0.85em; color: #444; }
@page { margin: 18mm; } @media print { body { margin: 0; max-width: none; padding: 0; } }
"""
UNWRITTEN = "(Not written yet.)"


def export(folder: str | Path = ".", author: str = "") -> list[Path]:
    """Write S05_memo.md and its figures, and S05_memo.html, which includes them and can be printed.

    Returns the files. Raises OSError if the folder cannot be written.
    """
    place, plan = Path(folder), decided()
    pictures = figures(plan) if plan else ()
    files = {f"S05_memo-{number}.svg": picture.svg for number, picture in enumerate(pictures, 1)}
    drawn = [f"![{picture.summary}]({name})" for name, picture in zip(files, pictures, strict=True)]
    title = f"A plan for {CASE.cluster.devices} GPUs" + f", by {author}" * bool(author)
    parts = list(_parts(plan))
    text = [f"# {title}", *(f"## {heading}\n\n{said}\n\n{numbers}" for heading, said, numbers in parts), *drawn]
    files["S05_memo.md"] = "\n\n".join(filter(None, map(str.strip, text))) + "\n"
    files["S05_memo.html"] = _page(title, parts, pictures)
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / name).write_text(content, encoding="utf-8")
    return [place / name for name in files]


def _parts(plan: Estimate | None) -> Iterator[tuple[str, str, str]]:
    """The parts of the memo: heading, latest answer, and remarks on its numbers, or on the plan."""
    for name in PARTS:
        question = questions.load(name)
        note = question.latest()
        said = note.answer if note else UNWRITTEN
        if note and name not in SECTIONS:
            words = question.form.words(note.answer)
            said = f"{words[:1].upper()}{words[1:]}."
        checked = ""
        if plan and name == PLAN:
            checked = "\n\n".join(text for _, text in demands(CASE, plan))
        elif plan and note and name in SECTIONS:
            checked = f"Numbers against the planner's.\n\n{in_words(check(said, plan))}"
        yield question.entry.title, said, checked


def _page(title: str, parts: list[tuple[str, str, str]], pictures: tuple[Picture, ...]) -> str:
    sections = "".join(
        f"<section><h2>{escape(heading)}</h2>{to_html(said)}<div class='numbers'>{to_html(numbers)}</div></section>"
        for heading, said, numbers in parts
    )
    drawn = "".join(f"<figure>{one.svg}<figcaption>{escape(one.summary)}</figcaption></figure>" for one in pictures)
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    body = f"<h1>{escape(title)}</h1>{sections}{drawn}"
    return f"<!DOCTYPE html><html lang='en'><head>{head}</head><body>{body}</body></html>"
