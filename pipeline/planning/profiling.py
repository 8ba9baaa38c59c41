"""`OpGraph.profile`: measures the operations of a TensorFlow step in place.

The step runs on one device, one operation after the other, as `planning.execution` would run it
there, and TensorFlow's profiler tells what each took; the median of several runs counts. What lies
between operations (scheduling) is shared out among them, so that the graph's total is what the
device really needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.errors import PlanningError
from pipeline.planning.execution import PlacedStep, _finish
from pipeline.planning.graph import OpGraph
from pipeline.planning.step_graph import StepGraph
from pipeline.planning.tracing import Tracer


def profile(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 9,
    max_ops: int | None = 300,
    tolerance: float = 0.02,
    device: str | None = None,
) -> OpGraph:
    """Measures a step.

    The step really runs, `calls` + 2 times; variables that it changes are set back afterwards.

    Args:
        fn: a `tf.function`, a callable, a step of `terra_tf` or a `ConcreteFunction`.
        *args: what it is called with, tensors or arrays.
        calls: how many runs to measure; the median of each operation counts.
        max_ops: fuse the graph to about so many operations; None: do not.
        tolerance: by which share fusing may change the makespan.
        device: TensorFlow's name of the device to measure on; by default the first GPU, or CPU.

    Returns:
        The graph, with seconds from the profiler and bytes from the shapes.

    Raises:
        PlanningError: if the step cannot be traced, or no operation was seen.
    """
    step = StepGraph(fn, args)
    if device is None:
        kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
        device = f"/device:{kind}:0"
    placed = PlacedStep(step, dict.fromkeys(step.names, device), [step.names])
    variables = list(step.concrete.graph.variables)
    before = [tf.identity(variable) for variable in variables]
    try:
        traces = _trace(placed, args, calls)
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    names = set(step.names)
    seconds = {
        name: statistics.median(trace.seconds(name) for trace in traces) for name in step.names
    }
    total = sum(seconds.values())
    if step.names and not total:
        raise PlanningError("the profiler saw no operation of the step", "no-trace")
    between = max(0.0, statistics.median(trace.span(names) for trace in traces) - total)
    share = between / max(1, len(step.names))
    graph = step.op_graph({name: value + share for name, value in seconds.items()})
    return graph if max_ops is None else graph.fuse(max_ops, tolerance)


def _trace(placed: PlacedStep, args: tuple[Any, ...], calls: int) -> list[Any]:
    for _ in range(2):
        _finish(placed(*args))
    with tensorflow_internals.literal_graphs(), Tracer() as tracer:
        for _ in range(calls):
            with tracer.call():
                _finish(placed(*args))
    return tracer.traces()
