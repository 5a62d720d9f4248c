"""A night with a fault: what the engineer on call sees, measures and does, and what it costs until the morning.

    evidence()      the timeline, the plan, settings that somebody changed, and lines of the log: free
    measure(NAME)   an instrument: the job stands still for its minutes
    rehearse(NAME)  a suspect, tried on the healthy job with another magnitude: minutes, too
    act(...)        what is done, where, and from which checkpoint: the job goes on with that change
    debrief()       what it was, and what the night has cost beside other ways to spend it

A seed draws the culprits, their places and magnitudes, the moment, and which of all lines are their traces. What is
done stands in the journal, and the night follows from it, so a restarted notebook goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from course_lib.classroom import journal
from course_lib.classroom.pages import sections
from course_lib.classroom.questions import checked
from course_lib.classroom.questions.catalog import case_of
from course_lib.classroom.questions.markup import bullets
from course_lib.classroom.questions.outcome import Feedback, Outcome
from course_lib.classroom.questions.prose import items
from course_lib.classroom.questions.question import is_for_a_room
from course_lib.classroom.scenarios.jobs.culprits import ACTS, CULPRITS, Culprit, mended
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, Scene, checkpoints, clock, spent, timeline
from course_lib.classroom.scenarios.jobs.job import CHECKPOINT, REPORT, Change, Job
from course_lib.classroom.scenarios.jobs.night import Night, night, reached
from course_lib.classroom.scenarios.jobs.step import step
from course_lib.classroom.scenarios.jobs.training import held_out
from course_lib.figures.axis import counted
from course_lib.ranks import Link

HOURS, DAY = 5 * 3600, 12 * 3600  # seconds from the call until the morning; from there until the evening
WELL = 0.99  # of the planned speed
WATCH = 12  # reports after an act, before the next one
REHEARSAL = 15  # minutes
BOTH, TWO = {"slow", "learns"}, 0.2  # kinds that come together, and how often
LINES, SETTINGS = 9, 4  # lines of the log and changed settings that one sees
NOTED = 0.25  # how often somebody surely wrote down what is guilty


class Drawn(NamedTuple):
    """A culprit of a night. onset: the report from which it is there."""

    name: str
    value: Any
    often: float
    onset: int

    @property
    def kind(self) -> Culprit:
        return CULPRITS[self.name]

    @property
    def place(self) -> Any:
        return self.kind.place(self.value)

    @property
    def change(self) -> Change:
        return Change(self.onset, {self.kind.field: self.value}, self.often)

    @property
    def noun(self) -> str:
        """The kind of its place, in a word."""
        return {"card": "device", "cable": "node"}.get(self.kind.act, self.kind.act)

    def __str__(self) -> str:
        where = "" if self.noun in ("setting", "restart") else f", {self.noun} {self.place}"
        return f"{called(self.name)}{where}, from step {self.onset} on"


class Story(NamedTuple):
    """The acts and measurements so far. stands: minutes for which the job stands still since the last act.

    acts: their number.  used: the measurements since.
    """

    scene: Scene
    stands: float
    acts: int
    used: list[str]


@cache
def _said() -> dict[str, str]:
    """The words for culprits, acts, settings and the log, by heading."""
    return {heading.lstrip("# "): text for _, heading, text in sections(Path(__file__).with_name("night.md"))}


def listed(heading: str) -> dict[str, str]:
    """The items of a list, each "name: words"."""
    return dict(item.split(": ", 1) for item in items(_said()[heading]))


def called(culprit: str) -> str:
    return _said()[f"culprit: {culprit}"].partition("\n\n")[0]


def placed(what: str, place: Any) -> str:
    """The place of an act in words."""
    return listed("settings")[place].partition(" | ")[0] if what == "setting" else str(place)


@dataclass(frozen=True)
class Incident:
    """A case, and a night of it. healthy: the job as planned.  culprits: names of those that it chooses among."""

    name: str
    healthy: Job
    culprits: tuple[str, ...]
    seed: int = 0

    def variant(self, seed: int = 0) -> Incident:
        """Draw a night. Raises ValueError for a seed that is no number from 0 to 9999."""
        return replace(self, seed=checked(seed))

    @cached_property
    def _drawn(self) -> list[Drawn]:
        random = Random(f"{self.name} {self.seed}")
        chosen = [random.choice(self.culprits)]
        others = [name for name in self.culprits if {CULPRITS[name].kind, CULPRITS[chosen[0]].kind} == BOTH]
        chosen += [random.choice(others)] if others and random.random() < TWO else []
        onset = 10 * random.randrange(6, 11) + random.choice((9, random.randrange(10)))  # often at a checkpoint
        return [
            Drawn(name, CULPRITS[name].draw(random, self.planned), random.choice(CULPRITS[name].often), onset)
            for name in chosen
        ]

    @cached_property
    def planned(self) -> Job:
        """The job of this night: another minibatch, learning rate, loss scale, devices and links."""
        random, link = Random(f"planned {self.name} {self.seed}"), self.healthy.between
        samples, longer = random.choice((64, 96, 128)), random.uniform(0.6, 1.8)
        return self.healthy.but(
            seed=self.seed,
            samples=samples,
            rate=random.choice((7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3)),
            forward=longer * self.healthy.forward * self.healthy.samples / samples,
            between=Link(link.latency, link.bandwidth * random.uniform(0.8, 1.4) / longer),
            fixed=self.healthy.fixed and self.healthy.fixed / random.choice((1, 2, 4)),
        )

    @cached_property
    def _call(self) -> Scene:
        """The job when somebody noticed; one that hangs has no more reports."""
        faulty = night(self.planned.after(*(one.change for one in self._drawn)))
        wanted = self._drawn[0].onset + Random(f"called {self.seed}").randrange(28, 45)
        return Scene(faulty, len(faulty.reports(wanted)))

    @property
    def _morning(self) -> float:
        """When the day shift comes, in seconds after the evening."""
        return self._call.night.reports(self._call.now)[-1].begins + HOURS

    # What was done

    @property
    def story(self) -> Story:
        scene, stands, acts, used = self._call, 0.0, 0, list[str]()
        for note in journal.notes():
            if (note.question, note.seed) != (self._name, self.seed):
                continue
            if note.what == "ran":
                scene, acts = self.after(scene, stands, *note.answer), acts + 1
                stands, used = 0.0, []
            elif note.answer not in used:
                used.append(note.answer)
                stands += INSTRUMENTS[note.answer].minutes if note.answer in INSTRUMENTS else REHEARSAL
        return Story(scene, stands, acts, used)

    def after(self, scene: Scene, stands: float, what: str, place: Any, resume: int | None) -> Scene:
        """The job after an act, by the time one looks again."""
        job, now = scene.night.job, scene.now
        stands += ACTS[what].minutes + (job.patience / 60 if scene.night.hung else 0)
        fields = mended(scene.job, self.planned, what, place)
        after = night(job.after(Change(now, fields, 1.0, resume, stands)))
        return Scene(after, len(after.reports(now + WATCH)))

    @property
    def _name(self) -> str:
        return f"{self.name}_night"

    def measure(self, name: str) -> Feedback:
        """Use an instrument; using it again costs again only after an act. Raises ValueError for an unknown one."""
        _check("name", name, INSTRUMENTS)
        pictures = INSTRUMENTS[name].read(self.story.scene)
        self._pay(name)
        return Feedback("", Outcome(None, pictures=pictures), title=INSTRUMENTS[name].title)

    def rehearse(self, name: str) -> Feedback:
        """Try a suspect on the healthy job, at another place and with another magnitude."""
        _check("name", name, self.culprits)
        self._pay(f"rehearse {name}")
        random, culprit = Random(f"rehearsed {self._name} {self.seed} {name}"), CULPRITS[name]
        job = self.planned.after(Change(20, {culprit.field: culprit.draw(random, self.planned)}))
        picture = timeline(Scene(night(job), 60))
        return Feedback("", Outcome(None, "From report 20 on.", pictures=(picture,)), title=f"With {called(name)}")

    def _pay(self, name: str) -> None:
        if name not in self.story.used:
            journal.record("measured", self._name, self.seed, name)

    def act(self, what: str, place: Any = "", resume: int | None = None) -> Feedback:
        """Do something. place: where, as the list of acts says.  resume: a checkpoint; None: the latest.

        Raises ValueError for what cannot be done.
        """
        scene, stands, *_ = self.story
        _check("what", what, ACTS)
        _check("place", place, ACTS[what].places(scene.job))
        saved = checkpoints(scene)
        resume = None if what == "wait" else saved[-1] if resume is None else resume
        _check("resume", resume, [None, *saved])
        scene = self.after(scene, stands, what, place, resume)
        well = self.speed(scene) > WELL
        journal.record("ran", self._name, self.seed, [what, place, resume], well)
        words = "The job is as it was planned again." if well else "The job is not as it was planned."
        at = f": {placed(what, place)}" if place != "" else ""
        done = listed("acts")[what] + at + ("" if resume is None else f", from checkpoint {resume}")
        return Feedback("", Outcome(well, words, pictures=(timeline(scene),)), title=f"Done: {done}")

    def speed(self, scene: Scene) -> float:
        """The speed of a job as a share of the planned one; 0 if its next steps learn something else, or never end."""
        if scene.night.hung:
            return 0.0
        one, weights = scene.job, scene.night.state(scene.now).weights
        own, planned = (step(each.clocked(CHECKPOINT - 1)) for each in (one, self.planned))
        if own.hung or one.trained != self.planned.trained or not (weights == weights[:1]).all():
            return 0.0
        return planned.timeline.makespan / own.timeline.makespan

    # What it costs

    def bill(self) -> str:
        scene, stands, acts, used = self.story
        last, waits = scene.night.reports(scene.now)[-1], scene.job.patience if scene.night.hung else 0.0
        at = clock(last.begins + last.seconds + waits + 60 * stands)
        return f"It is {at}, after {counted(acts, 'change')} and {counted(len(used), 'measurement')} since."

    def cost(self, done: Night, stands: float = 0.0) -> tuple[int, int]:
        """The steps that a job is behind the plan, and the device-hours that makes.

        Until the morning it is what it has learned less than the plan. From then on, until somebody looks at it in the
        evening, it goes on as it is: at its speed, or for nothing if it hangs or does not learn what was planned.
        """
        planned, own = night(self.planned).by(self._morning), done.by(self._morning - 60 * stands)
        behind = reached(planned, planned) - reached(own, planned)
        behind += (1 - self.speed(Scene(done, len(own)))) * DAY / planned[0].seconds
        seconds = behind * planned[0].seconds * self.planned.world
        return round(behind * REPORT), round(seconds / 3600)

    def par(self) -> tuple[int, int]:
        """The cost of the best way: the measurements that tell it, then what mends it, from the best checkpoint."""
        told = {name for one in self._drawn for name in one.kind.told}
        stands = sum(INSTRUMENTS[name].minutes for name in told)
        saved = range(self._drawn[0].onset // CHECKPOINT * CHECKPOINT, self._last + 1, CHECKPOINT)
        best = min(saved, key=lambda at: held_out(self._call.night.state(at)))
        return min(self.cost(self._mended(stands, resume)) for resume in {saved[0], best, self._last})

    def _mended(self, stands: float, resume: int) -> Night:
        scene = self._call
        for one in sorted(self._drawn, key=lambda one: one.kind.kind):  # what "learns" wrong comes before what is slow
            scene = self.after(scene, stands, one.kind.act, one.place, resume)
            stands, resume = 0.0, checkpoints(scene)[-1]
        return scene.night

    def debrief(self) -> Feedback:
        """Tell what it was and what the night has cost, once the job is well, or in a room."""
        scene, stands, acts, _ = self.story
        if not is_for_a_room() and not (acts and self.speed(scene) > WELL):
            return Feedback("", Outcome(None, "First make the job well again."), title="There is no debrief yet.")
        ways = {
            "Yours": self.cost(scene.night, stands),
            "Par": self.par(),
            "Back to bed until the morning": self.cost(self.after(self._call, 0.0, "wait", "", None).night),
            "Start it again, and nothing else": self.cost(self.after(self._call, 0.0, "restart", "", self._last).night),
        }
        behind = f"behind the plan at {clock(self._morning)} and until the evening"
        said = bullets(
            f"{way}: {counted(n, 'step')} {behind}, {counted(h, 'device-hour')}" for way, (n, h) in ways.items()
        )
        what = " And ".join(_said()[f"culprit: {one.name}"].partition("\n\n")[2] for one in self._drawn)
        incident = case_of(self._name).sections["incident"].text
        title = f"It was {' and '.join(map(str, self._drawn))}."
        return Feedback("", Outcome(None, f"{what}\n\n{said}", incident), title=title)

    @property
    def _last(self) -> int:
        """The last checkpoint before somebody noticed."""
        return self._call.now // CHECKPOINT * CHECKPOINT

    # What one sees

    def evidence(self) -> Feedback:
        """Everything that costs nothing to see: the timeline, the plan, changed settings, and lines of the log."""
        scene = self.story.scene
        said = {
            "As it was planned": [*self.planned.configuration, f"in a step, rank 0 {spent(self.planned, 0)}"],
            "Settings that somebody wrote down as changed": self._settings(),
            "From the log": self._log(),
        }
        text = "\n\n".join(f"{what}:\n\n{bullets(lines)}" for what, lines in said.items())
        outcome = Outcome(None, f"{self._page(scene)}\n\n{text}", pictures=(timeline(scene),))
        return Feedback("", outcome, title="What everybody sees")

    def _page(self, scene: Scene) -> str:
        """The message that woke you: of a job that hangs, the watchdog's, from a rank that waited."""
        if not scene.night.hung:
            return "Somebody looked at the curves and called you. The job goes on."
        calls = scene.night.hung
        waits = [rank for rank, call in enumerate(calls) if call == max(calls, key=calls.count)]
        rank = Random(f"watchdog {self.seed}").choice(waits)
        return (
            f"The watchdog has ended rank {rank}, whose collective was not over after {scene.job.patience:.0f} s. "
            f"All other ranks were ended with it. The last report is of "
            f"{clock(scene.night.reports(scene.now)[-1].begins)}."
        )

    def _settings(self) -> list[str]:
        """Changed settings: harmless ones, and a culprit's a little more often than any other."""
        random, lines = Random(f"settings {self._name} {self.seed}"), listed("settings")
        guilty = [one.place for one in self._drawn if one.kind.act == "setting" and random.random() < NOTED]
        names = dict.fromkeys([*guilty, *random.sample(list(lines), SETTINGS)])
        shown = random.sample(list(names)[:SETTINGS], SETTINGS)
        times = sorted(3600 * random.uniform(0, 4) for _ in shown)
        return [f"{clock(at)} {lines[name].split(' | ')[1]}" for at, name in zip(times, shown, strict=True)]

    def _log(self) -> list[str]:
        """Lines of the log. Which of them are traces of a culprit depends on the seed."""
        random, lines = Random(f"log {self._name} {self.seed}"), listed("log")
        a_report = REPORT * step(self.planned.clocked(0)).timeline.makespan + self.planned.saving / CHECKPOINT
        onset = a_report * self._drawn[0].onset
        said = []
        for name in random.sample(list(lines), LINES):
            traced = next((one for one in self._drawn if one.name == name.split()[0]), None)
            at, places = random.uniform(0, onset + self.planned.patience), self._places(random, None)
            if traced and random.random() < 0.5:
                at, places = onset - random.uniform(0, 120), self._places(random, traced)
            said.append((at, lines[name].format(**places)))
        return [f"{clock(at)} {line}" for at, line in sorted(said)]

    def _places(self, random: Random, one: Drawn | None) -> dict[str, int]:
        """A rank, and what belongs to it: any, or one at the place of a culprit."""
        job = self.planned
        places = [
            {"rank": rank, "device": job.device(rank), "node": job.node(rank), "shard": rank // job.pp // job.tp}
            for rank in range(job.world)
        ]
        return random.choice([place for place in places if one is None or place.get(one.noun, one.place) == one.place])


def _check(name: str, value: Any, known: Iterable[Any]) -> None:
    """Raises ValueError for what is not known."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is not there; choose one of {', '.join(map(str, known))}")
