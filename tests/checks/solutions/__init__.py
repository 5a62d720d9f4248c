"""Solutions as students write them, by exercise.

RIGHT: in many ways.  WRONG: with what has to be said.  ACCIDENTS: wrong ones whose runs do not come to their end.
"""

from tests.checks.solutions import data_parallelism, mixed_precision, pipeline, planning, sharding, tensor_parallelism

EXERCISES = (data_parallelism, sharding, pipeline, tensor_parallelism, mixed_precision, planning)
RIGHT = {part: programs for exercise in EXERCISES for part, programs in exercise.RIGHT.items()}
WRONG = {part: programs for exercise in EXERCISES for part, programs in exercise.WRONG.items()}
ACCIDENTS = {**sharding.ACCIDENTS, **pipeline.ACCIDENTS}
