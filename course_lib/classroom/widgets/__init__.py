"""Widgets: explorers and question cards, with real ranks behind their sliders and buttons.

    from lessons.L02_data_parallelism.explorer import DataParallelExplorer
    from course_lib.classroom.widgets.cards import Card
    from course_lib.classroom.widgets import play

Import each by its own name, so that a notebook loads only what it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course_lib.classroom.widgets.player import Player
    from course_lib.figures import Picture
    from course_lib.timeline import Timeline


def play(what: Timeline | Picture, title: str | None = None, follow: int | None = None) -> Player:
    """A player of a timeline or of a picture that moves: space starts and stops it, arrows go from event to event.

    follow: a micro-batch to light up from the start; then it begins to play by itself.
    """
    from course_lib.classroom.widgets.player import Player

    return Player(what, title, follow)
