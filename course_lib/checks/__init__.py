"""Checks for the exercises: run a student's function on real ranks, and say what is right, wrong, and what it costs.

    verdict = checks.ring_all_reduce(ring_all_reduce)     shows itself in a notebook
    verdict.points(5)                                     the same, and raises NotPassed unless it is right

Each is an `Exercise`: a right solution, cases to try, and the wrong solutions that tell which idea a student had.
"""

from course_lib.checks.averaging import average_gradients, backward_in_buckets
from course_lib.checks.combining import complete_gradients, gradient_norm, mesh_groups
from course_lib.checks.exercise import Case, Exercise
from course_lib.checks.layerwise import forward_and_backward, split_layers, who_holds_what
from course_lib.checks.mixed_precision import master_step, sum_gradients, unscale_and_clip, update_scale
from course_lib.checks.pipeline import best_micro_batches, bubble, interleaved_actions, pipeline_actions, run_actions
from course_lib.checks.planning import choose, state_bytes, step_traffic
from course_lib.checks.ring import ring_all_reduce
from course_lib.checks.sharding import all_gather, recompute, reduce_scatter, sharded_linear, train_sharded
from course_lib.checks.splitting import split_batch
from course_lib.checks.tensor_parallel import column_parallel, cross_entropy, cut_heads, row_parallel
from course_lib.checks.verdict import Cost, Idle, NotPassed, Verdict

PARTS = tuple(one for one in list(vars().values()) if isinstance(one, Exercise))
