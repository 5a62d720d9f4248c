"""Bytes that the course's own mechanisms send and hold, exactly, for a model of model.py.

Estimates are for large machines, and neglect what is small there. On a laptop, with a model of a few thousand
parameters, everything shows: the weight that travels with a bucket, the padding of a shard, the description of a
message. So here is the same arithmetic in integers, to compare with a trace and with the ledger.

    part        what one rank sends in a step of n ranks, in numbers of `size` bytes
    data        all-reduce of each bucket and its weight         2 (n - 1) / n (bucket + k + 1)
    ZeRO-1, 2   reduce-scatter and all-gather of each bucket     (n - 1) (2 shard + k),  shard = bucket / n, rounded up
    ZeRO-3      two all-gathers and a reduce-scatter of a block  (n - 1) (3 shard + k)
    tensor      all-reduces of hidden states                     2 (n - 1) / n (4 layers + 2) b s h, and the loss
    pipeline    messages over each boundary, there and back      b s h

A bucket of k parameters carries k numbers: how many ranks had a gradient of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from course_lib.planner.memory import share
from course_lib.planner.spec import ModelSpec

MiB = 2**20
COUNT = 8  # bytes of a number of samples, which some mechanisms send along
DESCRIPTION = 64 * 8  # bytes that tell a stage, once in a pass, what messages from the stage before look like


def parameter_sizes(model: ModelSpec, block: int, tp: int = 1, rank: int = 0) -> list[int]:
    """Numbers in each parameter of a block on a tensor rank, in the model's order: embedding, layers, head.

    Raises ValueError for a model that model.py cannot build.
    """
    if model.gated_mlp or not (model.biases and model.learned_positions):
        raise ValueError("model.py builds models with biases and learned positions and without a gated MLP only")
    h, f, kv = model.hidden, model.ffn_width, model.key_value_width

    def mine(length: int) -> int:  # the first ranks have one more
        return length // tp + (rank < length % tp)

    if block == 0:
        return [mine(model.vocab) * h, model.sequence * h]
    if block == model.layers + 1:
        return [h, h] + ([] if model.tied_embeddings else [mine(model.vocab) * h])
    queries, keys, hidden_units = mine(h), mine(kv), mine(f)
    attention = [queries * h, queries, *[keys * h, keys] * 2, h * queries]
    mlp = [hidden_units * h, hidden_units, h * hidden_units]
    return [h, h, *attention, h, h, h, *mlp, h]


def all_parameter_sizes(model: ModelSpec, tp: int = 1, rank: int = 0) -> list[int]:
    """Numbers in each parameter of the whole model; a tied matrix counts once."""
    return [size for block in range(model.layers + 2) for size in parameter_sizes(model, block, tp, rank)]


def buckets(sizes: Sequence[int], bucket_mb: float = 25, size: int = 4) -> Iterator[list[int]]:
    """Buckets of parameters from the last to the first, of up to bucket_mb MiB; a larger parameter has its own."""
    bucket: list[int] = []
    for numbers in reversed(sizes):
        if bucket and (sum(bucket) + numbers) * size > bucket_mb * MiB:
            yield bucket
            bucket = []
        bucket = [*bucket, numbers]
    if bucket:
        yield bucket


def all_reduce(n_bytes: int, n: int) -> int:
    return 2 * (n - 1) * n_bytes // n


# Bytes that one rank sends in a step


def average_gradients(sizes: Sequence[int], n: int, size: int = 4) -> int:
    """average_gradients: an all-reduce for each parameter, with two numbers that say what it is a sum of."""
    return sum(all_reduce((numbers + 2) * size, n) for numbers in sizes)


def data_parallel(sizes: Sequence[int], n: int, bucket_mb: float = 25, size: int = 4) -> int:
    """DataParallel, from its second step on; the first one also adds up the samples."""
    return sum(all_reduce((sum(bucket) + len(bucket) + 1) * size, n) for bucket in buckets(sizes, bucket_mb, size))


def sharded_optimizer(sizes: Sequence[int], n: int, bucket_mb: float = 25, size: int = 4) -> int:
    """ShardedOptimizer, whether gradients are freed early or not."""
    numbers = sum(share(sum(bucket), n) for bucket in buckets(sizes, bucket_mb, size))
    return (n - 1) * size * (2 * numbers + len(sizes))


def fully_sharded(model: ModelSpec, n: int, size: int = 4) -> int:
    """FullySharded: every block is gathered forward and backward; one count of samples."""
    shards = sum(share(sum(block), n) for block in sharded_blocks(model))
    counts = sum(map(len, sharded_blocks(model)))
    return (n - 1) * (3 * shards + counts) * size + all_reduce(COUNT, n)


def sharded_blocks(model: ModelSpec) -> list[list[int]]:
    """The parameters of each block that FullySharded gathers; a tied matrix belongs to the model as a whole."""
    blocks = [parameter_sizes(model, block) for block in range(model.layers + 2)]
    if model.tied_embeddings:
        return [[blocks[0][0]], blocks[0][1:], *blocks[1:]]
    return blocks


def tensor_parallel(
    model: ModelSpec, blocks: Sequence[int], samples: int, tp: int, sequence_parallel: bool = False, size: int = 4
) -> int:
    """What f and g send for these blocks, forward and backward, and the loss if the head is among them."""
    layers, head = sum(0 < block <= model.layers for block in blocks), model.layers + 1 in blocks
    # Norms and biases after a sum, of which each rank has a partial sum if it has seen its own positions only.
    partial = (6 * layers + 2 * head) * model.hidden * sequence_parallel
    hidden = samples * model.sequence * model.hidden * size
    once = all_reduce(hidden, tp)
    half = (tp - 1) * (hidden // tp)  # an all-gather or a reduce-scatter
    total = all_reduce(partial * size, tp) + layers * (8 * half if sequence_parallel else 4 * once)
    if 0 in blocks:
        total += once + (half if sequence_parallel else 0)
    if head:
        tokens = samples * model.sequence * max(4, size)  # the loss is computed in 32 bits at least
        total += (2 * half if sequence_parallel else once) + all_reduce(tokens, tp) + all_reduce(2 * tokens, tp)
    return total


def pipeline(model: ModelSpec, ranks_of_stages: Sequence[int], rank: int, samples: int, size: int = 4) -> int:
    """run_schedule: hidden states to the next stage and gradients to the one before, if another rank has it."""
    hidden = samples * model.sequence * model.hidden * size
    total = 0
    for stage, home in enumerate(ranks_of_stages):
        if home == rank:
            after, before = ranks_of_stages[stage + 1 : stage + 2], ranks_of_stages[max(0, stage - 1) : stage]
            total += sum(hidden + DESCRIPTION for other in after if other != rank)
            total += sum(hidden for other in before if other != rank)
    return total


# Bytes that one rank holds: parameters, gradients after backward, state of Adam


def held(sizes: Sequence[int], size: int = 4) -> tuple[int, int, int]:
    """A plain model and optimizer: 4 + 4 + 8 bytes a parameter, and a count of steps for each tensor."""
    total = sum(sizes) * size
    return total, total, 2 * total + 4 * len(sizes)


def held_sharded_optimizer(sizes: Sequence[int], n: int, bucket_mb: float = 25, size: int = 4) -> tuple[int, int, int]:
    """ShardedOptimizer: parameters are padded to n shards, and Adam has a tensor for a rank's part of each."""
    shards = [share(sum(bucket), n) for bucket in buckets(sizes, bucket_mb, size)]
    return n * sum(shards) * size, sum(sizes) * size, 2 * sum(shards) * size + 4 * len(sizes)


def held_fully_sharded(model: ModelSpec, n: int, size: int = 4) -> tuple[int, int, int]:
    """FullySharded: one shard for each block, and in it a tensor for each parameter."""
    blocks = sharded_blocks(model)
    parameters, gradients, _ = held([share(sum(block), n) for block in blocks], size)
    return parameters, gradients, 2 * parameters + 4 * sum(map(len, blocks))
