"""Measure the timeline that the README shows: one training step of four ranks that share this machine.

python lessons/readme_picture.py
"""

from __future__ import annotations

from pathlib import Path

from course_lib.classroom.runs import training_step
from course_lib.figures import gantt
from course_lib.model import GPTConfig

PICTURE = Path(__file__).parent.parent / "notebooks" / "images" / "timeline.svg"


def main() -> None:
    step = training_step(4, batch_size=256, config=GPTConfig(), repeat=5)
    picture = gantt(step, title="One training step of four real processes")
    PICTURE.write_text(picture.svg, encoding="utf-8")
    print(picture.summary)


if __name__ == "__main__":
    main()
