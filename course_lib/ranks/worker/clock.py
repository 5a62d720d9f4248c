"""The emulated clock: processes, messages and results are real, and time is computed, not spent.

Eight ranks on two cores cannot show what eight devices do, however long one waits. So in a run with a `Pace` every
rank carries a clock of its own, which starts at zero and moves by these rules alone:

    compute      a mark takes the seconds that the pace has for its kind and work, and more on a slow rank. What is
                 not marked takes none, and neither does a mark that the pace has no seconds for (the timeline says so)
    message      queues on the sender's outgoing link (it has one inside the node and one between nodes) behind the
                 messages posted there before, occupies it for bytes / bandwidth, and arrives a latency later. It
                 occupies nothing at the receiver. The sender is free once the link is, whether or not the receive
                 has been posted
    collective   begins when the last member has come and the group's collective before it is over, and takes the time
                 of its algorithm: a ring (`pace._RINGS`) as if each step were messages from rank to rank, any other
                 step by step on the slowest link between its members. One with a root keeps all members until its
                 end. Collectives and messages do not slow each other down
    wait         moves the clock to the end of what it waits for, if that is later. So does `is_completed()`, whose
                 answer would otherwise depend on the machine; it is refused for a receive, whose sender may send the
                 message only later. A wait out of sight, on `work.get_future()` as in DistributedDataParallel,
                 counts at the end of the mark around it; outside of marks, before the next mark or operation

Messages match as they really do, in order for each sender, receiver, tag and group. So the same program gives the same
timeline to the last bit on any machine, as long as it does not ask for the real time. Whatever else depends on the
machine is refused: a receive from any of several senders, and operations of several threads of a rank.

The message rule is that of LogGP (Alexandrov et al. 1995) with its overhead and gap at zero; running a program to find
out how long it would take elsewhere is direct-execution simulation (Degomme et al. 2017, "Simulating MPI Applications:
The SMPI Approach").
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from course_lib.ranks.board import Moments, Operation
from course_lib.ranks.pace import Pace

_POLL = 0.0002  # seconds between polls for a member that has not come yet


class Entry(NamedTuple):
    """One rank's part of an operation, for other ranks: when its message arrives, or when it came to a collective.

    peer: the receiver of a message; -1 for a collective.
    """

    group: int
    peer: int
    tag: int
    order: int
    bytes: int
    posted: float
    arrival: float


_ENTRY = struct.Struct("<IiqQQdd")
_Key = tuple[int, int, int, int]  # the first four of an entry


class Entries:
    """The times that ranks tell each other: each rank appends to a file of its own.

    A sender may be ten thousand messages ahead of its receiver. An entry is written before its operation really
    begins, so it is there before the data.
    """

    def __init__(self, prefix: str, rank: int) -> None:
        self.rank, self._prefix = rank, prefix
        self._own = open(f"{self._prefix}{rank}", "ab", buffering=0)  # noqa: SIM115  (closed with the run)
        self._files: dict[int, IO[bytes]] = {}
        self._known: dict[int, dict[_Key, Entry]] = defaultdict(dict)

    def write(self, entry: Entry) -> None:
        self._own.write(_ENTRY.pack(*entry))

    def of(self, rank: int, key: _Key) -> Entry:
        """Read a rank's entry of an operation; wait for it, since a root may be done before the others have come."""
        while key not in (known := self._read(rank)):
            time.sleep(_POLL)
        return known[key]

    def _read(self, rank: int) -> dict[_Key, Entry]:
        """All entries that a rank has written so far; it may not have begun its run yet.

        Of two entries for one operation the later counts: the earlier one was refused.
        """
        with contextlib.suppress(FileNotFoundError):
            if rank not in self._files:
                self._files[rank] = open(f"{self._prefix}{rank}", "rb", buffering=0)  # noqa: SIM115  (as above)
            data = self._files[rank].read()
            whole = len(data) - len(data) % _ENTRY.size
            self._files[rank].seek(whole - len(data), os.SEEK_CUR)  # the next read gets the rest of an entry
            for entry in map(Entry._make, _ENTRY.iter_unpack(data[:whole])):
                if entry.peer in (-1, self.rank):
                    self._known[rank][entry[:4]] = entry
        return self._known[rank]

    def close(self) -> None:
        """Close and remove the files, after the run, when no other rank reads any more."""
        for file in (self._own, *self._files.values()):
            file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._own.name)


@dataclass
class _OpenMark:
    """An open mark. begun: when it would have begun if nothing had blocked its rank inside it.

    unseen: handles of operations whose futures somebody took inside it.
    """

    seconds: float
    begun: float
    unseen: list[Any] = field(default_factory=list)


