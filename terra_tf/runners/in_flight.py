"""Iterations that Python has left while their graph still runs.

They are kept until their graph has ended, because an error in the graph is answered by replaying
the iteration eagerly, and that needs what was fed to it. Iterations are recovered in the order in
which they were launched, so that each replay starts from the state it should.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from terra_tf import native

if TYPE_CHECKING:
    from terra_tf.runners.iteration import CoExecutedIteration

_lock = threading.RLock()
_iterations: list[CoExecutedIteration] = []
_recovering = threading.local()
_forgotten: list[CoExecutedIteration] = []
_errors: dict[int, list[Exception]] = {}  # thread -> what it has yet to be told


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
    with _lock:
        waiting = [iteration for iteration in _iterations if iteration.thread == me]
    for position, iteration in enumerate(waiting):
        iteration.walk.wait_checked()
        if len(waiting) - position > lead:
            while not iteration.walk.wait_finished(50):
                pass
    drop_finished()


def drop_finished() -> None:
    """Forgets what has ended well; recovers what has failed."""
    with _lock:
        # `finished` is asked before `failed`: what ends in between is looked at next time.
        _iterations[:] = [i for i in _iterations if not i.walk.finished or i.walk.failed]
        failed = any(iteration.walk.failed for iteration in _iterations)
    if failed:
        recover(-1)
    _tell(threading.get_ident())


def _tell(thread: int) -> None:
    errors = _errors.get(thread)
    if errors:
        raise errors.pop(0)


def recover(_: int) -> None:
    """Replays, in order, all iterations whose graph failed.

    An error belongs to the thread that ran the iteration; another one keeps it for that thread.

    Raises:
      tf.errors.OpError: what eager would have raised.
    """
    if getattr(_recovering, "active", False):
        return
    _recovering.active = True
    try:
        while True:
            with _lock:
                iteration = next((i for i in _iterations if i.walk.failed), None)
                if iteration is None:
                    break
                _iterations.remove(iteration)
            iteration.walk.mark_recovered()
            try:
                iteration.recover()
            except Exception as error:
                _errors.setdefault(iteration.thread, []).append(error)
    finally:
        _recovering.active = False
    _tell(threading.get_ident())


def forget_all() -> None:
    """For a forked child: what its parent has in flight is not its own."""
    _forgotten.extend(_iterations)  # kept alive: their locks may be held by threads that are gone
    _iterations.clear()


def wait_for_all() -> None:
    """Waits until every graph has ended, whatever became of it."""
    with _lock:
        waiting = list(_iterations)
    for iteration in waiting:
        while not iteration.walk.wait_finished(50):
            pass


def sync() -> None:
    """Waits until every graph has ended.

    Raises:
      tf.errors.OpError: an op failed.
    """
    native.core.sync_closed()
    drop_finished()
