"""What a user calls: `function`, `iterate`, `disable`, `sync`, `stats`, `explain`, `timeline`.

A `Step` wraps the user's function. Each call is one iteration: the step's PythonRunner chooses how
it runs and the user's function is called just once, unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar, overload

from terra_tf import native
from terra_tf.configuration import settings
from terra_tf.dropin import loops as watched_loops
from terra_tf.dropin.roles import Role
from terra_tf.region import Region, all_regions, loop_region, loop_regions, usable
from terra_tf.report.counters import Stats, all_stats, stats_of
from terra_tf.report.explain import explain_without_native, page
from terra_tf.report.findings import report_of
from terra_tf.report.program import LoopReport, ProgramReport, in_order, total_modes
from terra_tf.report.timeline import write_chrome_trace
from terra_tf.runners import in_flight
from terra_tf.runners.marks import disable_begins, disable_ends
from terra_tf.runners.signature import signature
from terra_tf.tracing.handlers import Loop

T = TypeVar("T")


class Step:
    """A function whose calls are co-executed; made by `terra_tf.function`.

    Call it as the function that it was made of. `stats()` counts what its calls did, `graphs()`
    are the graphs that were generated, and `str()` of it is the page of `terra_tf.explain`. In a
    class it works as a method, with a TraceGraph for each instance.
    """

    def __init__(self, fn: Callable[..., Any], region: Region):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._region = region
        # id of an instance -> (the instance, its region), for a step that is a method.
        self._bound: dict[int, tuple[weakref.ref[Any], Region]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one iteration: the user's function, once, in the mode that fits."""
        if watched_loops.watching():
            watched_loops.step_called()
        region = self._region
        if not region.outermost() or region.runner.rests():
            return watched_loops.call_resting(self._fn, args, kwargs)
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

    def _region_of(self, instance: Any) -> Region:
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

    def _regions(self) -> list[Region]:
        return [self._region, *(region for _, region in self._bound.values())]

    def __repr__(self) -> str:
        return f"<terra_tf step {self._region.name!r}>"

    def __str__(self) -> str:
        return "\n".join(_page(region) for region in self._regions())


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

        >>> import tensorflow as tf, terra_tf as terra
        >>> weight, losses = tf.Variable(0.0), []
        >>> @terra.function
        ... def train_step(x):
        ...     with tf.GradientTape() as tape:
        ...         loss = (weight - x) ** 2
        ...     weight.assign_sub(0.1 * tape.gradient(loss, weight))
        ...     losses.append(loss)  # Python runs every time
        ...     return loss
        >>> for turn in range(10):
        ...     loss = train_step(tf.constant(3.0))
        >>> len(losses), round(float(loss), 4), train_step.stats().coexecuted
        (10, 0.1621, 8)

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
    region = Region(
        step_name, max_graphs=max_graphs, numerics=numerics, on_new_trace=on_new_trace, xla=xla
    )
    return Step(fn, region)


class _Loop(Iterator[T]):
    """The iterator behind `iterate`: a region is open while the loop's body runs."""

    def __init__(self, iterable: Iterable[T], region: Region):
        self._iterator = iter(iterable)
        self._region = region
        self._open = False

    def __next__(self) -> T:
        if watched_loops.watching():
            watched_loops.step_called()
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


