"""A night with a fault: what the engineer on call sees, measures and does, and what it costs until the morning.

    evidence()      the timeline, memory, settings that somebody changed, and lines of the log: free
    measure(NAME)   an instrument: the job stands still for its minutes
    rehearse(NAME)  a suspect, tried on the healthy job with another magnitude: minutes, too
    act(...)        what is done, where, and from which checkpoint: the job goes on with that change
    debrief()       what it was, and what the night has cost beside other ways to spend it

A seed draws the culprits, their places and magnitudes, the moment, and which of all lines are their traces. What is
done stands in the journal, and the night follows from it, so a restarted notebook goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from course_lib.classroom.scenarios.jobs.instruments import INSTRUMENTS, Reading, Scene, checkpoints, clock, timeline
from course_lib.classroom.scenarios.jobs.job import CHECKPOINT, REPORT, Change, Job
from course_lib.classroom.scenarios.jobs.night import night, reached
from course_lib.classroom.scenarios.jobs.step import step
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


class Act(NamedTuple):
    """What was done. resume: the checkpoint from which the job went on; None: it was not started again."""

    what: str
    place: Any
    resume: int | None


@cache
def _said() -> dict[str, str]:
    """The words for culprits, acts, settings and the log, by heading."""
    return {heading.lstrip("# "): text for _, heading, text in sections(Path(__file__).with_name("night.md"))}


def listed(heading: str) -> dict[str, str]:
    """The items of a list, each "name: words"."""
    return dict(item.split(": ", 1) for item in items(_said()[heading]))


@dataclass(frozen=True)
class Fault:
    """A case. healthy: the job as planned.  culprits: names of those that it chooses among."""

    name: str
    healthy: Job
    culprits: tuple[str, ...]

    def variant(self, seed: int = 0) -> Incident:
        """Draw a night. Raises ValueError for a seed that is no number from 0 to 9999."""
        return Incident(self, checked(seed))


@dataclass(frozen=True)
class Incident:
    case: Fault
    seed: int = 0

    @cached_property
    def _drawn(self) -> list[Drawn]:
        random = Random(f"{self.case.name} {self.seed}")
        chosen = [random.choice(self.case.culprits)]
        others = [name for name in self.case.culprits if {CULPRITS[name].kind, CULPRITS[chosen[0]].kind} == BOTH]
        chosen += [random.choice(others)] if others and random.random() < TWO else []
        onset = 10 * random.randrange(8, 12)
        return [
            Drawn(name, CULPRITS[name].draw(random, self.planned), random.choice(CULPRITS[name].often), onset)
            for name in chosen
        ]

    @cached_property
    def planned(self) -> Job:
        """The job of this night, whose links are as good as the seed has it."""
        link, better = self.case.healthy.between, Random(f"link {self.seed}").uniform(0.8, 1.4)
        return self.case.healthy.but(seed=self.seed, between=Link(link.latency, link.bandwidth * better))

    @cached_property
    def _called(self) -> int:
        """The report after which somebody noticed; a job that hangs has no more."""
        wanted = self._drawn[0].onset + Random(f"called {self.seed}").randrange(28, 45)
        return len(night(self._at_first).reports(wanted))

    @cached_property
    def _morning(self) -> float:
        """When the day shift comes, in seconds after the evening."""
        return night(self._at_first).reports(self._called)[-1].begins + HOURS

    @cached_property
    def _at_first(self) -> Job:
        return self.planned.after(*(one.change for one in self._drawn))

    # What was done

    def _notes(self) -> list[journal.Note]:
        own = (self.case.name, f"{self.case.name}_night")
        return [note for note in journal.notes() if note.question in own and note.seed == self.seed]

    def _story(self) -> tuple[Scene, float, list[Act], list[str]]:
        """The job after all that was done, minutes for which it stands still since, the acts, and the measurements."""
        job, now, stands, acts, used = self._at_first, self._called, 0.0, list[Act](), list[str]()
        for note in self._notes():
            if note.what == "measured" and note.answer not in used:
                used.append(note.answer)
                stands += INSTRUMENTS[note.answer].minutes if note.answer in INSTRUMENTS else REHEARSAL
            elif note.what == "ran":
                acts.append(Act(*note.answer))
                job, now = self.after(job, now, stands, acts[-1])
                stands, used = 0.0, []
        return Scene(night(job), now), stands, acts, used

    def after(self, job: Job, now: int, stands: float, act: Act, watch: int = WATCH) -> tuple[Job, int]:
        """The job after an act, and the number of its reports by the time one looks again."""
        fields = mended(job.at(now, always=True), self.planned, act.what, act.place)
        stands += ACTS[act.what].minutes + (job.patience / 60 if night(job).hung else 0)
        job = job.after(Change(now, fields, 1.0, act.resume, stands))
        return job, len(night(job).reports(now + watch))

    @property
    def scene(self) -> Scene:
        return self._story()[0]

    def measure(self, name: str) -> Feedback:
        """Use an instrument; using it again costs again only after an act. Raises ValueError for an unknown one."""
        if name not in INSTRUMENTS:
            raise ValueError(f"name={name!r} is no instrument; choose one of {', '.join(INSTRUMENTS)}")
        reading = INSTRUMENTS[name].read(self.scene)
        if name not in self._story()[3]:
            journal.record("measured", self.case.name, self.seed, name)
        return _shown(INSTRUMENTS[name].title, reading)

    def rehearse(self, name: str) -> Feedback:
        """Try a suspect on the healthy job, at another place and with another magnitude."""
        if name not in self.case.culprits:
            raise ValueError(f"name={name!r} is no suspect here; choose one of {', '.join(self.case.culprits)}")
        random, key = Random(f"rehearsed {self.case.name} {self.seed} {name}"), f"rehearse {name}"
        if key not in self._story()[3]:
            journal.record("measured", self.case.name, self.seed, key)
        job = self.planned.after(Change(20, {CULPRITS[name].field: CULPRITS[name].draw(random, self.planned)}))
        scene = Scene(night(job), 60)
        shown = Scene(scene.night, len(scene.night.reports(60)))
        return Feedback(
            "", Outcome(None, "From report 20 on.", pictures=(timeline(shown),)), title=f"With {self.called(name)}"
        )

    def act(self, what: str, place: Any = "", resume: int | None = None) -> Feedback:
        """Do something. place: where, as the list of acts says.  resume: a checkpoint; None: the latest.

        Raises ValueError for what cannot be done.
        """
        scene, stands, *_ = self._story()
        if what not in ACTS:
            raise ValueError(f"what={what!r} is nothing one can do; choose one of {', '.join(ACTS)}")
        places, saved = {str(one): one for one in ACTS[what].places(scene.job)}, checkpoints(scene)
        if str(place) not in places:
            raise ValueError(f"place={place!r} is no place for that; choose one of {', '.join(places)}")
        resume = None if what == "wait" else saved[-1] if resume is None else resume
        if resume not in (None, *saved):
            raise ValueError(f"resume={resume!r} is no checkpoint; choose one of {', '.join(map(str, saved))}")
        act = Act(what, places[str(place)], resume)
        job, now = self.after(scene.night.job, scene.now, stands, act)
        well = self.is_well(job, now)
        journal.record("ran", f"{self.case.name}_night", self.seed, list(act), well)
        words = "The job is as it was planned again." if well else "The job is not as it was planned."
        picture = timeline(Scene(night(job), now))
        return Feedback(self.in_words(act), Outcome(well, f"{words} {self.bill()}", pictures=(picture,)))

    def is_well(self, job: Job, now: int) -> bool:
        """Whether it is as fast as planned, and learns what was planned."""
        return self._goes_on(job, now) > WELL

    def _goes_on(self, job: Job, now: int) -> float:
        """The speed of a job as a share of the planned one; 0 if its next steps learn something else, or never end."""
        if night(job).hung:
            return 0.0
        one, weights = job.at(now, always=True), night(job).state(now).weights
        own, planned = (step(each.clocked(CHECKPOINT - 1)) for each in (one, self.planned))
        if own.hung or one.trained != self.planned.trained or not (weights == weights[:1]).all():
            return 0.0
        return (planned.timeline.makespan - self.planned.saving) / (own.timeline.makespan - one.saving)

    # What it costs

    def bill(self) -> str:
        scene, stands, acts, used = self._story()
        last = scene.night.reports(scene.now)[-1]
        at = clock(last.begins + last.seconds + 60 * stands)
        return f"It is {at}, after {counted(len(acts), 'change')} and {counted(len(used), 'measurement')} since."

    def cost(self, job: Job, stands: float = 0.0) -> tuple[int, int]:
        """The steps that a job is behind the plan, and the device-hours that makes.

        Until the morning it is what it has learned less than the plan. From then on, until somebody looks at it in the
        evening, it goes on as it is: at its speed, or for nothing if it hangs or does not learn what was planned.
        """
        planned, own = night(self.planned).by(self._morning), night(job).by(self._morning - 60 * stands)
        behind = reached(planned, planned) - reached(own, planned)
        behind += (1 - self._goes_on(job, len(own))) * DAY / planned[0].seconds
        seconds = behind * planned[0].seconds * self.planned.world
        return round(behind * REPORT), round(seconds / 3600)

    def par(self) -> tuple[int, int]:
        """The cost of the best way: the measurements that tell it, then what mends it, from the best checkpoint."""
        return min(self.cost(job) for job in self._mended())

    def _mended(self) -> Iterator[Job]:
        told = dict.fromkeys(name for one in self._drawn for name in one.kind.told)
        stands = sum(INSTRUMENTS[name].minutes for name in told)
        for resume in {self._drawn[0].onset, self._last}:
            job, now = self._at_first, self._called
            for number, one in enumerate(self._drawn):
                act = Act(one.kind.act, one.place, resume)
                job, now = self.after(job, now, 0.0 if number else stands, act, watch=1)
            yield job

    def debrief(self) -> Feedback:
        """Tell what it was and what the night has cost, once the job is well, or in a room."""
        scene, stands, acts, _ = self._story()
        if not is_for_a_room() and not (acts and self.is_well(scene.night.job, scene.now)):
            return Feedback("", Outcome(None, "First make the job well again."), title="There is no debrief yet.")
        sleep = Act("wait", "", None), Act("restart", "", self._last)
        waited, again = (self.after(self._at_first, self._called, 0.0, act)[0] for act in sleep)
        ways = {
            "Yours": self.cost(scene.night.job, stands),
            "Par": self.par(),
            "Back to bed until the morning": self.cost(waited),
            "Start it again, and nothing else": self.cost(again),
        }
        behind = f"behind the plan at {clock(self._morning)} and until the evening"
        said = bullets(
            f"{way}: {counted(n, 'step')} {behind}, {counted(h, 'device-hour')}" for way, (n, h) in ways.items()
        )
        what = " And ".join(_said()[f"culprit: {one.name}"].partition("\n\n")[2] for one in self._drawn)
        incident = case_of(f"{self.case.name}_night").sections["incident"].text
        title = f"It was {' and '.join(map(self.in_brief, self._drawn))}."
        return Feedback("", Outcome(None, f"{what}\n\n{said}", incident), title=title)

    @property
    def _last(self) -> int:
        """The last checkpoint before somebody noticed."""
        return self._called // CHECKPOINT * CHECKPOINT

    # What one sees

    def called(self, culprit: str) -> str:
        return _said()[f"culprit: {culprit}"].partition("\n\n")[0]

    def in_brief(self, one: Drawn) -> str:
        """A culprit in words, with its place and the checkpoint before it."""
        noun = {"card": "device", "cable": "node"}.get(one.kind.act, one.kind.act)
        where = "" if noun in ("setting", "restart") else f", {noun} {one.place}"
        return f"{self.called(one.name)}{where}, from step {one.onset} on"

    def in_words(self, act: Act) -> str:
        place = listed("settings")[act.place].partition(" | ")[0] if act.what == "setting" else act.place
        going_on = "" if act.resume is None else f", from checkpoint {act.resume}"
        return f"{listed('acts')[act.what]} {place}".strip() + going_on

    def evidence(self) -> Feedback:
        """What everybody sees: the timeline, memory, the plan, changed settings, and lines of the log."""
        scene = self.scene
        jobs = {"planned": self.planned, "now": scene.job}
        memory = (f"{when}: {', '.join(f'{size / 1e6:.1f}' for size in job.memory)} MB" for when, job in jobs.items())
        said = {
            "As it was planned": self.planned.configuration,
            "Memory of each rank (modelled)": memory,
            "Settings that somebody wrote down as changed": self._settings(),
            "From the log": self._log(),
        }
        text = "\n\n".join(f"{what}:\n\n{bullets(lines)}" for what, lines in said.items())
        words = self._page()
        return Feedback(
            "", Outcome(None, f"{words}\n\n{text}", pictures=(timeline(scene),)), title="What everybody sees"
        )

    def _page(self) -> str:
        """The message that woke you: of a job that hangs, the watchdog's, from a rank that waited."""
        scene = self.scene
        if not scene.night.hung:
            return "Somebody looked at the curves and called you. The job goes on."
        calls = scene.night.hung
        waits = [rank for rank, call in enumerate(calls) if call == max(calls, key=calls.count)]
        rank = Random(f"watchdog {self.seed}").choice(waits)
        one = calls[rank]
        return (
            f"The watchdog has ended rank {rank}: {one.name}, number {one.number}, was not over after "
            f"{scene.job.patience:.0f} s. All other ranks were ended with it. The last report is of "
            f"{clock(scene.night.reports(scene.now)[-1].begins)}."
        )

    def _settings(self) -> list[str]:
        """Changed settings: harmless ones, and a culprit's a little more often than any other."""
        random, lines = Random(f"settings {self.seed}"), listed("settings")
        shown = random.sample(list(lines), SETTINGS)
        if random.random() < NOTED:
            shown = random.sample(list(dict.fromkeys([*self._guilty, *shown]))[:SETTINGS], SETTINGS)
        return [f"{clock(3600 * random.uniform(0, 4))} {lines[name].split(' | ')[1]}" for name in shown]

    @property
    def _guilty(self) -> list[str]:
        return [one.place for one in self._drawn if one.kind.act == "setting"]

    def _log(self) -> list[str]:
        """Lines of the log. Which of them are traces of a culprit depends on the seed."""
        random, lines = Random(f"log {self.seed}"), listed("log")
        a_report = REPORT * step(self.planned.clocked(0)).timeline.makespan + self.planned.saving / CHECKPOINT
        onset = a_report * self._drawn[0].onset
        said = []
        for name in random.sample(list(lines), LINES):
            traced = next((one for one in self._drawn if one.name == name.split()[0]), None)
            at, places = random.uniform(0, onset + 3600), self._places(random, None)
            if traced and random.random() < 0.5:
                at, places = onset - random.uniform(0, 120), self._places(random, traced)
            said.append((at, lines[name].format(**places)))
        return [f"{clock(at)} {line}" for at, line in sorted(said)]

    def _places(self, random: Random, one: Drawn | None) -> dict[str, int]:
        job = self.planned
        rank = random.randrange(job.world)
        if one and isinstance(one.place, int):
            act, place = one.kind.act, one.place
            if act == "shard":
                return {"shard": place, "rank": rank, "device": job.device(rank), "node": job.node(rank)}
            rank = next(r for r in range(job.world) if place == (job.device(r) if act == "card" else job.node(r)))
        return {"rank": rank, "device": job.device(rank), "node": job.node(rank), "shard": random.randrange(job.dp)}


def _shown(title: str, reading: Reading) -> Feedback:
    facts = bullets(f"{what}: {fact}" for what, fact in reading.facts.items())
    return Feedback("", Outcome(None, facts, pictures=reading.pictures), title=title)
