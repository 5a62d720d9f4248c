"""A timeline that can be played: a cursor moves over its picture, and messages fly from rank to rank.

    rank 0  |forward 0|forward 1|...      [##  ] 2     micro-batches held
                       \\
                        o   a message on its way
                         \\
    rank 1  |. . wait . .|forward 0|...   [#   ] 1
                        |
    [Play] ----------o--------------  Light up [micro-batch 1]
    At 0.13 s  rank 0: forward, micro-batch 1   rank 1: wait, recv, with rank 0

The picture is that of `gantt`. Moving things lie over it, in the browser alone (player.js), at the places of the bars.
Other pictures with a clock are played, too: their parts say when they are seen and how they move (`moving`).
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from course_lib.classroom.widgets.running import KEYS, beside_this, shown
from course_lib.figures import gantt, held_activations
from course_lib.figures.axis import TIMES, unit_of
from course_lib.figures.lanes import PlacedSpan
from course_lib.figures.picture import Picture
from course_lib.figures.svg import ROOMY
from course_lib.figures.words import activity
from course_lib.timeline import RECEIVING, Timeline

WIDTH = 840  # pixels: fits a page of 1280 beside the list of files
BESIDE = 130  # pixels: for the micro-batches that ranks hold
LONG = 1000  # pixels that would be the time of a picture without an axis of it
STILL = "<p><i>Run this cell to play it.</i></p>"


class Player(anywidget.AnyWidget):
    """A player as a widget; without widgets, the still picture.

    picture: the still picture below, as HTML.  places: the positions of everything that the script lays over it.
    """

    _esm = KEYS + beside_this("player.js")
    _css = f".course-player {{ {ROOMY} }}" + beside_this("player.css")
    picture = traitlets.Unicode().tag(sync=True)
    places = traitlets.Dict().tag(sync=True)

    def __init__(
        self, what: Timeline | Picture, title: str | None = None, follow: int | None = None, is_shown: bool = True
    ) -> None:
        """what: to be played.  follow: see `play`.  is_shown: whether the picture is not on the page yet."""
        if isinstance(what, Timeline):
            is_held = any(one.most for one in held_activations(what))
            what = gantt(what, width=WIDTH - BESIDE * is_held, title=title)
        follows = {} if follow is None else {"follow": follow}
        super().__init__(picture=what.inline() * is_shown, places=places(what) | follows)
        self.still = what

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        live: Any = super()._repr_mimebundle_(**kwargs)
        data, metadata = live
        stored = self.still._repr_mimebundle_()
        return shown(data, {**stored, "text/html": STILL + stored["text/html"]}), metadata


def places(picture: Picture) -> dict[str, Any]:
    """The rows, bars and messages of a picture's first timeline, with their positions in pixels."""
    if picture.clock:
        unit, name = unit_of(picture.clock.seconds, TIMES)
        says = [(LONG * share, words) for share, words in picture.clock.says]
        where = {"left": 0, "width": LONG, "length": picture.clock.seconds / unit, "unit": name, "beside": 0}
        return {**where, "says": says, "lights": list(picture.lights), "rows": [], "bars": [], "held": []}
    (panel, *_) = picture.timelines
    timeline, scale = panel.timeline, panel.scale
    held = held_activations(timeline)
    unit, name = unit_of(timeline.makespan, TIMES)
    return {
        "left": scale.left,
        "width": scale.pixels(timeline.makespan),
        "length": timeline.makespan / unit,
        "unit": name,
        "rows": [panel.row(rank) for rank in range(timeline.world_size)],
        "row": panel.lanes._asdict(),
        "beside": BESIDE,
        "bars": [_bar(bar) for bar in panel.bars()],
        "held": [[[scale.left + scale.pixels(when), count] for when, count in one.steps] for one in held],
    }


def _bar(bar: PlacedSpan) -> dict[str, Any]:
    span = bar.span
    place = {"x": bar.x, "y": bar.y, "width": bar.width, "height": bar.height}
    said = {"rank": span.rank, "does": activity(span), "kind": span.kind, "peer": span.peer, "bytes": span.bytes}
    # A message is drawn with its receiver's times: the sender is done once it has left.
    is_message = span.kind == "transfer" and span.peer is not None and span.name in RECEIVING
    part = {"microBatch": span.micro_batch, "stage": span.stage, "isMessage": is_message}
    return {**place, **said, **part, "isBackground": span.background}
