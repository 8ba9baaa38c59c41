"""Calls of a pipeline are for one thread at a time: ranks pair their messages by their order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.errors import UsageError

_Method = TypeVar("_Method", bound=Callable[..., Any])


class CallGuard:
    """Which thread is in a call of a pipeline."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._current = ""

    def enter(self, name: str) -> None:
        """Enters a call.

        Raises:
            UsageError: if another thread is in one.
        """
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"{name} was called while another thread is in {self._current} of the same "
                "pipeline; call a pipeline from one thread at a time, in the same order on all "
                "ranks"
            )
        self._current = f"{name} ({threading.current_thread().name})"

    def leave(self) -> None:
        """Leaves the call."""
        self._lock.release()


def one_thread(method: _Method) -> _Method:
    """Has a method of an object with `_guard: CallGuard` refuse a second thread."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._guard.enter(method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            self._guard.leave()

    return guarded  # type: ignore[return-value]
