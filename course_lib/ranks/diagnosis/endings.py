"""The reason why a run ended early: an exception of a rank, the death of its process, or the time limit."""

from __future__ import annotations

import signal

from course_lib.ranks import errors
from course_lib.ranks.diagnosis.status import RankStatus
from course_lib.ranks.errors import describe_line, listing, sentence
from course_lib.ranks.messages import Failure


def explain_failures(statuses: list[RankStatus]) -> errors.RunError:
    """Explain exceptions of ranks and results that cannot be sent; the first one counts."""
    by_time = sorted(statuses, key=lambda status: status.since)
    failed = [(status.rank, status.failure) for status in by_time if status.failure]
    rank, first = failed[0]
    text = _failure_sentence(rank, first)
    others = [f"rank {rank} {_raised(failure)}" for rank, failure in failed if failure.message != first.message]
    if not others and len(failed) == len(statuses) > 1:
        text = text.replace(f"Rank {rank}", "Every rank", 1)
    if others:
        text += f" Also: {'; '.join(others).rstrip('.')}."
    waiting = [status.rank for status in statuses if status.state == "waiting"]
    if waiting:
        text += f" {sentence(listing(waiting))} waited for it."
    kinds = {"exited": errors.RankDied, "joining": errors.NotConnected}
    error = kinds.get(first.kind, errors.RankFailed)(text, rank, details=first.traceback)
    error.__cause__ = first.original
    return error


def _raised(failure: Failure) -> str:
    first_line = failure.message.strip().partition("\n")[0][:300]
    if failure.kind == "exited":
        return f"called sys.exit({failure.message})"
    return f"raised {failure.type}: {first_line}" if first_line else f"raised {failure.type}"


def _failure_sentence(rank: int, failure: Failure) -> str:
    if failure.kind == "result":
        return f"Rank {rank} returned a {failure.type} {failure.message}."
    if failure.kind == "joining":
        return f"Rank {rank} could not connect to the others before the function began: it {_raised(failure)}."
    if failure.kind == "arrival":
        return f"Rank {rank} could not rebuild the function or its args, which {_raised(failure)} there."
    if failure.kind == "leftover":
        return f"Rank {rank} returned but left {failure.type} behind; {failure.message}."
    return f"Rank {rank} {_raised(failure)} ({describe_line(failure.line) or 'in the call fn(rank, *args)'})."


def behind(error: errors.RunError, statuses: list[RankStatus], handled: dict[int, Failure]) -> errors.RunError:
    """The exception that led a rank to a call that does not fit or cannot end, if there was one; else the error itself.

    Where every rank handles one, as in a program that runs in an `except ImportError`, it explains nothing.
    """
    last = [status.operations[-1] for status in statuses if status.operations]
    brought = [(rank, op) for rank, op in error.calls.items() if op.in_handler and rank in handled]
    if not brought or all(op.in_handler for op in last):
        return error
    rank, op = brought[0]
    text = f"{_failure_sentence(rank, handled[rank])} While it handled that, it called {op.name}. {error.message}"
    found = errors.RankFailed(text, rank, details=f"{error.details}\n\n{handled[rank].traceback}")
    found.__cause__ = handled[rank].original
    return found


def is_cut_off(status: RankStatus) -> bool:
    """Whether a rank failed in an operation, or failed to begin one, because another rank had ended."""
    refused = status.failure is not None and "by peer" in status.failure.message  # closed or reset
    return status.state == "raised" and (status.blocked_in is not None or refused)


def forgive_cut_off(statuses: list[RankStatus]) -> None:
    """Treat ranks whose operation failed because another rank died as waiting; the failure is not their own."""
    for status in statuses:
        if status.state == "raised" and status.blocked_in is not None:
            status.state = "waiting"


def explain_death(status: RankStatus, has_begun: bool = True) -> errors.RunError:
    """Explain why the process of a rank ended, as far as its exit code tells. has_begun: whether its function had."""
    code, kind = status.exit_code or 0, errors.RankDied if has_begun else errors.NotConnected
    where = describe_line(status.line)
    last = f" The last line it reached in a process group call: {where}." if where else ""
    if code >= 0:
        text = f"Rank {status.rank} ended its process with exit code {code} in the middle of the run.{last}"
        return kind(text, status.rank)
    reasons = {  # by name, as not every system has them all
        "SIGKILL": "was killed (SIGKILL), by somebody or because memory ran out",
        "SIGSEGV": "crashed with a segmentation fault: compiled code touched memory that is not its own",
        "SIGABRT": "was aborted by compiled code (SIGABRT)",
        "SIGTERM": "was asked to end (SIGTERM)",
    }
    why = reasons.get(signal.Signals(-code).name, f"was ended by signal {-code}")
    return kind(f"Rank {status.rank} {why}.{last}", status.rank)


def explain_timeout(statuses: list[RankStatus], timeout: float) -> errors.RankTimeout:
    """Name the ranks that have not returned at the time limit."""
    busy = [status for status in statuses if status.state in ("computing", "starting")]
    waiting = [status.rank for status in statuses if status.state == "waiting"]
    if busy:
        where = describe_line(busy[0].line)
        text = f"{listing([status.rank for status in busy])} had not returned" + (f" ({where})" if where else "")
        text += f", and {listing(waiting)} waited" if waiting else ""
    else:
        text = f"{listing(waiting)} had not finished an operation on all sides"
    advice = "If it is right but slow, give launch a longer timeout."
    rank = busy[0].rank if busy else None
    return errors.RankTimeout(f"Time limit: after {timeout:g} s {text}.", rank, details=advice)


def explain_stop(statuses: list[RankStatus]) -> errors.Stopped:
    """Say what the ranks were doing when the run was stopped."""
    doing = {"computing": "computed", "waiting": "waited"}
    ranks = {state: [status.rank for status in statuses if status.state == state] for state in doing}
    parts = [f"{listing(ranks[state])} {did}" for state, did in doing.items() if ranks[state]]
    text = f"When you stopped it, {' and '.join(parts) or 'the ranks were starting'}."
    return errors.Stopped(text, details="The next launch starts fresh.")