class EmulatedClock:
    """The clock of one rank in one run."""

    def __init__(self, rank: int, pace: Pace, entries: Entries) -> None:
        self.rank, self.pace, self.entries = rank, pace, entries
        self.now = 0.0
        self.untimed: set[str] = set()  # kinds of marks that the pace has no seconds for
        self.refused: RuntimeError | None = None  # the error of another thread, which may have gone unnoticed
        self._thread = threading.get_ident()
        self._marks = [_OpenMark(0.0, 0.0)]  # the innermost one last; the first stands for unmarked code
        self._link_free = {True: 0.0, False: 0.0}  # by whether it is the link inside the node
        self._collectives: dict[int, list[Operation]] = defaultdict(list)  # begun, by group
        self._ends: dict[int, list[Moments]] = defaultdict(list)  # of these collectives, as far as they are known

    # Compute

    def follow(self, what: str) -> None:
        """Refuse what any thread does but the one that runs the function."""
        if threading.get_ident() != self._thread:
            self.refused = RuntimeError(
                f"Another thread than that of the function has begun {what}, as a callback of a future does. The "
                "emulated clock follows one thread of each rank: begin it in the function, or launch without a pace."
            )
            raise self.refused

    def call_back(self, callback: Any, future: Any) -> Any:
        """Call a callback as if from another thread, even if this one calls it since the future is done already."""
        before = self._thread
        if threading.get_ident() == before:
            self._thread = 0
        try:
            return callback(future)
        finally:
            self._thread = before

    def begin(self, kind: str, work: float, includes: str) -> None:
        self.follow(f"a mark of the kind {kind!r}")
        self.come_by()
        seconds = self.pace.compute_seconds(kind, work, includes)
        if seconds is None and work:
            self.untimed.add(kind)
        self._marks.append(_OpenMark((seconds or 0.0) * self.pace.slow.get(self.rank, 1.0), self.now))

    def progress(self, fraction: float) -> None:
        mark = self._marks[-1]
        self.now = max(self.now, mark.begun + fraction * mark.seconds)

    def end(self, failed: bool) -> None:
        """End a mark; one that failed waits for nobody, since the rank must report its exception."""
        self.progress(1.0)
        if not failed:
            self._settle()
        self._marks[-2].unseen += self._marks.pop().unseen

    def come_by(self) -> None:
        """Settle waits out of sight, when the rank comes to a mark, to an operation or to its end."""
        if len(self._marks) == 1:
            self._settle()

    def wait_unseen(self, work: Any) -> None:
        """Note that somebody has taken the future of this operation."""
        self._marks[-1].unseen.append(work)

    def _settle(self) -> None:
        while unseen := self._marks[-1].unseen:
            unseen.pop(0).wait()

    # Operations

    def post(self, op: Operation) -> None:
        """Begin an operation. Other ranks can read its times before its data can reach them."""
        op.emulated = Moments(self.now, self.now)
        if op.is_send:
            (link,) = self.pace.links_among([self.rank, op.peer])
            inside = self.pace.node(self.rank) == self.pace.node(op.peer)
            self._link_free[inside] = carried = max(self.now, self._link_free[inside]) + op.bytes / link.bandwidth
            op.emulated = Moments(self.now, self.now, ended=carried)
            self.entries.write(Entry(op.group, op.peer, op.tag, op.order, op.bytes, self.now, carried + link.latency))
        elif not op.is_message:
            self._collectives[op.group].append(op)
            self.entries.write(Entry(op.group, -1, 0, op.order, op.bytes, self.now, 0.0))

    def withdraw(self, op: Operation) -> None:
        """Take back a collective that was refused as soon as it began. (Messages are refused before they begin.)"""
        if not op.is_message:
            self._collectives[op.group].pop()

    def finish(self, op: Operation) -> None:
        """End the rank's wait for an operation, which is really complete."""
        moments = self._moments(op)
        op.emulated = moments._replace(posted=op.emulated.posted, blocked=self.now)  # type: ignore[union-attr]
        before, self.now = self.now, max(self.now, moments.ended)
        for mark in self._marks:
            mark.begun += self.now - before

    def _moments(self, op: Operation) -> Moments:
        if not op.is_message:
            return self._collective(op)
        assert op.emulated is not None
        if op.is_send:
            return op.emulated
        sent = self.entries.of(op.peer, (op.group, self.rank, op.tag, op.order))
        return Moments(0.0, max(sent.posted, op.emulated.posted), ended=max(sent.arrival, op.emulated.posted))

    def _collective(self, op: Operation) -> Moments:
        """Moments of a collective. Those of a group come one after the other, so earlier ones are computed first."""
        known, begun = self._ends[op.group], self._collectives[op.group]
        while len(known) <= op.order:
            one = begun[len(known)]
            ranks = one.member_ranks()
            came = [self.entries.of(rank, (one.group, -1, 0, one.order)) for rank in ranks]
            moving = max(entry.posted for entry in came)
            start = max(moving, known[-1].ended if known else 0.0)
            seconds = self.pace.collective_seconds(one.name, max(entry.bytes for entry in came), ranks)
            known.append(Moments(0.0, moving, ended=start + seconds))
        return known[op.order]
