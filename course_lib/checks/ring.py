"""The check for `ring_all_reduce(tensor)`: the sum on every rank, from messages between neighbors alone.

Every element of every rank carries a number from which, however they were added, one can read back what is in it:

    16**rank + BASE * (element + 1)        BASE = 16**ranks

In a sum of such numbers the digits below BASE, in base 16, count how often each rank's number was added, and the rest,
divided by how many numbers there are, names the element. So the first message that carries something wrong can be
named, with its round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from course_lib.checks.examine import Exercise, Explanation, contains, examine
from course_lib.checks.verdict import Cost, Idle, Verdict
from course_lib.instruments.watch import Sent, Watch
from course_lib.ranks import Deadlock, Link, Mismatch, Pace, Run, RunError
from course_lib.ranks.errors import listing
from course_lib.timeline import compute

LINK = Link(latency=0.005, bandwidth=6e6)
BACKWARD = 0.1  # seconds that the step around it computes
PACE = Pace(device={"backward": BACKWARD}, link=LINK)
MESSAGES = frozenset({"send", "isend", "recv", "irecv", "recv_any_source"})


def ring_all_reduce(fn: Callable[..., Any], seed: int = 0) -> Verdict:
    """Check a student's ring_all_reduce on 2, 3 and 4 ranks. seed: tensors of other sizes."""
    return examine(RING, fn, seed)


