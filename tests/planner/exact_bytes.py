"""What the course's own mechanisms send and hold, to the byte, for a model as model.py builds it.

Estimates are about large machines and round off what does not matter there. On a laptop, with a model of a few
thousand parameters, everything shows: the weight that travels with a bucket, the padding of a shard, the description
of a message. So here is the same arithmetic in whole numbers, to be held against a trace and against the ledger.

    part        what one rank sends in a step of n ranks, in numbers of `size` bytes
    data        all-reduce of each bucket and its weight         2 (n - 1) / n (bucket + k + 1)
    ZeRO-1, 2   reduce-scatter and all-gather of each bucket     (n - 1) (2 shard + k),  shard = bucket / n, rounded up
    ZeRO-3      two all-gathers and a reduce-scatter of a block  (n - 1) (3 shard + k)
    tensor      all-reduces of hidden states                     2 (n - 1) / n (4 layers + 2) b s h, and the loss
    pipeline    messages over each boundary, there and back      b s h

A bucket of k parameters carries k numbers: how many ranks had a gradient of each.

A combination sends the sum: what its data groups, its tensor groups and its pipelines send. For all of them at once,
as `mechanisms.hybrid` has them, see `Hybrid`, which tells the axes apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from course_lib.planner.memory import share
from course_lib.planner.spec import ModelSpec
from course_lib.schedules import Schedule

MiB = 2**20
COUNT = 8  # bytes of a number of samples, which some mechanisms send along
DESCRIPTION = 64 * 8  # bytes that tell a stage, once in a pass, what messages from the stage before look like
NUMBER, FLAG = 8, 4  # bytes of a loss or a norm, and of whether all is finite
AXES = ("dp", "pp", "tp", "all")


def parameter_sizes(model: ModelSpec, block: int, tp: int = 1, rank: int = 0) -> list[int]:
    """Numbers in each parameter of a block on a tensor rank, in the model's order: embedding, layers, head.

    Raises ValueError for a model that model.py cannot build.
    """
    return [numbers for numbers, _ in _parameters(model, block, tp, rank)]


def _parameters(model: ModelSpec, block: int, tp: int, rank: int) -> list[tuple[int, bool]]:
    """Numbers in each parameter, and whether it is cut."""
    if model.gated_mlp or not (model.biases and model.learned_positions):
        raise ValueError("model.py builds models with biases and learned positions and without a gated MLP only")
    h, f, kv = model.hidden, model.ffn_width, model.key_value_width

    def mine(length: int) -> int:  # the first ranks have one more
        return length // tp + (rank < length % tp)

    if block == 0:
        return [(mine(model.vocab) * h, True), (model.sequence * h, False)]
    if block == model.layers + 1:
        return [(h, False)] * 2 + ([] if model.tied_embeddings else [(mine(model.vocab) * h, True)])
    queries, keys, hidden_units, norm = mine(h), mine(kv), mine(f), [(h, False)] * 2
    attention = [(queries * h, True), (queries, True), *[(keys * h, True), (keys, True)] * 2, (h * queries, True)]
    mlp = [(hidden_units * h, True), (hidden_units, True), (h * hidden_units, True)]
    return [*norm, *attention, (h, False), *norm, *mlp, (h, False)]


def all_parameter_sizes(model: ModelSpec, tp: int = 1, rank: int = 0) -> list[int]:
    """Those of the whole model; a tied matrix is there once."""
    return [size for block in range(model.layers + 2) for size in parameter_sizes(model, block, tp, rank)]


def buckets(sizes: Sequence[int], bucket_mb: float = 25, size: int = 4) -> Iterator[list[int]]:
    """Parameters from the last to the first, in buckets of up to bucket_mb MiB; a larger one has its own."""
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
    """One all-reduce for each parameter, with two numbers that say what it is a sum of."""
    return sum(all_reduce((numbers + 2) * size, n) for numbers in sizes)


def data_parallel(sizes: Sequence[int], n: int, bucket_mb: float = 25, size: int = 4) -> int:
    """DataParallel, from its second step on; the first one also adds up the samples."""
    return sum(all_reduce((sum(bucket) + len(bucket) + 1) * size, n) for bucket in buckets(sizes, bucket_mb, size))


def sharded_optimizer(
    sizes: Sequence[int], n: int, bucket_mb: float = 25, size: int = 4, gradient_size: int | None = None
) -> int:
    """ShardedOptimizer, whether gradients are freed early or not.

    gradient_size: bytes of a number in a gradient, where it is not that of a parameter.
    """
    numbers = sum(share(sum(bucket), n) for bucket in buckets(sizes, bucket_mb, size))
    return (n - 1) * (numbers * size + (numbers + len(sizes)) * (gradient_size or size))


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
    flow = _tensor_flow(model, blocks, samples, tp, sequence_parallel, size)
    return flow + all_reduce(_partial_gradients(model, blocks, sequence_parallel) * size, tp)


def _tensor_flow(
    model: ModelSpec, blocks: Sequence[int], samples: int, tp: int, sequence_parallel: bool, size: int
) -> int:
    """What goes with each micro-batch."""
    hidden = samples * model.sequence * model.hidden * size
    once = all_reduce(hidden, tp)
    half = (tp - 1) * (hidden // tp)  # an all-gather or a reduce-scatter
    total = _layers(model, blocks) * (8 * half if sequence_parallel else 4 * once)
    if 0 in blocks:
        total += once + (half if sequence_parallel else 0)
    if model.layers + 1 in blocks:
        tokens = samples * model.sequence * max(4, size)  # the loss is computed in 32 bits at least
        total += (2 * half if sequence_parallel else once) + all_reduce(tokens, tp) + all_reduce(2 * tokens, tp)
    return total


def _partial_gradients(model: ModelSpec, blocks: Sequence[int], sequence_parallel: bool) -> int:
    """Numbers of which each rank has an addend: norms and biases after a sum, if it has seen its own positions only."""
    return (6 * _layers(model, blocks) + 2 * (model.layers + 1 in blocks)) * model.hidden * sequence_parallel


def _layers(model: ModelSpec, blocks: Sequence[int]) -> int:
    return sum(0 < block <= model.layers for block in blocks)


def pipeline(
    model: ModelSpec, ranks_of_stages: Sequence[int], rank: int, samples: int, size: int = 4, cut: int = 1
) -> int:
    """run_schedule: hidden states to the next stage and gradients to the one before, if another rank has it.

    cut: among how many ranks positions are shared.
    """
    hidden = samples * model.sequence // cut * model.hidden * size
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


# All mechanisms at once


@dataclass(frozen=True)
class Hybrid:
    """`hybrid.train_step` on a mesh.

    mesh: the sizes of dp, pp and tp; rank = (d x pp + p) x tp + t.  samples: of the whole minibatch.
    zero, sequence_parallel: as for `hybrid.make_optimizer` and `hybrid.ModelPart`.
    clips, scales: whether the step has a max_norm and a scaler.
    size: bytes of a number in the model's dtype; what is added up has 4 at least.

    Raises ValueError for a model of fewer layers than stages.
    """

    model: ModelSpec
    mesh: tuple[int, int, int]
    schedule: Schedule
    samples: int
    sequence_parallel: bool = False
    zero: bool = True
    clips: bool = False
    scales: bool = False
    size: int = 4

    def __post_init__(self) -> None:
        layers, stages = self.model.layers, self.schedule.n_stages
        if layers < stages:
            raise ValueError(f"schedule has {stages} stages, the model {layers} layers; give each stage one or more")

    def sent(self, rank: int) -> dict[str, int]:
        """Bytes that a rank sends in a step, by axis; "all" are the single numbers that go around all ranks."""
        d, p, t = self._coordinates(rank)
        n = self.mesh[0] * self.mesh[1] * self.mesh[2]
        everywhere = [NUMBER] + [NUMBER] * self.clips + [FLAG] * self.scales
        return {
            "dp": self._data(p, t),
            "pp": self._pipeline(d, p, t),
            "tp": self._tensor(d, p),
            "all": sum(all_reduce(number, n) for number in everywhere),
        }

    def held(self, rank: int) -> tuple[int, int, int]:
        """Bytes that a rank holds: parameters, gradients after backward, state of Adam with masters for 16 bits."""
        _, p, t = self._coordinates(rank)
        kinds = [sizes for sizes in self._kinds(p, t).values() if sizes]
        n = self.mesh[0] if self.zero else 1
        shards = [share(sum(bucket), n) for sizes in kinds for bucket in buckets(sizes, 10, self.size)]
        numbers = sum(map(sum, kinds))
        state = (2 if self.size >= 4 else 3) * sum(shards) * self._sum_size + 4 * sum(map(len, kinds))
        return n * sum(shards) * self.size, numbers * self._sum_size, state

    @property
    def _sum_size(self) -> int:
        return max(4, self.size)

    def _coordinates(self, rank: int) -> tuple[int, int, int]:
        _, pp, tp = self.mesh
        return rank // (pp * tp), rank // tp % pp, rank % tp

    @cached_property
    def _stages(self) -> list[range]:
        """The blocks of each stage: equal numbers of layers, or the first have one more; the ends are at the ends."""
        last_layers = [0, *accumulate(_dealt(self.model.layers, self.schedule.n_stages))]
        last_layers[-1] += 1  # the head
        return [range(before + (before > 0), last + 1) for before, last in pairwise(last_layers)]

    def _blocks(self, p: int) -> list[int]:
        return [block for stage in self.schedule.stages_of(p) for block in self._stages[stage]]

    @property
    def _has_two_ends(self) -> bool:
        """Whether two ranks of a pipeline each have a copy of the tied embedding."""
        first, last = (self.schedule.rank_of[stage] for stage in (0, self.schedule.n_stages - 1))
        return self.model.tied_embeddings and first != last

    def _kinds(self, p: int, t: int) -> dict[str, list[int]]:
        """Numbers in each parameter of a rank, as the optimizer groups them."""
        kinds: dict[str, list[int]] = {"cut": [], "whole": [], "tied": []}
        for block in self._blocks(p):
            for numbers, is_cut in _parameters(self.model, block, self.mesh[2], t):
                kinds["cut" if is_cut else "whole"].append(numbers)
        if self._has_two_ends:
            embedding = parameter_sizes(self.model, 0, self.mesh[2], t)[0]
            if 0 in self._blocks(p):
                kinds["cut"].remove(embedding)
                kinds["tied"].append(embedding)
            if self.model.layers + 1 in self._blocks(p):
                kinds["tied"].append(embedding)
        return kinds

    def _data(self, p: int, t: int) -> int:
        n, kinds = self.mesh[0], self._kinds(p, t).values()
        if self.zero:
            return sum(sharded_optimizer(sizes, n, 10, self.size, self._sum_size) for sizes in kinds)
        return average_gradients([numbers for sizes in kinds for numbers in sizes], n, self._sum_size)

    def _pipeline(self, d: int, p: int, t: int) -> int:
        samples, tp = _dealt(self.samples, self.mesh[0])[d], self.mesh[2]
        homes = [self.schedule.rank_of[stage] for stage in range(self.schedule.n_stages)]
        total = pipeline(self.model, homes, p, samples, self.size, tp if self.sequence_parallel else 1)
        return total + sum(self._kinds(p, t)["tied"]) * self._sum_size

    def _tensor(self, d: int, p: int) -> int:
        tp, blocks = self.mesh[2], self._blocks(p)
        of_replica = _dealt(self.samples, self.mesh[0])[d]
        flow = (
            _tensor_flow(self.model, blocks, samples, tp, self.sequence_parallel, self.size)
            for samples in _dealt(of_replica, self.schedule.n_micro_batches)
        )
        partial = _partial_gradients(self.model, blocks, self.sequence_parallel)
        return sum(flow) + all_reduce(partial * self._sum_size, tp)


def _dealt(total: int, n: int) -> list[int]:
    """How many each of n gets; the first have one more."""
    return [total // n + (i < total % n) for i in range(n)]
