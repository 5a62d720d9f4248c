"""The checks for data parallelism: shares of a minibatch, averaged gradients, an all-reduce, buckets."""

from lessons.L02_data_parallelism.checks_averaging import average_gradients, backward_in_buckets, faster_backward
from lessons.L02_data_parallelism.checks_ring import ring_all_reduce
from lessons.L02_data_parallelism.checks_splitting import split_batch

__all__ = ["average_gradients", "backward_in_buckets", "faster_backward", "ring_all_reduce", "split_batch"]
