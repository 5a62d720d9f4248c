"""The memo (S5): a brief, the plan that a student decides on, and the pages to hand in.

A seed draws the brief. All answers are in the student's journal, as they were typed, and nowhere else: `export` makes
two printed pages of the latest, and a sheet for whoever marks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple, cast

from course_lib.classroom import journal, questions
from course_lib.classroom.questions import plan_text
from course_lib.classroom.questions.forms import FreeText
from course_lib.classroom.questions.markup import bullets, to_html
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.question import Question
from course_lib.figures import Picture, Timing, devices, memory_by_part, speed_up, step_time_by_part
from course_lib.figures.axis import memory_size, percent
from course_lib.figures.words import plan_in_words
from course_lib.planner import Cluster, Estimate, ModelSpec, estimate, search


class Brief(NamedTuple):
    """A case for a memo. rule: what may be changed, of RULES.

    expected: the share of the ideal speed-up that all nodes should reach against one.
    """

    model: ModelSpec
    cluster: Cluster
    batch: int
    rule: str
    expected: float
    seed: int = 0


OPT_13B = ModelSpec(layers=40, hidden=5120, heads=80, sequence=2048, vocab=51200, flash_attention=True)
NEOX_20B = ModelSpec(44, 6144, 64, sequence=2048, vocab=50432, tied_embeddings=False, flash_attention=True)
TRIAL = "There is money for one purchase, and a trial has shown that it learns as well with twice the minibatch."
RULES = {  # what a brief allows to change: in words, and by name
    "program": (
        "Nothing may be bought, and the minibatch stays. The program may change.",
        ("overlap", "schedule", "tensor"),
    ),
    "settings": (f"{TRIAL} The program stays, except for its plan.", ("schedule", "tensor", "network", "batch")),
    "all": (f"{TRIAL} The program may change, too.", ("overlap", "schedule", "tensor", "network", "batch")),
}
BRIEFS = (
    Brief(OPT_13B, Cluster("A100-40GB", 4, between="Ethernet 25"), 256, "program", 0.8),
    Brief(NEOX_20B, Cluster("A100-80GB", 4, between="Ethernet 100"), 64, "settings", 0.75),
    Brief(NEOX_20B, Cluster("H100-80GB", 4, between="Ethernet 25"), 512, "all", 0.75),
    Brief(OPT_13B, Cluster("H100-80GB", 4, between="Ethernet 100"), 64, "settings", 0.6),
    Brief(OPT_13B, Cluster("A100-80GB", 8, between="InfiniBand HDR"), 64, "all", 0.65),
)
PLAN = "S5_plan"
SECTIONS = {  # the sections of prose, and what is chosen or calculated beside each of them
    "S5_memory": ("S5_state", "S5_need"),
    "S5_gradients": ("S5_sent", "S5_speed_up"),
    "S5_pipeline": ("S5_bubble", "S5_naive"),
    "S5_precision": ("S5_wide",),
    "S5_advice": ("S5_lost", "S5_bottleneck", "S5_mitigation"),
}
CHOICES = ("S5_bottleneck", "S5_mitigation")
NUMBERS = [name.removeprefix("S5_") for beside in SECTIONS.values() for name in beside if name not in CHOICES]
PARTS = (PLAN, *(name for section, beside in SECTIONS.items() for name in (section, *beside)))


def brief(seed: int = 0) -> Brief:
    return BRIEFS[questions.checked(seed) % len(BRIEFS)]._replace(seed=seed)


@cache
def one_node(case: Brief) -> Estimate:
    """The fastest plan for a single node and the same minibatch that fits or may fit there."""
    found = search(case.model, replace(case.cluster, nodes=1), case.batch)
    return min((one for one in found if one.fit != "does not fit"), key=lambda one: one.step_time.total)


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


def decided(case: Brief) -> Estimate | None:
    """The plan that the student chose last."""
    answers = [note.answer for note in journal.notes() if _decides(note, case)]
    return estimate(case.model, case.cluster, plan_text.parse(answers[-1]), case.batch) if answers else None


def _decides(note: journal.Note, case: Brief) -> bool:
    return (note.question, note.seed) == (PLAN, case.seed) and note.what in ("committed", "ran")


def figures(case: Brief, plan: Estimate, width: int = 800) -> tuple[Picture, Picture, Picture]:
    steps = {"one node, the best plan": one_node(case), "all nodes, this plan": plan}
    return (
        memory_by_part(devices(plan), plan.capacity, width, "What each device of a pipeline holds"),
        step_time_by_part(steps, width, "What the time of a step goes into"),
        speed_up([Timing.planned(one) for one in steps.values()], title="From one node to all of them"),
    )


# What stands beside the text, and what another plan makes of it


def numbers(seed: int = 0, **given: str) -> Feedback:
    """Ask for numbers, and compare those given with the plan that was decided on last; without names, all of them.

    given: numbers with their units, by name: need="29.7 GB". Raises ValueError for a name that it does not know.
    """
    if unknown := given.keys() - NUMBERS:
        raise ValueError(f"{unknown.pop()!r} is no number of the memo; choose one of {', '.join(NUMBERS)}")
    asked = {name: questions.load(f"S5_{name}", seed) for name in given or NUMBERS}
    rows = [_compared(name, question, given.get(name, "")) for name, question in asked.items()]
    plan = decided(brief(seed))
    title = f"Compared with your plan: {plan_in_words(plan.plan)}" if plan else "Decide on a plan first, in section 1."
    return Feedback("", Outcome(None, bullets(rows)), title=title)


def _compared(name: str, question: Question, text: str) -> str:
    """A number, asked for, and what the run says of it now. text: a new one; "" for the latest."""
    try:
        if text:
            question.answer(text)
    except ValueError as unread:
        return f"`{name}`: {unread}"
    note = question.latest()
    if note is None:
        return f"`{name}`: {question.text} {UNWRITTEN}"
    outcome = question.form.run(note.answer)
    wrong = "right for an earlier plan, and not for this one" if note.right else "not right"
    verdict = {True: ", right", False: f", {wrong}", None: ""}[outcome.right]
    why = outcome.why if outcome.right is False else ""
    return " ".join(f"`{name}`: {note.answer}{verdict}. {question.text} {why}".split())


def stale(case: Brief) -> list[str]:
    """The titles of what was right for an earlier plan, or was written for one."""
    plan, written = "", dict[str, tuple[str, bool | None]]()
    for note in journal.notes():
        if _decides(note, case):
            plan = note.answer
        elif note.seed == case.seed and note.question in PARTS:
            written[note.question] = plan, note.right
    old = [name for name, (its, right) in written.items() if its not in ("", plan) and right is not False]
    found = [questions.load(name, case.seed) for name in PARTS if name in old]
    return [one.entry.title for one in found if one.name in SECTIONS or _verdict(one) == "not right"]


# The pages to hand in

STYLE = """
body { font: 10pt/1.35 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 52em; margin: 2em auto; }
h1 { font-size: 1.4em; margin: 0; } h2 { font-size: 1.1em; margin: 0.9em 0 0.2em; break-after: avoid; } p { margin: 0; }
table { border-collapse: collapse; margin: 0.6em 0; break-inside: avoid; } td { padding: 0 1.2em 0 0; }
td { vertical-align: top; } td:first-child { white-space: nowrap; }
figure { display: inline-block; width: 49%; margin: 0.6em 0 0; } svg { width: 100%; height: auto; }
@page { size: A4; margin: 16mm; } @media print { body { margin: 0; max-width: none; } }
"""
UNWRITTEN = "(Not written yet.)"


def export(folder: str | Path = ".", author: str = "", seed: int = 0) -> list[Path]:
    """Write S05_memo.html, which can be printed, and S05_sheet.html, for whoever marks it; return the files.

    Raises OSError if the folder cannot be written.
    """
    title = f"A plan for {brief(seed).cluster.devices} GPUs" + f", by {author}" * bool(author)
    pages = {"S05_memo.html": (title, _memo(brief(seed))), "S05_sheet.html": (f"Marks. {title}", _sheet(brief(seed)))}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, (head, parts) in pages.items():
        body = f"<h1>{escape(head)}</h1>{''.join(parts)}"
        start = f"<meta charset='utf-8'><title>{escape(head)}</title><style>{STYLE}</style>"
        (Path(folder) / name).write_text(
            f"<!DOCTYPE html><html lang='en'><head>{start}</head><body>{body}</body></html>", encoding="utf-8"
        )
    return [Path(folder) / name for name in pages]


def _memo(case: Brief) -> Iterator[str]:
    """The memo: the plan, each section, its numbers and choices in one table, and two figures."""
    plan, told = decided(case), {name: questions.load(name, case.seed) for name in PARTS}
    for name in (PLAN, *SECTIONS):
        yield f"<h2>{escape(told[name].entry.title)}</h2>{to_html(_said(told[name], UNWRITTEN))}"
    beside = (told[name] for names in SECTIONS.values() for name in names)
    yield _table((one.entry.title, re.sub("^[a-e], ", "", _said(one, ""))) for one in beside if one.latest())
    for picture in figures(case, plan, 560)[:2] if plan else ():
        yield f"<figure>{picture.svg}</figure>"


def _sheet(case: Brief) -> Iterator[str]:
    """The sheet: the run's verdict on all that is not prose, and for each section its levels and points."""
    plan = decided(case)
    yield to_html(bullets(text for _, text in demands(case, plan)) if plan else "No plan has been decided on.")
    yield _table(_beside(case.seed))
    for name in SECTIONS:
        question = questions.load(name, case.seed)
        form = cast(FreeText, question.form)
        levels, points = form.model_answer.partition("\n\n")[2], (f"☐ {one}" for one in form.checklist)
        yield f"<h2>{escape(question.entry.title)}: ___ of 3</h2>{to_html(levels)}{to_html(bullets(points))}"


def _beside(seed: int) -> list[tuple[str, str, str]]:
    """All but the prose: its title, the latest answer, and what the run says of it now."""
    chosen = [questions.load(name, seed) for name in PARTS if name not in SECTIONS]
    return [(one.entry.title, _said(one, UNWRITTEN), _verdict(one)) for one in chosen]


def _said(question: Question, otherwise: str) -> str:
    """The latest answer in words, prose as it was typed."""
    note = question.latest()
    if note is None:
        return otherwise
    return note.answer if question.name in SECTIONS else question.form.words(note.answer)


def _verdict(question: Question) -> str:
    """Run the latest answer again, as the plan may have changed since."""
    note = question.latest()
    right = question.form.run(note.answer).right if note else None
    return {True: "right", False: "not right", None: "not run yet"}[right]


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
