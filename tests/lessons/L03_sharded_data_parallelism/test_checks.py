"""The checks of sharded data parallelism: right solutions beside one process and PyTorch's own, and their prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from course_lib import launch
from course_lib.classroom.checks.exercise import Exercise
from course_lib.classroom.checks.part import Case
from lessons.L03_sharded_data_parallelism import checks
from tests.classroom.checks.prices import counted
from tests.lessons.L03_sharded_data_parallelism import solutions as s


def hardest(exercise: Exercise) -> list[Case]:
    """The last case of each number of ranks. The bank's test sees that solutions agree in the others."""
    return list({case.world_size: case for case in exercise.cases(3)}.values())


def results(exercise: Exercise, case: Case) -> list[Any]:
    return [programs[0].values for programs in exercise.run_right(case).results]


@pytest.mark.parametrize(("n", "size"), [(2, 7), (3, 11), (4, 6)])
def test_pieces_are_those_of_the_sum_and_their_whole(n: int, size: int) -> None:
    case = checks._case(checks._tensor, n, size, seed=4)
    total = torch.stack([case.arguments(rank)[0] for rank in range(n)]).sum(0)
    for values, piece in zip(results(checks.reduce_scatter, case), total.tensor_split(n), strict=True):
        assert torch.equal(values["the result"], piece)
    (whole,) = checks._tensor(size, 4, rank=0)
    for values in results(checks.all_gather, checks._case(checks._piece, n, size, seed=4)):
        assert torch.equal(values["the result"], whole)


