"""What contracts say of the messages that a solution has sent."""

from __future__ import annotations

from course_lib.classroom.checks.part import Left

# What torch.distributed calls a collective, where the library below calls it otherwise.
SPELLED = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}


def most_sent(lefts: list[Left]) -> tuple[int, int]:
    """Of the rank that has most: operations, and the numbers that it gave to them."""
    numbers = (sum(sent.content.numel() for sent in left.sent) for left in lefts)
    return max(len(left.sent) for left in lefts), max(numbers)


def sent_more(lefts: list[Left], most: tuple[int, int], what: str) -> str:
    """That `what` is right, and a rank sends more messages or numbers than these; "" if none does."""
    sent = most_sent(lefts)
    yours, enough = (f"{messages} messages with {numbers} numbers" for messages, numbers in (sent, most))
    too_much = f"{what} right, but a rank sends {yours} in all, where {enough} would do."
    return too_much * (sent[0] > most[0] or sent[1] > most[1])


def collective_at_work(lefts: list[Left]) -> str:
    """What to say if there is anything but messages; "" if there is not."""
    other = [sent.operation.removesuffix("_base") for left in lefts for sent in left.sent if sent.operation != "send"]
    called = SPELLED.get(other[0], other[0]) if other else ""
    return f"That is `{called}` at work. Here you build what is inside it, out of messages alone." if other else ""
