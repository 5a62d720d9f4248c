"""Explorers: controls, and beside them sentences and pictures that are redrawn in place.

    Explorer([slider, slider], look)     look(*values) runs or calculates something at the controls' values

It yields a View, and more if there is more to find out (other points of a curve). A move of a control shows the first
at once; the others follow, one at a time, once there was no move for a moment, so that a new move never waits long.
Then the settings one move away may be prepared, while one looks at this one.
All of it happens in the kernel's main thread, between its messages: of the moves made meanwhile, the browser holds back
all but the last. Anything that takes longer than a blink shows the time left, and can be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from math import isclose
from typing import Any, NamedTuple

import ipywidgets as widgets

from course_lib.classroom.widgets.answers import Button
from course_lib.classroom.widgets.controls import in_words
from course_lib.classroom.widgets.player import WIDTH, Player
from course_lib.classroom.widgets.running import Running, attempt, explained, said, shown
from course_lib.figures import Picture
from course_lib.figures.axis import duration, percent
from course_lib.figures.svg import scaled
from course_lib.ranks import fenced
from course_lib.timeline import Timeline

PAUSE = 0.6  # seconds without a move before more views are made
BREATH = 0.05  # seconds in which a move can come between two views
HALF = WIDTH // 2 - 5  # pixels
EXACTLY = "exactly as predicted"
AGAIN = "Move a control to go on."


def compared(seconds: float, predicted: float) -> str:
    """The time of an emulated run beside the prediction, in words."""
    return EXACTLY if isclose(seconds, predicted) else f"{_difference(seconds, predicted)} than predicted"


def beside_pinned(seconds: float, pinned: float) -> str:
    """The time of a step beside the pinned one, in words."""
    if isclose(seconds, pinned):
        return "This step takes exactly as long as the pinned one"
    return f"This step is {_difference(seconds, pinned)} than the pinned one"


def _difference(seconds: float, other: float) -> str:
    off = abs(seconds - other)
    how_much = percent(off / other) if off >= 0.01 * other else duration(off)
    return f"{how_much} {'longer' if seconds > other else 'shorter'}"


class View(NamedTuple):
    """The view of one setting: sentences under the controls, a picture beside them and maybe one below.

    left: the number of views to come.
    """

    sentences: str
    beside: Picture
    below: Picture | None = None
    left: int = 0

    @property
    def pictures(self) -> list[Picture]:
        return [picture for picture in (self.beside, self.below) if picture]


class Runs(dict[Any, Any]):
    """The runs of all settings so far; a missing one is run first."""

    def __missing__(self, setting: Any) -> Any:
        self[setting] = setting.run()
        return self[setting]

    def one_by_one(self, settings: Sequence[Any]) -> Iterator[int]:
        """Run the missing settings, one for each step of the iteration; yield how many are left."""
        while missing := [setting for setting in settings if setting not in self]:
            yield len(missing)
            self[missing[0]] = missing[0].run()
        yield 0


class Explorer:
    """An explorer as a widget, with its controls; without widgets, as its first pictures.

    controls: sliders.
    look: called with these values; yields ever more complete views.
    heights: pixels reserved for the part above, and for the picture below, so that nothing moves when they grow.
    prepare: called with the values of settings that are one move away, so that `look` has less to do when they come.

    An error is shown in place of the sentences, and the next move works. If a picture shows a timeline, a button plays
    it, until the next move. Under it lies the run of the setting before, in thin bars, or the one that a button pins.
    """

    def __init__(
        self,
        controls: Sequence[Any],
        look: Callable[..., Iterable[View]],
        heights: tuple[int, int] = (0, 0),
        prepare: Callable[..., object] | None = None,
    ) -> None:
        self.controls, self.look, self.prepare = list(controls), look, prepare
        self._views: Iterator[View] = iter(())  # views to come
        self._near: Iterator[list[Any]] = iter(())  # settings to prepare
        self.sentences, self.beside, self.below = (widgets.HTML(layout={"max_width": "100%"}) for _ in range(3))
        self._places = self.beside, self.below
        self.running, self._stage = Running(), widgets.VBox()
        self.play, self.pin = (Button(partial(self._act, do)) for do in (self._open_player, self._pin_or_unpin))
        self._pinned: tuple[Timeline, str] | None = None  # their setting
        self._before: Timeline | None = None  # the run of the last setting
        self._key = f"explorer-{secrets.token_hex(4)}"
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = {"first": 0.0, "next": 0.0}  # seconds that the last such view took
        self.view: View | None = None
        self._shown: list[Any] = []  # its setting
        self._is_back = False
        self._box = self._arrange(*heights)
        if self._try(self._look_anew) and self._try(self.complete) and prepare:
            self._plan(PAUSE)
        self._stored = self._picture()
        for control in self.controls:
            control.observe(lambda change: self.move(change.owner.last.get("moved", 0.0)), ["index", "value"])
        self.running.observe(lambda _: self.stop(), "stopped")

    def move(self, when: float = 0.0) -> None:
        """Show the view at the controls' values, and plan the next ones.

        when: on the clock of `running.stopped`. A move that the browser held back until after Stop is undone.
        """
        if self._is_back:
            return
        if 0 < when < self.running.stopped:
            self.stop()
            return
        self._box.add_class("course-old")
        self._close_player()
        self._before = next(iter(self._timelines), None)
        if self._try(self._move):
            self.running.end()
            self._plan(PAUSE)

    def complete(self) -> None:
        """Make all missing views."""
        while self._look_further():
            pass

    def stop(self) -> None:
        """Stop until the next move. The last view stays, and the controls go back to its setting."""
        # The button also sends an interrupt, which may come late and have nothing left to stop.
        with contextlib.suppress(KeyboardInterrupt), fenced(always=True):
            if self._timer is not None:
                self._timer.cancel()
            self._is_back = True
            for control, value in zip(self.controls, self._shown, strict=False):
                control.value = value
            self._is_back = False
            self._box.remove_class("course-old")
            self._fail(f"{self.view.sentences if self.view else ''} Stopped. {AGAIN}".strip())

    def _act(self, do: Callable[[], object]) -> None:
        """Do what a button says, with the setting that was chosen last."""
        for control in self.controls:
            if control.last.get("moved", 0.0) > self.running.stopped:
                control.set_state(control.last)
        do()

    def _open_player(self) -> None:
        """Open a player: of the picture that moves, or of the first run, in place of the picture below."""
        runs, clocked = self._timelines, [picture for picture in self._pictures if picture.clock]
        self.below.layout.display = "none" if runs else None
        self._stage.children = [Player(runs[0]) if runs else Player(clocked[0], is_shown=False)]

    def _pin_or_unpin(self) -> None:
        """Pin the first run in the pictures, to compare others with it; or unpin it."""
        setting = ", ".join(in_words(control) for control in self.controls)
        self._pinned = None if self._pinned else (self._timelines[0], setting)
        self._close_player()
        if self.view:
            self._draw(self.view)

    def _close_player(self) -> None:
        self.below.layout.display = None
        self._stage.children = ()

    @property
    def _timelines(self) -> list[Timeline]:
        return [panel.timeline for picture in self._pictures for panel in picture.timelines]

    @property
    def _pictures(self) -> list[Picture]:
        return self.view.pictures if self.view else []

    def _move(self) -> None:
        self.running.begin("Running", self._seconds["first"])
        self._look_anew()

    def _look_anew(self) -> None:
        self._views = self._all_views()
        self._look_further("first")

    def _all_views(self) -> Iterator[View]:
        """The views of `look`, which runs with the first one."""
        self._near = self._one_move_away()
        yield from self.look(*self._values)

    @property
    def _values(self) -> list[Any]:
        return [control.value for control in self.controls]

    def _one_move_away(self) -> Iterator[list[Any]]:
        """The settings one move away; those of the control that was moved last come first."""
        values = self._values
        for control in sorted(self.controls, key=lambda control: -control.last.get("moved", 0.0)):
            place = self.controls.index(control)
            for index in (control.index - 1, control.index + 1):
                if 0 <= index < len(control.options):
                    yield [*values[:place], control.options[index], *values[place + 1 :]]

    def _look_further(self, which: str = "next") -> bool:
        """Make the next view; return whether there was one."""
        start = time.monotonic()
        view = next(self._views, None)
        if view:
            self._seconds[which] = time.monotonic() - start
            self._draw(view)
        return view is not None

    def _continue(self) -> None:
        self._announce()
        if self._look_further():
            self._announce()
            self._plan(BREATH)
        else:
            self.running.end()
            self._prepare_next()

    def _prepare_next(self) -> None:
        """Prepare one of the settings around; what goes wrong with it is told to who chooses it."""
        if self.prepare and (values := next(self._near, None)) and attempt(partial(self.prepare, *values)) is None:
            self._plan(BREATH)

    def _announce(self) -> None:
        """Announce the views that are still to come."""
        if self.view and self.view.left:
            self.running.begin(f"{self.view.left} more to run", self.view.left * self._seconds["next"])

    def _plan(self, seconds: float) -> None:
        """Continue after some seconds, if there is an event loop (a plain script has none)."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._timer = loop.call_later(seconds, self._try, self._continue)

    def _try(self, action: Callable[[], object]) -> bool:
        """Run an action and show its error; return whether there was none."""
        problem = attempt(action)
        if isinstance(problem, KeyboardInterrupt):
            self.stop()
        elif problem:
            self._fail(explained(problem, AGAIN))
        return problem is None

    def _fail(self, text: str) -> None:
        self.running.end()
        self.sentences.value = said(text, "alert")

    def _draw(self, view: View) -> None:
        self.view, self._shown = view, self._values
        self._box.remove_class("course-old")
        ghost, name, text = self._ghost()
        self.sentences.value = said(view.sentences + text)
        self.pin.label = ("Unpin" if self._pinned else "Pin") if self._timelines else ""
        self.play.label = "Play" if self._timelines or any(picture.clock for picture in view.pictures) else ""
        for number, (place, picture) in enumerate(zip(self._places, view.pictures, strict=False)):
            # The same ids each time, so that an unchanged picture is not sent again.
            over = picture.over(ghost=ghost, ghost_name=name) if picture.over and ghost else picture
            place.value = f"<div style='line-height:1.4'>{over.inline(f'{self._key}-{number}')}</div>"

    def _ghost(self) -> tuple[Timeline | None, str, str]:
        """The run under the first one: the pinned one, with a sentence that compares their times, or the one before."""
        runs = self._timelines
        if self._pinned and runs:
            run, setting = self._pinned
            return run, "pinned", f" {beside_pinned(runs[0].makespan, run.makespan)} ({setting})."
        return None if self._before in runs else self._before, "before", ""

    def _arrange(self, above: int, below: int) -> Any:
        self.play.layout.order = self.pin.layout.order = "-1"  # shown first, though Stop comes first with the Tab key
        left = widgets.VBox([*self.controls, widgets.HBox([self.running, self.play, self.pin]), self.sentences])
        left.layout = {"width": scaled(WIDTH - HALF - 4), "max_width": "100%"}  # 4: the margins beside it
        # Side by side, or below each other on a narrow page; a picture that grows must not move the controls.
        layout = widgets.Layout(flex_flow="row wrap", align_items="flex-start", min_height=scaled(above))
        self.below.layout.min_height, self.below.layout.margin = scaled(below), "0"
        box = widgets.VBox([widgets.HBox([left, self.beside], layout=layout), self.below, self._stage])
        box.layout.min_height = scaled(above + below)  # a player that needs less does not move what follows
        for place in self._places:
            place.add_class("course-picture")
        return box.add_class("course-live")

    def _picture(self) -> dict[str, str]:
        """The explorer without widgets."""
        if self.view is None:
            return {"text/plain": "", "text/html": self.sentences.value}
        names = ", ".join(control.label for control in self.controls)
        html = f"<p><i>Run this cell for the controls: {escape(names)}.</i></p><p>{escape(self.view.sentences)}</p>"
        html += "".join(f"<div>{picture._repr_mimebundle_()['text/html']}</div>" for picture in self.view.pictures)
        return {"text/plain": self.view.sentences, "text/html": html}

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return shown(self._box._repr_mimebundle_(), self._stored)
