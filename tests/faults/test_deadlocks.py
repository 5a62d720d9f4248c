"""Ranks that wait for each other, or for one that never comes: one line says who waits for whom."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course_lib import Deadlock, Mismatch, RankFailed, RankTimeout, launch
from course_lib.ranks.worker import traced_group
from course_lib.ranks.worker.traced_group import TracedWork
from tests.faults.conftest import others_wait


def waits(kind, who, whom):
    return f"{who} waits to {kind} {'from' if kind == 'receive' else 'to'} {whom}"


def test_two_ranks_that_receive_from_each_other_are_a_cycle(fault, row_at):
    def both_receive(rank):
        box = torch.zeros(2, 3)
        dist.recv(box, 1 - rank)  # receives
        dist.send(box, 1 - rank)

    begun = time.monotonic()
    error = fault.of(Deadlock, both_receive)
    took = time.monotonic() - begun
    line = str(error).splitlines()[0]
    assert waits("receive", 0, 1) in line and waits("receive", 1, 0) in line
    for rank in range(2):
        row = row_at(error, rank, both_receive, "receives")
        assert (row.operation, row.peer, row.shape) == ("recv", str(1 - rank), "2x3 float32")
        assert 0 < row.seconds < took


def test_two_ranks_that_send_to_each_other_first_are_a_cycle(fault, row_at):
    def both_send(rank):
        box = torch.zeros(1)
        dist.send(box, 1 - rank)  # sends
        dist.recv(box, 1 - rank)

    error = fault.of(Deadlock, both_send)
    line = str(error).splitlines()[0]
    assert waits("send", 0, 1) in line and waits("send", 1, 0) in line
    assert row_at(error, 0, both_send, "sends").operation == "send"


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_longer_cycle_of_receives_is_named_in_full(fault, world_size):
    def ring(rank):
        dist.recv(torch.zeros(1), (rank - 1) % world_size)

    line = str(fault.of(Deadlock, ring, world_size)).splitlines()[0]
    for rank in range(world_size):
        assert waits("receive", rank, (rank - 1) % world_size) in line


def test_a_ring_of_sends_is_named_in_full(fault):
    def ring(rank):
        dist.send(torch.zeros(1), (rank + 1) % 4)
        dist.recv(torch.zeros(1), (rank - 1) % 4)

    line = str(fault.of(Deadlock, ring, 4)).splitlines()[0]
    for rank in range(4):
        assert waits("send", rank, (rank + 1) % 4) in line


def test_a_cycle_of_asynchronous_receives_is_found_at_their_wait(fault, row_at):
    def both_wait(rank):
        work = dist.irecv(torch.zeros(4), 1 - rank)  # begun
        work.wait()
        dist.send(torch.zeros(4), 1 - rank)

    error = fault.of(Deadlock, both_wait)
    line = str(error).splitlines()[0]
    assert waits("receive", 0, 1) in line and waits("receive", 1, 0) in line
    row_at(error, 0, both_wait, "begun")


def test_a_cycle_in_batched_sends_and_receives_is_found(fault):
    def both_only_receive(rank):
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), 1 - rank)])
        for work in works:
            work.wait()

    line = str(fault.of(Deadlock, both_only_receive)).splitlines()[0]
    assert waits("receive", 0, 1) in line


def test_a_cycle_among_some_is_named_though_the_others_returned(fault, judged_when):
    def two_of_four(rank):
        if rank in (1, 2):
            dist.recv(torch.zeros(1), 3 - rank)
        return rank

    judged_when(lambda statuses: statuses[0].has_ended and statuses[3].has_ended)
    error = fault.of(Deadlock, two_of_four, 4)
    line = str(error).splitlines()[0]
    assert waits("receive", 1, 2) in line and waits("receive", 2, 1) in line
    assert [row.state for row in error.report.rows] == ["returned", "waiting", "waiting", "returned"]


def test_a_cycle_among_some_is_named_though_the_others_wait_in_a_collective(fault):
    def two_of_four(rank):
        if rank in (1, 2):
            dist.recv(torch.zeros(1), 3 - rank)
        dist.all_reduce(torch.zeros(1))

    line = str(fault.of(Deadlock, two_of_four, 4)).splitlines()[0]
    assert waits("receive", 1, 2) in line and waits("receive", 2, 1) in line


def test_a_cycle_among_some_is_named_though_another_computes_on(fault):
    def two_of_three(rank):
        if rank < 2:
            dist.recv(torch.zeros(1), 1 - rank)
        time.sleep(60)

    line = str(fault.of(Deadlock, two_of_three, 3)).splitlines()[0]
    assert waits("receive", 0, 1) in line and waits("receive", 1, 0) in line


def test_a_cycle_of_a_receive_and_a_collective_is_found(fault):
    def crossed(rank):
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
            dist.all_reduce(torch.zeros(1))
        else:
            dist.all_reduce(torch.zeros(1))
            dist.send(torch.zeros(1), 0)

    line = str(fault.of(Deadlock, crossed)).splitlines()[0]
    assert waits("receive", 0, 1) in line and "all_reduce" in line


def test_a_receive_from_a_rank_that_returned_is_named(fault, row_at):
    def one_forgets_to_send(rank):
        if rank == 0:
            dist.recv(torch.zeros(7), 1)  # receives

    error = fault.of(Deadlock, one_forgets_to_send)
    assert str(error).startswith("Rank 0 waits to receive from rank 1, but rank 1 has already returned")
    assert row_at(error, 0, one_forgets_to_send, "receives").shape == "7 float32"


def test_a_send_that_nobody_receives_is_named(fault):
    def one_forgets_to_receive(rank):
        if rank == 0:
            dist.send(torch.zeros(7), 1)

    error = fault.of(Deadlock, one_forgets_to_receive)
    assert str(error).startswith("Rank 0 waits to send to rank 1, but rank 1 has already returned")


def test_a_receive_from_the_wrong_rank_is_named(fault):
    def mixed_up(rank):
        if rank == 0:
            dist.recv(torch.zeros(1), 1)
        if rank == 2:
            dist.send(torch.zeros(1), 0)

    assert "Rank 0 waits to receive from rank 1" in str(fault.of(Deadlock, mixed_up, 3)).splitlines()[0]


def test_different_tags_do_not_meet(fault):
    def tagged(rank):
        if rank == 0:
            dist.send(torch.zeros(1), 1, tag=1)
        else:
            dist.recv(torch.zeros(1), 0, tag=2)

    text = str(fault.of(Deadlock, tagged))
    assert "tag" in text


def test_a_rank_that_returns_early_is_named_by_those_who_wait_in_a_collective(fault, row_at):
    def one_returns_early(rank):
        if rank < 2:
            dist.all_reduce(torch.zeros(2, 2))  # waits
        else:
            others_wait(rank, "all_reduce")

    error = fault.of(Deadlock, one_returns_early, 3)
    line = str(error).splitlines()[0]
    assert line == "Ranks 0 and 1 wait in all_reduce, but rank 2 has already returned without that all_reduce."
    assert error.rank == 2
    assert row_at(error, 0, one_returns_early, "waits").operation == "all_reduce"


def test_a_rank_that_makes_one_collective_less_in_a_loop_is_named(fault):
    def unequal_steps(rank):
        for _ in range(5 - rank):
            dist.all_reduce(torch.zeros(1))

    error = fault.of(Deadlock, unequal_steps)
    assert error.rank == 1 and "rank 1" in str(error).splitlines()[0].lower()


def test_a_rank_that_computes_elsewhere_is_named_when_the_time_is_up(fault, row_at, judged_when):
    def one_never_comes(rank):
        while rank == 1:
            sum(range(1_000_000))  # computes
        dist.all_reduce(torch.zeros(3))  # waits

    judged_when(lambda statuses: statuses[0].state == "waiting" and statuses[1].state == "computing")
    error = fault.of(RankTimeout, one_never_comes, timeout=1.5)
    assert error.rank == 1 and "rank 1" in str(error).splitlines()[0].lower()
    row_at(error, 0, one_never_comes, "waits")
    row_at(error, 1, one_never_comes, "computes")


def test_a_forgotten_subgroup_member_is_named(fault):
    def in_part(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            dist.all_reduce(torch.zeros(1), group=group)
        dist.barrier()

    error = fault.of(Deadlock, in_part, 3)
    assert "all_reduce" in str(error) and "barrier" in str(error)


def test_a_rank_that_leaves_its_group_does_not_break_the_connections_of_those_in_it(fault):
    def leaves(rank):
        if rank == 1:
            return dist.destroy_process_group()
        time.sleep(0.5)
        return dist.all_reduce(torch.zeros(1))

    line = str(fault.of(Deadlock, leaves)).splitlines()[0]
    assert line == "Rank 0 waits in all_reduce, but rank 1 has already returned without that all_reduce."


# Receives from any rank, groups, threads


def test_a_receive_from_any_rank_too_many_accuses_nobody(fault, row_at):
    def one_too_many(rank):
        if rank > 0:
            dist.send(torch.ones(1), 0)
        while rank == 0:
            dist.recv(torch.zeros(1))  # receives

    error = fault.of(Deadlock, one_too_many, 4)
    line = str(error).splitlines()[0]
    assert line.startswith("Rank 0 waits to receive from any rank, but ranks 1, 2 and 3 have already returned")
    assert error.rank is None and "its part" not in line
    row_at(error, 0, one_too_many, "receives")


def test_a_server_that_waits_for_whoever_comes_waits_for_nobody_else(fault):
    def serves(rank):
        box = torch.zeros(1)
        if rank == 0:
            while True:
                dist.send(box, dist.recv(box))
        dist.send(box, 0)
        dist.recv(box, 0)
        if rank == 1:
            dist.recv(box, 0)  # one answer too many

    line = str(fault.of(Deadlock, serves, 3)).splitlines()[0]
    assert line == "Nobody can move: 0 waits to receive from any rank, 1 waits to receive from 0."


def test_calls_in_different_groups_are_said_to_be_in_different_groups(fault):
    def differ(rank):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=group if rank == 0 else None)

    error = fault.of(Deadlock, differ, 3)
    line = str(error).splitlines()[0]
    assert "0 waits in all_reduce for 1 (in the group of ranks 0 and 1)" in line
    assert "1 waits in all_reduce for 0 (in the group of all ranks)" in line
    assert "same group" in str(error)


def reads_a_queue():
    threading.Thread(target=queue.Queue().get, daemon=True).start()


def has_a_pool():
    ThreadPoolExecutor(1).submit(int).result()


@pytest.mark.parametrize("begin", [reads_a_queue, has_a_pool])
def test_threads_that_only_wait_for_others_change_nothing(fault, begin):
    def both_receive(rank):
        begin()
        dist.recv(torch.zeros(1), 1 - rank)

    line = str(fault.of(Deadlock, both_receive)).splitlines()[0]
    assert waits("receive", 0, 1) in line and waits("receive", 1, 0) in line


def test_a_helper_thread_that_is_stuck_is_told_while_its_rank_waits_for_it(fault, row_at):
    def joins(rank):
        def receive():
            dist.recv(torch.zeros(1), 1 - rank)  # receives

        thread = threading.Thread(target=receive)
        thread.start()
        thread.join()

    error = fault.of(Deadlock, joins)
    assert waits("receive", 0, 1) in str(error).splitlines()[0]


def test_a_future_that_nobody_will_fulfil_is_a_deadlock(fault):
    def waits_for_it(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()

    line = str(fault.of(Deadlock, waits_for_it)).splitlines()[0]
    assert "all_reduce" in line and "rank 1 has already returned" in line


def test_gradients_that_another_rank_does_not_have_are_a_deadlock(fault):
    def one_step_less(rank):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        for _ in range(3 - rank):
            model(torch.ones(1, 2)).sum().backward()

    line = str(fault.of(Deadlock, one_step_less)).splitlines()[0]
    assert "all_reduce" in line and "rank 1 has already returned" in line


# Runs that look like a deadlock and are none


def test_a_slow_rank_is_waited_for():
    def slow(rank):
        if rank == 0:
            time.sleep(2.5)
        value = torch.tensor(1)
        dist.all_reduce(value)
        return int(value)

    assert launch(slow, 3).results == [3, 3, 3]


def test_a_rank_that_computes_for_long_while_the_others_wait_is_no_deadlock():
    def busy(rank):
        until = time.monotonic() + 2.5
        while rank == 0 and time.monotonic() < until:
            pass
        dist.barrier()
        return rank

    assert launch(busy, 2).results == [0, 1]


def test_a_ring_with_asynchronous_sends_is_no_deadlock():
    def ring(rank):
        box = torch.zeros(1)
        work = dist.isend(torch.tensor([float(rank)]), (rank + 1) % 4)
        dist.recv(box, (rank - 1) % 4)
        work.wait()
        return int(box)

    assert launch(ring, 4).results == [3, 0, 1, 2]


def test_receiving_from_any_rank_is_no_deadlock():
    def any_order(rank):
        if rank > 0:
            dist.send(torch.tensor([rank]), 0)
            return None
        box, seen = torch.zeros(1, dtype=torch.long), []
        for _ in range(2):
            dist.recv(box)
            seen.append(int(box))
        return sorted(seen)

    assert launch(any_order, 3).results[0] == [1, 2]


def test_a_rank_that_is_held_up_while_it_takes_a_message_from_any_rank_is_no_deadlock():
    """The sender has long returned by then."""

    def held_up(rank):
        if rank == 1:
            dist.send(torch.ones(1), 0)
            return 1.0
        box, note_sender = torch.zeros(1), TracedWork._note_sender

        def late(work):
            time.sleep(2.5)
            note_sender(work)

        with mock.patch.object(TracedWork, "_note_sender", late):
            dist.recv(box)
        return float(box)

    assert launch(held_up, 2).results == [1.0, 1.0]


def test_a_message_too_few_for_who_takes_it_from_any_rank_is_a_deadlock(fault):
    def one_too_many(rank):
        if rank == 1:
            return dist.send(torch.ones(1), 0)
        dist.recv(torch.zeros(1))
        return dist.recv(torch.zeros(1))

    fault.of(Deadlock, one_too_many)


def test_a_deadlock_is_a_deadlock_and_no_mismatch(fault):
    def both_receive(rank):
        dist.recv(torch.zeros(1), 1 - rank)

    assert not isinstance(fault.of(Deadlock, both_receive), Mismatch)


def test_a_message_with_another_tag_is_named(fault):
    def ring(rank):
        sending = dist.isend(torch.zeros(1), 1 - rank, tag=rank)
        dist.recv(torch.zeros(1), 1 - rank, tag=rank)
        sending.wait()

    assert "Rank 1 sends with tag 1, and rank 0 waits for tag 0." in str(fault.of(Deadlock, ring))


def test_a_round_that_the_sender_does_not_have_is_counted(fault):
    def ring(rank):
        for step in range(3):
            sending = dist.isend(torch.zeros(1), 1 - rank) if step < 2 else None
            dist.recv(torch.zeros(1), 1 - rank)
            if sending:
                sending.wait()

    assert "Rank 0 waits for message 3 of rank 1, which has sent 2: compare rounds." in str(fault.of(Deadlock, ring))


def test_a_message_arrives_although_nobody_keeps_its_handle():
    def forgetful(rank):
        dist.isend(torch.full((1,), float(rank)), 1 - rank)
        box = torch.zeros(1)
        dist.recv(box, 1 - rank)
        assert box == 1 - rank

    with pytest.raises(RankFailed, match="began isend to rank 1 and returned without waiting for it"):
        launch(forgetful, 2)


def test_a_wait_for_what_began_long_ago_is_seen_where_it_began(fault, row_at):
    def waits_for_the_first(rank):
        if rank == 1:
            dist.recv(torch.zeros(1), 0, tag=7)
        first = dist.isend(torch.zeros(1), 1)  # never received
        others = [dist.isend(torch.zeros(1), 1) for _ in range(200)]
        first.wait()
        [other.wait() for other in others]

    error = fault.of(Deadlock, waits_for_the_first)
    assert "0 waits to send to 1" in str(error) and "tag 7" in str(error)
    row_at(error, 0, waits_for_the_first, "never received")


def test_a_receive_that_waits_inside_the_call_as_nccl_does_while_it_connects_is_told(fault):
    """NCCL makes the connection between two ranks in their first message, and waits in there for the other."""

    def lonely_receive(rank):
        if rank == 0:
            group = dist.group.WORLD
            connect = compile("lambda *args: inner.recv(*args).wait()", traced_group.__file__, "eval")
            group.inner = SimpleNamespace(recv=eval(connect, {"inner": group.inner}))
            group.tracer.device = torch.device("cuda")
            dist.recv(torch.zeros(1), 1)

    assert waits("receive", 0, "rank 1") in str(fault.of(Deadlock, lonely_receive))


def test_a_wait_for_a_collective_is_told_where_futures_are_done_at_once_as_those_of_nccl(fault):
    def lonely(rank):
        if rank == 0:
            group, done = dist.group.WORLD, torch.futures.collect_all([])
            begin = group.inner.allreduce
            handle = lambda *args: SimpleNamespace(wait=begin(*args).wait, get_future=lambda: done)  # noqa: E731
            group.inner, group.tracer.device = SimpleNamespace(allreduce=handle), torch.device("cuda")
            dist.all_reduce(torch.zeros(1), async_op=True).wait()

    assert "Rank 0 waits in all_reduce" in str(fault.of(Deadlock, lonely))
