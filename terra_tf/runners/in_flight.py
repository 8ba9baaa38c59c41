"""Iterations that Python has left while their graph still runs.

They are kept until their graph has ended, because an error in the graph is answered by replaying
the iteration eagerly, and that needs what was fed to it. Iterations are recovered in the order in
which they were launched, so that each replay starts from the state it should.

An iteration that was left by Ctrl-C has no end of its own: its graph goes on as far as it can
without Python, and the rest is replayed when somebody looks at a tensor or a variable of it. So an
interrupt never waits for a long computation, and still nothing of the iteration is lost.
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from terra_tf import native

if TYPE_CHECKING:
    from terra_tf.runners.iteration import CoExecutedIteration

_lock = threading.RLock()
_iterations: list[CoExecutedIteration] = []
_recovering = threading.local()  # .active: this thread is at it
_one_at_a_time = threading.Lock()
_forgotten: list[CoExecutedIteration] = []
_errors: dict[int, list[Exception]] = {}  # thread -> what it has yet to be told
_failed: dict[int, Exception] = {}  # iteration -> its error, of the latest ones that failed
_MOST_FAILED = 32


def add(iteration: CoExecutedIteration) -> None:
    """Keeps an iteration until its graph has ended."""
    with _lock:
        if iteration not in _iterations:
            _iterations.append(iteration)


def settle_finished(lead: int) -> None:
    """Makes sure that a new iteration may start.

    Waits until no op that may fail is outstanding and at most `lead` graphs are unfinished.

    Raises:
      tf.errors.OpError: an op of an earlier iteration failed.
    """
    me = threading.get_ident()
    if _iterations:
        with _lock:
            waiting = [iteration for iteration in _iterations if iteration.thread == me]
        for position, iteration in enumerate(waiting):
            if iteration.walk.interrupted:
                break
            iteration.walk.wait_checked()
            if len(waiting) - position > lead:
                _wait_for(iteration)
    drop_finished()


def drop_finished() -> None:
    """Forgets what has ended well; recovers what has failed or was interrupted."""
    if _iterations:
        with _lock:
            due = [iteration.walk.is_due for iteration in _iterations]
            if False in due:
                left = zip(_iterations, due, strict=True)
                _iterations[:] = [iteration for iteration, is_due in left if is_due is not False]
        if True in due:
            recover(-1)
    _tell(threading.get_ident())


def _is_interrupted(iteration: CoExecutedIteration) -> bool:
    return iteration.walk.interrupted


def _is_failed(iteration: CoExecutedIteration) -> bool:
    return iteration.walk.failed or iteration.walk.interrupted


def _wait_for(iteration: CoExecutedIteration) -> None:
    while not iteration.walk.wait_finished(50):
        pass


def _tell(thread: int) -> None:
    errors = _errors.get(thread)
    if errors:
        raise errors.pop(0)


def recover(number: int) -> None:
    """Replays, in order, all iterations whose graph failed or that were interrupted.

    An error belongs to the thread that ran the iteration; another one keeps it for that thread.

    Args:
      number: of the iteration of which a tensor is looked at, or -1.

    Raises:
      tf.errors.OpError: what eager would have raised.
    """
    _recover(_is_failed)
    _tell(threading.get_ident())
    if number in _failed:
        raise copy.copy(_failed[number])


def note_error(number: int, error: Exception) -> None:
    """Keeps the error of an iteration for whoever looks at a tensor that was made behind it."""
    _failed[number] = copy.copy(error)  # without its traceback, which holds the step's tensors
    if len(_failed) > _MOST_FAILED:
        del _failed[next(iter(_failed))]


def _recover(is_due: Callable[[CoExecutedIteration], bool]) -> None:
    if getattr(_recovering, "active", False):
        return
    _recovering.active = True
    try:
        with _one_at_a_time:
            while (iteration := _first(is_due)) is not None:
                try:
                    iteration.recover()
                except Exception as error:
                    _errors.setdefault(iteration.thread, []).append(error)
                # Only now: what Ctrl-C interrupts goes on when recovery is asked for again.
                iteration.walk.mark_recovered()
                with _lock:
                    _iterations.remove(iteration)
    finally:
        _recovering.active = False


def _first(is_due: Callable[[CoExecutedIteration], bool]) -> CoExecutedIteration | None:
    """The first iteration that is due, once it is known how those before it have ended."""
    while True:
        with _lock:
            due = next((i for i in _iterations if is_due(i)), None)
            if due is None:
                return None
            earlier = _iterations[: _iterations.index(due)]
        running = [i for i in earlier if i.thread == due.thread and not i.walk.finished]
        if not running:
            return due
        for iteration in running:
            _wait_for(iteration)


def forget_all() -> None:
    """For a forked child: what its parent has in flight is not its own."""
    _forgotten.extend(_iterations)  # kept alive: their locks may be held by threads that are gone
    _iterations.clear()


def end_all() -> None:
    """Waits until every graph has ended, whatever became of it."""
    _recover(_is_interrupted)
    _wait_for_uninterrupted()


def shut_down() -> None:
    """At the program's end: waits for graphs and prints the errors that nobody has asked for.

    What was interrupted stays as it is, and so does all that is on its way in a program that ends
    by Ctrl-C: whoever still looks at it waits for it.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        return
    _wait_for_uninterrupted()
    _recover(lambda iteration: _is_failed(iteration) and not _is_interrupted(iteration))
    for error in _errors.pop(threading.get_ident(), []):
        traceback.print_exception(error)


def _wait_for_uninterrupted() -> None:
    with _lock:
        waiting = [iteration for iteration in _iterations if not _is_interrupted(iteration)]
    for iteration in waiting:
        _wait_for(iteration)


def sync() -> None:
    """Waits until every graph has ended.

    Raises:
      tf.errors.OpError: an op failed.
    """
    native.core.sync_closed()
    drop_finished()
