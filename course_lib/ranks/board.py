"""The status board: what each rank is doing right now, in memory that outlives it.

Every rank owns one slot of a shared array and writes an operation into it *before* it can block. The
parent reads the slots without asking anyone, so it can say who waits for whom even when a rank hangs in
C code or has been killed. A slot is a header and a ring of the rank's last operations:

    slot of rank r:  [has begun, events, posted, answered, acting | operation 1 | operation 2 | ... | operation RING]
"""

from __future__ import annotations

import functools
import struct
import time
import zlib
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

MAX_WORLD_SIZE = 32
RING = 128  # operations kept for each rank
_OPERATION = struct.Struct("<QIQIiqqQdddBBB20s192s32s16s192s")
_SIZE = _OPERATION.size + 4  # and a checksum: a look at it while it is being written shows a mixture
SLOT = 64 + RING * _SIZE
PATIENCE = 0.2  # seconds for a rank to finish writing; it may have been killed


class Moments(NamedTuple):
    """One operation of one rank on the clock of its run, in seconds.

    moving: when its data could begin to move, because everything that it depends on had arrived.
    blocked: when the rank began to wait for its end; None if it did not.
    """

    posted: float
    moving: float
    blocked: float | None = None
    ended: float = 0.0


@dataclass
class Operation:
    """One call to a process group by one rank.

    order: the number of operations of its kind before it on this rank: collectives are counted by group,
        messages by group, sender, receiver and tag. Equal orders on two ranks belong together.
    posted, blocked, ended: seconds when the call began, when the rank began to wait for its end, and
        when it ended; 0.0 for not yet. These are real, whatever the clock of the run.
    """

    number: int
    members: int  # global ranks of the group, as bits
    order: int
    group: int  # hash of the group's name
    peer: int = -1  # the other rank of a message, the root of a rooted collective
    tag: int = 0
    bytes: int = 0  # of the tensor on this rank
    elements: int = 0
    posted: float = 0.0
    blocked: float = 0.0
    ended: float = 0.0
    is_async: bool = False
    handed_on: bool = False  # somebody waits on its future, out of sight of the trace
    in_handler: bool = False  # called while an exception was handled, or passed through a finally
    name: str = ""
    detail: str = ""  # must fit on all ranks, too: the reduce operation, or rows taken and given, as "2,2>1,3"
    shape: str = ""
    dtype: str = ""
    line: str = ""  # "file:number" of the caller's own code
    sent: int = 0  # bytes on the wire; not on the board
    emulated: Moments | None = None  # on the clock of a run with a pace; not on the board

    @property
    def family(self) -> str:
        """The family: "message", "collective" or "new_group". Only operations of one family can match."""
        return _family(self.name)

    @property
    def is_message(self) -> bool:
        return self.family == "message"

    @property
    def is_send(self) -> bool:
        return self.name.endswith("send")

    @property
    def is_blocked(self) -> bool:
        return self.blocked > 0 and not self.ended

    def meeting(self, rank: int) -> tuple:
        """A key, equal for both sides of a message and for all calls of a collective. rank: of this operation."""
        if not self.is_message:
            return (self.group, self.family, self.order)
        ends = (rank, self.peer) if self.is_send else (self.peer, rank)
        return (self.group, *ends, self.tag, self.order)

    def member_ranks(self) -> list[int]:
        return [rank for rank in range(MAX_WORLD_SIZE) if self.members >> rank & 1]


@functools.cache  # called ten thousand times in a run of a thousand operations
def _family(name: str) -> str:
    if name.endswith(("send", "recv")) or name == "recv_any_source":
        return "message"
    return "new_group" if name == "new_group" else "collective"


