"""Every explorer with real ranks during a run: it shows the time left, and it can be stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from course_lib import Span, Timeline
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import Explorer, View
from course_lib.figures import gantt, loss_curves
from course_lib.ranks import Deadlock
from tests.classroom.widgets.hands import in_a_kernel, move

PICTURE = gantt(Timeline([Span(0, "forward", "", 0.0, 1.0)], 1, "modelled"), width=420)


class Pieces:
    """An explorer with four views, one after the other."""

    def __init__(self) -> None:
        self.clock = 0.0  # seconds: each view takes ten milliseconds
        self.number = Slider("number", (1, 2, 3), 1)
        self.said: list[tuple[str, float]] = []
        self.explorer = Explorer([self.number, Slider("more", (False, True), True)], self.look)
        self.explorer.running.observe(lambda _: self.said.append(self.now), "words")

    @property
    def now(self) -> tuple[str, float]:
        return self.explorer.running.words, self.explorer.running.seconds

    def look(self, number: int, more: bool) -> Iterator[View]:
        for self.missing in (3, 2, 1, 0):
            self.clock += 0.01
            yield View(f"number {number}, {self.missing} missing", PICTURE, PICTURE, self.missing)


def moved(pieces: Pieces, during: Callable[[], None] = lambda: None) -> None:
    in_a_kernel(lambda: move(pieces.explorer, "number", 2), during)


@contextlib.contextmanager
def handled(handler: Any) -> Iterator[None]:
    """Set a handler of interrupts, as a kernel does, and check that it is still set afterwards."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        assert signal.signal(signal.SIGINT, before) is handler


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, no_pause: None) -> Pieces:
    pieces = Pieces()
    monkeypatch.setattr("course_lib.classroom.widgets.explorer.time", SimpleNamespace(monotonic=lambda: pieces.clock))
    return pieces


def test_long_work_says_how_much_there_is_to_do_and_for_how_long(pieces: Pieces) -> None:
    moved(pieces)
    assert [words for words, _ in pieces.said if "more" in words][-1] == "1 more to run"
    *_, seconds = [seconds for words, seconds in pieces.said if words == "2 more to run"]
    assert seconds == pytest.approx(0.02)
    assert pieces.now == ("", 0.0)
    assert pieces.missing == 0


def test_a_stop_takes_effect_between_two_pieces(pieces: Pieces) -> None:
    def press_stop() -> None:
        if pieces.missing == 2:
            pieces.explorer.running.stopped += 1

    moved(pieces, press_stop)
    assert pieces.missing == 2
    assert pieces.now == ("", 0.0)
    assert "number 2" in pieces.explorer.sentences.value


def test_a_stop_ends_a_run_in_the_middle_and_the_next_move_works(pieces: Pieces) -> None:
    def interrupted(*values: object) -> Iterator[View]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        raise AssertionError("nobody stopped it")

    pieces.explorer.look = interrupted
    with handled(signal.SIG_IGN):  # as between messages
        pieces.number.value = 3
    assert "Stopped. Move a control to go on." in pieces.explorer.sentences.value
    assert pieces.now == ("", 0.0)
    assert pieces.number.value == 1  # what the picture shows
    assert not is_dimmed(pieces)
    pieces.explorer.look = pieces.look
    pieces.number.value = 2
    assert "number 2" in pieces.explorer.sentences.value


def test_a_move_that_was_kept_back_until_after_a_stop_is_taken_back(pieces: Pieces) -> None:
    explorer, number = pieces.explorer, pieces.number
    explorer.running.stopped = 1000.0
    for moved, index, shown in ((999.0, 1, 0), (1001.0, 2, 2)):
        number.last = {"moved": moved, "index": index}  # the browser sends this at once, and the state later
        number.set_state({"index": index})
        assert number.index == shown
        assert f"number {number.value}" in explorer.sentences.value
        assert ("Stopped." in explorer.sentences.value) == (shown != index)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])  # between messages, and in one
@pytest.mark.parametrize("how", ["a move", "more to run"])
def test_a_stop_is_heard_as_soon_as_its_button_can_be_seen(pieces: Pieces, how: str, handler: Any) -> None:
    def press(change: Any) -> None:
        if change["new"]:
            os.kill(os.getpid(), signal.SIGINT)

    running, explorer = pieces.explorer.running, pieces.explorer
    if how == "more to run":
        pieces.number.value = 2  # without an event loop no further views are made
        assert pieces.missing
    missing = pieces.missing
    running.observe(press, "words")
    with handled(handler):
        if how == "a move":
            pieces.number.value = 3
        else:
            explorer._try(explorer._continue)
    assert pieces.missing == missing
    assert "Stopped. Move a control to go on." in explorer.sentences.value
    assert pieces.now == ("", 0.0)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])  # between messages, and in one
