"""Solutions as students write them, by exercise.

RIGHT: right ones.  WRONG: wrong ones, with words of their verdicts.  ACCIDENTS: wrong ones whose runs do not end well.
"""

from tests.lessons.L02_data_parallelism import solutions as data_parallelism
from tests.lessons.L03_sharded_data_parallelism import solutions as sharding
from tests.lessons.L04_layerwise_model_parallelism import solutions as layerwise
from tests.lessons.L05_pipeline_parallelism import solutions as pipeline
from tests.lessons.L06_tensor_parallelism import solutions as tensor_parallelism
from tests.lessons.L07_mixed_precision import solutions as mixed_precision
from tests.lessons.L08_combining_mechanisms import solutions as combining
from tests.lessons.L09_planning import solutions as planning

EXERCISES = (data_parallelism, sharding, layerwise, pipeline, tensor_parallelism, mixed_precision, combining, planning)
RIGHT = {part: programs for exercise in EXERCISES for part, programs in exercise.RIGHT.items()}
WRONG = {part: programs for exercise in EXERCISES for part, programs in exercise.WRONG.items()}
ACCIDENTS = {part: some for exercise in EXERCISES for part, some in getattr(exercise, "ACCIDENTS", {}).items()}
