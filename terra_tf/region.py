"""A Region: what `function`, `iterate` and the loops that `terra run` finds have in common.

It owns the PythonRunner of one step and says whether an iteration of it may begin here and now.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from terra_tf import native
from terra_tf.configuration import settings
from terra_tf.report import observers
from terra_tf.report.counters import Source, register
from terra_tf.runners.python_runner import PythonRunner, initialise
from terra_tf.tensorflow_internals import executing_eagerly
from terra_tf.tracing.handlers import Loop

_numbers = itertools.count()
_warned = False
_FOREIGN_THREAD = threading._DummyThread


def usable() -> bool:
    """Whether steps can co-execute in this process; warns once if the native core is missing."""
    global _warned
    if settings.disabled:
        return False
    if native.core is None:
        if not _warned:
            _warned = True
            warnings.warn(
                f"terra_tf runs in plain eager mode: {native.problem}", RuntimeWarning, stacklevel=3
            )
        return False
    return True


class Region:
    """A PythonRunner and the right to open an iteration with it.

    Attributes:
      name: shown by reports.
      runner: all that was learned of the step.
      source: of the step's `Stats`.
    """

    def __init__(
        self,
        name: str,
        *,
        max_graphs: int = 8,
        numerics: str = "eager",
        on_new_trace: str = "fallback",
        xla: bool = False,
        loop: Loop | None = None,
    ):
        """Makes the region of a step; see `terra_tf.function` for the options.

        Args:
          name: shown by reports.
          max_graphs: how many generated graphs to keep.
          numerics: "eager" or "fast".
          on_new_trace: "fallback", "warn" or "error".
          xla: have graphs compiled.
          loop: where the loop is, if the step is the body of one.
        """
        self.name = name
        self.ready = False
        self._options: dict[str, Any] = {
            "max_graphs": max_graphs,
            "numerics": numerics,
            "on_new_trace": on_new_trace,
            "xla": xla,
            "loop": loop,
        }
        self.runner = PythonRunner(
            name,
            max_graphs=max_graphs,
            exact=numerics == "eager",
            on_new_trace=on_new_trace,
            xla=xla,
        )
        self.runner.loop = loop
        graph = self.runner.tracegraph
        self.source = Source(
            self.runner.counters,
            lambda: (graph.traces, graph.nodes, graph.branches, graph.loops),
        )
        register(self, self.source)
        self.number = next(_numbers)
        _all.add(self)

    def outermost(self) -> bool:
        """Whether an iteration may begin here."""
        if not executing_eagerly():
            return False
        if not self.ready:
            if usable():
                initialise()
            if not usable():
                if observers.active:
                    observers.notify(self.name, "eager")
                return False
            self.ready = True
        return (
            not native.core.inside()
            and not settings.disabled
            # TensorFlow's own threads, which run Python functions of datasets, must not wait.
            and not isinstance(threading.current_thread(), _FOREIGN_THREAD)
        )

    def like(self) -> Region:
        """A fresh region with the same options."""
        return Region(self.name, **self._options)


# (code around it, what else tells it apart) of a loop -> its region, most recently used last. The
# graphs of a loop keep its code alive, so loops that are not run any more are dropped by number.
_loops: dict[object, Region] = {}
_MOST_LOOPS = 64


def loop_region(key: object, name: str, loop: Loop) -> Region:
    """The region of a loop's body, made on first use.

    Args:
      key: tells the loop from others in the same code. Code is told apart by identity, since equal
        code may be of another file.
      name: shown by reports.
      loop: where it is.
    """
    key = (id(loop.code), key)
    region = _loops.pop(key, None)
    if region is None:
        region = Region(name, loop=loop)
    _loops[key] = region
    while len(_loops) > _MOST_LOOPS:
        del _loops[next(iter(_loops))]
    return region


def loop_regions() -> Iterable[Region]:
    """The regions of all loops, oldest first."""
    return tuple(_loops.values())


_all: weakref.WeakSet[Region] = weakref.WeakSet()


def all_regions() -> list[Region]:
    """The living regions of all steps and loops, oldest first."""
    return sorted(_all, key=lambda region: region.number)
