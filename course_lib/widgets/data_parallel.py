"""An explorer of data parallelism: turn a knob, and real ranks run one training step at the new setting.

    | ranks      --o---   4          | speed-up over the   |
    | batch size -o----   32 samples | number of ranks,    |
    | link speed ---o--   10 MB/s    | and the ideal       |
    | [x] overlap                    |                     |
    | what came of it, in words      |                     |
    | where the time went            |                     |
    | what every rank did in this step                     |

Devices and links are paced, so that a laptop can show what eight devices would do.

A move runs one step and draws it at once. When no move has followed for a moment, the rest of the speed-up curve
is measured, point by point, so that a new move never waits for long. All of it happens in the kernel's main
thread, between its messages: of the moves made meanwhile, the browser keeps back all but the last.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Callable
from html import escape
from statistics import median
from typing import Any, NamedTuple

import ipywidgets as widgets

from course_lib.experiments import training_step
from course_lib.figures import Picture, Timing, attribute, gantt, lost_time, speed_up
from course_lib.figures.axis import duration, percent
from course_lib.figures.shares import CAUSES
from course_lib.ranks import Link, Pace, RunError
from course_lib.timeline import Timeline
from course_lib.widgets.controls import Slider

SECONDS_PER_SAMPLE = {"forward": 0.002, "backward": 0.004}
LATENCY = 0.0005  # seconds
BATCH_SIZES = (16, 32, 64)
LINK_SPEEDS = (2, 5, 10, 20, 100)  # megabytes per second
CURVE = (1, 2, 4, 8)  # numbers of ranks that every speed-up curve gets
PAUSE = 0.6  # seconds without a move before the rest of the curve is measured
BREATH = 0.05  # seconds in which a move can come between two of those measurements
WIDTH, CHART_WIDTH = 850, 420  # pixels


class Setting(NamedTuple):
    """What the controls say. link_speed: between any two ranks, in megabytes per second."""

    ranks: int
    batch_size: int
    link_speed: float
    overlap: bool

    def with_ranks(self, ranks: int) -> Setting:
        if ranks == 1:  # it sends nothing: the same over every link
            return Setting(1, self.batch_size, max(LINK_SPEEDS), True)
        return self._replace(ranks=ranks)

    def run(self) -> Timeline:
        """One training step on real ranks, at the pace of the devices and links that they stand for."""
        pace = Pace(SECONDS_PER_SAMPLE, Link(LATENCY, self.link_speed * 1e6))
        return training_step(self.ranks, self.batch_size, pace, self.overlap)


class Measured:
    """The steps run so far, from which each setting has its speed-up curve."""

    def __init__(self) -> None:
        self._timings: dict[Setting, list[Timing]] = defaultdict(list)

    def run(self, setting: Setting) -> Timeline:
        step = setting.run()
        self._timings[setting.with_ranks(setting.ranks)].append(Timing.of(step))
        return step

    def curve(self, setting: Setting) -> list[Timing]:
        """The timings of all settings that differ from this one in the number of ranks alone."""
        settings = (setting.with_ranks(ranks) for ranks in range(1, max(CURVE) + 1))
        return [timing for one in settings for timing in self._timings.get(one, [])]

    def missing(self, setting: Setting) -> list[Setting]:
        """What its curve lacks. One rank, with which all are compared, comes first, and for other batch sizes too."""
        sizes = (setting.batch_size, *BATCH_SIZES)
        wanted = [setting._replace(batch_size=size).with_ranks(1) for size in sizes]
        wanted += [setting.with_ranks(ranks) for ranks in CURVE]
        return [one for one in dict.fromkeys(wanted) if one not in self._timings]


class View(NamedTuple):
    """All there is to see of a step."""

    sentences: str
    curve: Picture
    losses: Picture
    step: Picture


def draw(setting: Setting, step: Timeline, curve: list[Timing]) -> View:
    """A step in pictures. curve: the timings to compare it with, one rank's among them."""
    return View(
        describe(setting, step, curve),
        speed_up(curve, CHART_WIDTH, "How much faster are more ranks?"),
        lost_time({_count(setting.ranks): attribute(step)}, CHART_WIDTH, "Where did the time go?"),
        gantt(step, width=WIDTH, title="What did every rank do?"),
    )


def describe(setting: Setting, step: Timeline, curve: list[Timing]) -> str:
    """What came of a step, in two sentences."""
    text = f"{_count(setting.ranks)}, {setting.batch_size} samples, {step.origin}: {duration(step.makespan)} for a step"
    if setting.ranks == 1:
        return f"{text}. One rank has nobody to wait for and nothing to send."
    shares = attribute(step)
    alone = median(timing.seconds for timing in curve if timing.ranks == 1)
    cause = max(("wait", "transfer", "rest"), key=lambda cause: getattr(shares, cause))
    return (
        f"{text}, {alone / step.makespan:.1f} times as fast as 1 rank (ideal: {setting.ranks}). "
        f"The ranks computed for {percent(shares.compute)} of the time; "
        f"the largest loss is {CAUSES[cause]}, {percent(getattr(shares, cause))}."
    )


