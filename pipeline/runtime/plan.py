"""A plan: one trace of a stage, cut into pieces, each compiled.

    trace_stage   forward and gradients in one graph
    cut_trace     which ops run in the forward, backward and weight pieces, and the stash between
    Plan          the compiled pieces

A trace leaves the batch size open and fixes the other sizes until they vary (see `FunctionStage`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from pipeline.runtime.body import BodyResult, StageBody
from pipeline.runtime.graph_cut import Piece, TracedGraph, copies_among, stash_boundary
from pipeline.runtime.model import raw

Tensors = list[tf.Tensor]


@dataclass
class Trace:
    """Forward and gradients of a stage in one graph; all tensors are the graph's.

    Attributes:
        graph: the graph.
        result: the forward pass.
        given: what the forward piece is called with: inputs, targets, sample weights, seeds.
        data: of these the targets and sample weights, which stay on this rank.
        incoming: the gradients of the differentiable outputs.
        scale: what the losses are multiplied by.
        input_gradients: of the differentiable inputs.
        weight_gradients: for each weight, or None where the losses do not depend on it.
    """

    graph: TracedGraph
    result: BodyResult
    given: Tensors
    data: Tensors
    incoming: Tensors
    scale: tf.Tensor
    input_gradients: Tensors
    weight_gradients: list[tf.Tensor | None]

    @property
    def scalars(self) -> Tensors:
        """The losses that there are: the micro-batch's, then that of the layers."""
        return [t for t in (self.result.loss, self.result.layer_losses) if t is not None]


def trace_stage(
    body: StageBody,
    sends_back: bool,
    inputs: Sequence[tf.TensorSpec],
    targets: Any,
    sample_weight: tf.TensorSpec | None,
    seeds: tf.TensorSpec,
) -> Trace:
    """Traces a stage.

    Args:
        body: what it computes.
        sends_back: whether gradients of the inputs are wanted.
        inputs: the specs of the flat inputs.
        targets: the specs of y, or None.
        sample_weight: its spec, or None.
        seeds: the spec of the random states.
    """
    made: dict[str, Any] = {}

    def trace(inputs: Tensors, targets: Any, sample_weight: Any, seeds: Any, scale: Any) -> None:
        reads = body.read_weights()
        sources = [t for t in inputs if t.dtype.is_floating] if sends_back else []
        count = len(sources)
        sources = [*sources, *reads]
        with tf.GradientTape() as tape:
            for source in sources:
                tape.watch(source)
            result = body.run(inputs, reads, seeds, True, targets, sample_weight)
        ends, incoming, weights_of_ends = ends_of(result, scale)
        gradients = tape.gradient(ends, sources, weights_of_ends) if ends else [None] * len(sources)
        gradients = [None if g is None else tf.convert_to_tensor(g) for g in gradients]
        made.update(result=result, incoming=incoming, scale=scale, seeds=seeds)
        made["data"] = [t for t in tf.nest.flatten([targets, sample_weight]) if t is not None]
        made["given"] = [*inputs, *made["data"], seeds]
        # Where the losses do not depend on an input, the stage before still waits for a gradient.
        made["input_gradients"] = [
            tf.zeros_like(source) if gradient is None else gradient
            for source, gradient in zip(sources[:count], gradients[:count], strict=True)
        ]
        made["weight_gradients"] = gradients[count:]

    concrete = tf.function(trace, autograph=False).get_concrete_function(
        list(inputs), targets, sample_weight, seeds, tf.TensorSpec([], tf.float64)
    )
    result: BodyResult = made["result"]
    graph = TracedGraph(concrete, {id(raw(variable).handle) for variable, _ in result.updates})
    return Trace(
        graph,
        result,
        made["given"],
        made["data"],
        made["incoming"],
        made["scale"],
        made["input_gradients"],
        made["weight_gradients"],
    )


def ends_of(result: BodyResult, scale: tf.Tensor) -> tuple[Tensors, Tensors, Tensors]:
    """Where a stage's backward pass starts.

    Returns:
        The tensors to differentiate; those that stand for gradients which the next stage sends
        (placeholders in a graph); and the gradients of the first.
    """
    losses = [t for t in (result.loss, result.layer_losses) if t is not None]
    outputs, incoming = [], []
    if result.loss is None:
        outputs = [t for t in result.outputs if t.dtype.is_floating]
        incoming = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in outputs]
    weights = [tf.cast(scale, loss.dtype) for loss in losses]
    return [*outputs, *losses], incoming, [*incoming, *weights]


@dataclass
class Cut:
    """The pieces of a trace, and what goes from one to the next.

    Attributes:
        forward: fetches the outputs, the losses, the new states, then the stash.
        stash: what the forward piece leaves; without the user's data, which is here anyway.
        backward: fetches the gradients of the inputs, then those of the weights or, if these are
            apart, what of `passed_on` it makes.
        passed_on: what the weight piece starts from.
        weight: fetches the gradients of the weights; None if they are not apart.
    """

    forward: Piece
    stash: Tensors
    backward: Piece
    passed_on: Tensors
    weight: Piece | None


