"""Predicted bytes against real runs: against the trace, and against the ledger."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib import Timeline, launch
from course_lib.mechanisms import data_parallel
from course_lib.model import GPTConfig, TinyGPT
from course_lib.planner import ModelSpec, Plan
from course_lib.planner.memory import model_state
from tests.planner import exact_bytes

pytestmark = pytest.mark.long

WORLD_SIZES = [2, 4, 8]
CONFIG = GPTConfig(vocab=13, sequence=8, layers=2, hidden=16, heads=8, ffn_hidden=24)
CONFIGS = [CONFIG, replace(CONFIG, tied_embeddings=True), replace(CONFIG, ffn_hidden=32)]
EVERY_SIZE_AND_CONFIG = [(2, CONFIGS[0]), (4, CONFIGS[1]), (4, CONFIGS[2]), (8, CONFIGS[0])]
SAMPLES = 8
BUCKET_MB = 0.01  # several buckets even for this model


def spec(config: GPTConfig) -> ModelSpec:
    return ModelSpec(
        config.layers, config.hidden, config.heads, config.sequence, config.vocab, None, config.ffn_hidden,
        tied_embeddings=config.tied_embeddings,
    )  # fmt: skip


def batch(config: GPTConfig, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(samples * (config.sequence + 1)).view(samples, -1) % config.vocab
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def steps() -> Iterator[None]:
    """Two steps, each after a barrier: the first one sends more than later ones."""
    for _ in range(2):
        dist.barrier()
        yield


def sent_and_held(run: Callable[..., Any], world_size: int, *args: Any) -> tuple[list[int], list[Any]]:
    """Bytes by rank sent in the second of two steps, and what the function returned after it."""
    done = launch(run, world_size, args)
    sent = [sent_between_barriers(done.timeline, rank, 1) for rank in range(world_size)]
    return sent, done.results


def sent_in_a_step(run: Callable[..., Any], world_size: int, *args: Any) -> list[int]:
    return sent_and_held(run, world_size, *args)[0]


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "tied", "fewer keys"])
def test_parameters_are_those_of_the_model_in_its_order(config: GPTConfig) -> None:
    sizes = [parameter.numel() for parameter in TinyGPT(config).parameters()]
    assert exact_bytes.all_parameter_sizes(spec(config)) == sizes
    assert spec(config).parameters == sum(sizes)
    assert model_state(sum(sizes), Plan(precision="fp32")) == (4 * sum(sizes), 4 * sum(sizes), 8 * sum(sizes))


def averaging(rank: int, config: GPTConfig) -> None:
    model = TinyGPT(config)
    inputs, targets = batch(config, 2)
    for _ in steps():
        loss_of(model(inputs), targets).backward()
        data_parallel.average_gradients(model)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_average_gradients_sends_what_was_predicted(world_size: int) -> None:
    expected = exact_bytes.average_gradients(exact_bytes.all_parameter_sizes(spec(CONFIG)), world_size)
    assert sent_in_a_step(averaging, world_size, CONFIG) == [expected] * world_size


def in_buckets(rank: int, config: GPTConfig) -> None:
    replica = data_parallel.DataParallel(TinyGPT(config), bucket_mb=BUCKET_MB)
    inputs, targets = batch(config, 2)
    for _ in steps():
        loss_of(replica(inputs), targets).backward()
        replica.finish()


@pytest.mark.parametrize(("world_size", "config"), EVERY_SIZE_AND_CONFIG)
def test_data_parallel_sends_what_was_predicted(world_size: int, config: GPTConfig) -> None:
    expected = exact_bytes.data_parallel(exact_bytes.all_parameter_sizes(spec(config)), world_size, BUCKET_MB)
    assert sent_in_a_step(in_buckets, world_size, config) == [expected] * world_size


def with_sharded_optimizer(rank: int, config: GPTConfig, gradients: Any) -> Any:
    from course_lib.instruments import ledger
    from course_lib.mechanisms import sharding

    model = TinyGPT(config)
    optimizer = sharding.ShardedOptimizer(
        model.parameters(),
        torch.optim.Adam,
        gradients=gradients,
        bucket_mb=BUCKET_MB,
    )
    inputs, targets = batch(config, 2)
    for _ in steps():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    held = ledger.count(model, optimizer.inner)
    return held.parameters, held.optimizer


@pytest.mark.parametrize(("world_size", "gradients"), [(2, "sharded"), (4, "local"), (8, "sharded")])
def test_the_sharded_optimizer_sends_and_holds_what_was_predicted(world_size: int, gradients: str) -> None:
    sizes = exact_bytes.all_parameter_sizes(spec(CONFIG))
    sent, found = sent_and_held(with_sharded_optimizer, world_size, CONFIG, gradients)
    assert sent == [exact_bytes.sharded_optimizer(sizes, world_size, BUCKET_MB)] * world_size
    parameters, _, optimizer = exact_bytes.held_sharded_optimizer(sizes, world_size, BUCKET_MB)
    assert found == [(parameters, optimizer)] * world_size


def fully_sharded(rank: int, config: GPTConfig) -> Any:
    from course_lib.instruments import ledger
    from course_lib.mechanisms import sharding

    model = sharding.FullySharded(TinyGPT(config))
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = batch(config, 2)
    for _ in steps():
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    held = ledger.count(model, optimizer)
    return held.parameters, held.gradients, held.optimizer


@pytest.mark.parametrize(("world_size", "config"), EVERY_SIZE_AND_CONFIG)
def test_the_fully_sharded_model_sends_and_holds_what_was_predicted(world_size: int, config: GPTConfig) -> None:
    expected = exact_bytes.fully_sharded(spec(config), world_size)
    sent, found = sent_and_held(fully_sharded, world_size, config)
    assert sent == [expected] * world_size
    assert found == [exact_bytes.held_fully_sharded(spec(config), world_size)] * world_size


def tensor_parallel_step(rank: int, config: GPTConfig, sequence_parallel: bool) -> Any:
    from course_lib.instruments import ledger
    from course_lib.mechanisms import tensor_parallel

    model = tensor_parallel.parallelize(TinyGPT(config), sequence_parallel=sequence_parallel)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, targets = batch(config, 2)
    for _ in steps():
        optimizer.zero_grad()
        tensor_parallel.vocab_parallel_cross_entropy(model(inputs), targets, config.vocab).backward()
        tensor_parallel.sum_partial_gradients(model)
        optimizer.step()
    held = ledger.count(model, optimizer)
    return held.parameters, held.gradients, held.optimizer


@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(2, True), (4, False), (8, True)])
def test_tensor_parallelism_sends_and_holds_what_was_predicted(world_size: int, sequence_parallel: bool) -> None:
    blocks = range(CONFIG.layers + 2)
    expected = exact_bytes.tensor_parallel(spec(CONFIG), blocks, 2, world_size, sequence_parallel)
    sent, found = sent_and_held(tensor_parallel_step, world_size, CONFIG, sequence_parallel)
    assert sent == [expected] * world_size
    sizes = [exact_bytes.all_parameter_sizes(spec(CONFIG), world_size, rank) for rank in range(world_size)]
    assert found == [exact_bytes.held(of_rank) for of_rank in sizes]


def pipeline_step(rank: int, config: GPTConfig, name: str, n_stages: int) -> None:
    from course_lib import schedules
    from course_lib.mechanisms import pipeline

    schedule = schedules.SCHEDULES[name](n_stages, SAMPLES)
    blocks, cuts = TinyGPT(config).blocks, stage_blocks(config, n_stages)
    stages = [blocks[cut.start : cut.stop] for cut in cuts]
    inputs, targets = batch(config, SAMPLES)
    for _ in steps():
        pipeline.run_schedule(schedule, stages, inputs, targets, loss_of)


def stage_blocks(config: GPTConfig, n_stages: int) -> list[range]:
    ends = [round(stage * (config.layers + 2) / n_stages) for stage in range(n_stages + 1)]
    return [range(first, last) for first, last in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("world_size", "name", "stages_per_rank"), [(2, "zbv", 2), (4, "1f1b", 1), (4, "zbv", 2), (8, "gpipe", 1)]
)
def test_a_pipeline_sends_what_was_predicted(world_size: int, name: str, stages_per_rank: int) -> None:
    from course_lib import schedules

    n_stages = world_size * stages_per_rank
    config = replace(CONFIG, layers=max(2, n_stages - 2))
    rank_of = schedules.SCHEDULES[name](n_stages, SAMPLES).rank_of
    homes = [rank_of[stage] for stage in range(n_stages)]
    expected = [exact_bytes.pipeline(spec(config), homes, rank, SAMPLES) for rank in range(world_size)]
    assert sent_in_a_step(pipeline_step, world_size, config, name, n_stages) == expected


def sent_between_barriers(timeline: Timeline, rank: int, number: int) -> int:
    """Bytes that a rank sent after its barrier of this number (from 0) and before the next one, if there is one."""
    ends = [span.end for span in timeline.of(rank) if span.name == "barrier" and span.kind == "transfer"] + [math.inf]
    first, last = ends[number : number + 2]
    return Timeline([span for span in timeline.spans if first <= span.start < last], timeline.world_size).bytes_sent(
        rank
    )


def test_a_model_that_the_course_cannot_build_is_refused() -> None:
    with pytest.raises(ValueError, match="biases and learned positions"):
        exact_bytes.all_parameter_sizes(ModelSpec(2, 16, 4, 8, 13, gated_mlp=True))