def of_pytorch(rank: int, case: Case) -> Tensor:
    """Train with PyTorch's ZeRO-1, after DistributedDataParallel has averaged the gradients."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, batches, loss_fn, make_optimizer = case.arguments(rank)
    parallel = DistributedDataParallel(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ZeroRedundancyOptimizer(trained, make_optimizer.func, **make_optimizer.keywords)
    for inputs, targets in batches:
        loss_fn(parallel(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("case", hardest(checks.train_sharded), ids=lambda case: case.text)
def test_the_right_training_is_that_of_one_process_and_of_pytorch(case: Case) -> None:
    shares = [case.arguments(rank) for rank in range(case.world_size)]
    model, _, loss_fn, make_optimizer = shares[0]
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for batch in zip(*(batches for _, batches, _, _ in shares), strict=True):
        inputs, targets = map(torch.cat, zip(*batch, strict=True))
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = dict(model.named_parameters())
    theirs = launch(of_pytorch, case.world_size, (case,)).results[0]
    torch.testing.assert_close(theirs, parameters_to_vector(alone.values()).detach(), rtol=1e-10, atol=1e-12)
    for values in results(checks.train_sharded, case):
        for name, parameter in alone.items():
            torch.testing.assert_close(values[name], parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", hardest(checks.sharded_linear), ids=lambda case: case.text)
def test_the_right_layers_are_those_of_one_process_with_all_samples(case: Case) -> None:
    n, shares = case.world_size, launch(arguments, case.world_size, (case,)).results
    shapes = shares[0][2]
    cut = [torch.cat([shards[i] for _, shards, _, _ in shares]) for i in range(len(shapes))]
    weights = [flat.view(shape).requires_grad_() for flat, shape in zip(cut, shapes, strict=True)]
    xs = [x.requires_grad_() for x, _, _, _ in shares]
    y = torch.cat(xs)
    for weight in weights:
        y = nn.functional.linear(y, weight)
    y.backward(torch.cat([dy for _, _, _, dy in shares]))
    for rank, values in enumerate(results(checks.sharded_linear, case)):
        torch.testing.assert_close(values["the result[y]"], y.chunk(n)[rank].detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(values["the result[dx]"], xs[rank].grad, rtol=1e-12, atol=1e-14)
        for i, weight in enumerate(weights):
            own = weight.grad.flatten().tensor_split(n)[rank] / n
            gradient = values[f"the result[gradient of shards[{i}]]"]
            torch.testing.assert_close(gradient, own, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", checks.recompute.cases(3)[:-1], ids=lambda case: case.text)
def test_what_is_computed_twice_is_what_is_computed_once(case: Case) -> None:
    """Recomputing is exact to the bit, with the same dropout. (PyTorch's own is among the right solutions.)"""
    run = checks.recompute.run([lambda block, x: block(x)], case)
    for once, values in zip(run.results, results(checks.recompute, case), strict=True):
        assert once[0].values.keys() == values.keys()
        for name, value in once[0].values.items():
            assert torch.equal(values[name], value) if isinstance(value, Tensor) else values[name] == value


def arguments(rank: int, case: Case) -> Any:
    x, shards, shapes, dy = case.arguments(rank)
    return x.detach(), [shard.detach() for shard in shards], shapes, dy


# The price


SENT, CALLS, HELD, IDLE = (
    "bytes a rank sends",
    "operations they take",
    "bytes of extra memory on a rank",
    "idle time (emulated)",
)


def test_each_half_of_an_all_reduce_sends_half_of_it() -> None:
    size = 3_000 * 8
    scatter = counted(checks.reduce_scatter, checks.scattered)
    gather = counted(checks.all_gather, s.gathered_in_a_batch)
    assert scatter[SENT] == gather[SENT] == (size * 3 // 4,) * 2
    assert scatter[CALLS] == gather[CALLS] == (3, 3)
    assert scatter[HELD][1] == 2 * size // 4  # the sum of a piece, and an arriving piece
    assert gather[HELD][1] == size
    one_by_one, at_once = 3 * (0.005 + size / 4 / 6e5), 0.005 + 3 * size / 4 / 6e5
    assert scatter[IDLE] == (round(100 * one_by_one / (0.1 + one_by_one)),) * 2
    assert gather[IDLE] == (round(100 * at_once / (0.1 + at_once)),) * 2
    everything = counted(checks.reduce_scatter, s.all_at_once)
    assert everything[IDLE][0] == gather[IDLE][0] and everything[HELD][0] >= 3 * size // 4


def test_a_step_of_zero_1_sends_an_all_reduce_of_the_parameters_and_can_take_two_operations() -> None:
    padded, messages = counted(checks.train_sharded, s.with_padding), counted(checks.train_sharded, checks.trained)
    pieces = [81, 80, 80, 80]
    assert sum(pieces) == 5 * 64 + 1
    assert messages[SENT] == (3 * 8 * (3 * 80 + 3 * 81),) * 2  # rank 0, in three steps
    assert padded[SENT][0] == 3 * 8 * (3 * 81 + 3 * 81)
    assert padded[CALLS] == (6, 6) and messages[CALLS] == (18, 18)


def test_layers_are_gathered_twice_and_their_gradients_scattered_once() -> None:
    price = counted(checks.sharded_linear, checks.linear)
    layer = 16 * 16 * 8
    assert price[SENT] == (3 * 6 * layer * 3 // 4,) * 2
    assert 2 * layer <= price[HELD][0] <= 4 * layer  # one layer, its gradient, and sent and kept pieces


def test_a_block_that_is_computed_twice_is_gathered_once_more_and_only_one_is_there_at_a_time() -> None:
    price = counted(checks.recompute, s.pytorch_reentrant)
    layer, inside = 3 * checks.WIDE * 8, 8 * checks.WIDE * 8
    assert price[SENT] == (4 * (3 + 1) * layer * 3 // 4,) * 2
    assert 3 * inside <= price[HELD][0] <= 6 * inside


def test_what_does_better_than_the_right_solution_is_the_best_possible() -> None:
    assert all(yours >= best for yours, best in counted(checks.train_sharded, s.with_padding).values())


def test_the_next_launch_works() -> None:
    assert launch(lambda rank: dist.get_world_size(), 2).results == [2, 2]


@pytest.mark.parametrize("case", hardest(checks.faster_layers), ids=lambda case: case.text)
def test_layers_have_the_gradients_of_one_process_with_all_samples(case: Case) -> None:
    x, pieces, shapes, targets = zip(*launch(arguments, case.world_size, (case,)).results, strict=True)
    weights = [torch.cat(of_one).view(shapes[0][0]).requires_grad_() for of_one in zip(*pieces, strict=True)]
    y = torch.cat(x)
    for weight in weights:
        y = torch.tanh(y @ weight.T)
    (y - torch.cat(targets)).square().sum().div(2 * case.world_size).backward()
    for rank, values in enumerate(results(checks.faster_layers, case)):
        for i, weight in enumerate(weights):
            mine = weight.grad.tensor_split(case.world_size)[rank]
            torch.testing.assert_close(values[f"the result[gradient of shards[{i}]]"], mine, rtol=1e-9, atol=1e-12)


def test_the_best_step_known_is_as_short_as_any_can_be() -> None:
    """The last layer waits for all gathers, the way back takes all backward passes, and the last scatter comes last."""
    task, layers, forward, backward, message = checks.faster_layers, 8, 20, 60, 25
    assert task.budget
    best = task.run([task.budget.ours], task.price_case).timeline
    assert 1000 * best.makespan == pytest.approx(layers * message + forward + layers * backward + message)
    assert 1000 * task.run_right(task.price_case).timeline.makespan == pytest.approx(layers * (80 + 3 * message))
