"""The ways from each node to the next, around: the longer a message takes, the thicker.

[node 0]--2.6 MB/s--[node 1]==0.5 MB/s==[node 2]
   |________________2.6 MB/s________________|
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.figures.axis import duration
from course_lib.figures.frame import MARGIN, begin
from course_lib.figures.picture import Picture, table
from course_lib.figures.vocabulary import draw_machine

WIDTH, NODE, HIGH = 800, 76.0, 52.0  # pixels: of the picture, and of a node in it
THIN, THICK = 2.0, 20.0  # pixels: of the fastest way; of one that is ten times as slow or slower


def ways_around(seconds: Sequence[float], words: Sequence[str]) -> Picture:
    """Draw the nodes and ways. seconds, words: of a message from each to the next, and at last to the first."""
    sheet, top = begin(WIDTH, "The thicker a way, the longer a message takes", ["emulated"])
    last = len(seconds) - 1
    apart, middle = (WIDTH - 2 * MARGIN - NODE) / last, top + HIGH / 2
    for node, (took, text) in enumerate(zip(seconds, words, strict=True)):
        left = MARGIN + apart * node
        draw_machine(sheet, left, top, NODE, HIGH, f"node {node}")
        path, x, y = f"M{left + NODE},{middle}h{apart - NODE}", left + (NODE + apart) / 2, middle - 16
        if node == last:
            path = f"M{left + NODE / 2},{top + HIGH}v40H{MARGIN + NODE / 2}v-40"
            x, y = WIDTH / 2, top + HIGH + 66
        sheet.path(path, fill="none", stroke="currentColor", stroke_width=min(THIN * took / min(seconds), THICK))
        sheet.text(x, y, text, text_anchor="middle")
    sheet.height = top + HIGH + 80
    rows = table(("from node", "to the next (s)", "rate"), zip(range(len(words)), seconds, words, strict=True))
    return Picture(sheet, f"A message takes {duration(min(seconds))} to {duration(max(seconds))}.", rows)