class DataParallelExplorer:
    """Shows itself in a notebook, with its controls; where widgets do not run, as the pictures it began with.

    What goes wrong in a run is said in place of the sentences, and the next move works.
    """

    def __init__(self, ranks: int = 4, batch_size: int = 32, link_speed: float = 5, overlap: bool = True) -> None:
        self.ranks = Slider("ranks", range(1, max(CURVE) + 1), ranks)
        self.batch_size = Slider("batch size", BATCH_SIZES, batch_size, [f"{size} samples" for size in BATCH_SIZES])
        self.link_speed = Slider("link speed", LINK_SPEEDS, link_speed, [f"{speed} MB/s" for speed in LINK_SPEEDS])
        self.overlap = widgets.Checkbox(overlap, description="overlap: send while computing", indent=False)
        self.places: dict[str, Any] = {
            "sentences": _html(CHART_WIDTH),
            "curve": _html(CHART_WIDTH),
            "losses": _html(CHART_WIDTH),
            "step": _html(WIDTH),
        }
        self._key = f"explorer-{secrets.token_hex(4)}"
        self._measured = Measured()
        self._last: tuple[Setting, Timeline] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if self._try(self._run):
            self._try(self.complete_curve)
        self._box = self._arrange(**self.places)
        self._stored = self._picture()
        for control in self.controls:
            control.observe(lambda _: self.move(), ["index", "value"])

    @property
    def controls(self) -> list[Any]:
        return [self.ranks, self.batch_size, self.link_speed, self.overlap]

    @property
    def setting(self) -> Setting:
        return Setting(*(control.value for control in self.controls))

    def _arrange(self, sentences: Any, curve: Any, losses: Any, step: Any) -> Any:
        left = widgets.VBox([*self.controls, sentences, losses])
        # Side by side, or below each other on a narrow page.
        charts = widgets.HBox([left, curve], layout=widgets.Layout(flex_flow="row wrap", align_items="flex-end"))
        return widgets.VBox([charts, step])

    def move(self) -> None:
        """Run one step as the controls say and draw it; the rest of its curve is measured when no move follows."""
        if self._try(self._run):
            self._plan(PAUSE)

    def complete_curve(self) -> None:
        """Measure all that the speed-up curve lacks."""
        while missing := self._measured.missing(self.setting):
            self._measured.run(missing[0])
        self._draw()

    def _run(self) -> None:
        setting = self.setting
        alone = setting.with_ranks(1)
        if alone in self._measured.missing(setting):
            self._measured.run(alone)
        self._last = setting, self._measured.run(setting)
        self._draw()

    def _measure_more(self) -> None:
        """One more point of the curve; when it has all, the ranks for the next move are made ready."""
        missing = self._measured.missing(self.setting)
        self._measured.run(missing[0] if missing else self.setting)
        self._draw()
        if missing:
            self._plan(BREATH)

    def _plan(self, seconds: float) -> None:
        """Measure more after so many seconds. Without an event loop, as in a plain script, nobody does."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timer = loop.call_later(seconds, self._try, self._measure_more)

    def _try(self, action: Callable[[], None]) -> bool:
        """Whether it went well; if not, why it did not is there to read."""
        try:
            action()
        except (Exception, KeyboardInterrupt) as error:
            reason = error.message if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            text = f"This step could not be run. {reason} Move a control to try again."
            self._say(text, "alert")
            return False
        return True

    def _draw(self) -> None:
        if self._last is None:
            return
        view = self._view()
        self._say(view.sentences, "status")
        for name in ("losses", "curve", "step"):
            # Always the same ids, so that a picture that did not change is not sent again.
            picture = getattr(view, name).inline(key=f"{self._key}-{name}")
            self.places[name].value = f"<div style='line-height:1.4'>{picture}</div>"

    def _say(self, text: str, role: str) -> None:
        """role: "status" or "alert", so that screen readers speak up."""
        self.places["sentences"].value = f"<p role='{role}' style='line-height:1.4;margin:8px 0'>{escape(text)}</p>"

    def _view(self) -> View:
        assert self._last is not None
        setting, step = self._last
        return draw(setting, step, self._measured.curve(setting))

    def _picture(self) -> dict[str, str]:
        """What stays of the explorer where no widget runs."""
        if self._last is None:
            return {"text/plain": "", "text/html": self.places["sentences"].value}
        view = self._view()
        curve, losses, step = (picture._repr_mimebundle_()["text/html"] for picture in view[1:])
        columns = "".join(f"<div style='max-width:{CHART_WIDTH}px'>{chart}</div>" for chart in (losses, curve))
        charts = f"<div style='display:flex;flex-wrap:wrap;align-items:flex-end'>{columns}</div>"
        invitation = "<p><i>Run this cell for the controls: ranks, batch size, link speed and overlap.</i></p>"
        html = f"{invitation}<p>{escape(view.sentences)}</p>{charts}{step}"
        return {"text/plain": view.sentences, "text/html": html}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {**self._box._repr_mimebundle_(), **self._stored}


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _html(width: int) -> Any:
    return widgets.HTML(layout=widgets.Layout(width=f"{width}px", max_width="100%"))