def belong(op: Operation, rank: int, theirs: Operation, other: int) -> bool:
    """Whether `op` of `rank` and `theirs` of `other` are two sides of one message or collective.

    A later operation of the same kind counts, too: it proves that the matching one was posted before.
    """
    if op.group != theirs.group or op.family != theirs.family:
        return False
    if not op.is_message:
        return theirs.order >= op.order
    if op.is_send == theirs.is_send or op.tag != theirs.tag:
        return False
    if "recv_any_source" in (op.name, theirs.name):
        return other in (op.peer, -1) or rank in (theirs.peer, -1)
    return op.peer == other and theirs.peer == rank and theirs.order >= op.order


_TEXTS = 5  # number of text fields, the last ones on the board: from `name` to `line`
_ON_BOARD = [f.name for f in fields(Operation)][:-2]
_numbers_of, _texts_of = attrgetter(*_ON_BOARD[:-_TEXTS]), attrgetter(*_ON_BOARD[-_TEXTS:])


class Board:
    """All slots of one pool, over any writable buffer of SLOT bytes for each rank."""

    def __init__(self, buffer: Any) -> None:
        self.memory = memoryview(buffer).cast("B")
        starts = range(0, len(self.memory), SLOT)
        # has begun; events; operations posted; how many events and one more when it last answered; threads that acted
        # then: each is written in one piece, where `struct` would clear it first
        self.headers = [self.memory[start : start + 40].cast("Q") for start in starts]

    def clear(self, rank: int, has_begun: bool) -> None:
        """Forget the last run; its operations stay behind the counter, unread."""
        for place, number in enumerate((has_begun, 0, 0, 0, 0)):
            self.headers[rank][place] = number

    def has_begun(self, rank: int) -> bool:
        """Whether the rank has begun the run that it is needed for."""
        return bool(self.headers[rank][0])

    def events(self, rank: int) -> int:
        """A number that grows whenever the rank starts or finishes something."""
        return self.headers[rank][1]

    def answer(self, rank: int, events: int, acting: int) -> None:
        """Write down how many threads of the rank could go on without another rank, after this number of events."""
        self.headers[rank][4] = acting
        self.headers[rank][3] = events + 1

    def may_act(self, rank: int) -> bool:
        """Whether the rank might still go on: since its last event it has not answered that it cannot."""
        _, events, _, answered, acting = self.headers[rank]
        return answered != events + 1 or acting > 0

    def touch(self, rank: int) -> None:
        """Count an event that is not an operation."""
        self.headers[rank][1] += 1

    def post(self, rank: int, op: Operation) -> None:
        """Write a new operation; the counter moves last, so that a reader never sees half of one."""
        self.write(rank, op)
        self.headers[rank][2] = op.number

    def write(self, rank: int, op: Operation) -> None:
        """Write an operation that has changed, with its checksum."""
        texts = [text.encode()[-192:] for text in _texts_of(op)]  # a long one keeps its end, the line number
        data = _OPERATION.pack(*_numbers_of(op), *texts)
        self._place(rank, op.number)[:] = data + zlib.crc32(data).to_bytes(4, "little")
        self.touch(rank)

    def operations(self, rank: int) -> list[Operation]:
        """The last operations of the rank in this run, oldest first, at most RING."""
        posted = self.headers[rank][2]
        found = (self._read(rank, number) for number in range(1, min(posted, RING) + 1))
        return sorted((op for op in found if op.number <= posted), key=attrgetter("number"))

    def _read(self, rank: int, number: int) -> Operation:
        place = self._place(rank, number)
        until = time.monotonic() + PATIENCE
        while zlib.crc32((data := bytes(place))[:-4]).to_bytes(4, "little") != data[-4:] and time.monotonic() < until:
            time.sleep(0)  # its rank is just writing it
        values: list[Any] = list(_OPERATION.unpack(data[:-4]))
        values[-_TEXTS:] = [text.rstrip(b"\0").decode(errors="replace") for text in values[-_TEXTS:]]
        return Operation(*values)

    def _place(self, rank: int, number: int) -> memoryview:
        """The memory of an operation; the operation RING later uses the same."""
        start = rank * SLOT + 64 + (number - 1) % RING * _SIZE
        return self.memory[start : start + _SIZE]
