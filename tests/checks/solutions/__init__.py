"""Solutions as students write them, by exercise: right ones in many ways, and wrong ones with what has to be said."""

from tests.checks.solutions import data_parallelism, mixed_precision, tensor_parallelism

RIGHT = {**data_parallelism.RIGHT, **tensor_parallelism.RIGHT, **mixed_precision.RIGHT}
WRONG = {**data_parallelism.WRONG, **tensor_parallelism.WRONG, **mixed_precision.WRONG}
