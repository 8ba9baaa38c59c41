"""What a user calls: `function`, `iterate`, `disable`, `sync`, `stats`, `explain`.

A `Step` wraps the user's function. Each call is one iteration: the step's PythonRunner chooses how
it runs and the user's function is called just once, unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from terra_tf import native
from terra_tf.configuration import settings
from terra_tf.report import observers
from terra_tf.report.counters import Source, Stats, all_stats, register, stats_of
from terra_tf.report.explain import explain_runner, explain_without_native
from terra_tf.runners import in_flight
from terra_tf.runners.marks import disable_begins, disable_ends
from terra_tf.runners.python_runner import PythonRunner, initialise
from terra_tf.runners.signature import signature
from terra_tf.tensorflow_internals import executing_eagerly
from terra_tf.tracing.handlers import Loop

T = TypeVar("T")
_warned = False
_FOREIGN_THREAD = threading._DummyThread


def _usable() -> bool:
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


class _Region:
    """Shared by steps and loops: a PythonRunner and the right to open a region with it."""

    def __init__(
        self, name: str, *, max_graphs: int, numerics: str, on_new_trace: str, xla: bool = False
    ):
        self.name = name
        self.ready = False
        self._options: dict[str, Any] = {
            "max_graphs": max_graphs,
            "numerics": numerics,
            "on_new_trace": on_new_trace,
            "xla": xla,
        }
        self.runner = PythonRunner(
            name,
            max_graphs=max_graphs,
            exact=numerics == "eager",
            on_new_trace=on_new_trace,
            xla=xla,
        )
        graph = self.runner.tracegraph
        self.source = Source(
            self.runner.counters,
            lambda: (graph.traces, graph.nodes, graph.branches, graph.loops),
        )
        register(self, self.source)

    def outermost(self) -> bool:
        """Whether a region may be opened here."""
        if not self.ready:
            if _usable():
                initialise()
            if not _usable():
                if observers.active:
                    observers.notify(self.name, "eager")
                return False
            self.ready = True
        return (
            not native.core.inside()
            and executing_eagerly()
            and not settings.disabled
            # TensorFlow's own threads, which run Python functions of datasets, must not wait.
            and not isinstance(threading.current_thread(), _FOREIGN_THREAD)
        )

    def like(self) -> _Region:
        """A fresh region with the same options."""
        return _Region(self.name, **self._options)

    def explain(self) -> str:
        """The page of text about this region."""
        if settings.disabled or native.core is None:
            return explain_without_native(self.name, native.problem)
        return explain_runner(self.runner, stats_of([self.source]))


class Step:
    """A function whose calls are co-executed; made by `terra_tf.function`."""

    def __init__(self, fn: Callable[..., Any], region: _Region):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._region = region
        # id of an instance -> (the instance, its region), for a step that is a method.
        self._bound: dict[int, tuple[weakref.ref[Any], _Region]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one iteration: the user's function, once, in the mode that fits."""
        region = self._region
        if not region.outermost() or region.runner.rests():
            return self._fn(*args, **kwargs)
        key, arguments = signature(args, kwargs)
        runner = region.runner
        try:
            runner.begin(key, arguments)
            result = self._fn(*args, **kwargs)
            runner.end()
        except BaseException:
            runner.abort()
            raise
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: each instance has a TraceGraph of its own, as it has its own variables."""
        if instance is None:
            return self
        return Step(types.MethodType(self._fn, instance), self._region_of(instance))

    def _region_of(self, instance: Any) -> _Region:
        key = id(instance)
        if key in self._bound:
            return self._bound[key][1]
        bound = self._bound
        try:
            reference = weakref.ref(instance, lambda _: bound.pop(key, None))
        except TypeError:  # without weak references nobody tells when the instance is gone
            return self._region
        region = self._region.like()
        bound[key] = (reference, region)
        return region

    def stats(self) -> Stats:
        """A snapshot of this step's counters; its `reset()` zeroes them.

        For a method looked up on the class: of all instances together.
        """
        return stats_of([region.source for region in self._regions()])

    def graphs(self) -> list[Any]:
        """The generated graphs, each a `tf.function` ConcreteFunction, most recent last."""
        sequences = [s for region in self._regions() for s in region.runner.tracegraph.sequences]
        return [sequence.graph.concrete for sequence in sequences if sequence.graph is not None]

    def _regions(self) -> list[_Region]:
        return [self._region, *(region for _, region in self._bound.values())]

    def __repr__(self) -> str:
        return f"<terra_tf step {self._region.name!r}>"

    def __str__(self) -> str:
        return "\n".join(region.explain() for region in self._regions())


@overload
def function(fn: Callable[..., Any]) -> Step: ...
@overload
def function(
    fn: None = None,
    *,
    xla: bool = False,
    numerics: Literal["eager", "fast"] = "eager",
    max_graphs: int = 8,
    on_new_trace: Literal["fallback", "warn", "error"] = "fallback",
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Step]: ...
def function(
    fn: Callable[..., Any] | None = None,
    *,
    xla: bool = False,
    numerics: Literal["eager", "fast"] = "eager",
    max_graphs: int = 8,
    on_new_trace: Literal["fallback", "warn", "error"] = "fallback",
    name: str | None = None,
) -> Any:
    """Makes a step of an eager function: the same results, co-executed with a graph.

    Use it on the body of a training loop, as a call or a decorator. The function's Python runs on
    every call; tensors, variables, printed text and exceptions are those of eager mode.

    Args:
      fn: any callable: function, method, closure, partial, object with `__call__`.
      xla: have XLA compile what it can of the graph: pure ops of fixed sizes that cannot fail. It
        often makes matrices and elementwise ops faster and convolutions slower, and changes the
        last digits. What XLA cannot compile runs as without it; `explain` says what was chosen.
      numerics: "eager" keeps results bit-equal to eager; "fast" lets TensorFlow's graph optimizer
        rewrite arithmetic, which changes the last digits.
      max_graphs: how many generated graphs to keep; the least recently used go first.
      on_new_trace: what to do when the step does something new after it has co-executed: go on
        eagerly, also warn (once a place), or raise `NewTraceError` at that op.
      name: shown by `explain` and `terra bench`; default: the function's name.

    Returns:
      A `Step`, or a decorator that makes one if `fn` is not given.

    Raises:
      TypeError: `fn` is not callable.
      ValueError: an option has an unknown value.
    """
    if numerics not in ("eager", "fast"):
        raise ValueError(f'numerics must be "eager" or "fast", not {numerics!r}')
    if on_new_trace not in ("fallback", "warn", "error"):
        raise ValueError(
            f'on_new_trace must be "fallback", "warn" or "error", not {on_new_trace!r}'
        )
    if not isinstance(max_graphs, int) or max_graphs < 1:
        raise ValueError(f"max_graphs must be a positive int, not {max_graphs!r}")
    options: dict[str, Any] = {
        "xla": xla,
        "numerics": numerics,
        "max_graphs": max_graphs,
        "on_new_trace": on_new_trace,
        "name": name,
    }
    if fn is None:
        return functools.partial(function, **options)
    if not callable(fn):
        raise TypeError(f"terra_tf.function takes a callable, not {type(fn).__name__}")
    step_name = name or getattr(fn, "__name__", None) or type(fn).__name__
    region = _Region(
        step_name, max_graphs=max_graphs, numerics=numerics, on_new_trace=on_new_trace, xla=xla
    )
    return Step(fn, region)


class _Loop(Iterator[T]):
    """The iterator behind `iterate`: a region is open while the loop's body runs."""

    def __init__(self, iterable: Iterable[T], region: _Region):
        self._iterator = iter(iterable)
        self._region = region
        self._open = False

    def __next__(self) -> T:
        self._leave()
        item = next(self._iterator)
        if self._region.outermost() and not self._region.runner.rests():
            key, arguments = signature((item,), {})
            self._open = True
            try:
                self._region.runner.begin(key, arguments)
            except BaseException:
                self._abort()
                raise
        return item

    def _leave(self) -> None:
        if not self._open:
            return
        try:
            self._region.runner.end()
        except BaseException:
            self._abort()
            raise
        self._open = False

    def _abort(self) -> None:
        self._open = False
        self._region.runner.abort()

    def __del__(self) -> None:
        # The loop was left by break, return or an exception: what its body did so far stands.
        if self._open:
            self._abort()


