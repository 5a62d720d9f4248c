"""Solutions as students write them, by exercise.

RIGHT: in many ways.  WRONG: with what has to be said.  ACCIDENTS: wrong ones whose runs do not come to their end.
"""

from tests.checks.solutions import (
    combining,
    data_parallelism,
    layerwise,
    mixed_precision,
    pipeline,
    planning,
    sharding,
    tensor_parallelism,
)

EXERCISES = (data_parallelism, sharding, layerwise, pipeline, tensor_parallelism, mixed_precision, combining, planning)
RIGHT = {part: programs for exercise in EXERCISES for part, programs in exercise.RIGHT.items()}
WRONG = {part: programs for exercise in EXERCISES for part, programs in exercise.WRONG.items()}
ACCIDENTS = {part: some for exercise in EXERCISES for part, some in getattr(exercise, "ACCIDENTS", {}).items()}