def test_a_stop_is_whole_though_its_interrupt_comes_in_the_middle_of_it(pieces: Pieces, handler: Any) -> None:
    """The button sends a message and an interrupt, on separate ways, which may arrive in any order."""

    def interrupt(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    explorer, number = pieces.explorer, pieces.number
    explorer._shown = [2, True]  # so that the control has to go back
    number.observe(interrupt, "index")
    with handled(handler), contextlib.suppress(KeyboardInterrupt):  # a kernel writes it into its log
        explorer.running.stopped += 1
    number.unobserve(interrupt, "index")
    assert number.value == 2
    assert "Stopped. Move a control to go on." in explorer.sentences.value
    number.value = 3
    assert "number 3" in explorer.sentences.value


def test_it_also_works_in_a_thread_that_no_interrupt_reaches(pieces: Pieces) -> None:
    def move() -> None:
        pieces.number.value = 2

    thread = threading.Thread(target=move)
    thread.start()
    thread.join()
    assert "number 2" in pieces.explorer.sentences.value


def test_what_is_running_is_said_before_it_runs(pieces: Pieces) -> None:
    said: list[str] = []

    def look(number: int, more: bool) -> Iterator[View]:
        said.append(pieces.now[0])
        return pieces.look(number, more)

    pieces.explorer.look = look
    pieces.number.value = 2
    assert said == ["Running"]


def is_dimmed(pieces: Pieces) -> bool:
    return "course-old" in pieces.explorer._box._dom_classes


def test_what_goes_wrong_is_said_in_place_of_a_dimmed_picture_and_the_next_move_works(pieces: Pieces) -> None:
    seen: list[bool] = []

    def fail(*values: object) -> Iterator[View]:
        seen.append(is_dimmed(pieces))
        raise Deadlock("Nobody can move: 0 waits for <1>.")

    look, pieces.explorer.look = pieces.explorer.look, fail
    pieces.number.value = 2
    assert seen == [True] and is_dimmed(pieces) and pieces.number.value == 2
    assert "role='alert'" in pieces.explorer.sentences.value
    assert "Nobody can move: 0 waits for &lt;1&gt;." in pieces.explorer.sentences.value
    pieces.explorer.look = look
    pieces.number.value = 3
    assert not is_dimmed(pieces)
    assert "number 3" in pieces.explorer.sentences.value


def test_it_can_even_begin_with_a_run_that_fails() -> None:
    assert "ZeroDivisionError" in Explorer([], lambda: [1 / 0])._repr_mimebundle_()["text/html"]  # type: ignore[list-item]


def test_a_picture_that_stays_the_same_is_not_sent_again(pieces: Pieces) -> None:
    changed: list[str] = []
    pieces.explorer.below.observe(lambda change: changed.append(change.name), "value")
    moved(pieces)
    assert pieces.missing == 0 and changed == []


def test_the_run_in_the_picture_can_be_played_until_the_next_move(pieces: Pieces) -> None:
    explorer = pieces.explorer
    assert explorer.play.label == "Play"
    explorer.play.clicks += 1
    (player,) = explorer._stage.children
    assert [bar["does"] for bar in player.places["bars"]] == ["forward"]
    assert explorer.play.enabled
    pieces.number.value = 3
    assert explorer._stage.children == ()


def test_without_a_timeline_there_is_nothing_to_play() -> None:
    chart = loss_curves({"float32": [2.0, 1.0]})
    explorer = Explorer([], lambda: [View("a chart", chart, chart)])
    assert explorer.play.label == ""


class Steps:
    """An explorer whose steps take the number of seconds on its slider."""

    def __init__(self) -> None:
        self.seconds = Slider("seconds", (5, 10, 20), 10)
        self.explorer = Explorer([self.seconds, Slider("overlap", (False, True), True, ("off", "on"))], self.look)

    def look(self, seconds: int, overlap: bool) -> list[View]:
        step = Timeline([Span(0, "forward", "", 0.0, float(seconds))], 1, "modelled")
        return [View("Done.", gantt(step, width=420), loss_curves({"float32": [2.0, 1.0]}))]


def test_the_step_before_lies_under_the_next_one() -> None:
    steps = Steps()
    explorer = steps.explorer
    assert "before" not in explorer.beside.value
    for seconds, before in ((5, 10), (20, 5)):
        steps.seconds.value = seconds
        assert f"before (thin bars): {before} s" in explorer.beside.value


def test_a_pinned_step_stays_under_the_next_ones_and_the_difference_is_said() -> None:
    steps = Steps()
    explorer = steps.explorer
    assert explorer.pin.label == "Pin"
    explorer.pin.clicks += 1
    assert "This step takes exactly as long as the pinned one (seconds 10, overlap on)." in explorer.sentences.value
    for seconds, words in (
        (5, "This step is 50% shorter than the pinned one"),
        (20, "This step is 100% longer than the pinned"),
    ):
        steps.seconds.value = seconds
        assert words in explorer.sentences.value
        assert "pinned (thin bars): 10 s" in explorer.beside.value
    explorer.pin.clicks += 1
    assert explorer.pin.label == "Pin" and explorer.pin.enabled
    assert "pinned" not in explorer.beside.value + explorer.sentences.value


def test_a_pinned_step_survives_a_stop_and_can_still_be_played_beside() -> None:
    steps = Steps()
    explorer = steps.explorer
    explorer.play.clicks += 1
    assert explorer.below.layout.display == "none"
    explorer.pin.clicks += 1
    assert explorer._stage.children == () and explorer.below.layout.display is None
    steps.seconds.value = 20
    explorer.running.stopped += 1
    assert "Stopped." in explorer.sentences.value and explorer.pin.label == "Unpin"
    steps.seconds.value = 5
    assert "shorter than the pinned one" in explorer.sentences.value
    explorer.play.clicks += 1
    (player,) = explorer._stage.children
    assert player.places["length"] == 5


class Prepared:
    """An explorer of 3 x 3 settings that can prepare the settings around. done: what it looked at and prepared."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, int]] = []
        controls = [Slider("rows", (1, 2, 3), 1), Slider("columns", (4, 5, 6), 5)]
        self.explorer = Explorer(controls, self.look, prepare=self.prepare)

    def look(self, rows: int, columns: int) -> list[View]:
        self.done.append(("look", rows, columns))
        return [View(f"{rows} x {columns}", PICTURE)]

    def prepare(self, rows: int, columns: int) -> None:
        self.done.append(("prepare", rows, columns))

    def move(self, label: str, value: int, during: Callable[[], None] = lambda: None) -> None:
        self.done.clear()
        for control in self.explorer.controls:
            control.last = {"moved": 1.0 if control.label == label else 0.5}
        in_a_kernel(lambda: move(self.explorer, label, value), during)


def test_while_one_looks_the_settings_around_are_prepared_and_first_those_of_the_control_moved_last(
    no_pause: None,
) -> None:
    prepared = Prepared()
    in_a_kernel(prepared.explorer._look_anew)
    prepared.move("rows", 2)
    assert prepared.done[0] == ("look", 2, 5)
    around = [(rows, columns) for _, rows, columns in prepared.done[1:] if (rows, columns) != (2, 5)]
    assert around == [(1, 5), (3, 5), (2, 4), (2, 6)]
    prepared.move("columns", 6)
    around = [(rows, columns) for _, rows, columns in prepared.done[1:] if (rows, columns) != (2, 6)]
    assert around == [(2, 5), (1, 6), (3, 6)]


def test_a_move_ends_the_preparation_for_the_setting_before(no_pause: None) -> None:
    prepared = Prepared()

    def move_on() -> None:
        if prepared.done[-1] == ("prepare", 1, 5):
            move(prepared.explorer, "columns", 4)

    prepared.move("rows", 2, move_on)
    looked = prepared.done.index(("look", 2, 4))
    assert all(columns == 4 or rows == 2 for _, rows, columns in prepared.done[looked:])
    assert ("prepare", 3, 5) not in prepared.done


@pytest.mark.parametrize("problem", [lambda: 1 / 0, lambda: os.kill(os.getpid(), signal.SIGINT)])
def test_what_goes_wrong_in_a_preparation_leaves_the_picture_alone(no_pause: None, problem: Callable) -> None:
    prepared = Prepared()
    prepared.explorer.prepare = lambda *_: problem()
    with handled(signal.SIG_IGN):
        prepared.move("rows", 2)
    assert "2 x 5" in prepared.explorer.sentences.value
    assert "Stopped" not in prepared.explorer.sentences.value and "Error" not in prepared.explorer.sentences.value
    assert prepared.done == [("look", 2, 5)]