# (code around it, line, name) of a loop -> its region, most recently used last. The graphs of a
# loop keep its code alive, so loops that are not run any more are dropped by number.
_loops: dict[Hashable, _Region] = {}
_MOST_LOOPS = 64


def _loop_region(code: types.CodeType, line: int, name: str | None) -> _Region:
    """The region of a loop. Code is told apart by identity: equal code may be of another file."""
    key = (id(code), line, name)
    region = _loops.pop(key, None)
    if region is None:
        label = name or f"loop at {code.co_filename}:{line}"
        region = _Region(label, max_graphs=8, numerics="eager", on_new_trace="fallback")
        region.runner.loop = Loop(code, line)
    _loops[key] = region
    while len(_loops) > _MOST_LOOPS:
        del _loops[next(iter(_loops))]
    return region


def iterate(iterable: Iterable[T], *, name: str | None = None) -> Iterator[T]:
    """Iterates over anything, with the loop's body co-executed as one step.

        for x, y in terra.iterate(dataset):
            ...  # unchanged eager code

    Loops at the same line share what was learned, so a loop inside a function that is called once
    per epoch is learned once.

    Args:
      iterable: a `tf.data.Dataset` or any other iterable.
      name: shown by `explain`; default: the line of the loop.
    """
    frame = sys._getframe(1)
    region = _loop_region(frame.f_code, frame.f_lineno, name)
    return _Loop(iterable, region)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Runs the block in plain eager mode, also inside a step.

    Effects of the step before the block are visible in it, and its own are visible after it. The
    iteration still counts as co-executed.
    """
    if not _usable():
        yield
        return
    marked = native.core.in_region() and not native.core.suspended()
    if marked:
        disable_begins()
    native.core.suspend()
    try:
        yield
    finally:
        native.core.resume()
        if marked:
            disable_ends()


def sync() -> None:
    """Waits until all that was started has finished.

    Raises:
      tf.errors.OpError: an op failed in a graph since the last synchronisation.
    """
    if native.core is not None:
        in_flight.sync()


def stats() -> Stats:
    """A snapshot of the counters of all steps together; its `reset()` zeroes them."""
    return all_stats()


def explain(step: Step | None = None) -> str:
    """A page of text: what a step (or every loop of `iterate`) did, and why it fell back."""
    if step is not None:
        return str(step)
    return "\n".join(region.explain() for region in _loops.values())
