"""From accumulated gradients to new weights: reduction, clipping, loss scale, optimizer.

A weight's gradient is summed over all ranks that hold the weight: the replicas of its stage, and
for tied weights all stages that share it. Losses were multiplied by their share of the samples
before they were differentiated, so a sum is all it takes. Everything that must agree between
stages, the norm of all gradients and whether they are finite, goes through the step's one exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.communication.collectives import Collective, Collectives
from pipeline.runtime.model import raw
from pipeline.runtime.optimizer_slots import OptimizerSlots


def check_optimizer(optimizer: Any) -> None:
    """Refuses what cannot work.

    Raises:
        TypeError: if it is not an optimizer of Keras 3 or tf_keras, or one that reduces itself.
    """
    if hasattr(optimizer, "_allreduce_grads"):
        raise TypeError(
            "the optimizer is a hvd.DistributedOptimizer; a pipeline reduces gradients over its "
            "replicas itself (and around an optimizer of Keras 3, DistributedOptimizer reduces "
            "nothing): pass the plain optimizer"
        )
    if not hasattr(optimizer, "apply_gradients") or isinstance(optimizer, type):
        raise TypeError(
            f"{optimizer!r} is not an optimizer of Keras; pass an object such as "
            "keras.optimizers.Adam(1e-3)"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer) and hasattr(
        optimizer, "get_unscaled_gradients"
    ):
        raise TypeError(
            "LossScaleOptimizer of tf_keras is not supported, since it scales in the training "
            "loop; use keras.optimizers.LossScaleOptimizer"
        )


@dataclass
class Group:
    """Ranks that hold the same variables.

    Attributes:
        ranks: Horovod's, in order.
        members: their process set.
        numbers: which of this rank's variables they are.
    """

    ranks: tuple[int, ...]
    members: Any
    numbers: list[int]

    @property
    def name(self) -> str:
        """The same on all its ranks."""
        return "-".join(map(str, self.ranks))


class Updater:
    """One rank's gradients and its optimizer.

    Args:
        optimizer: the user's.
        weights: all trainable variables that this rank holds, each once.
        home: for each weight, whether this rank counts it in sums over the whole model.
        groups: the sets of ranks that share weights with this one.
        chunks: for each weight the chunk whose backward passes complete its gradient, or None if it
            takes more than one.
        collectives: of this pipeline, with a name that is the same on all ranks.

    Attributes:
        accumulators: for each weight, the variable that gradients are added to.
        slots: what the optimizer keeps.
    """

    def __init__(
        self,
        optimizer: Any,
        weights: Sequence[Any],
        home: Sequence[bool],
        groups: Sequence[Group],
        chunks: Sequence[int | None],
        collectives: Collectives,
    ) -> None:
        self.optimizer = optimizer
        self.weights = list(weights)
        self._number = {id(weight): number for number, weight in enumerate(self.weights)}
        self.accumulators = [
            tf.Variable(tf.zeros_like(raw(weight)), trainable=False) for weight in self.weights
        ]
        self._home = list(home)
        self._is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
        scaler = keras.optimizers.LossScaleOptimizer
        self._scaler = optimizer if isinstance(optimizer, scaler) else None
        self._inner = optimizer.inner_optimizer if self._scaler is not None else optimizer
        # The norm of all gradients is known here alone, so the clipping by it is done here.
        self._clip_norm = getattr(self._inner, "global_clipnorm", None)
        # Chunk → the sums that can be made when its backward passes are done; None: when all are.
        self._reductions: dict[int | None, list[_Reduction]] = {}
        for group in groups:
            for chunk in sorted({chunks[n] for n in group.numbers}, key=str):
                variables = [self.accumulators[n] for n in group.numbers if chunks[n] == chunk]
                reduction = _Reduction(
                    group, variables, f"{collectives.name}/gradients/{group.name}/{chunk}"
                )
                self._reductions.setdefault(chunk, []).append(reduction)
        self._collectives = collectives
        self._running: list[Collective] = []
        self._variables = self._as_optimizer_takes_them()
        if self.weights and hasattr(optimizer, "build"):
            optimizer.build(self._variables)
        elif self.weights:
            tensorflow_internals.make_legacy_slots(optimizer, self._variables)
        self.slots = OptimizerSlots(optimizer, self.weights)
        self._updates: dict[tuple[bool, ...], Callable[..., None]] = {}

    def accumulator_of(self, weight: Any) -> tf.Variable:
        """What the gradients of a weight are added to."""
        return self.accumulators[self._number[id(weight)]]

    @property
    def loss_scale(self) -> float:
        """What losses have to be multiplied by; 0 where this rank's optimizer does not know it."""
        if self._scaler is None:
            return 1.0
        if not self.weights:
            return 0.0
        return float(tf.convert_to_tensor(self._scaler.dynamic_scale))

    @property
    def is_scaling(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    @property
    def initial_loss_scale(self) -> float:
        """The loss scale of the first step."""
        return 1.0 if self._scaler is None else float(self._scaler.initial_scale)

    @property
    def needs_agreement(self) -> bool:
        """Whether `squares_and_finite` has to be exchanged between the ranks."""
        return self._clip_norm is not None or self._scaler is not None

    def start_reduction(self, chunk: int | None) -> None:
        """Begins to sum the gradients that a chunk has completed; the line goes on meanwhile."""
        reductions = self._reductions.get(chunk)
        if not reductions:
            return

        def run() -> None:
            for reduction in reductions:
                reduction.run()

        ranks = sorted({rank for reduction in reductions for rank in reduction.group.ranks})
        self._running.append(self._collectives.start("the sum of gradients", ranks, run))

    def finish_reductions(self) -> None:
        """Sums what is left and waits until every gradient is summed over its ranks."""
        self.start_reduction(None)
        running, self._running = self._running, []
        for reduction in running:
            reduction.wait()

    def squares_and_finite(self) -> tuple[float, bool]:
        """The squares' sum of this rank's share of all gradients, and whether all are finite."""
        squares, finite = self._summary()
        return float(squares), bool(finite)

    @tf.function(autograph=False)
    def _summary(self) -> tuple[tf.Tensor, tf.Tensor]:
        squares = [
            tf.reduce_sum(tf.square(tf.cast(accumulator, tf.float64)))
            for accumulator, home in zip(self.accumulators, self._home, strict=True)
            if home
        ]
        finite = [
            tf.reduce_all(tf.math.is_finite(accumulator)) for accumulator in self.accumulators
        ]
        return (
            tf.add_n(squares) if squares else tf.constant(0.0, tf.float64),
            tf.reduce_all(finite) if finite else tf.constant(True),
        )

    def apply(
        self, used: Sequence[bool], factor: float, squares: float = 0.0, finite: bool = True
    ) -> None:
        """Updates the weights and empties the accumulators.

        Args:
            used: for each weight, whether any loss depends on it; the others are left alone.
            factor: what the accumulated gradients are multiplied by.
            squares: the sum over all ranks of their squares, if the gradients are clipped by norm.
            finite: whether all ranks' gradients are finite, with a loss scale.
        """
        if not self.weights:
            return
        if self._clip_norm is not None:
            scale = self.loss_scale if self._scaler is not None else 1.0
            norm = factor * float(np.sqrt(squares)) / scale
            factor *= self._clip_norm / max(norm, self._clip_norm) if finite else 1.0
        if not finite:
            # All optimizers have to find out, so that all skip the step and lower the scale.
            factor = float("nan")
        update = self._updates.get(tuple(used))
        if update is None:
            update = self._updates[tuple(used)] = self._make_update(used)
        update(tf.constant(factor, tf.float64), tf.constant(factor != 1.0))

    def _make_update(self, used: Sequence[bool]) -> Callable[..., None]:
        chosen = [number for number, is_used in enumerate(used) if is_used]

        def update(factor: tf.Tensor, multiply: tf.Tensor) -> None:
            gradients = []
            for number in chosen:
                gradient = tf.convert_to_tensor(self.accumulators[number])
                gradients.append(
                    tf.cond(
                        multiply,
                        lambda g=gradient: g * tf.cast(factor, g.dtype),
                        lambda g=gradient: g,
                    )
                )
            variables = [self._variables[number] for number in chosen]
            with (
                tensorflow_internals.direct_updates(self.optimizer),
                _without_norm_of_all(self._inner),
            ):
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            with tf.control_dependencies(gradients):
                for accumulator in self.accumulators:
                    accumulator.assign(tf.zeros_like(accumulator))

        numbers = _python_numbers(self.optimizer)
        compiled = tf.function(update, autograph=False).get_concrete_function(
            tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.bool)
        )
        if _python_numbers(self.optimizer) == numbers:
            return compiled
        # It counts in Python (Nadam of tf_keras does), which a graph would not.
        vars(self.optimizer).update(numbers)
        return update

    def _as_optimizer_takes_them(self) -> list[Any]:
        if not self._is_keras:
            return [raw(weight) for weight in self.weights]
        return [
            weight
            if isinstance(weight, keras.Variable)
            else tensorflow_internals.as_keras_variable(weight)
            for weight in self.weights
        ]


