"""Things to turn and press: explorers and question cards, with real ranks behind their sliders and buttons.

    from lessons.L02_data_parallelism.explorer import DataParallelExplorer
    from course_lib.classroom.widgets.cards import Card
    from course_lib.classroom.widgets import play

Each is imported by its own name, so that nothing is loaded that a notebook does not show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib.classroom.widgets.player import Player
    from course_lib.timeline import Timeline


def play(timeline: Timeline, title: str | None = None) -> Player:
    """The picture of a timeline, to play: space starts and stops it, arrows go from event to event."""
    from course_lib.classroom.widgets.player import Player

    return Player(timeline, title)
