"""Leftovers of a function that has returned: the error names them, they are ended, and the next run is clean."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_lib import Deadlock, Pace, RankFailed, RunError, launch
from tests.faults.conftest import assert_gone, with_numbers


def assert_named(error, rank, *words):
    line = str(error).splitlines()[0]
    assert error.rank == rank and f"rank {rank}" in line.lower()
    for word in words:
        assert word in str(error), word


def test_a_thread_left_behind_is_named(fault):
    def leaves(rank):
        if rank == 1:
            threading.Thread(target=time.sleep, args=(60,), name="prefetcher").start()

    assert_named(fault.of(RankFailed, leaves), 1, "thread", "prefetcher")


def test_a_thread_that_was_joined_is_lawful():
    def joins(rank):
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()
        thread.join()
        return rank

    assert launch(joins, 2).results == [0, 1]


def test_daemon_threads_of_libraries_are_lawful():
    def starts(rank):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        x = torch.ones(3, requires_grad=True)
        (x * x).sum().backward()
        return rank

    assert launch(starts, 2).results == [0, 1]


def test_a_child_process_left_behind_is_named_and_ended(fault, tmp_path):
    note = tmp_path / "child"

    def leaves(rank):
        if rank == 0:
            child = subprocess.Popen(["sleep", "60"])
            note.write_text(str(child.pid))

    assert_named(fault.of(RankFailed, leaves), 0, "child process")
    assert_gone(with_numbers([int(note.read_text())]))


@pytest.mark.linux
def test_a_child_of_multiprocessing_left_behind_is_named(fault):
    def leaves(rank):
        import multiprocessing

        if rank == 0:
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()

    assert_named(fault.of(RankFailed, leaves), 0, "process")


@pytest.mark.linux
def test_a_child_process_of_a_rank_that_raises_is_ended_too(fault, tmp_path):
    note = tmp_path / "child"

    def leaves(rank):
        note.write_text(str(subprocess.Popen(["sleep", "60"]).pid)) if rank == 0 else None
        dist.barrier()
        raise ValueError("and then this")

    fault.of(RankFailed, leaves)
    assert_gone(with_numbers([int(note.read_text())]))


def test_a_child_process_that_was_waited_for_is_lawful():
    def asks(rank):
        return subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout

    assert launch(asks, 2).results == ["42\n", "42\n"]


@pytest.mark.linux
def test_a_data_loader_with_workers_is_lawful():
    def loads(rank):
        numbers = torch.utils.data.TensorDataset(torch.arange(8))
        loader: Any = torch.utils.data.DataLoader(numbers, batch_size=4, num_workers=1)
        return [batch.tolist() for (batch,) in loader]

    assert launch(loads, 2).results == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


@pytest.mark.linux
@pytest.mark.parametrize("is_fine", [True, False])
@pytest.mark.parametrize("pace", [None, Pace()])
def test_a_child_of_fork_that_returns_from_the_function_is_no_rank(is_fine, pace):
    def forks(rank):
        child = os.fork()
        if child == 0 and not is_fine:
            raise ValueError("a child's own business")
        os.waitpid(child, 0) if child else None
        return "parent" if child else "child"

    for _ in range(2):
        assert launch(forks, 2, timeout=20, pace=pace).results == ["parent", "parent"]


@pytest.mark.linux
def test_a_child_of_fork_that_nobody_waits_for_is_named(fault):
    def forks(rank):
        return os.fork()

    assert fault.of(RankFailed, forks, timeout=20).message.startswith("Every rank returned")


def test_a_send_that_was_never_waited_for_nor_received_is_named(fault, row_at):
    def forgets(rank):
        if rank == 0:
            dist.isend(torch.zeros(6), 1)  # forgotten

    error = fault.of(RunError, forgets)
    assert isinstance(error, (RankFailed, Deadlock))
    assert_named(error, 0, "isend", "wait")
    row_at(error, 0, forgets, "forgotten")


def test_a_receive_that_was_never_waited_for_is_named(fault):
    def forgets(rank):
        if rank == 1:
            dist.irecv(torch.zeros(6), 0)

    assert_named(fault.of(RunError, forgets), 1, "irecv", "wait")


def test_a_collective_that_was_never_waited_for_is_named(fault):
    def forgets(rank):
        work = dist.all_reduce(torch.zeros(6), async_op=True)
        if rank == 0:
            work.wait()

    assert_named(fault.of(RunError, forgets), 1, "all_reduce", "wait")


def test_a_message_received_too_late_does_not_reach_the_next_run(fault):
    def sends_into_the_void(rank):
        if rank == 0:
            dist.isend(torch.full((1,), 666.0), 1)

    def next_run(rank):
        box = torch.zeros(1)
        dist.send(torch.full((1,), 1.0), 1) if rank == 0 else dist.recv(box, 0)
        return float(box)

    fault.of(RunError, sends_into_the_void)
    assert launch(next_run, 2).results == [0.0, 1.0]


def test_a_destroyed_process_group_does_not_spoil_the_next_run():
    def destroys(rank):
        dist.destroy_process_group()
        return rank

    def total(rank):
        value = torch.tensor(rank)
        dist.all_reduce(value)
        return int(value)

    assert launch(destroys, 3).results == [0, 1, 2]
    assert launch(total, 3).results == [3, 3, 3]


def test_settings_of_a_run_do_not_reach_the_next_one():
    def changes(rank):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(99)
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)

    def looks(rank):
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), torch.initial_seed()

    before = launch(looks, 2).results
    assert [each[:3] for each in before] == [(torch.float32, True, 1)] * 2
    launch(changes, 2)
    assert launch(looks, 2).results == before


def test_the_directory_and_environment_of_a_run_do_not_reach_the_next_one():
    def changes(rank):
        os.environ["LEFT_BEHIND"] = "yes"
        os.chdir("/")

    def looks(rank):
        return os.environ.get("LEFT_BEHIND"), os.getcwd()

    launch(changes, 2)
    assert launch(looks, 2).results == [(None, os.getcwd())] * 2


def no_reduction(rank):
    dist.all_reduce = lambda *args, **options: None


def no_backward(rank):
    torch.Tensor.backward = lambda *args, **options: None  # type: ignore[method-assign]


def no_layer(rank):
    torch.nn.Linear.forward = lambda self, x: self.weight.sum() * x  # type: ignore[assignment, method-assign]


def another_function_of_the_course(rank):
    from course_lib.mechanisms import data_parallel

    data_parallel.average_gradients = lambda *args, **options: None


def another_time(rank):
    time.perf_counter = lambda: 0.0


def a_removed_function(rank):
    del torch.nn.functional.gelu


def a_hook_on_all_modules(rank):
    torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 0)


def settings_of_torch(rank):
    torch.set_autocast_enabled("cpu", True)
    torch.set_printoptions(precision=1)
    torch.use_deterministic_algorithms(True)


def a_device(rank):
    torch.set_default_device("meta")


def an_alarm(rank):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(30)


def only_on_one_rank(rank):
    if rank == 1:
        torch.set_default_device("meta")


def one_step(rank):
    """Read all settings that are changed above."""
    from course_lib.mechanisms.data_parallel import average_gradients

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    result = model(torch.full((1, 2), float(rank + 1)))
    result.sum().backward()
    total = model.weight.grad.clone()
    dist.all_reduce(total)
    average_gradients(model)
    left = [torch.are_deterministic_algorithms_enabled(), time.perf_counter() > 0, signal.alarm(0)]
    return [str(total), str(model.weight.grad), str(result), hasattr(torch.nn.functional, "gelu"), *left]


@pytest.mark.linux
@pytest.mark.parametrize(
    "change",
    [
        no_reduction,
        no_backward,
        no_layer,
        another_function_of_the_course,
        another_time,
        a_removed_function,
        a_hook_on_all_modules,
        settings_of_torch,
        a_device,
        an_alarm,
        only_on_one_rank,
    ],
)
def test_what_a_run_changes_on_its_ranks_is_nothing_that_the_next_one_meets(change):
    before = launch(one_step, 2).results
    launch(change, 2)
    assert launch(one_step, 2).results == before


def test_a_filter_of_warnings_goes_with_its_run():
    def warns(rank, is_quiet):
        with contextlib.redirect_stderr(io.StringIO()) as shown:
            if is_quiet:
                warnings.simplefilter("ignore")
            warnings.warn("here", stacklevel=1)
        return "here" in shown.getvalue()

    assert [launch(warns, 1, (is_quiet,)).results for is_quiet in (False, True, False)] == [[True], [False], [True]]


def test_ranks_stay_for_the_next_run_where_nothing_is_changed_for_good():
    """Changes that libraries make for themselves, undone or not, are no reason to fork again."""

    def uses_much(rank):
        import unittest.mock

        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        with warnings.catch_warnings(), torch.autocast("cpu"), torch.device("cpu"), torch.no_grad():
            warnings.simplefilter("ignore")
        with unittest.mock.patch.object(dist, "all_reduce"):
            pass
        plain = torch.nn.Linear(4, 4)
        sharded: Any = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        replicated = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for model in (plain, sharded, replicated):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return os.getpid()

    assert launch(uses_much, 2).results == launch(uses_much, 2).results


def late_receive(rank, shape=4):
    if rank == 1:
        time.sleep(0.3)  # computes first
        buffer = torch.zeros(shape)
        dist.recv(buffer, 0)
        return buffer.tolist()
    return None


def test_a_tensor_that_was_changed_on_its_way_is_named(fault):
    def overwrites(rank):
        if rank == 0:
            activations = torch.ones(4)
            handle = dist.isend(activations, 1)
            activations *= 2  # the next layer
            handle.wait()
        return late_receive(rank)

    assert_named(
        fault.of(RankFailed, overwrites), 0, "changed the tensor", "rank 1", "isend(activations, 1)", "clone()"
    )


def test_a_tensor_that_is_overwritten_with_the_same_numbers_is_not_changed():
    def clears(rank):
        if rank == 0:
            buffer = torch.zeros(4)
            handle = dist.isend(buffer, 1)
            buffer.zero_()
            handle.wait()
        return late_receive(rank)

    assert launch(clears, 2).results[1] == [0.0] * 4


def changes_a_copy():
    numbers = torch.ones(4)
    handle = dist.isend(numbers.clone(), 1)
    numbers.mul_(2)
    handle.wait()


def changes_it_after_waiting():
    numbers = torch.ones(4)
    dist.isend(numbers, 1).wait()
    numbers.mul_(2)


def changes_another_part():
    numbers = torch.ones(8)
    first, second = numbers.split(4)
    handle = dist.isend(first, 1)
    second.mul_(2)
    handle.wait()


def changes_what_a_packed_copy_was_made_of():
    numbers = torch.ones(2, 2).t()[:, :2].t().t()
    handle = dist.isend(numbers, 1)
    numbers.mul_(2)
    handle.wait()


def updates_the_parameter_while_its_gradient_travels():
    layer = torch.nn.Linear(4, 1, bias=False)
    layer(torch.ones(4)).backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    handle = dist.isend(layer.weight.grad.view(4), 1)
    optimizer.step()
    handle.wait()


def sends_what_nobody_tracks():
    with torch.inference_mode():
        numbers = torch.ones(4)
        handle = dist.isend(numbers, 1)
    handle.wait()


@pytest.mark.parametrize(
    "send",
    [
        changes_a_copy,
        changes_it_after_waiting,
        changes_another_part,
        changes_what_a_packed_copy_was_made_of,
        updates_the_parameter_while_its_gradient_travels,
        sends_what_nobody_tracks,
    ],
)
def test_changing_what_is_not_on_its_way_is_lawful(send):
    def sends(rank):
        if rank == 0:
            send()
        return late_receive(rank, (2, 2) if send is changes_what_a_packed_copy_was_made_of else 4)

    assert launch(sends, 2).results[1] in ([1.0] * 4, [[1.0] * 2] * 2)


def test_changing_what_the_receiver_says_it_has_got_is_lawful():
    def acknowledged(rank):
        numbers, word = torch.ones(4), torch.zeros(1)
        if rank == 0:
            handle = dist.isend(numbers, 1)
            dist.recv(word, 1)
            numbers.mul_(2)
            handle.wait()
        else:
            dist.recv(numbers, 0)
            dist.send(word, 0)
        return numbers.tolist()

    assert launch(acknowledged, 2).results == [[2.0] * 4, [1.0] * 4]


def test_on_an_emulated_clock_a_message_on_its_way_is_a_copy():
    def overwrites(rank):
        if rank == 0:
            numbers = torch.ones(4)
            handle = dist.isend(numbers, 1)
            numbers.mul_(2)
            handle.wait()
        return late_receive(rank)

    assert launch(overwrites, 2, pace=Pace()).results[1] == [1.0] * 4
