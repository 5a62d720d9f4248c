"""Tensor parallelism, in four pages; what others need is handed out here.

linear        the idea: f and g, and the linear layers between them
vocab         embedding, logits and loss, cut by vocabulary
transformer   `parallelize`: a whole model, cut
placement     how parameters lie on the ranks, and how shards become whole again
"""

from course_lib.mechanisms.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, gather_from_ranks
from course_lib.mechanisms.tensor_parallel.placement import full_state, placements, sum_partial_gradients
from course_lib.mechanisms.tensor_parallel.transformer import parallelize
from course_lib.mechanisms.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy
