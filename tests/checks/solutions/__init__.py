"""Solutions as students write them, by exercise.

RIGHT: in many ways.  WRONG: with what has to be said.  ACCIDENTS: wrong ones whose runs do not come to their end.
"""

from tests.checks.solutions import data_parallelism, pipeline, sharding

RIGHT = {**data_parallelism.RIGHT, **sharding.RIGHT, **pipeline.RIGHT}
WRONG = {**data_parallelism.WRONG, **sharding.WRONG, **pipeline.WRONG}
ACCIDENTS = {**sharding.ACCIDENTS, **pipeline.ACCIDENTS}
