"""Right programs that look like mistakes: none of them is refused, on either clock."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from course_lib import Pace, launch

CLOCKS = {"real": None, "emulated": Pace(device=0.01)}


@pytest.fixture(params=CLOCKS)
def pace(request):
    return CLOCKS[request.param]


# Tensors with different names on ranks, or used on different lines


def test_each_shard_may_be_reduced_to_its_owner_by_a_rank_that_names_its_own(pace):
    def owned(rank):
        shards = [torch.full((2,), float(rank + i)) for i in range(2)]
        own = shards[rank]
        for owner, shard in enumerate(shards):
            dist.reduce(shard, dst=owner)
        return own.tolist()

    assert launch(owned, 2, pace=pace).results == [[1.0, 1.0], [3.0, 3.0]]


def test_all_gradients_may_be_reduced_by_a_rank_that_names_its_own(pace):
    def reduced(rank):
        grads = [torch.full((2,), float(rank + i)) for i in range(2)]
        mine = grads[rank]
        for g in grads:
            dist.all_reduce(g)
        return mine.tolist()

    assert launch(reduced, 2, pace=pace).results == [[1.0, 1.0], [3.0, 3.0]]


def test_a_part_may_be_chosen_by_its_owner(pace):
    def chosen(rank):
        mine, theirs = torch.full((2,), float(rank)), torch.full((2,), 10.0)
        for owner in range(2):
            part = mine if owner == rank else theirs
            dist.reduce(part, owner)
        return mine.tolist()

    assert launch(chosen, 2, pace=pace).results == [[10.0, 10.0], [11.0, 11.0]]


def test_a_part_may_be_chosen_on_two_lines(pace):
    def chosen(rank):
        mine, theirs = torch.full((2,), float(rank)), torch.full((2,), 10.0)
        for owner in range(2):
            if owner == rank:
                dist.reduce(mine, owner)
            else:
                dist.reduce(theirs, owner)
        return mine.tolist()

    assert launch(chosen, 2, pace=pace).results == [[10.0, 10.0], [11.0, 11.0]]


# Waiting ranks with another thread that will help


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread.join


def in_a_daemon(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread.join


def in_a_pool(work):
    pool = ThreadPoolExecutor(1)
    pool.submit(work)
    return pool.shutdown


@pytest.mark.parametrize("later", [in_a_thread, in_a_daemon, in_a_pool])
def test_a_helper_thread_may_send_late_what_the_other_waits_for(later):
    def helped(rank):
        box, echo = torch.zeros(1), torch.zeros(1)

        def send():
            time.sleep(3)
            dist.send(torch.ones(1), 1, tag=1)

        if rank == 0:
            end = later(send)
            dist.recv(echo, 1)
            end()
        else:
            dist.recv(box, 0, tag=1)
            dist.send(box + 1, 0)
        return float(echo + box)

    assert launch(helped, 2).results == [2.0, 1.0]


def test_a_timer_may_send_what_the_other_waits_for():
    def helped(rank):
        box = torch.zeros(1)
        if rank == 1:
            dist.recv(box, 0, tag=1)
            dist.send(box + 1, 0)
            return float(box)
        timer = threading.Timer(3.0, dist.send, (torch.ones(1), 1), {"tag": 1})
        timer.start()
        dist.recv(box, 1)
        timer.join()
        return float(box)

    assert launch(helped, 2).results == [2.0, 1.0]


def test_a_rank_may_compute_while_its_helper_thread_waits_for_a_message():
    def helped(rank):
        box = torch.zeros(1)
        if rank == 1:
            dist.recv(box, 0, tag=1)
            dist.send(box + 1, 0)
            return float(box)
        thread = threading.Thread(target=dist.recv, args=(box, 1))
        thread.start()
        time.sleep(3)
        dist.send(torch.ones(1), 1, tag=1)
        thread.join()
        return float(box)

    assert launch(helped, 2).results == [2.0, 1.0]


def test_a_rank_may_sleep_with_a_future_outstanding():
    def sleeps(rank):
        total, box = torch.ones(1), torch.zeros(1)
        if rank == 0:
            future = dist.all_reduce(total, async_op=True).get_future()
            time.sleep(3)
            dist.send(total, 1)
            future.wait()
        else:
            dist.recv(box, 0)
            dist.all_reduce(total)
        return float(total)

    assert launch(sleeps, 2).results == [2.0, 2.0]


# Operations that torch begins by itself


def test_ranks_with_unequal_batches_may_join():
    def joined(rank):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        with model.join():
            for _ in range(1 + 2 * rank):
                model.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
        return model.module.weight.tolist()

    first, second = launch(joined, 2).results
    assert first == second


@pytest.mark.parametrize("wrapped", ["plain", "joined"])
def test_an_exception_from_a_forward_pass_may_be_caught(wrapped):
    def caught(rank):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        with model.join() if wrapped == "joined" else contextlib.nullcontext():
            with contextlib.suppress(RuntimeError):
                model(torch.ones(1, 3))
            model(torch.ones(1, 2)).sum().backward()
        return model.module.weight.grad.tolist()

    assert launch(caught, 2).results == [[[1.0, 1.0]]] * 2


def test_an_exception_from_a_sharded_forward_pass_may_be_caught():
    def caught(rank):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        with contextlib.suppress(RuntimeError):
            model(torch.ones(1, 3))
        return tuple(model(torch.ones(1, 2)).shape)

    assert launch(caught, 2).results == [(1, 1)] * 2


def test_what_torch_did_not_wait_for_may_end_in_the_next_run():
    """For example the all-reduce with which DDP.join counts: its end must not be taken for one of the next run."""

    def begins(rank):
        code = compile("work = dist.all_reduce(torch.ones(10**6), async_op=True)", torch.nn.__file__, "exec")
        exec(code, {"dist": dist, "torch": torch})

    def next_run(rank):
        return [dist.broadcast(torch.ones(1), 0) for _ in range(20)] and dist.get_world_size()

    for _ in range(3):
        launch(begins, 2)
        assert launch(next_run, 2).results == [2, 2]


# Tensors of as many numbers


def test_a_flat_view_may_be_broadcast_into_a_matrix(pace):
    def shared(rank):
        matrix = torch.arange(6.0).reshape(2, 3) if rank == 0 else torch.zeros(2, 3)
        dist.broadcast(matrix.view(-1) if rank == 0 else matrix, 0)
        return matrix.tolist()

    assert launch(shared, 2, pace=pace).results == [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2


def test_a_flat_view_may_be_reduced_with_a_matrix(pace):
    def shared(rank):
        matrix = torch.ones(2, 3)
        dist.all_reduce(matrix.view(-1) if rank == 0 else matrix)
        return matrix.sum().item()

    assert launch(shared, 2, pace=pace).results == [12.0, 12.0]