def cut_trace(trace: Trace, recompute: bool, splits: bool) -> Cut:
    """Cuts a trace.

    Args:
        trace: of `trace_stage`.
        recompute: the policy for the stash.
        splits: whether the weights' gradients get a piece of their own.
    """
    graph = trace.graph
    results = [
        *trace.result.outputs,
        *trace.scalars,
        *(value for _, value in trace.result.updates),
    ]
    forward_ops = graph.with_sizes(graph.ancestors(results))
    not_stashed = {tensor.name for tensor in [*trace.data, *trace.incoming, trace.scale]}
    weight_gradients = [g for g in trace.weight_gradients if g is not None]
    everything = [*trace.input_gradients, *weight_gradients]
    boundary = stash_boundary(graph, forward_ops, recompute)
    copies = copies_among(graph.piece(everything, boundary).feeds)
    boundary = stash_boundary(graph, forward_ops, recompute, copies)

    weight, passed_on = None, []
    if splits:
        inner = graph.piece(trace.input_gradients, boundary)

        def weight_boundary(tensor: tf.Tensor) -> bool:
            made_before = tensor.op.name in inner.ops and not graph.is_fixed(tensor.op)
            return made_before or boundary(tensor)

        weight = graph.piece(weight_gradients, weight_boundary)
        passed_on = weight.feeds
        made_here = [tensor for tensor in passed_on if tensor.op.name in inner.ops]
        backward = graph.piece([*trace.input_gradients, *made_here], boundary)
    else:
        backward = graph.piece(everything, boundary)

    needed = {tensor.name: tensor for tensor in [*backward.feeds, *passed_on]}
    stash = [
        tensor
        for name, tensor in needed.items()
        if name not in not_stashed and tensor.op.name not in backward.ops
    ]
    forward = graph.piece(
        [*results, *stash],
        lambda tensor: tensor.op.type == "Placeholder",
        graph.effects(trace.given),
    )
    return Cut(forward, stash, backward, passed_on, weight)


class Plan:
    """The compiled pieces of one trace.

    Args:
        trace: of `trace_stage`.
        cut: of `cut_trace`.
        accumulators: for each weight, the variable that its gradients are added to.

    Attributes:
        forward: called with the trace's `given`; returns the outputs, the losses and the stash,
            and assigns the new states.
        backward: called with the stash, the user's data, the incoming gradients and the scale;
            returns the inputs' gradients and what is passed on; adds to the accumulators unless
            `weight` does.
        weight: called with what is passed on; adds to the accumulators. None if not apart.
        used: for each weight, whether the losses depend on it.
    """

    def __init__(self, trace: Trace, cut: Cut, accumulators: Sequence[tf.Variable]) -> None:
        self.has_loss = trace.result.loss is not None
        self.used = [gradient is not None for gradient in trace.weight_gradients]
        used = [a for a, is_used in zip(accumulators, self.used, strict=True) if is_used]
        self.forward = _compile(trace.given, _forward(trace, cut))
        self.backward = _compile(
            [*cut.stash, *trace.data, *trace.incoming, trace.scale], _backward(trace, cut, used)
        )
        self.weight = None
        if cut.weight is not None:
            self.weight = _compile(cut.passed_on, _weight(cut.weight, used))


def _forward(trace: Trace, cut: Cut) -> Callable[..., Any]:
    variables = [raw(variable) for variable, _ in trace.result.updates]
    ends = [len(trace.result.outputs)]
    ends.append(ends[0] + len(trace.scalars))
    ends.append(ends[1] + len(variables))

    def forward(*values: tf.Tensor) -> tuple[Tensors, Tensors, Tensors]:
        made = _run(cut.forward, trace.given, values)
        for variable, new in zip(variables, made[ends[1] : ends[2]], strict=True):
            variable.assign(new)
        return made[: ends[0]], made[ends[0] : ends[1]], made[ends[2] :]

    return forward


def _backward(trace: Trace, cut: Cut, accumulators: Sequence[tf.Variable]) -> Callable[..., Any]:
    count = len(trace.input_gradients)
    given = [*cut.stash, *trace.data, *trace.incoming, trace.scale]

    def backward(*values: tf.Tensor) -> tuple[Tensors, Tensors]:
        made = _run(cut.backward, given, values)
        if cut.weight is None:
            _accumulate(accumulators, made[count:])
        known = {t.name: value for t, value in zip(given, values, strict=True)}
        known.update((t.name, v) for t, v in zip(cut.backward.fetches, made, strict=True))
        return made[:count], [known[tensor.name] for tensor in cut.passed_on]

    return backward


def _weight(piece: Piece, accumulators: Sequence[tf.Variable]) -> Callable[..., Any]:
    def weight(*values: tf.Tensor) -> None:
        _accumulate(accumulators, piece.run(values))

    return weight


def _run(piece: Piece, given: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Tensors:
    """Runs a piece with those of the values that it reads."""
    by_name = {tensor.name: value for tensor, value in zip(given, values, strict=True)}
    return piece.run([by_name[feed.name] for feed in piece.feeds])


def _accumulate(accumulators: Sequence[tf.Variable], gradients: Sequence[tf.Tensor]) -> None:
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        accumulator.assign_add(tf.cast(gradient, accumulator.dtype))


def _compile(given: Sequence[tf.Tensor], function: Callable[..., Any]) -> Callable[..., Any]:
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
    return tf.function(function, autograph=False).get_concrete_function(*specs)
