"""Solutions as students write them, by exercise.

RIGHT: right ones.  WRONG: wrong ones, with words of their verdicts.  ACCIDENTS: wrong ones whose runs fail.
"""

import importlib
from pathlib import Path

EXERCISES = [
    importlib.import_module(f"tests.lessons.{file.parent.name}.solutions")
    for file in sorted(Path(__file__).parent.glob("L*/solutions.py"))
]
RIGHT = {part: programs for exercise in EXERCISES for part, programs in exercise.RIGHT.items()}
WRONG = {part: programs for exercise in EXERCISES for part, programs in exercise.WRONG.items()}
ACCIDENTS = {part: some for exercise in EXERCISES for part, some in getattr(exercise, "ACCIDENTS", {}).items()}
