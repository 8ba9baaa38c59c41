"""What surrounds every call of a pipeline's methods.

Calls are for one thread at a time, since ranks pair their messages by their order. Inside a step
that `terra_tf` co-executes, they run plainly: messages have to leave when they are sent.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from pipeline.errors import UsageError

_Method = TypeVar("_Method", bound=Callable[..., Any])


class CallGuard:
    """Lets one thread at a time into the calls of a pipeline.

    Args:
        may_coexecute: whether the stages are co-executed; then calls are not kept from it.
    """

    def __init__(self, may_coexecute: bool = False) -> None:
        self._lock = threading.RLock()
        self._current = ""
        self._may_coexecute = may_coexecute

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Surrounds a call.

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
        try:
            terra = sys.modules.get("terra_tf")
            plainly = terra is not None and not self._may_coexecute
            with terra.disable() if plainly else nullcontext():
                yield
        finally:
            self._lock.release()


def guarded_call(method: _Method) -> _Method:
    """Has a method of an object with `_guard: CallGuard` surrounded by that."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._guard.entered(method.__name__):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]
