"""Operations on a rank that does not exist: refused at once, where they would wait for ever."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib import RankFailed, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ring_without_end(rank):
    box = torch.zeros(1)
    if rank == 0:
        dist.recv(box, rank - 1)  # before the first
    dist.recv(box, rank - 1)
    dist.send(box, rank + 1)


def ring_with_an_end(rank):
    x = torch.ones(1)
    if rank == 2:
        dist.send(x, rank + 1)  # after the last
    dist.send(x, rank + 1)


@pytest.mark.parametrize(
    "ring, rank, named, marker",
    [
        (ring_without_end, 0, "recv names rank -1", "before the first"),
        (ring_with_an_end, 2, "rank 3", "after the last"),
    ],
)
def test_a_ring_that_does_not_close_is_said_at_the_line_that_opens_it(fault, row_at, ring, rank, named, marker):
    error = fault.of(RankFailed, ring, 3)
    line = str(error).splitlines()[0]
    assert error.rank == rank and line.startswith(f"Rank {rank} ")
    assert named in line and "the world has only ranks 0, 1 and 2" in line and "(rank + 1) % world_size" in line
    row_at(error, rank, ring, marker)


def test_a_message_to_oneself_is_refused(fault, row_at):
    def to_itself(rank):
        dist.send(torch.ones(1), rank)  # to itself

    error = fault.of(RankFailed, to_itself, 2)
    assert "two ranks" in str(error).splitlines()[0]
    row_at(error, error.rank, to_itself, "to itself")


def test_a_ring_of_one_rank_is_refused():
    with pytest.raises(RankFailed, match="A message needs two ranks, and there is only one here"):
        launch(lambda rank: dist.isend(torch.ones(1), (rank + 1) % 1), 1)


def test_a_root_that_is_not_there_is_said_once_for_all_ranks(fault):
    def to_the_size(rank):
        dist.broadcast(torch.zeros(3), dist.get_world_size())

    line = str(fault.of(RankFailed, to_the_size, 3)).splitlines()[0]
    assert "raised ValueError: broadcast names rank 3, but the world has only ranks 0, 1 and 2." in line
    assert line.count("broadcast names") == 1
    assert "% world_size" not in line and "root" in line


MESSAGES = {
    "send": lambda x, to: dist.send(x, **to("dst")),
    "isend": lambda x, to: dist.isend(x, **to("dst")),
    "recv": lambda x, to: dist.recv(x, **to("src")),
    "irecv": lambda x, to: dist.irecv(x, **to("src")),
    "P2POp": lambda x, to: dist.P2POp(dist.isend, x, **to("peer")),
    "send_object_list": lambda x, to: dist.send_object_list([x], **to("dst")),
    "recv_object_list": lambda x, to: dist.recv_object_list([x], **to("src")),
}

ROOTED = {
    "broadcast": lambda x, to: dist.broadcast(x, **to("src")),
    "reduce": lambda x, to: dist.reduce(x, **to("dst")),
    "gather": lambda x, to: dist.gather(x, [x.clone(), x.clone()], **to("dst")),
    "scatter": lambda x, to: dist.scatter(x, [x.clone(), x.clone()], **to("src")),
    "broadcast_object_list": lambda x, to: dist.broadcast_object_list([x], **to("src")),
    "gather_object": lambda x, to: dist.gather_object(x, [None, None], **to("dst")),
    "scatter_object_list": lambda x, to: dist.scatter_object_list([None], [x, x], **to("src")),
}


def in_group(rank):
    """The group of ranks 2 and 3, in which they are 0 and 1; None on the others."""
    group = dist.new_group([2, 3])
    return group if rank > 1 else None


def refusal(call, *arguments):
    try:
        call(torch.zeros(1), *arguments)
    except ValueError as error:
        return str(error)
    return "allowed"


def refusals(own, names, group, **choice):
    """The error of each operation for a rank named in this way, by the operation's name."""
    group = in_group(own) if group == "two of four" else None
    if group is None and dist.get_world_size() == 4:
        return {}
    calls = {name: {**MESSAGES, **ROOTED}[name] for name in names}

    def to(parameter):
        key, named = next(iter(choice.items()))
        if named == "own":
            named = own if key == "rank" else dist.get_rank(group)
        return {parameter if key == "rank" else f"group_{parameter}": named, "group": group}

    return {name: refusal(call, to) for name, call in calls.items()}


WAYS = {
    "past the last": ("all", {"rank": 2}, "names rank 2, but the world has only ranks 0 and 1. "),
    "before the first": ("all", {"rank": -1}, "names rank -1, but the world has only ranks 0 and 1. "),
    "as a group rank": ("all", {"group_rank": 2}, "names rank 2, but the world has only ranks 0 and 1. "),
    "in a group": ("two of four", {"rank": 1}, "names rank 1, but its group has only ranks 2 and 3. "),
    "a group rank in a group": (
        "two of four",
        {"group_rank": 2},
        "names group rank 2, but its group has only ranks 0 and 1. ",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_operation_refuses_a_rank_that_is_not_there(way):
    group, choice, sentence = WAYS[way]
    run = launch(lambda rank: refusals(rank, [*MESSAGES, *ROOTED], group, **choice), 4 if group != "all" else 2)
    for said in run.results[-2:]:
        assert [*said] == [*MESSAGES, *ROOTED]
        for name, text in said.items():
            assert text.startswith(f"{name} {sentence}") and len(text) < 300
            ring = "% dist.get_world_size(group)" if group != "all" else "(rank - 1) % world_size"
            assert (ring in text) == (name in MESSAGES) and ("root" in text) == (name in ROOTED)


@pytest.mark.parametrize("key", ["rank", "group_rank"])
@pytest.mark.parametrize("group, world_size", [("all", 2), ("two of four", 4)])
def test_every_message_to_oneself_is_refused(group, world_size, key):
    run = launch(lambda rank: refusals(rank, list(MESSAGES), group, **{key: "own"}), world_size)
    for said in run.results[-2:]:
        for name, text in said.items():
            assert text.startswith(f"{name} names ") and "A message needs two ranks" in text


def test_a_process_group_called_directly_refuses_too():
    def directly(rank):
        world = dist.group.WORLD
        options = dist.BroadcastOptions()
        options.rootRank = 2
        return [
            refusal(lambda x: world.send([x], 2, 0)),
            refusal(lambda x: world.recv([x], -1, 0)),
            refusal(lambda x: world.broadcast([x], options)),
        ]

    for said in launch(directly, 2).results:
        assert [text.partition(",")[0] for text in said] == [
            "send names rank 2",
            "recv names rank -1",
            "broadcast names rank 2",
        ]


def test_ranks_that_are_there_may_be_named_in_every_way():
    def talk(rank):
        group, x = in_group(rank), torch.tensor([float(rank)])
        if group is None:
            return None
        if rank == 2:
            dist.send(x, 3, group=group)
            dist.send(x + 10, group=group, group_dst=1)
        box, other = torch.zeros(1), torch.zeros(1)
        if rank == 3:
            dist.recv(box, 2, group=group)
            dist.recv(other, group=group, group_src=0)
        dist.broadcast(x, 3, group=group)
        return float(box), float(other), float(x)

    assert launch(talk, 4).results[2:] == [(0.0, 0.0, 3.0), (2.0, 12.0, 3.0)]
