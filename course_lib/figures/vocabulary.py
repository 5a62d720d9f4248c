"""The vocabulary of drawn mechanisms: a rank is a device, a tensor is blocks in it, a link is an edge between two."""

from __future__ import annotations

from course_lib.figures.svg import BACKGROUND, HALO, Sheet


def draw_device(
    sheet: Sheet, x: float, y: float, width: float, height: float, rank: int, is_small: bool = False
) -> None:
    """A rank: a rounded box with its name above, or with its number in it."""
    sheet.box(x, y, width, height, rx=4, fill=BACKGROUND, stroke="currentColor", stroke_width=1.5)
    name, down = (rank, height / 2 + 4) if is_small else (f"rank {rank}", -4)
    sheet.text(x + width / 2, y + down, name, text_anchor="middle", font_size=11, font_weight="bold", **HALO)


def draw_machine(sheet: Sheet, x: float, y: float, width: float, height: float, name: str) -> None:
    """A machine around its devices. It may be drawn over lines: they can still be pointed at."""
    with sheet.group(pointer_events="none"):
        sheet.box(x, y, width, height, rx=10, fill="currentColor", fill_opacity=0.06, stroke="currentColor")
        sheet.text(x + 10, y + 15, name, font_size=11, **HALO)
