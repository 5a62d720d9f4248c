"""Every right ring all-reduce is accepted, and every wrong one is told what is wrong about it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import Mismatch, checks
from course_lib.checks import ring
from course_lib.checks.examine import recognize
from course_lib.ranks import monitor
from course_lib.ranks.errors import Report, Row

AllReduce = Callable[[Tensor], Any]

verdict_on = functools.cache(checks.ring_all_reduce)  # several tests look at one verdict


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def exchange(outgoing: Tensor, incoming: Tensor) -> None:
    rank, n = place()
    sending = dist.isend(outgoing, (rank + 1) % n)
    dist.recv(incoming, (rank - 1) % n)
    sending.wait()


def add_up(tensor: Tensor, n_rounds: int | None = None) -> list[Tensor]:
    """The first phase. Returns the chunks; rank r has finished chunk r + 1."""
    rank, n = place()
    chunks = list(tensor.view(-1).tensor_split(n))
    for step in range(n - 1 if n_rounds is None else n_rounds):
        own = chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(own)
        exchange(chunks[(rank - step) % n], arriving)
        own += arriving
    return chunks


def hand_out(chunks: list[Tensor]) -> None:
    rank, n = place()
    for step in range(n - 1):
        exchange(chunks[(rank - step + 1) % n], chunks[(rank - step) % n])


# Right ones


def textbook(tensor: Tensor) -> None:
    hand_out(add_up(tensor))


def other_direction_and_returned(tensor: Tensor) -> Tensor:
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        arriving = torch.empty_like(chunks[(rank + step + 1) % n])
        handles = [dist.isend(chunks[(rank + step) % n], (rank - 1) % n), dist.irecv(arriving, (rank + 1) % n)]
        for handle in handles:
            assert handle is not None
            handle.wait()
        own = chunks[(rank + step + 1) % n]
        own.copy_(own + arriving if step < n - 1 else arriving)
    return tensor


def in_batches(tensor: Tensor) -> None:
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        own = chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(own)
        send = dist.P2POp(dist.isend, chunks[(rank - step) % n], (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, arriving, (rank - 1) % n)
        for handle in dist.batch_isend_irecv([send, receive]):
            handle.wait()
        own.copy_(own + arriving if step < n - 1 else arriving)


def rank_0_receives_first(tensor: Tensor) -> None:
    """Blocking sends all around; one rank breaks the circle."""
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * (n - 1)):
        outgoing, own = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(own)
        if rank:
            dist.send(outgoing, (rank + 1) % n)
        dist.recv(arriving, (rank - 1) % n)
        if not rank:
            dist.send(outgoing, (rank + 1) % n)
        own.copy_(own + arriving if step < n - 1 else arriving)


@pytest.mark.parametrize("fn", [textbook, other_direction_and_returned, in_batches, rank_0_receives_first])
def test_a_right_ring_passes(fn: AllReduce) -> None:
    verdict = verdict_on(fn)
    assert verdict.passed, verdict
    assert verdict.idle is not None and verdict.idle.timeline.origin == "emulated"


def test_tensors_of_other_sizes_pass_too() -> None:
    assert checks.ring_all_reduce(textbook, seed=1).passed


def test_the_price_is_exact() -> None:
    verdict = verdict_on(textbook)
    sent, memory = verdict.costs
    size = ring.RING.priced.sum().nbytes
    assert sent.yours == sent.best == f"{2 * 3 * size // 4:,}"
    assert memory.best == f"{size // 4:,}"
    exchanging = 6 * (ring.LINK.latency + size / 4 / ring.LINK.bandwidth)
    assert verdict.idle is not None
    assert verdict.idle.best == pytest.approx(exchanging / (ring.BACKWARD + exchanging), rel=1e-9)
    assert verdict.idle.timeline.idle_fraction() == pytest.approx(verdict.idle.best, rel=1e-9)


def test_ranks_that_take_turns_get_a_remark() -> None:
    verdict = verdict_on(rank_0_receives_first)
    assert "take turns" in verdict.remarks[0]
    assert verdict.idle is not None and verdict.idle.timeline.idle_fraction() > verdict.idle.best
    assert verdict_on(textbook).remarks == ()


# Wrong ones, named after what the check calls them


def uses_a_collective(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def nothing_sent(tensor: Tensor) -> None:
    tensor *= dist.get_world_size()


def result_not_in_place(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    textbook(copy)
    return copy


def mean_instead_of_sum(tensor: Tensor) -> None:
    textbook(tensor)
    tensor /= dist.get_world_size()


def second_phase_missing(tensor: Tensor) -> None:
    add_up(tensor)


def added_in_second_phase(tensor: Tensor) -> None:
    rank, n = place()
    chunks = add_up(tensor)
    for step in range(n - 1):
        own = chunks[(rank - step) % n]
        arriving = torch.empty_like(own)
        exchange(chunks[(rank - step + 1) % n], arriving)
        own += arriving


def wrong_message(tensor: Tensor) -> None:
    """Sends its own chunk in every round of the first phase, instead of what it has just added up."""
    rank, n = place()
    chunks = tensor.view(-1)[: tensor.numel() // n * n].chunk(n)
    for step in range(n - 1):
        arriving = torch.empty_like(chunks[rank])
        exchange(chunks[rank], arriving)
        chunks[(rank - step - 1) % n].add_(arriving)
    hand_out(list(chunks))


def rounds_missing(tensor: Tensor) -> None:
    hand_out(add_up(tensor, n_rounds=dist.get_world_size() - 2))


def wrong_place(tensor: Tensor) -> None:
    textbook(tensor)
    tensor.copy_(tensor.flatten().flip(0).view_as(tensor))


def through_one_rank(tensor: Tensor) -> None:
    """Everything to rank 0, and back again."""
    rank, n = place()
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    arriving = torch.empty_like(tensor)
    for other in range(1, n):
        dist.recv(arriving, other)
        tensor += arriving
    for other in range(1, n):
        dist.send(tensor, other)


def sends_beyond_neighbors(tensor: Tensor) -> None:
    """Recursive doubling: whole tensors, to partners twice as far away in each round."""
    rank, n = place()
    if n == 3:
        textbook(tensor)
        return
    distance = 1
    while distance < n:
        arriving = torch.empty_like(tensor)
        sending = dist.isend(tensor, rank ^ distance)
        dist.recv(arriving, rank ^ distance)
        sending.wait()
        tensor += arriving
        distance *= 2


def whole_tensor_in_every_message(tensor: Tensor) -> None:
    """The tensors themselves go around the ring, n - 1 times."""
    travelling, arriving = tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        exchange(travelling, arriving)
        tensor += arriving
        travelling.copy_(arriving)


def too_many_bytes(tensor: Tensor) -> None:
    """One round more than needed."""
    chunks = add_up(tensor)
    hand_out(chunks)
    exchange(chunks[0], torch.empty_like(chunks[0]))


WRONG: dict[AllReduce, str] = {
    uses_a_collective: "`dist.all_reduce` at work",
    nothing_sent: "sends nothing",
    result_not_in_place: "You return the right sum, but `tensor` itself is what it was before",
    mean_instead_of_sum: "the mean over the ranks",
    second_phase_missing: "The first phase is right",
    added_in_second_phase: "copy what arrives",
    wrong_message: "In round 2 of 4 rank 0 sends",
    rounds_missing: "each rank sends 2 messages; yours send 1",
    wrong_place: "rank 0 ends with something else in element 0",
}
TOO_EXPENSIVE: dict[AllReduce, str] = {
    through_one_rank: "everything passes through rank 0: it sends 112 bytes, and others only 56",
    sends_beyond_neighbors: "Rank 0 sends to rank 2, which is not its neighbor",
    whole_tensor_in_every_message: "every message carries the whole tensor",
    too_many_bytes: "The sum is right, but a rank sends",
}


@pytest.mark.parametrize(("fn", "words"), WRONG.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_wrong_ring_is_told_why(fn: AllReduce, words: str) -> None:
    verdict = verdict_on(fn)
    assert verdict.outcome == "idea"
    assert verdict.idea == fn.__name__
    assert words in verdict.message


@pytest.mark.parametrize(("fn", "words"), TOO_EXPENSIVE.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_right_sum_at_the_wrong_price_is_told_so(fn: AllReduce, words: str) -> None:
    verdict = verdict_on(fn)
    assert verdict.outcome == "price"
    assert verdict.idea == fn.__name__
    assert words in verdict.message


def test_every_misconception_is_tried() -> None:
    tried = {fn.__name__ for fn in [*WRONG, *TOO_EXPENSIVE]}
    assert tried == {idea.__name__ for idea in [*ring.RING.ideas, *ring.RING.prices]}


# Which round, which chunk


def starts_the_second_phase_with_the_wrong_chunk(tensor: Tensor) -> None:
    rank, n = place()
    chunks = add_up(tensor)
    for step in range(n - 1):
        exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n])


def adds_to_the_wrong_chunk(tensor: Tensor) -> None:
    rank, n = place()
    chunks = list(tensor.view(-1)[: tensor.numel() // n * n].chunk(n))
    for _ in range(2 * (n - 1)):
        arriving = torch.empty_like(chunks[rank])
        exchange(chunks[rank], arriving)
        chunks[rank] += arriving


def replaces_list_entries(tensor: Tensor) -> None:
    rank, n = place()
    chunks = list(tensor.view(-1).tensor_split(n))
    for step in range(n - 1):
        own = (rank - step - 1) % n
        arriving = torch.empty_like(chunks[own])
        exchange(chunks[(rank - step) % n], arriving)
        chunks[own] = chunks[own] + arriving
    for step in range(n - 1):
        own = (rank - step) % n
        arriving = torch.empty_like(chunks[own])
        exchange(chunks[(rank - step + 1) % n], arriving)
        chunks[own] = arriving


def test_the_wrong_first_chunk_of_the_second_phase_is_found() -> None:
    verdict = verdict_on(starts_the_second_phase_with_the_wrong_chunk)
    assert verdict.idea == "wrong_message"
    assert "In round 2 of 2 rank 0 sends elements 0 to 2, with the numbers of rank 0 in it" in verdict.message
    assert "finished" in verdict.message


def test_chunks_that_are_mixed_up_are_found() -> None:
    verdict = verdict_on(adds_to_the_wrong_chunk)
    assert verdict.idea == "wrong_message"
    assert "a mix of different elements" in verdict.message


def test_new_tensors_in_the_list_do_not_reach_the_tensor() -> None:
    verdict = verdict_on(replaces_list_entries)
    assert verdict.idea == "result_not_in_place"
    assert "Your ranks exchange messages, but `tensor` itself" in verdict.message


# Runs that do not come to their end


def everybody_sends_first(tensor: Tensor) -> None:
    rank, n = place()
    arriving = torch.empty_like(tensor)
    dist.send(tensor, (rank + 1) % n)
    dist.recv(arriving, (rank - 1) % n)


def everybody_receives_first(tensor: Tensor) -> None:
    rank, n = place()
    arriving = torch.empty_like(tensor)
    dist.recv(arriving, (rank - 1) % n)
    dist.send(tensor, (rank + 1) % n)


def buffer_of_wrong_type(tensor: Tensor) -> None:
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        own = chunks[(rank - step - 1) % n]
        arriving = torch.empty(len(own))
        exchange(chunks[(rank - step) % n], arriving)
        own += arriving
    hand_out(list(chunks))


def buffer_of_wrong_size(tensor: Tensor) -> None:
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        own = chunks[(rank - step - 1) % n]
        arriving = torch.empty_like(chunks[(rank - step) % n])
        exchange(chunks[(rank - step) % n], arriving)
        own += arriving
    hand_out(list(chunks))


def too_few_chunks(tensor: Tensor) -> None:
    rank, n = place()
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):
        exchange(chunks[rank + step], torch.empty_like(chunks[rank + step + 1]))


ACCIDENTS: dict[AllReduce, str] = {
    everybody_sends_first: "Start sending with `dist.isend`",
    everybody_receives_first: "nobody has sent anything yet",
    buffer_of_wrong_type: "What arrives is float64, and the tensor it is received into is float32",
    buffer_of_wrong_size: "chunks differ in length",
    too_few_chunks: "`% world_size`",
}


@pytest.mark.parametrize(("fn", "words"), ACCIDENTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_run_that_does_not_end_well_is_explained(fn: AllReduce, words: str) -> None:
    verdict = verdict_on(fn)
    assert (verdict.outcome, verdict.idea) == ("idea", fn.__name__)
    assert words in verdict.message
    assert "test_ring.py, line" in " ".join(text for _, text in verdict.facts)


@pytest.mark.parametrize("fn", [buffer_of_wrong_type, buffer_of_wrong_size])
def test_a_wrong_buffer_is_told_also_before_the_other_ranks_have_noticed(
    fn: AllReduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the others still wait when the rank that received too much is already dead."""
    monkeypatch.setattr(monitor, "_GRACE", 0.0)
    assert checks.ring_all_reduce(fn).idea == fn.__name__


@pytest.mark.parametrize(
    ("received", "idea"), [("2 float64", "buffer_of_wrong_size"), ("3 float32", "buffer_of_wrong_type")]
)
def test_a_wrong_buffer_is_told_whatever_the_ranks_were_doing_by_then(received: str, idea: str) -> None:
    for states in itertools.product(["waiting", "raised", "died", "computing"], repeat=3):
        for operations in itertools.product(["recv", "send"], repeat=3):
            rows = map(Row, range(3), states, operations)
            text = f"Rank 0 sends 3 float64 but rank 1 receives into {received}."
            error = Mismatch(text, report=Report(tuple(rows)))
            assert recognize(ring.RING.accidents, error)[0] == idea, states


def test_every_accident_is_tried() -> None:
    assert {fn.__name__ for fn in ACCIDENTS} == {idea.__name__ for idea in ring.RING.accidents}
