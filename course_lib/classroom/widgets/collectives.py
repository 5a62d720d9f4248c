"""An explorer of collectives: choose one, and real ranks run it, chunk by chunk.

    | collective  o------  ring all-reduce  | what every rank has,        |
    | ranks       ------o  8                | piece by piece              |
    | the result, in words                  |                             |
    | the timeline of all ranks                                           |

Links are emulated. The content of a piece is read off the numbers that were really sent.
"""

from __future__ import annotations

from course_lib.classroom.runs.collectives import RANKS, WAYS, run_collective
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, WIDTH, Explorer, View
from course_lib.figures import gantt
from course_lib.figures.axis import counted, duration
from course_lib.figures.chunk_table import chunk_table


def collective_explorer(way: str = "ring all-reduce", ranks: int = 8) -> Explorer:
    """An explorer of collectives with two controls, three sentences and two pictures; Play shows moving pieces."""
    controls = [Slider("collective", tuple(WAYS), way), Slider("ranks", RANKS, ranks)]
    return Explorer(controls, lambda *values: [look(*values)], (362, 312))


def look(way: str, ranks: int) -> View:
    timeline, sums = run_collective(way, ranks)
    table = chunk_table(timeline, sums, HALF, "Who has what?")
    sent = max(sum(one.source == rank != one.target for one in sums) for rank in range(ranks))
    words = f"{way.capitalize()}: {table.summary} It takes {duration(timeline.makespan)}, and no rank sends more than "
    words += f"{counted(sent, 'piece')}. (A message takes 1 ms, and 1 ms for each piece in it.)"
    return View(words, table, gantt(timeline, width=WIDTH, title="What did every rank do?"))
