"""How a process ends when another rank is lost: with its message, its exit code, and in time.

Left alone, Horovod makes this impossible. Its shutdown at the end of the interpreter waits for all
ranks, also for one that is stopped. Where its own thread meets a connection that has ended, it may
throw through, and the process is aborted without a word of Python's. And the launcher sends SIGTERM
to the other ranks within a second of the first that ends, and SIGKILL five seconds later.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from pipeline import native
from pipeline.communication.watch import Failure, Watch, say

# What a rank gets to raise its error and save what it can: the launcher gives five seconds.
_LAST_SECONDS = 4.5
# An aborting thread waits for so long, so that the program can end in its own way.
_ABORT_SECONDS = 20.0

TERMINATED = 128 + signal.SIGTERM

# The functions that C++ holds pointers to; they must not go.
_held: list[Any] = []


def prepare(watch: Watch) -> None:
    """Makes this process end well whatever happens to the others; once a process.

    Args:
        watch: what knows of failures.
    """
    atexit.register(watch.say_bye)
    watch.on_failure(_leave_horovod_behind)
    _tell_of_uncaught_exceptions(watch)
    _outlive_horovods_abort(watch)
    _take_time_to_terminate(watch)


def _leave_horovod_behind(failure: Failure) -> None:
    """After the loss of a rank, the end of this process no longer waits for Horovod.

    Its exit code is not 0 then: otherwise, if a rank is stopped and the programs of all others
    catch the error, the launcher would wait for the stopped one for ever.
    """
    if not failure.ends_horovod or "left" in _held:
        return
    _held.append("left")
    import horovod.tensorflow as hvd

    atexit.unregister(hvd.shutdown)
    # The destructor of Horovod's state waits as well.
    if native.core is not None:
        native.core.end_without_destructors()
    else:  # almost the same: C's `_exit` with the exit code, once Python has finalised and flushed
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _tell_of_uncaught_exceptions(watch: Watch) -> None:
    """An exception that ends the program outside a pipeline's calls is news to all ranks."""
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not watch.is_failing:
            why = f"rank {watch.rank} ended by {kind.__name__}: {error}"
            watch.give_up(Failure(why, watch.rank, "failed"))
        before(kind, error, trace)

    sys.excepthook = tell


def _outlive_horovods_abort(watch: Watch) -> None:
    """Holds a thread that C++ would abort the process from, until the program has ended."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate = library._ZSt13set_terminatePFvvE
        exception_type = library.__cxa_current_exception_type
    except (OSError, AttributeError):
        return  # another C++ library: the process is aborted, after the watch has printed why
    exception_type.restype = ctypes.POINTER(ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None)
    def hold() -> None:
        kind = exception_type()
        # The second word of a `std::type_info` is the type's name.
        name = ctypes.string_at(kind[1]) if kind else b""
        if b"gloo" in name or b"horovod" in name:
            end = time.monotonic() + _ABORT_SECONDS
            while not watch.is_failing and time.monotonic() < end - _ABORT_SECONDS + 1:
                time.sleep(0.02)  # the watch knows better what has happened, in a moment
            if not watch.is_failing:
                why = f"Horovod lost its connection to another rank; {watch.silence()}"
                watch.notice(Failure(why, -1, "silent"))
            time.sleep(max(0.0, end - time.monotonic()))

    _held.append(hold)
    set_terminate(hold)


def _take_time_to_terminate(watch: Watch) -> None:
    """SIGTERM raises SystemExit, or lets an error that is on its way come through."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(_LAST_SECONDS, os._exit, (TERMINATED,))
        timer.daemon = True
        timer.start()
        if not watch.is_failing:
            say(watch.rank, "SIGTERM: told to end")
            raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, terminate)
