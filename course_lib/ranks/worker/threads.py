"""The threads of a rank that may still go on, counted when nothing has moved for a while.

A rank whose main thread waits for another rank is not stuck as long as a thread that the student's code has started,
or that runs it, goes on. What waits for another thread, without a time limit, goes on when that one does. Threads of
libraries, which load data or save a history, never talk to another rank.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import FrameType
from typing import Any, cast

import torch

from course_lib.ranks.library_code import RANKS, is_library

TORCH = os.path.dirname(torch.__file__) + os.sep


def watch() -> None:
    """Remember the threads that the student's code starts, and wrap waits on futures in a frame that shows them."""
    threads, futures = cast(Any, threading.Thread), cast(Any, torch._C.Future)
    start, wait = threads.start, futures.wait

    def noted(thread: Any) -> None:
        thread.is_students = not is_library(sys._getframe(1).f_code.co_filename)
        start(thread)

    threads.start = noted
    futures.wait = lambda future: wait(future)


def how_many_act(has_futures: bool) -> int:
    """The number of threads that may go on while no other rank does.

    has_futures: whether torch may wait on futures, as DistributedDataParallel does.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    return sum(_acts(frame, threads.get(ident), has_futures) for ident, frame in sys._current_frames().items())


def _acts(frame: FrameType, thread: Any, has_futures: bool) -> bool:
    """Whether a thread is the student's and waits neither for another rank nor, without a limit, for a thread."""
    files = [each.f_code.co_filename for each, _ in traceback.walk_stack(frame)]  # the innermost first
    is_own = thread is threading.main_thread() or getattr(thread, "is_students", False)
    if not is_own and all(map(is_library, files)):
        return False
    if files[0] == threading.Thread.join.__code__.co_filename:  # in a wait() or join()
        return frame.f_locals.get("timeout", 0) not in (None, -1)
    outside = next((file for file in files if not file.startswith(TORCH)), "")
    return not outside.startswith(RANKS) and not (has_futures and outside != files[0])
