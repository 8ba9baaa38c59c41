"""What a user calls: `function`, `iterate`, `disable`, `sync`, `stats`, `explain`.

A `Step` wraps the user's function. Each call is one iteration: the step's PythonRunner chooses how
it runs and the user's function is called just once, unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from terra_tf import native
from terra_tf.report import observers
from terra_tf.report.counters import Source, Stats, all_stats, register, stats_of
from terra_tf.report.explain import explain_runner, explain_without_native
from terra_tf.runners import in_flight
from terra_tf.runners.marks import disable_begins, disable_ends
from terra_tf.runners.python_runner import PythonRunner, initialise
from terra_tf.runners.signature import signature
from terra_tf.settings import settings
from terra_tf.tensorflow_internals import executing_eagerly

T = TypeVar("T")
_warned = False


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

    def __init__(self, name: str, *, max_graphs: int, numerics: str, on_new_trace: str):
        self.name = name
        self.ready = False
        self.runner = PythonRunner(
            name, max_graphs=max_graphs, exact=numerics == "eager", on_new_trace=on_new_trace
        )
        graph = self.runner.tracegraph
        self.source = Source(self.runner.counters, lambda: (graph.traces, graph.nodes))
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
        return not native.core.inside() and executing_eagerly() and not settings.disabled

    def explain(self) -> str:
        """The page of text about this region."""
        if settings.disabled or native.core is None:
            return explain_without_native(self.name, native.problem)
        return explain_runner(self.runner, stats_of([self.source]))


class Step:
    """A function whose calls are co-executed; made by `terra_tf.function`."""

    def __init__(self, fn: Callable[..., Any], region: _Region):
        self._fn = fn
        self._region = region
        self._bound: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one iteration: the user's function, once, in the mode that fits."""
        region = self._region
        if not region.outermost() or region.runner.rests():
            return self._fn(*args, **kwargs)
        key, arguments = signature(args, kwargs)
        iteration = region.runner.begin(key, arguments)
        try:
            result = self._fn(*args, **kwargs)
        except BaseException:
            iteration.abort()
            raise
        iteration.end()
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: each instance has a TraceGraph of its own, as it has its own variables."""
        if instance is None:
            return self
        try:
            bound = self._bound.get(instance)
        except TypeError:  # not hashable or without weak references: share this one
            return types.MethodType(self, instance)
        if bound is None:
            reference = weakref.ref(instance)
            fn = self._fn

            @functools.wraps(fn)
            def method(*args: Any, **kwargs: Any) -> Any:
                return fn(reference(), *args, **kwargs)

            runner = self._region.runner
            bound = Step(method, _like(self._region, runner))
            self._bound[instance] = bound
        return bound

    def stats(self) -> Stats:
        """A snapshot of this step's counters; its `reset()` zeroes them."""
        return stats_of([self._region.source])

    def graphs(self) -> list[Any]:
        """The generated graphs, each a `tf.function` ConcreteFunction, most recent last."""
        sequences = self._region.runner.tracegraph.sequences
        return [sequence.graph.concrete for sequence in sequences if sequence.graph is not None]

    def __repr__(self) -> str:
        return f"<terra_tf step {self._region.name!r}>"

    def __str__(self) -> str:
        return self._region.explain()


def _like(region: _Region, runner: PythonRunner) -> _Region:
    numerics, on_new_trace, max_graphs = runner.options
    return _Region(region.name, max_graphs=max_graphs, numerics=numerics, on_new_trace=on_new_trace)


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
      xla: reserved for compiling the graph with XLA; a warning says that it has no effect yet.
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
    if xla:
        warnings.warn("xla=True has no effect yet: the graph is not compiled", stacklevel=2)
    step_name = name or getattr(fn, "__name__", None) or type(fn).__name__
    region = _Region(step_name, max_graphs=max_graphs, numerics=numerics, on_new_trace=on_new_trace)
    return Step(fn, region)


class _Loop(Iterator[T]):
    """The iterator behind `iterate`: a region is open while the loop's body runs."""

    def __init__(self, iterable: Iterable[T], region: _Region):
        self._iterator = iter(iterable)
        self._region = region
        self._iteration: Any = None

    def __next__(self) -> T:
        self._leave()
        item = next(self._iterator)
        if self._region.outermost() and not self._region.runner.rests():
            key, arguments = signature((item,), {})
            self._iteration = self._region.runner.begin(key, arguments)
        return item

    def _leave(self) -> None:
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.end()

    def __del__(self) -> None:
        # The loop was left by break, return or an exception: what its body did so far stands.
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            iteration.abort()


_loops: dict[Hashable, _Region] = {}


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
    from terra_tf.tracing.location import user_location

    frames = user_location(depth=1).frames
    place = frames[0] if frames else None
    key = (place, name)
    region = _loops.get(key)
    if region is None:
        label = name or (f"loop at {place[0]}:{place[1]}" if place else "loop")
        region = _Region(label, max_graphs=8, numerics="eager", on_new_trace="fallback")
        _loops[key] = region
    return _Loop(iterable, region)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Runs the block in plain eager mode, also inside a step.

    Effects of the step before the block are visible in it, and its own are visible after it. The
    iteration still counts as co-executed.
    """
    if not _usable() or not native.core.inside():
        yield
        return
    disable_begins()
    native.core.suspend()
    try:
        yield
    finally:
        native.core.resume()
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
