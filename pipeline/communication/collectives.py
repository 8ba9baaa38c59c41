"""Horovod's collectives with a time limit, and with news of what happens to other ranks.

A call of Horovod waits without end for a rank that does not come. So it runs in a thread of its
own, and whoever needs it done waits here, where a limit and the watch can end the wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from pipeline.communication.watch import Failure, Watch
from pipeline.errors import CommunicationError, CommunicationTimeout

T = TypeVar("T")
_LOOK_SECONDS = 0.05
# A connection's end comes at once when a rank has died, the watch's reason a moment later.
_REASON_SECONDS = 1.0


class Collective:
    """A call of Horovod under way.

    Args:
        owner: with the time limit and the watch.
        what: what it does, for errors.
        ranks: that take part.
        work: the call; runs in another thread.
    """

    def __init__(
        self, owner: Collectives, what: str, ranks: Sequence[int], work: Callable[[], Any]
    ) -> None:
        self._owner, self._what, self._ranks, self._work = owner, what, ranks, work
        self._result: Any = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="pipeline-horovod", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._done.set()

    def wait(self) -> Any:
        """What the call returned.

        Raises:
            CommunicationError: if it failed, or a rank was lost.
            CommunicationTimeout: if it took longer than the limit from now on.
        """
        owner = self._owner
        end = time.monotonic() + owner.timeout
        while not self._done.wait(_LOOK_SECONDS):
            failure = owner.failure()
            if failure is not None:
                raise CommunicationError(f"{self}: {failure.why}")
            if time.monotonic() > end:
                raise CommunicationTimeout(
                    f"{self}: not done within {owner.timeout:g} s{owner.silence()}"
                )
        if self._error is None:
            return self._result
        raise self._explained(self._error) from self._error

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, (tf.errors.OpError, RuntimeError)):
            return error
        lines = [line for line in str(error).splitlines() if "Horovod" in line or "gloo" in line]
        why = self._owner.reason() or next(iter(lines), "")
        return CommunicationError(f"{self}: {why}") if why else error

    def __str__(self) -> str:
        if not self._ranks:
            return self._what
        return f"{self._what} (with ranks {', '.join(map(str, self._ranks))})"


class Collectives:
    """Starts collectives of one pipeline.

    Args:
        name: the pipeline.
        timeout: seconds that a wait may take.
        watch: knows of other ranks; None while there is none.
    """

    def __init__(self, name: str, timeout: float, watch: Watch | None) -> None:
        self.name, self.timeout, self.watch = name, timeout, watch

    def start(self, what: str, ranks: Sequence[int], work: Callable[[], Any]) -> Collective:
        """Begins a collective; the caller goes on."""
        return Collective(self, what, ranks, work)

    def run(self, what: str, ranks: Sequence[int], work: Callable[[], T]) -> T:
        """Runs a collective to its end; see `Collective.wait` for what it raises."""
        return self.start(what, ranks, work).wait()

    def failure(self) -> Failure | None:
        """Why the pipeline cannot go on, if it cannot."""
        return self.watch.failure_of(self.name) if self.watch is not None else None

    def reason(self) -> str:
        """Why the pipeline cannot go on; waits a moment for the watch to know. Empty if it can."""
        end = time.monotonic() + _REASON_SECONDS
        while self.watch is not None:
            failure = self.failure()
            if failure is not None:
                return failure.why
            if time.monotonic() > end:
                break
            time.sleep(_LOOK_SECONDS)
        return ""

    def silence(self) -> str:
        """What is known of other ranks after a wait that took too long, to add to its error."""
        return f"; {self.watch.silence()}" if self.watch is not None else ""
