"""What the latest iterations of a step did and when, and where Python waited for their values.

The PythonRunner writes here; `explain`, `timeline` and the page read. All of it is bounded: the
iterations by number, the waits by the program's lines.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import time
from typing import Any

from terra_tf.tracing.location import is_users

KEPT = 256  # latest iterations of a step
_MOST_LINES = 200  # in which Python waited
_RECENT = 512  # iterations of all steps whose values may still be waited for

Line = tuple[str, int, str]  # file, line, function


@dataclasses.dataclass(slots=True)
class Record:
    """One iteration; times are seconds of `time.perf_counter`.

    Attributes:
      mode: "eager", "traced" or "coexecuted", as it began.
      thread: name of its thread.
      begin: when Python entered it.
      end: when Python left it; 0 while it is in it.
      graph: the native Timeline of its graph, if it had one.
      outcome: "ended", "fell back" or "raised".
      built: seconds that generating a graph took before it began.
    """

    mode: str
    thread: str
    begin: float
    end: float = 0.0
    graph: Any = None
    outcome: str = "ended"
    built: float = 0.0


@dataclasses.dataclass(slots=True)
class Wait:
    """Where Python waited for values.

    Attributes:
      line: the user's line that looked at a value.
      inside: whether the line is in the step, not in what comes after it.
      count: how often it had to wait.
      seconds: for how long, all together.
    """

    line: Line
    inside: bool
    count: int = 0
    seconds: float = 0.0


class History:
    """Of one step.

    Attributes:
      records: latest iterations, oldest first.
      seconds: time in iterations, by mode, of all there have been.
      waits: by line and whether it is inside the step.
    """

    def __init__(self) -> None:
        self.records: collections.deque[Record] = collections.deque(maxlen=KEPT)
        self.seconds: dict[str, float] = {}
        self.waits: dict[tuple[Line, bool], Wait] = {}
        self._inside = threading.local()  # .id: of the iteration that this thread is in

    def begin(self, mode: str, walk: Any, started: float, built: float) -> Record:
        """An iteration begins.

        Args:
          mode: as in `Record`.
          walk: the native half of a co-executed iteration, or None.
          started: when the step was called.
          built: as in `Record`.
        """
        record = Record(mode, threading.current_thread().name, started, built=built)
        if walk is not None:
            record.graph = walk.timeline
            self._inside.id = walk.id
            _recent[walk.id] = self
            if len(_recent) > _RECENT:
                _recent.popitem(last=False)
        self.records.append(record)
        return record

    def end(self, record: Record, outcome: str | None = None) -> None:
        """Python has left an iteration."""
        record.end = time.perf_counter()
        record.outcome = outcome or record.outcome
        self._inside.id = -1
        seconds = self.seconds.get(record.mode, 0.0)
        self.seconds[record.mode] = seconds + record.end - record.begin

    def _waited(self, number: int, seconds: float) -> None:
        inside = getattr(self._inside, "id", -1) == number
        key = (_users_line(), inside)
        wait = self.waits.get(key)
        if wait is None:
            if len(self.waits) >= _MOST_LINES:
                return
            wait = self.waits[key] = Wait(*key)
        wait.count += 1
        wait.seconds += seconds


_recent: collections.OrderedDict[int, History] = collections.OrderedDict()


def waited(number: int, output: int, seconds: float) -> None:
    """Called by the native core when Python has waited for a value.

    Args:
      number: of the iteration that made the value.
      output: which of its outputs it is.
      seconds: how long.
    """
    history = _recent.get(number)
    if history is not None:
        history._waited(number, seconds)


def _users_line() -> Line:
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "<no line of yours>", 0, ""
