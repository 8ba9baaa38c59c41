"""Around every call of a pipeline: one at a time, and what fails anywhere fails everywhere."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline import tensorflow_internals
from pipeline.communication.transport import Transport
from pipeline.communication.watch import Failure, Watch
from pipeline.errors import (
    CheckpointError,
    CommunicationError,
    CommunicationTimeout,
    PipelineError,
    UsageError,
)
from pipeline.runtime.coexecution import plainly


class CallGuard:
    """The state of one pipeline between its calls: usable, in use, or broken.

    Args:
        name: of the pipeline, the same on all ranks.
        rank: this process.
        transport: of the pipeline.
        watch: of the job.
        rescue: a bound method, called, while the error is on its way, when another rank has failed.
        stage_mode: of the pipeline.

    Attributes:
        doing: what this rank is at inside a call, for people.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        transport: Transport,
        watch: Watch,
        rescue: Callable[[], None],
        stage_mode: str = "function",
    ) -> None:
        self._name, self._rank = name, rank
        self._transport, self._watch = transport, watch
        self._stage_mode = stage_mode
        self._rescue = weakref.WeakMethod(rescue)
        self._in_use = threading.Lock()
        self._call = ""
        # Why no call is possible any more.
        self._broken: str | None = None
        self._is_closed = False
        self._is_rescued = False
        self.doing: Callable[[], str] = str
        watch.subscribe(name, self._on_failure)

    @contextmanager
    def call(self, what: str) -> Iterator[None]:
        """Around what all ranks do together: if this one fails, the others learn why.

        Raises:
            UsageError: if another call has not returned yet.
            PipelineError: if the pipeline is closed; CommunicationError, if another rank failed.
        """
        if not self._in_use.acquire(blocking=False):
            raise UsageError(
                f"{what} was called while {self._call} of the same pipeline runs, in another "
                "thread or inside it; a pipeline does one call at a time, on every rank in the "
                "same order"
            )
        try:
            self._call = what
            self._refuse_if_broken()
            self._watch.activity = lambda: f"{what}, {self.doing()}"
            try:
                with tensorflow_internals.exact_graphs(), plainly(self._stage_mode):
                    yield
            except (UsageError, CheckpointError):
                raise  # all ranks know
            except BaseException as error:
                self._give_up(what, error)
                raise
        finally:
            self._watch.activity = "no call of a pipeline"
            self._in_use.release()

    def close(self) -> None:
        """No call is possible after it."""
        self._is_closed = True

    def _refuse_if_broken(self) -> None:
        if self._is_closed:
            raise PipelineError("this pipeline is closed")
        if self._broken is not None:
            self._save_what_is_left()
            raise CommunicationError(
                f"{self._call} did not begin, this pipeline cannot go on: {self._broken}"
            )

    def _on_failure(self, failure: Failure) -> None:
        """Called by the watch's thread."""
        self._broken = self._broken or failure.why
        self._transport.fail(failure.why)

    def _save_what_is_left(self) -> None:
        if not self._is_rescued:
            self._is_rescued = True
            rescue = self._rescue()
            if rescue is not None:
                rescue()

    def _give_up(self, call: str, error: BaseException) -> None:
        if isinstance(error, CommunicationTimeout):
            silent = self._watch.silent_ranks()
            failure = Failure(str(error), silent[0] if silent else -1, "silent", self._name)
        elif isinstance(error, CommunicationError):
            # The watch has told the others why; if not, this is news to them.
            failure = self._watch.failure_of(self._name) or Failure(
                str(error), -1, "failed", self._name
            )
        else:
            text = f": {error}" if str(error) else ""
            doing = self.doing()
            text += f" (in {doing})" if doing else ""
            why = f"rank {self._rank} failed in {call}: {type(error).__name__}{text}"
            failure = Failure(why, self._rank, "failed", self._name)
        self._broken = self._broken or failure.why
        self._watch.give_up(failure)
        self._transport.abort(failure.why)
        if isinstance(error, CommunicationError):
            # At once: the launcher may end this process before the program has printed the error.
            if not self._watch.has_said():
                self._watch.say(str(error))
            self._save_what_is_left()
        else:
            self._is_rescued = True  # what this rank holds may be half done
