"""Measures in one process what one micro-batch costs in each stage, for the estimate.

The time is that of the processor, which is the wall's if nothing else runs on the machine and the
better measure if something does; TensorFlow should have one thread for an op.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.estimation import Profile
from pipeline.runtime.body import StageBody
from pipeline.runtime.model import Model, raw
from pipeline.runtime.stage import FunctionStage, MicroBatch
from pipeline.runtime.structure import spec_of


class StageProfiler:
    """The stages of a model, to be timed one after the other.

    Args:
        layers: the whole model.
        loss: as for `Pipeline`.
        cuts: the first layer of each later stage.
        x: inputs of one micro-batch.
        y: its targets.
        recompute: the policy for the stash.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        loss: Callable[..., Any],
        cuts: Sequence[int],
        x: tf.Tensor,
        y: tf.Tensor,
        recompute: bool,
    ) -> None:
        self._x, self._recompute = x, recompute
        model = Model(layers, seed=0)
        specs = model.build(0, len(model), [spec_of(x)])
        bounds = [0, *cuts, len(model)]
        self._stages: list[tuple[FunctionStage, MicroBatch]] = []
        for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            last = end == len(model)
            body = StageBody(model, model.items[begin:end], specs[begin], loss if last else None)
            sums = [tf.Variable(tf.zeros_like(raw(weight))) for weight in body.weights]
            stage = FunctionStage(body, sums, recompute, splits=False, sends_back=number > 0)
            seeds = tf.constant(body.random.values(0, 0))
            self._stages.append((stage, MicroBatch(y if last else None, None, seeds)))
        self._forward: list[list[float]] = [[] for _ in self._stages]
        self._backward: list[list[float]] = [[] for _ in self._stages]
        self._sizes: list[tuple[int, int]] = []
        self.run()  # traces
        self._forward = [[] for _ in self._stages]
        self._backward = [[] for _ in self._stages]

    def run(self) -> None:
        """Times the forward and backward pass of every stage once."""
        one = tf.constant(1.0, tf.float64)
        flowing = [self._x]
        self._sizes = []
        for number, (stage, data) in enumerate(self._stages):
            last = number == len(self._stages) - 1
            with tensorflow_internals.exact_graphs():
                start = time.process_time()
                made = stage.forward(flowing, data)
                self._forward[number].append(time.process_time() - start)
                gradients = [] if last else [tf.ones_like(tensor) for tensor in made.outputs]
                start = time.process_time()
                stage.backward(made.plan, made.stash, gradients, one)
                self._backward[number].append(time.process_time() - start)
            stash, flowing = made.stash, made.outputs
            self._sizes.append(
                (
                    sum(map(tensorflow_internals.nbytes, stash)),
                    sum(map(tensorflow_internals.nbytes, flowing)),
                )
            )

    def profile(self) -> Profile:
        """What was measured; of each pass the least time, which nothing else has disturbed."""
        return Profile(
            microbatch=len(self._x),
            forward=[min(times) for times in self._forward],
            backward=[min(times) for times in self._backward],
            stash_bytes=[stash for stash, _ in self._sizes],
            recompute="full" if self._recompute else "none",
            boundary_bytes=[boundary for _, boundary in self._sizes],
        )
