"""An explorer of collectives: choose one, and real ranks run it, chunk by chunk.

    | collective  o------  ring all-reduce  | devices on a circle, and    |
    | ranks       ------o  8                | the pieces between them     |
    | the result, in words                  |                             |

Links are emulated. The content of a piece is read off the numbers that were really sent.
"""

from __future__ import annotations

from course_lib.classroom.runs.collectives import RANKS, TWO_MACHINES, WAYS, run_collective
from course_lib.classroom.widgets.controls import Slider
from course_lib.classroom.widgets.explorer import HALF, Explorer, View
from course_lib.figures.axis import counted, duration
from course_lib.figures.exchange import exchange


def collective_explorer(way: str = "ring all-reduce", ranks: int = 8) -> Explorer:
    """An explorer of collectives with two controls, three sentences and a picture; Play shows moving pieces."""
    controls = [Slider("collective", tuple(WAYS), way), Slider("ranks", RANKS, ranks)]
    return Explorer(controls, lambda *values: [look(*values)], (548, 0))


def look(way: str, ranks: int) -> View:
    timeline, sums = run_collective(way, ranks)
    per_machine = ranks // 2 if way.startswith("hier") and ranks in TWO_MACHINES else None
    picture = exchange(timeline, sums, HALF, "Who has what?", per_machine)
    sent = max(sum(one.source == rank != one.target for one in sums) for rank in range(ranks))
    words = (
        f"{way.capitalize()}: {picture.summary} It takes {duration(timeline.makespan)}, and no rank sends more than "
    )
    words += f"{counted(sent, 'piece')}. (A message takes 1 ms, and 1 ms for each piece in it.)"
    return View(words, picture)
