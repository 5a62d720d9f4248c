"""The ways from each node to the next, around: the longer a message takes, the thicker.

[node 0  0 1]--2.6 MB/s--[node 1  2 3]==0.5 MB/s==[node 2  4 5]
     |_______________________2.6 MB/s__________________|
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.figures.axis import duration
from course_lib.figures.frame import MARGIN, begin
from course_lib.figures.picture import Picture, table
from course_lib.figures.svg import Sheet
from course_lib.figures.vocabulary import draw_device, draw_machine

WIDTH, NODE, HIGH, DEVICE = 800, 88.0, 64.0, 26.0  # pixels: of the picture, of a node and of a device in it
THIN, THICK = 2.0, 20.0  # pixels: of the fastest way; of one that is ten times as slow or slower


def ways_around(seconds: Sequence[float], words: Sequence[str], devices: int) -> Picture:
    """Draw the nodes with their devices. seconds, words: of a message from each to the next, and at last to the first.

    devices: on a node.
    """
    sheet, top = begin(WIDTH, "The thicker a way, the longer a message takes", ["emulated"])
    apart = (WIDTH - 2 * MARGIN - NODE) / (len(seconds) - 1)
    for node, (took, text) in enumerate(zip(seconds, words, strict=True)):
        left, width = MARGIN + apart * node, min(THIN * took / min(seconds), THICK)
        _draw_node(sheet, left, top, node, devices)
        is_last = node == len(seconds) - 1
        path = f"M{left + NODE},{top + HIGH / 2}h{apart - NODE}"
        if is_last:
            path = f"M{left + NODE / 2},{top + HIGH}v40H{MARGIN + NODE / 2}v-40"
        sheet.path(path, fill="none", stroke="currentColor", stroke_width=width)
        x, y = (WIDTH / 2, top + HIGH + 66) if is_last else (left + (NODE + apart) / 2, top + HIGH / 2 - 16)
        sheet.text(x, y, text, text_anchor="middle")
    sheet.height = top + HIGH + 80
    rows = table(("from node", "to the next (s)", "rate"), zip(range(len(words)), seconds, words, strict=True))
    return Picture(sheet, f"A message takes {duration(min(seconds))} to {duration(max(seconds))}.", rows)


def _draw_node(sheet: Sheet, x: float, y: float, node: int, devices: int) -> None:
    draw_machine(sheet, x, y, NODE, HIGH, f"node {node}")
    pitch = (NODE - 8) / devices
    for place in range(devices):
        left = x + 4 + pitch * (place + 0.5) - DEVICE / 2
        draw_device(sheet, left, y + 28, DEVICE, DEVICE, devices * node + place, is_small=True)
