"""Contracts about the messages that a solution sends."""

from __future__ import annotations

from course_lib.classroom.checks.part import Observed
from course_lib.classroom.checks.prose import TEXTS


def most_sent(observed: list[Observed]) -> tuple[int, int]:
    """The most operations of a rank, and the most numbers that it sent."""
    numbers = (sum(sent.content.numel() for sent in seen.sent) for seen in observed)
    return max(len(seen.sent) for seen in observed), max(numbers)


def sent_more(observed: list[Observed], most: tuple[int, int], what: str) -> str:
    """A sentence: `what` is right, but a rank sends more messages or numbers than `most`; "" if none does."""
    sent = most_sent(observed)
    yours, enough = (f"{messages} messages with {numbers} numbers" for messages, numbers in (sent, most))
    too_much = f"{what} right, but a rank sends {yours} in all, where {enough} would do."
    return too_much * (sent[0] > most[0] or sent[1] > most[1])


def on_one_link(observed: list[Observed], n_groups: int = 1) -> str:
    """A sentence about messages that would share a real link, and do not share the emulated one; "" if there are none.

    Messages and collectives do not slow each other down there, and neither do the collectives of two groups.
    """
    kinds = {sent.operation == "send" for seen in observed for sent in seen.sent}
    groups = max(len({sent.group for sent in seen.sent}) for seen in observed)
    return TEXTS["on one link"] * (len(kinds) > 1 or groups > n_groups)


def collective_at_work(observed: list[Observed]) -> str:
    """A sentence about a collective where only messages are allowed; "" if there is none."""
    is_there = any(sent.operation != "send" for seen in observed for sent in seen.sent)
    return "That is a collective at work. Here you build what is inside it, out of messages alone." * is_there
