"""What the stages of a model cost: measured, or summed up from given costs of its layers.

Both answer the same questions, so that the search does not know which one it has: the seconds of
each layer (to cut by), the costs of a run of layers as a stage, weights and optimizer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

from pipeline.errors import PlanningError
from pipeline.planning.checks import number

_ANCHOR_STEP = 8
"""Costs are measured for 1, 8, 64 ... samples."""


@dataclass(frozen=True)
class StageCosts:
    """What one micro-batch costs in each virtual stage.

    Attributes:
        forward: seconds.
        backward: seconds, recomputation included.
        stash_bytes: of one micro-batch.
        boundary_bytes: of the tensors to the next stage.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stash_bytes: tuple[float, ...]
    boundary_bytes: tuple[float, ...]


class ModelCosts(Protocol):
    """What the search asks.

    Attributes:
        num_layers: the number of layers.
        weight_bytes: of each layer.
        copies: how many times its weights a rank holds: gradients and optimizer slots included.
        update_seconds: of the optimizer, for all weights.
    """

    num_layers: int
    weight_bytes: Sequence[float]
    copies: float
    update_seconds: float

    def layer_seconds(self, microbatch: int) -> Sequence[float]:
        """Forward and backward of each layer, for so many samples."""

    def stages(self, cuts: Sequence[int], microbatch: int, recompute: bool) -> StageCosts:
        """The costs of stages that begin at the cuts, all with one policy."""


