"""Watches what Python a library call runs while it is learned.

A call may be skipped later only if all its Python was that of known libraries, and if it did
nothing that somebody else can see: no print, no warning, no random draw, no look at a tensor that
the program feeds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import tensorflow as tf

from terra_tf import tensorflow_internals

_SITE_PACKAGES = os.path.dirname(os.path.dirname(tf.__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Packages whose functions depend on nothing but what they can reach.
_KNOWN_TEXT = """
absl astunparse flatbuffers gast google keras ml_dtypes namex numpy opt_einsum optree packaging six
tensorflow tf_keras typing_extensions wrapt
"""
_KNOWN = _KNOWN_TEXT.split()
_KNOWN_FILES = tuple(_SITE_PACKAGES + name + end for name in _KNOWN for end in (os.sep, ".py"))
_FORBIDDEN_MODULES = frozenset({"time", "_random", "posix", "select", "_socket", "_warnings"})
_FORBIDDEN_FUNCTIONS = frozenset({"print", "input", "open", "breakpoint"})
# Where TensorFlow measures itself.
_METRICS_OF_ITS_OWN = os.path.join("tensorflow", "python", "eager", "monitoring.py")
_FORBIDDEN_CODE = frozenset({"_log", "_showwarnmsg"})


class Watch:
    """What the Python between `start` and `stop` did; nested calls have a Watch each.

    Attributes:
      problem: why the call may not be skipped, or None.
      hopeless: it never will.
      modules: the global dictionaries of all code that ran.
    """

    def __init__(self, read_matters: Callable[[Any], bool]):
        """Makes a Watch.

        Args:
          read_matters: tells of a tensor that was looked at whether its value may differ in the
            next call.
        """
        self.problem: str | None = None
        self.hopeless = False
        self.modules: dict[int, dict[str, Any]] = {}
        self.read_matters = read_matters

    def note(self, problem: str, hopeless: bool = False) -> None:
        """Notes that the call may not be skipped."""
        if self.problem is None or hopeless > self.hopeless:
            self.problem, self.hopeless = problem, hopeless


class Profile:
    """The profile function of the thread while calls are being learned."""

    def __init__(self) -> None:
        self._open: list[Watch] = []

    def start(self, watch: Watch) -> None:
        """Opens a watch."""
        self._open.append(watch)
        if len(self._open) == 1:
            sys.setprofile(self._event)

    def stop(self, watch: Watch) -> None:
        """Closes the watch that was opened last."""
        assert self._open.pop() is watch
        if not self._open:
            sys.setprofile(None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing in the block counts: it is ours."""
        if self._open:
            sys.setprofile(None)
        try:
            yield
        finally:
            if self._open:
                sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._called(frame)
        elif event == "c_call":
            problem = _forbidden(argument)
            if problem is not None and not frame.f_code.co_filename.endswith(_METRICS_OF_ITS_OWN):
                self._all(problem)

    def _all(self, problem: str, hopeless: bool = False) -> None:
        for watch in self._open:
            watch.note(problem, hopeless)

    def _called(self, frame: FrameType) -> None:
        code = frame.f_code
        what = _what_is(code, frame.f_globals.get("__name__", ""))
        if what == "ours":
            if code is tensorflow_internals.read_code():
                self._read(frame.f_locals["tensor"])
            return
        if what == "user's":
            self._all(f"it runs {code.co_name} of {code.co_filename}", hopeless=True)
        elif what == "forbidden":
            self._all(f"it calls {code.co_name} of {code.co_filename}")
        module = frame.f_globals
        for watch in self._open:
            watch.modules[id(module)] = module

    def _read(self, tensor: Any) -> None:
        for watch in self._open:
            if watch.read_matters(tensor):
                watch.note("it looks at the value of a tensor")


@functools.cache
def _what_is(code: CodeType, module: str) -> str:
    file = code.co_filename
    if file.startswith("<"):  # made at run time, by namedtuple for instance, or frozen
        top = module.split(".")[0]
        if top == __name__.split(".")[0]:
            return "ours"
        known = file.startswith("<frozen") or top.startswith("namedtuple_") or top in _KNOWN
        return "library" if known else "user's"
    if file.startswith(_OURS):
        return "ours"
    in_packages = file.startswith(_SITE_PACKAGES)
    if in_packages and not file.startswith(_KNOWN_FILES):
        return "user's"
    if not in_packages and not file.startswith(_STANDARD_LIBRARY):
        return "user's"
    return "forbidden" if code.co_name in _FORBIDDEN_CODE else "library"


def _forbidden(function: Any) -> str | None:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, random.Random):
        return "it draws a random number of Python's"
    if isinstance(owner, io.IOBase):
        return "it writes or reads a file"
    if function.__name__ in _FORBIDDEN_FUNCTIONS or function.__module__ in _FORBIDDEN_MODULES:
        return f"it calls {function.__module__}.{function.__name__}"
    return None