def iterate(iterable: Iterable[T], *, name: str | None = None) -> Iterator[T]:
    """Iterates over anything, with the loop's body co-executed as one step.

        >>> import tensorflow as tf, terra_tf as terra
        >>> total = tf.Variable(0.0)
        >>> for x in terra.iterate(tf.data.Dataset.range(10)):
        ...     value = total.assign_add(tf.cast(x, tf.float32))  # unchanged eager code
        >>> float(total)
        45.0

    Loops at the same line share what was learned, so a loop inside a function that is called once
    per epoch is learned once.

    Args:
      iterable: a `tf.data.Dataset` or any other iterable.
      name: shown by `explain`; default: the line of the loop.

    Returns:
      An iterator over the same items.

    Raises:
      TypeError: `iterable` is not iterable.
      tf.errors.OpError: from the loop, where an op of an earlier turn failed in the graph.
    """
    frame = sys._getframe(1)
    code, line = frame.f_code, frame.f_lineno
    label = name or f"loop at {code.co_filename}:{line}"
    return _Loop(iterable, loop_region((line, name), label, Loop(code, line)))


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Runs the block in plain eager mode, also inside a step.

        >>> import tensorflow as tf, terra_tf as terra
        >>> @terra.function
        ... def step(x):
        ...     y = x * 2.0
        ...     with terra.disable():
        ...         print(f"{float(y):.0f}", end=" ")
        ...     return y + 1.0
        >>> for turn in range(5):
        ...     result = step(tf.constant(float(turn)))
        0 2 4 6 8

    Effects of the step before the block are visible in it, and its own are visible after it. The
    iteration still counts as co-executed.
    """
    if not usable():
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

        >>> import terra_tf as terra
        >>> terra.sync()

    Raises:
      tf.errors.OpError: an op failed in a graph since the last synchronisation.
    """
    if native.core is not None:
        in_flight.sync()


def stats() -> Stats:
    """A snapshot of the counters of all steps together; its `reset()` zeroes them.

    >>> import terra_tf as terra
    >>> stats = terra.stats()
    >>> stats.reset()
    >>> terra.stats().coexecuted
    0
    """
    return all_stats()


def explain(step: Step | None = None) -> str:
    """A page of text: what a step (or every loop) did, and why it fell back.

        >>> import tensorflow as tf, terra_tf as terra
        >>> step = terra.function(lambda x: x + 1.0, name="increment")
        >>> for turn in range(4):
        ...     result = step(tf.constant(float(turn)))
        >>> print(terra.explain(step).splitlines()[0])
        terra_tf step 'increment': co-executing

    It names the phase, the share of iterations that co-execute, each fallback with its reason code
    and the lines of the expected and of the actual op, the lines that look at values with what they
    wait, and hints. `terra explain SCRIPT` shows the same for a script, and as a web page.

    Args:
      step: what `function` returned; default: the loops of `iterate` and of `terra run`.
    """
    if step is not None:
        return str(step)
    return "\n".join(map(_page, loop_regions()))


def timeline(step: Step | None, path: str) -> None:
    """Writes the latest iterations of a step as a Chrome trace of both runners.

    chrome://tracing and ui.perfetto.dev show it: when Python was in an iteration, when the graph
    ran, and which of the two waited for the other. Kept are the latest 256 iterations of a step.

        >>> import json, tempfile, tensorflow as tf, terra_tf as terra
        >>> step = terra.function(lambda x: x * 2.0)
        >>> for turn in range(4):
        ...     result = step(tf.constant(float(turn)))
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     terra.timeline(step, file.name)
        ...     events = json.load(file)["traceEvents"]
        >>> sorted({event["cat"] for event in events if "cat" in event})
        ['GraphRunner', 'PythonRunner']

    Args:
      step: what `function` returned; None: all loops of `iterate` and of `terra run`.
      path: of the JSON file.

    Raises:
      OSError: the file cannot be written.
      tf.errors.OpError: an op failed in a graph since the last synchronisation.
    """
    sync()
    regions = loop_regions() if step is None else step._regions()
    write_chrome_trace(path, [(region.name, region.runner.history.records) for region in regions])


def report_program(title: str, seconds: float) -> ProgramReport:
    """All that is known of this process's steps; what `terra explain` shows.

    Args:
      title: of the report.
      seconds: how long the program has run.
    """
    regions = all_regions()
    steps = [report_of(region.runner, stats_of([region.source])) for region in regions]
    modes = total_modes(region.runner.history.seconds for region in regions)
    loops = [
        LoopReport(f"{site.file}:{site.line}", site.head, site.role.value, site.reason)
        for site in watched_loops.sites()
        if site.reason and site.role is not Role.SILENT
    ]
    return ProgramReport(title, seconds, in_order(steps), loops, modes)


def _page(region: Region) -> str:
    if settings.disabled or native.core is None:
        return explain_without_native(region.name, native.problem)
    return page(report_of(region.runner, stats_of([region.source])))
