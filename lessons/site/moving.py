"""The picture that moves on the first page and in README.md: a run of a pipeline, uncovered as time goes on.

python -m lessons.site.moving    draws it anew, always the same
"""

from __future__ import annotations

from pathlib import Path

from course_lib.classroom.runs import pipeline_step
from course_lib.figures import gantt
from course_lib.ranks import Link, Pace
from course_lib.schedules import SCHEDULES

PICTURE = Path(__file__).parents[2] / "notebooks" / "images" / "moving.svg"
STILL = "<style>@media (prefers-reduced-motion: reduce) { .veil { display: none } }</style>"
MOVES = 'dur="9s" repeatCount="indefinite" keyTimes="0;0.85;1"'  # and rests at the end


def draw() -> str:
    pace = Pace({"forward": 0.04, "backward": 0.08}, link=Link(latency=0.01))
    picture = gantt(
        pipeline_step(SCHEDULES["1f1b"](4, 8), pace), title="Four real processes train one model, a pipeline"
    )
    (panel,) = picture.timelines
    left, right = panel.scale.left, panel.scale.right
    veil = (
        f'<rect class="veil" x="{left}" y="{panel.top - 2}" width="{right - left}" height="{panel.bottom - panel.top}"'
        f' fill="#fff" fill-opacity="0.85"><animate attributeName="x" values="{left};{right};{right}" {MOVES}/>'
        f'<animate attributeName="width" values="{right - left};0;0" {MOVES}/></rect>'
    )
    return picture.svg.replace("</svg>", f"{STILL}{veil}</svg>")


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
