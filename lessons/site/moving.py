"""The picture that moves on the first page and in README.md: a run of a pipeline, uncovered as time goes on."""

from __future__ import annotations

from pathlib import Path

from course_lib.classroom.runs import pipeline_step
from course_lib.figures import gantt
from course_lib.ranks import Link, Pace
from course_lib.schedules import SCHEDULES

PICTURE = Path(__file__).parents[2] / "notebooks" / "images" / "moving.svg"
STILL = "<style>@media (prefers-reduced-motion: reduce) { .veil { display: none } }</style>"
LOOKS = 'fill="var(--jp-layout-color0,#ffffff)" fill-opacity="0.85"'
MOVES = 'dur="9s" repeatCount="indefinite" keyTimes="0;0.85;1"'  # and rests at the end


def draw() -> str:
    pace = Pace({"forward": 0.04, "backward": 0.08}, link=Link(latency=0.01))
    run = pipeline_step(SCHEDULES["1f1b"](4, 8), pace)
    picture = gantt(run, title="Four real processes train one model, a pipeline")
    (panel,) = picture.timelines
    left, right, height = panel.scale.left, panel.scale.right, panel.bottom - panel.top
    veil = (
        f'<rect class="veil" x="{left}" y="{panel.top - 2}" width="{right - left}" height="{height}" {LOOKS}>'
        f'<animate attributeName="x" values="{left};{right};{right}" {MOVES}/></rect>'
    )
    return picture.svg.replace("</svg>", f"{STILL}{veil}</svg>")