@contextlib.contextmanager
def _without_norm_of_all(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer does not clip by the norm of the gradients that it is given."""
    norm = getattr(optimizer, "global_clipnorm", None)
    if norm is None:
        yield
        return
    optimizer.global_clipnorm = None
    try:
        yield
    finally:
        optimizer.global_clipnorm = norm


def _python_numbers(optimizer: Any) -> dict[str, float]:
    """The optimizer's attributes that are plain numbers."""
    return {name: value for name, value in vars(optimizer).items() if type(value) in (int, float)}


class _Reduction:
    """The sum of some variables over a group of ranks, in one collective."""

    def __init__(self, group: Group, variables: Sequence[tf.Variable], name: str) -> None:
        self.group = group
        self._variables = list(variables)
        self._name = name

    @tf.function(autograph=False)
    def run(self) -> None:
        """Sums; a collective of the group."""
        import horovod.tensorflow as hvd

        sums = hvd.grouped_allreduce(
            [tf.convert_to_tensor(variable) for variable in self._variables],
            op=hvd.Sum,
            name=self._name,
            process_set=self.group.members,
        )
        for variable, total in zip(self._variables, sums, strict=True):
            variable.assign(total)


class StateAverage:
    """The average of states such as BatchNorm's over the replicas, at the end of a step.

    Args:
        states: this rank's.
        groups: the sets of ranks that share some of them.
        collectives: of this pipeline.
    """

    def __init__(
        self, states: Sequence[Any], groups: Sequence[Group], collectives: Collectives
    ) -> None:
        self._collectives = collectives
        self._parts: list[tuple[Group, list[tf.Variable]]] = []
        for group in groups:
            variables = [raw(states[number]) for number in group.numbers]
            variables = [variable for variable in variables if variable.dtype.is_floating]
            if variables:
                self._parts.append((group, variables))
        self._means: list[tf.Tensor] = []

    def compute(self) -> None:
        """Averages, and keeps the result until `assign`; a collective of each group."""
        if self._parts:
            ranks = sorted({rank for group, _ in self._parts for rank in group.ranks})
            self._means = self._collectives.run("the average of states", ranks, self._compute)

    @tf.function(autograph=False)
    def _compute(self) -> list[tf.Tensor]:
        import horovod.tensorflow as hvd

        means: list[tf.Tensor] = []
        for group, variables in self._parts:
            means += hvd.grouped_allreduce(
                [tf.convert_to_tensor(variable) for variable in variables],
                op=hvd.Average,
                name=f"{self._collectives.name}/states/{group.name}",
                process_set=group.members,
            )
        return means

    def assign(self) -> None:
        """Takes over what `compute` found; here alone, so that it cannot fail halfway."""
        means, self._means = self._means, []
        if means:
            variables = [variable for _, part in self._parts for variable in part]
            for variable, mean in zip(variables, means, strict=True):
                variable.assign(mean)
