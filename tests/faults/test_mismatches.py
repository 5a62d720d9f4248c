"""Operations that do not fit together: reported. Operations that differ and do fit: left alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from course_lib import Mismatch, RankFailed, launch
from course_lib.ranks.parent import monitor


def test_different_collectives_are_both_named(fault, row_at):
    def differ(rank):
        data = torch.zeros(3)
        if rank == 0:
            dist.all_reduce(data)  # reduces
        else:
            dist.broadcast(data, 1)  # broadcasts

    error = fault.of(Mismatch, differ)
    line = str(error).splitlines()[0]
    assert "all_reduce" in line and "broadcast" in line
    assert row_at(error, 0, differ, "reduces").operation == "all_reduce"
    assert row_at(error, 1, differ, "broadcasts").operation == "broadcast"


def test_a_mismatch_is_told_even_if_nobody_looked_before_the_time_was_over(fault, monkeypatch, judged_when):
    def differ_and_never_end(rank):
        dtype = [torch.float32, torch.int32][rank]
        dist.isend(torch.zeros(3, dtype=dtype), 1) if rank == 0 else dist.irecv(torch.zeros(3, dtype=dtype), 0)
        while True:
            pass

    monkeypatch.setattr(monitor, "_STILL", 60.0)
    judged_when(lambda statuses: all(status.operations for status in statuses))
    line = str(fault.of(Mismatch, differ_and_never_end, timeout=2.0)).splitlines()[0]
    assert "sends 3 float32" in line and "receives into 3 int32" in line


def test_a_barrier_against_an_all_gather_is_named(fault):
    def differ(rank):
        if rank == 0:
            dist.barrier()
        else:
            dist.all_gather([torch.zeros(2) for _ in range(3)], torch.zeros(2))

    line = str(fault.of(Mismatch, differ, 3)).splitlines()[0]
    assert "barrier" in line and "all_gather" in line


def test_different_shapes_in_one_collective_are_named(fault):
    def differ(rank):
        dist.all_reduce(torch.zeros(4 + rank, 2))

    line = str(fault.of(Mismatch, differ)).splitlines()[0]
    assert "all_reduce" in line and "4" in line and "5" in line


def test_different_dtypes_in_one_collective_are_named(fault):
    def differ(rank):
        dist.all_reduce(torch.zeros(4, dtype=[torch.float32, torch.int32][rank]))

    line = str(fault.of(Mismatch, differ)).splitlines()[0]
    assert "float32" in line and "int32" in line


def test_different_roots_of_a_broadcast_are_named(fault):
    def differ(rank):
        dist.broadcast(torch.zeros(4), src=rank)

    assert "broadcast" in str(fault.of(Mismatch, differ)).splitlines()[0]


def test_different_sums_of_a_reduction_are_named(fault):
    def differ(rank):
        dist.all_reduce(torch.ones(4), op=[dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])

    line = str(fault.of(Mismatch, differ)).splitlines()[0].lower()
    assert "sum" in line and "max" in line


def test_different_shapes_in_different_order_are_named(fault):
    def differ(rank):
        tensors = [torch.ones(4), torch.ones(6)]
        for tensor in tensors if rank == 0 else reversed(tensors):
            dist.all_reduce(tensor)

    fault.of(Mismatch, differ)


def test_a_message_of_another_dtype_is_named(fault):
    def differ(rank):
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.zeros(4, dtype=torch.int32), 0)

    line = str(fault.of(Mismatch, differ)).splitlines()[0]
    assert "float32" in line and "int32" in line


@pytest.mark.parametrize("sent, expected", [(4, 8), (8, 4), (100_000, 4)])
def test_a_message_of_another_size_is_named(fault, sent, expected):
    def differ(rank):
        if rank == 0:
            dist.send(torch.ones(sent), 1)
        else:
            dist.recv(torch.zeros(expected), 0)

    line = str(fault.of(Mismatch, differ)).splitlines()[0]
    assert str(sent) in line and str(expected) in line


def test_an_asynchronous_message_of_another_size_is_named(fault):
    def differ(rank):
        if rank == 0:
            dist.isend(torch.ones(9), 1).wait()
        else:
            dist.irecv(torch.zeros(5), 0).wait()

    line = str(fault.of(Mismatch, differ)).splitlines()[0]
    assert "9" in line and "5" in line


def test_a_collective_against_a_message_is_named(fault):
    def differ(rank):
        if rank == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.recv(torch.ones(2), 0)

    from course_lib import Deadlock

    line = str(fault.of(Deadlock, differ)).splitlines()[0]
    assert "all_reduce" in line and "receive" in line


# Parts of a collective: gloo's words say nothing to a student, and some of its checks end the process


def parts(*sizes):
    return [torch.zeros(size) for size in sizes]


def splits(takes, gives):
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4), takes, gives)


WRONG_PARTS = {
    "too few splits": (lambda rank: splits([4], [2, 2]), "output_split_sizes=[4]"),
    "splits that do not add up": (lambda rank: splits([2, 2], [2, 1]), "input_split_sizes=[2, 1]"),
    "another number for itself": (lambda rank: splits([2, 2], [1, 3][:: 1 - 2 * rank]), "1 of its own rows, and room"),
    "too many to exchange": (lambda rank: dist.all_to_all(parts(2, 2, 2), parts(2, 2, 2)), "all_to_all needs a list"),
    "too many to gather": (lambda rank: dist.all_gather(parts(2, 2, 2), torch.zeros(2)), "all_gather needs a list"),
    "too few to gather on one": (
        lambda rank: dist.gather(torch.zeros(2), None if rank else parts(2), dst=0),
        "gather needs a list with a tensor for each of the 2 ranks, and this has 1",
    ),
    "too many to scatter": (
        lambda rank: dist.scatter(torch.zeros(2), None if rank else parts(2, 2, 2)),
        "scatter needs a list",
    ),
    "too few to reduce": (lambda rank: dist.reduce_scatter(torch.zeros(2), parts(2)), "reduce_scatter needs a list"),
    "unequal ones to gather": (lambda rank: dist.all_gather(parts(2, 3), torch.zeros(2)), "(2,) and (3,)"),
    "unequal ones to reduce": (lambda rank: dist.reduce_scatter(torch.zeros(3), parts(2, 2)), "(3,) and (2,)"),
    "too small a whole": (
        lambda rank: dist.all_gather_single(torch.zeros(3), torch.zeros(2)),
        "all_gather of 2 numbers on each of 2 ranks has 4 in all, and not 3",
    ),
    "a whole that cannot be divided": (
        lambda rank: dist.reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
        "has 4 in all, and not 5",
    ),
}


@pytest.mark.parametrize("slip", WRONG_PARTS)
def test_parts_that_do_not_fit_are_refused_in_plain_words(fault, slip):
    wrong, words = WRONG_PARTS[slip]
    line = str(fault.of(RankFailed, wrong)).splitlines()[0]
    assert words in line and line.count("ValueError") == 1


def test_rows_that_another_rank_does_not_expect_are_named(fault):
    def exchange(rank):
        gives = [3, 1, 2] if rank == 2 else [2, 2, 2]
        dist.all_to_all_single(torch.zeros(6), torch.zeros(6), [2, 2, 2], gives)

    assert str(fault.of(Mismatch, exchange, 3)).startswith("Rank 2 gives rank 0 3 rows, which takes 2 of them.")


def test_groups_made_in_another_order_are_named(fault):
    """Under the same name torch would join ranks 0 and 2, and rank 0 take them for ranks 0 and 1."""

    def differ(rank):
        wanted = [[0, 1], [0, 2]]
        made = {str(ranks): dist.new_group(ranks) for ranks in (wanted if rank == 0 else wanted[::-1])}
        for ranks in wanted:
            if rank in ranks:
                dist.all_reduce(torch.ones(1), group=made[str(ranks)])

    error = fault.of(Mismatch, differ, 3)
    line = str(error).splitlines()[0]
    assert "new_group for ranks 0 and" in line and "ranks 0 and 1" in line and "ranks 0 and 2" in line
    assert "same order" in str(error)


def test_a_group_that_only_its_members_made_is_named_when_the_next_one_does_not_fit(fault):
    def in_part(rank):
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
        dist.new_group([1, 2])

    line = str(fault.of(Mismatch, in_part, 3)).splitlines()[0]
    assert "new_group for ranks 0 and 1" in line and "ranks 1 and 2" in line


# Right programs that look like these mistakes


def works(fn, world_size=2):
    return launch(fn, world_size).results


def test_a_broadcast_on_two_lines_is_lawful():
    def share(rank):
        if rank == 0:
            weights = torch.arange(3.0)
            dist.broadcast(weights, 0)
        else:
            weights = torch.empty(3)
            dist.broadcast(weights, 0)
        return weights.tolist()

    assert works(share, 3) == [[0.0, 1.0, 2.0]] * 3


def test_the_same_collective_under_other_names_is_lawful():
    def share(rank):
        mine, other = torch.ones(2), torch.ones(2)
        if rank == 0:
            dist.all_reduce(mine)
        else:
            dist.all_reduce(other)
        return int(mine.sum() + other.sum())

    assert works(share) == [6, 6]


def test_swapping_names_with_the_root_is_lawful():
    def exchange(rank):
        mine, theirs = torch.full((2,), float(rank)), torch.empty(2)
        if rank == 0:
            dist.broadcast(mine, 0)
            dist.broadcast(theirs, 1)
        else:
            dist.broadcast(theirs, 0)
            dist.broadcast(mine, 1)
        return theirs.tolist()

    assert works(exchange) == [[1.0, 1.0], [0.0, 0.0]]


def test_gather_and_scatter_with_other_arguments_on_the_root_are_lawful():
    def collect(rank):
        box = [torch.zeros(2) for _ in range(3)] if rank == 0 else None
        dist.gather(torch.full((2,), float(rank)), box, dst=0)
        mine = torch.zeros(2)
        dist.scatter(mine, box, src=0)
        return mine.tolist()

    assert works(collect, 3) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_messages_of_different_sizes_between_different_pairs_are_lawful():
    def pairs(rank):
        size = 3 if rank < 2 else 5
        if rank % 2 == 0:
            dist.send(torch.ones(size), rank + 1)
            return size
        box = torch.zeros(size)
        dist.recv(box, rank - 1)
        return int(box.sum())

    assert works(pairs, 4) == [3, 3, 5, 5]


def test_a_message_received_into_another_shape_of_the_same_size_is_lawful():
    def reshape(rank):
        if rank == 0:
            dist.send(torch.ones(2, 3), 1)
            return 6
        box = torch.zeros(6)
        dist.recv(box, 0)
        return int(box.sum())

    assert works(reshape) == [6, 6]


def test_messages_with_tags_may_overtake_each_other():
    def tagged(rank):
        a, b = torch.full((3,), 1.0), torch.full((2,), 2.0)
        if rank == 0:
            one, two = dist.isend(a, 1, tag=1), dist.isend(b, 1, tag=2)
            one.wait(), two.wait()
            return None
        first, second = torch.zeros(2), torch.zeros(3)
        dist.recv(first, 0, tag=2)
        dist.recv(second, 0, tag=1)
        return first.tolist() + second.tolist()

    assert works(tagged)[1] == [2.0, 2.0, 1.0, 1.0, 1.0]


def test_subgroups_may_do_different_things_at_the_same_time():
    def halves(rank):
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        value = torch.tensor([float(rank)])
        if rank < 2:
            dist.all_reduce(value, group=low)
        else:
            wide = torch.zeros(2)
            dist.all_gather_single(wide, value, group=high)
            value = wide.sum()
        dist.barrier()
        return int(value)

    assert works(halves, 4) == [1, 1, 5, 5]


def test_uneven_all_to_all_is_lawful():
    def exchange(rank):
        give = [torch.full((1 + rank,), float(rank)) for _ in range(2)]
        take = [torch.zeros(1 + peer) for peer in range(2)]
        dist.all_to_all_single(torch.cat(take), torch.cat(give), [1, 2], [1 + rank, 1 + rank])
        return rank

    assert works(exchange) == [0, 1]


def test_a_group_may_be_made_by_its_members_alone():
    def in_part(rank):
        value = torch.ones(1)
        if rank < 2:
            dist.all_reduce(value, group=dist.new_group([0, 1]))
            group = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(value, group=group)
        return float(value)

    assert works(in_part, 3) == [4.0, 4.0, 1.0]


def test_rows_of_every_number_may_be_exchanged_without_splits_on_one_rank():
    def exchange(rank):
        taken = torch.zeros(4)
        dist.all_to_all_single(taken, torch.full((4,), float(rank)), None if rank else [2, 2], [2, 2] if rank else None)
        return taken.tolist()

    assert works(exchange) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_objects_of_different_sizes_are_lawful():
    def objects(rank):
        everyone: list = [None] * 3
        dist.all_gather_object(everyone, "x" * (10 ** (rank + 1)))
        box = ["from 0" * 100] if rank == 0 else [None]
        dist.broadcast_object_list(box, src=0)
        return [len(each) for each in everyone] + [len(str(box[0]))]

    assert works(objects, 3) == [[10, 100, 1000, 600]] * 3


def test_asynchronous_collectives_waited_for_in_another_order_are_lawful():
    def overlap(rank):
        a, b = torch.ones(3), torch.ones(3)
        one, two = dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)
        for work in (one, two) if rank == 0 else (two, one):
            work.wait()
        return int(a.sum() + b.sum())

    assert works(overlap) == [12, 12]


def test_reductions_onto_different_roots_are_lawful():
    def onto(rank):
        parts = [torch.ones(2) for _ in range(2)]
        for root, part in enumerate(parts):
            dist.reduce(part, dst=root)
        return int(parts[rank].sum())

    assert works(onto) == [4, 4]