@dataclass(frozen=True)
class LayerCosts:
    """Given costs of layers: a fixed part and one for each sample; a stage costs their sum.

    Attributes:
        forward: seconds of each layer's forward, per sample.
        backward: of its backward, per sample.
        stash_bytes: that it keeps for its backward, per sample.
        output_bytes: of its output, per sample.
        weight_bytes: of its weights.
        copies: of the weights that a rank holds; Adam: weights, gradients and two slots are 4.
        update_seconds: of the optimizer, for all weights.
        fixed_seconds: of any forward or backward of a stage, however small.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    stash_bytes: Sequence[float]
    output_bytes: Sequence[float]
    weight_bytes: Sequence[float]
    copies: float = 4.0
    update_seconds: float = 0.0
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        names = ("forward", "backward", "stash_bytes", "output_bytes", "weight_bytes")
        if not len(self.forward):
            raise PlanningError("field 'forward' is empty; there must be a layer", "length")
        for name in names:
            values = getattr(self, name)
            if len(values) != len(self.forward):
                raise PlanningError(
                    f"field {name!r} has {len(values)} numbers for {len(self.forward)} layers",
                    "length",
                    f"field {name!r}",
                )
            for layer, value in enumerate(values):
                number(value, f"layer {layer}", name, PlanningError)
        for name in ("copies", "update_seconds", "fixed_seconds"):
            number(getattr(self, name), "layer costs", name, PlanningError)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.forward)

    def layer_seconds(self, microbatch: int) -> list[float]:
        """Forward and backward of each layer, for so many samples."""
        return [microbatch * (f + b) for f, b in zip(self.forward, self.backward, strict=True)]

    def stages(self, cuts: Sequence[int], microbatch: int, recompute: bool) -> StageCosts:
        """The costs of stages that begin at the cuts, all with one policy."""
        ends = [0, *cuts, self.num_layers]
        spans = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        forward = [self.fixed_seconds + microbatch * sum(self.forward[s]) for s in spans]
        backward = [self.fixed_seconds + microbatch * sum(self.backward[s]) for s in spans]
        inputs = [0.0, *(microbatch * self.output_bytes[s.stop - 1] for s in spans)]
        stash = [microbatch * sum(self.stash_bytes[s]) for s in spans]
        if recompute:
            backward = [b + f for f, b in zip(forward, backward, strict=True)]
            stash = [min(kept, given) for kept, given in zip(stash, inputs, strict=False)]
        return StageCosts(tuple(forward), tuple(backward), tuple(stash), tuple(inputs[1:]))


@dataclass
class MeasuredCosts:
    """Costs measured on this process's device, on a copy of the model.

    Layers that cannot be copied are measured themselves: they are built by it, if they were not,
    and otherwise stay as they were.

    Stages are run as the pipeline's runtime runs them. Times are of the processor, so that other
    programs do not count; TensorFlow should have one thread for an operation, as ranks that share
    a machine have.

    Args:
        layers: the whole model.
        loss: called as `loss(y_true, y_pred)`.
        optimizer: of Keras.
        x: inputs, at least as many samples as the largest micro-batch.
        y: targets.
        rounds: how often each stage is timed; the least time counts.
    """

    layers: Any
    loss: Callable[..., Any]
    optimizer: Any
    x: Any
    y: Any
    rounds: int = 5
    _known: dict[Any, StageCosts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        import tensorflow as tf

        from pipeline.runtime.batches import num_samples
        from pipeline.runtime.model import Model, raw
        from pipeline.runtime.structure import spec_of

        entries = self.layers.layers if hasattr(self.layers, "layers") else list(self.layers)
        try:
            self._copy = copy.deepcopy(entries)
        except Exception:  # Keras copies by saving, which layers of a user's own rarely support
            self._copy = entries
        self.x = tf.nest.map_structure(tf.convert_to_tensor, self.x)
        self.y = tf.nest.map_structure(tf.convert_to_tensor, self.y)
        self.samples = num_samples(self.x, "x")
        model = Model(self._copy, seed=0)
        one = tf.nest.map_structure(lambda part: part[:1], self.x)
        model.build(0, len(model), [spec_of(one)])
        self.num_layers = len(model)
        self._variables = [v for item in model.items for v in item.variables(False)]
        seen: set[int] = set()
        self.weight_bytes: list[float] = []
        weights = []
        for item in model.items:
            new = [w for w in item.variables(True) if id(w) not in seen]
            seen |= {id(weight) for weight in new}
            weights += new
            self.weight_bytes.append(
                float(sum(raw(w).shape.num_elements() * raw(w).dtype.size for w in new))
            )
        self.copies, self.update_seconds = _measure_update(self.optimizer, weights)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Sets back what running stages changes: moving averages, states of random numbers."""
        from pipeline.runtime.model import raw

        before = [(raw(variable), raw(variable).numpy()) for variable in self._variables]
        try:
            yield
        finally:
            for variable, value in before:
                variable.assign(value)

    def layer_seconds(self, microbatch: int) -> list[float]:
        """Forward and backward of each layer, for so many samples, as at one size measured."""
        size = min(_ANCHOR_STEP, self.samples)
        costs = self._measured(tuple(range(1, self.num_layers)), size, False)
        share = microbatch / size
        return [(f + b) * share for f, b in zip(costs.forward, costs.backward, strict=True)]

    def stages(self, cuts: Sequence[int], microbatch: int, recompute: bool) -> StageCosts:
        """The costs of stages that begin at the cuts, all with one policy.

        Measured for 1, 8, 64 ... samples; on a straight line between them.
        """
        low = 1
        while low * _ANCHOR_STEP <= microbatch:
            low *= _ANCHOR_STEP
        high = min(low * _ANCHOR_STEP, self.samples)
        first = self._measured(tuple(cuts), low, recompute)
        if microbatch == low or high == low:
            return first
        second = self._measured(tuple(cuts), high, recompute)
        share = (microbatch - low) / (high - low)
        columns = [
            tuple(a + share * (b - a) for a, b in zip(one, other, strict=True))
            for one, other in zip(astuple(first), astuple(second), strict=True)
        ]
        return StageCosts(*columns)

    def _measured(self, cuts: tuple[int, ...], microbatch: int, recompute: bool) -> StageCosts:
        import tensorflow as tf

        from pipeline.planning.stage_profile import StageProfiler

        key = (cuts, microbatch, recompute)
        if key not in self._known:
            x, y = (tf.nest.map_structure(lambda p: p[:microbatch], d) for d in (self.x, self.y))
            with self._kept():
                profiler = StageProfiler(self._copy, self.loss, list(cuts), x, y, recompute)
                for _ in range(self.rounds):
                    profiler.run()
            measured = profiler.profile()
            self._known[key] = StageCosts(
                *(
                    tuple(map(float, getattr(measured, name)))
                    for name in ("forward", "backward", "stash_bytes", "boundary_bytes")
                )
            )
        return self._known[key]


def _measure_update(optimizer: Any, weights: Sequence[Any]) -> tuple[float, float]:
    """How many copies of the weights a rank holds, and the seconds of an update of all of them."""
    import tensorflow as tf

    from pipeline.runtime.model import raw

    own = type(optimizer).from_config(optimizer.get_config())
    own.build(weights)
    size = sum(raw(w).shape.num_elements() * raw(w).dtype.size for w in weights) or 1
    slots = sum(
        raw(v).shape.num_elements() * raw(v).dtype.size for v in own.variables if raw(v).shape.rank
    )
    before = [tf.identity(raw(weight)) for weight in weights]
    gradients = [tf.zeros_like(raw(weight)) for weight in weights]
    apply = tf.function(lambda: own.apply(gradients, weights), autograph=False)
    times = []
    if weights:
        apply()
        for _ in range(5):
            begin = time.process_time()
            apply()
            times.append(time.process_time() - begin)
    for weight, value in zip(weights, before, strict=True):
        raw(weight).assign(value)
    return 2.0 + slots / size, min(times, default=0.0)