@dataclass(frozen=True)
class RingCase:
    world_size: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.world_size} ranks and {' x '.join(map(str, self.shape))} numbers"

    @property
    def base(self) -> int:
        return 16**self.world_size

    def tensor(self, rank: int) -> Tensor:
        elements = torch.arange(1, torch.Size(self.shape).numel() + 1, dtype=self.dtype)
        return (16**rank + self.base * elements).view(self.shape)

    def sum(self) -> Tensor:
        return torch.stack([self.tensor(rank) for rank in range(self.world_size)]).sum(0)

    def read(self, number: float) -> Content:
        """What a number is the sum of."""
        if not math.isfinite(number):
            return Content(-1, (0,) * self.world_size)
        how_often = [int(number) // 16**rank % 16 for rank in range(self.world_size)]
        many = sum(how_often)
        element = int(number) // self.base / many if many and number == int(number) >= 0 else 0.0
        return Content(int(element) - 1 if element == int(element) else -1, tuple(how_often))

    def largest_chunk(self) -> int:
        """Bytes of the tensor's n-th part, rounded up to whole elements."""
        return -(-torch.Size(self.shape).numel() // self.world_size) * self.dtype.itemsize


class WrongMessage(NamedTuple):
    rank: int
    round: int  # counted from 1
    contents: list[Content]


class Content(NamedTuple):
    """What a number is the sum of. element: -1 for a mix of several, or of nothing known; how_often: by rank."""

    element: int
    how_often: tuple[int, ...]

    @property
    def ranks(self) -> list[int]:
        return [rank for rank, count in enumerate(self.how_often) if count]


def _cases(seed: int) -> list[RingCase]:
    return [
        RingCase(2, (6 + 2 * seed,), torch.float32),
        RingCase(3, (7 + 3 * seed,), torch.float64),
        RingCase(4, (2, 5 + 2 * seed), torch.float64),
    ]


# On a rank


@dataclass(frozen=True)
class Ring:
    """What one rank did: the tensor in the end, what the function returned, if that was a tensor, and the messages."""

    after: Tensor
    returned: Tensor | None
    sent: list[Sent]
    memory: int


def _play(rank: int, fn: Callable[..., Any], case: RingCase) -> Ring:
    tensor = case.tensor(rank)
    with compute("backward"):
        pass
    with Watch() as watch:
        returned = fn(tensor)
    copy = returned.detach().clone() if isinstance(returned, Tensor) else None
    return Ring(tensor, copy, watch.sent, watch.peak)


# In the notebook


@dataclass(frozen=True)
class Rings:
    """What all ranks did in one run."""

    case: RingCase
    run: Run

    @property
    def rings(self) -> list[Ring]:
        return self.run.results

    @property
    def operations(self) -> set[str]:
        """The names of everything that was called in torch.distributed."""
        return {span.name for span in self.run.timeline.spans if span.kind in ("transfer", "wait")}

    @property
    def rounds(self) -> int:
        """Messages that each rank sends in each of the two phases."""
        return self.case.world_size - 1

    def contents(self, rank: int) -> list[Content]:
        """What each element of the tensor on a rank holds in the end."""
        return self.read(self.rings[rank].after)

    def read(self, tensor: Tensor) -> list[Content]:
        return [self.case.read(number) for number in tensor.flatten().tolist()]

    def bytes_sent(self) -> int:
        """By the rank that sends most."""
        return max(map(self.run.timeline.bytes_sent, range(self.case.world_size)))

    def bytes_allowed(self) -> int:
        return 2 * self.rounds * self.case.largest_chunk()

    def is_finished(self, content: Content) -> bool:
        """Whether it holds the number of every rank, once."""
        return content.element >= 0 and set(content.how_often) == {1}

    def first_wrong_message(self) -> WrongMessage | None:
        """The earliest message that does not carry what a ring carries in that round."""
        for round in range(1, 2 * self.rounds + 1):
            for rank, ring in enumerate(self.rings):
                contents = self.read(ring.sent[round - 1].content) if round <= len(ring.sent) else []
                if not all(self._belongs(content, round) for content in contents):
                    return WrongMessage(rank, round, contents)
        return None

    def _belongs(self, content: Content, round: int) -> bool:
        """In round 1 a rank's own numbers travel, in round 2 sums of two ranks, and so on until they are finished."""
        several = round if round <= self.rounds else self.case.world_size
        return content.element >= 0 and max(content.how_often) == 1 and len(content.ranks) == several


def _is_right(found: Rings) -> bool:
    by_hand = found.operations <= MESSAGES
    return by_hand and all(torch.equal(ring.after, found.case.sum()) for ring in found.rings)


# Runs that do not end


def everybody_sends_first(error: RunError) -> Explanation:
    """All send, then all receive: gloo's send, like NCCL's for large tensors, waits for its recv."""
    if not _all_wait_in(error, "send"):
        return None
    return (
        "Every rank sends, and nobody receives: `dist.send` comes back only when the other side has begun to receive. "
        "Start sending with `dist.isend`, which comes back at once, receive, and then `wait()` for what it returned."
    )


def everybody_receives_first(error: RunError) -> Explanation:
    if not _all_wait_in(error, "recv"):
        return None
    return (
        "Every rank waits to receive, and nobody has sent anything yet. Start sending with `dist.isend` before you "
        "receive, and `wait()` for what it returned afterwards."
    )


def _all_wait_in(error: RunError, direction: str) -> bool:
    """Whether the ranks are stuck, and all of them in this direction.

    After a mismatch it is chance who still waits: one rank is aborted, and the others notice sooner or later.
    """
    if not isinstance(error, Deadlock) or isinstance(error, Mismatch):
        return False
    waiting = [row.operation for row in error.report.rows if row.state == "waiting"]
    return bool(waiting) and all(name.endswith(direction) for name in waiting)


def buffer_of_wrong_type(error: RunError) -> Explanation:
    """torch.empty without a dtype makes float32."""
    sizes = re.search(r"sends (.+) (\w+) but rank \d+ receives into (.+) (\w+)\.", error.message)
    if not isinstance(error, Mismatch) or sizes is None or sizes[2] == sizes[4]:
        return None
    return (
        f"What arrives is {sizes[2]}, and the tensor it is received into is {sizes[4]}. `torch.empty(n)` is float32 "
        "whatever you are about to receive; `torch.empty_like(chunk)` has the shape and the dtype of the chunk."
    )


def buffer_of_wrong_size(error: RunError) -> Explanation:
    """Chunks are not all of one length, or the index of the arriving one is wrong."""
    if not isinstance(error, Mismatch) or not contains(error, "receives into"):
        return None
    return (
        "A rank receives into a tensor of another size than what is sent to it. When the ranks do not divide the "
        "tensor, chunks differ in length, so it matters which one arrives: the chunk that your left neighbor sends "
        "in this round, one place behind the one you send yourself."
    )


def too_few_chunks(error: RunError) -> Explanation:
    """torch.chunk makes fewer pieces than asked for: 7 numbers in 5 chunks of 2."""
    if not isinstance(error.__cause__, IndexError):
        return None
    return (
        "There is no chunk with this number. Indices go around the ring, so take each one `% world_size`. And "
        "`torch.chunk` may make fewer pieces than you ask for; `torch.tensor_split` makes exactly as many."
    )


# Results


def uses_a_collective(found: Rings) -> Explanation:
    others = sorted(found.operations - MESSAGES)
    if not others:
        return None
    return (
        f"That is `dist.{others[0]}` at work, and in real training you would be right to call it. Here you build what "
        "is inside: use `send`, `recv`, `isend` and `irecv` alone."
    )


def nothing_sent(found: Rings) -> Explanation:
    if any(ring.sent for ring in found.rings):
        return None
    return "Your function sends nothing, so no rank can know what the others hold. Begin with one round of messages."


def result_not_in_place(found: Rings) -> Explanation:
    """`chunks[i] = chunks[i] + arrived` puts a new tensor into the list."""
    if not all(torch.equal(ring.after, found.case.tensor(rank)) for rank, ring in enumerate(found.rings)):
        return None
    returned = all(_holds_sum(ring.returned, found.case) for ring in found.rings)
    start = "You return the right sum" if returned else "Your ranks exchange messages"
    return (
        f"{start}, but `tensor` itself is what it was before. `chunks[i] = chunks[i] + arrived` puts a new "
        "tensor into your list and leaves `tensor` alone; `chunks[i] += arrived` and `chunks[i].copy_(arrived)` write "
        "into it, as long as the chunks are views of it."
    )


def _holds_sum(returned: Tensor | None, case: RingCase) -> bool:
    return returned is not None and torch.equal(returned.flatten(), case.sum().flatten())


def mean_instead_of_sum(found: Rings) -> Explanation:
    mean = found.case.sum() / found.case.world_size
    if all(torch.allclose(ring.after, mean) for ring in found.rings):
        return "This is the mean over the ranks. An all-reduce adds up; dividing is left to whoever called it."
    return None


def second_phase_missing(found: Rings) -> Explanation:
    """Reduce-scatter without all-gather: each rank has one finished chunk."""
    finished = [sum(found.is_finished(content) for content in found.contents(r)) for r in range(len(found.rings))]
    if any(len(ring.sent) > found.rounds for ring in found.rings) or not all(finished):
        return None
    return (
        "The first phase is right: every rank holds one chunk with the sum over all ranks. The others are still "
        f"partial sums. Now the finished chunks go around the ring, {found.rounds} rounds more, and each rank copies "
        "what arrives instead of adding it."
    )


def added_in_second_phase(found: Rings) -> Explanation:
    """All messages fit, and then finished chunks are added instead of copied."""
    twice = any(max(content.how_often) > 1 for rank in range(len(found.rings)) for content in found.contents(rank))
    if not twice or found.first_wrong_message():
        return None
    return (
        "Some numbers are added more than once. In the second phase the chunks that go around are finished: copy what "
        "arrives over your own (`chunk.copy_(arrived)`, or receive right into it), do not add it."
    )


def wrong_message(found: Rings) -> Explanation:
    """The first round in which a rank sends what it should not."""
    wrong = found.first_wrong_message()
    if wrong is None:
        return None
    start = f"In round {wrong.round} of {2 * found.rounds} rank {wrong.rank} sends {_in_words(wrong.contents)}. "
    if wrong.round > found.rounds:
        return start + (
            "In the second phase only finished chunks travel. The first that a rank sends is the one it finished in "
            "the round before; from then on, the one that has just arrived."
        )
    return start + (
        f"In this round each message should hold the sum of {wrong.round} rank{'s' if wrong.round > 1 else ''}: "
        "what arrives is added to the same chunk of one's own, and that chunk is sent in the next round."
    )


def _in_words(contents: list[Content]) -> str:
    """What a message or an element holds."""
    if any(content.element < 0 for content in contents):
        return "a mix of different elements, added to each other or never filled"
    elements = [content.element for content in contents]
    where = f"element {elements[0]}" if len(elements) == 1 else f"elements {elements[0]} to {elements[-1]}"
    content = max(contents, key=lambda content: max(content.how_often))
    for rank, count in enumerate(content.how_often):
        if count > 1:
            return f"{where}, with the numbers of rank {rank} in it {count} times"
    return f"{where}, with the numbers of {listing(content.ranks)} in it"


def rounds_missing(found: Rings) -> Explanation:
    fewest = min(len(ring.sent) for ring in found.rings)
    if fewest >= 2 * found.rounds:
        return None
    return (
        f"With {found.case.world_size} ranks it takes {found.rounds} round{'s' if found.rounds > 1 else ''} to add up "
        f"and as many to hand out, so each rank sends {2 * found.rounds} messages; yours send {fewest}. Look at the "
        "`range` of your loops."
    )


def wrong_place(found: Rings) -> Explanation:
    """All messages were right, and something was stored where it does not belong."""
    for rank in range(len(found.rings)):
        for place, content in enumerate(found.contents(rank)):
            if content.element != place or not found.is_finished(content):
                return (
                    f"Your messages carry what they should, but rank {rank} ends with something else in element "
                    f"{place}: {_in_words([content])}. Look at where you put what arrives."
                )
    return None


# The price


def through_one_rank(found: Rings) -> Explanation:
    """Everything to rank 0, and back again."""
    sent = [found.run.timeline.bytes_sent(rank) for rank in range(found.case.world_size)]
    if max(sent) < 1.5 * min(sent):  # chunks of a ring differ by one element at most
        return None
    busiest = sent.index(max(sent))
    return (
        f"The sum is right, but everything passes through rank {busiest}: it sends {max(sent):,} bytes, and others "
        f"only {min(sent):,}. With every rank more its link becomes slower, while the others have nothing to do. In a "
        "ring each rank sends to the next one, `(rank + 1) % world_size`, and all links work at once."
    )


def sends_beyond_neighbors(found: Rings) -> Explanation:
    size = found.case.world_size
    messages = ((rank, message.peer) for rank, ring in enumerate(found.rings) for message in ring.sent)
    beyond = [(rank, peer) for rank, peer in messages if (rank - peer) % size not in (1, size - 1)]
    if not beyond:
        return None
    return (
        f"Rank {beyond[0][0]} sends to rank {beyond[0][1]}, which is not its neighbor in the ring. There, each rank "
        "sends to the next one, `(rank + 1) % world_size`, and receives from the one before."
    )


def whole_tensor_in_every_message(found: Rings) -> Explanation:
    elements = torch.Size(found.case.shape).numel()
    if found.bytes_sent() <= found.bytes_allowed() or any(
        message.content.numel() < elements for ring in found.rings for message in ring.sent
    ):
        return None
    return (
        f"The sum is right, but every message carries the whole tensor: a rank sends {found.bytes_sent():,} bytes "
        f"where {found.bytes_allowed():,} would do, and it grows with each rank more. Cut the tensor into "
        "`world_size` chunks and send one in each round; then the price hardly depends on the number of ranks."
    )


def too_many_bytes(found: Rings) -> Explanation:
    if found.bytes_sent() <= found.bytes_allowed():
        return None
    return (
        f"The sum is right, but a rank sends {found.bytes_sent():,} bytes where {found.bytes_allowed():,} would do: "
        f"{2 * found.rounds} messages of one chunk each, {found.rounds} to add up and {found.rounds} to hand out."
    )


def _weigh(found: Rings, verdict: Verdict) -> Verdict:
    chunk = found.case.largest_chunk()
    size = found.case.sum().nbytes
    costs = (
        Cost(
            f"bytes a rank sends, for a tensor of {size:,} bytes",
            f"{found.bytes_sent():,}",
            f"{found.bytes_allowed():,}",
        ),
        Cost("bytes of extra memory on a rank", f"{max(ring.memory for ring in found.rings):,}", f"{chunk:,}"),
    )
    exchanging = 2 * found.rounds * LINK.seconds(chunk)
    best = exchanging / (BACKWARD + exchanging)
    remarks = tuple(filter(None, [_takes_turns(found)]))
    return replace(verdict, costs=costs, remarks=remarks, idle=Idle(found.run.timeline, best))


def _takes_turns(found: Rings) -> Explanation:
    if "send" not in found.operations:
        return None
    return (
        "Your ranks take turns: with the blocking `send` some have to receive while others send, so each round takes "
        "longer than one message. With `isend` all links work at the same time; compare the idle time."
    )


RING = Exercise(
    name="ring_all_reduce",
    arguments=("tensor",),
    cases=_cases,
    priced=RingCase(4, (30_000,), torch.float64),
    play=_play,
    gather=Rings,
    is_right=_is_right,
    weigh=_weigh,
    ideas=(
        uses_a_collective,
        nothing_sent,
        result_not_in_place,
        mean_instead_of_sum,
        sends_beyond_neighbors,
        second_phase_missing,
        added_in_second_phase,
        wrong_message,
        rounds_missing,
        wrong_place,
    ),
    accidents=(
        everybody_sends_first,
        everybody_receives_first,
        buffer_of_wrong_type,
        buffer_of_wrong_size,
        too_few_chunks,
    ),
    prices=(through_one_rank, sends_beyond_neighbors, whole_tensor_in_every_message, too_many_bytes),
    pace=PACE,
)
