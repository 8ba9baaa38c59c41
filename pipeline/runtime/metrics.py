"""Keras metrics over the global batch, known on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from pipeline.communication.hub import Hub
from pipeline.runtime.step import StepData, StepResult

if TYPE_CHECKING:
    from pipeline.runtime.places import Place


class Metrics:
    """The metrics of a pipeline; they start anew with every batch.

    Args:
        metrics: Keras metrics; the same on every rank.

    Attributes:
        results: of the latest batch, by the metrics' names.
    """

    def __init__(self, metrics: Sequence[Any]) -> None:
        if isinstance(metrics, str) or not isinstance(metrics, Iterable):
            raise TypeError(f"metrics must be a list of Keras metrics, not {metrics!r}")
        for metric in metrics:
            if not hasattr(metric, "update_state"):
                raise TypeError(
                    f"{metric!r} is not a metric; pass objects such as "
                    "keras.metrics.SparseCategoricalAccuracy()"
                )
        self._metrics = list(metrics)
        self.results: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._metrics)

    def update(
        self, hub: Hub, is_last: bool, result: StepResult, data: StepData, place: Place
    ) -> None:
        """Takes in a batch; all ranks together.

        The states of metrics are sums over samples, so those of the replicas are added up.
        """
        if not self._metrics:
            return
        if is_last:
            self._compute(result, data)
        if place.num_replicas > 1:
            self._add_up(hub, is_last)
        mine = [float(m.result()) if is_last else 0.0 for m in self._metrics]
        rows = hub.exchange([float(is_last), *mine], "the metrics")
        row = rows[np.argmax(rows[:, 0]), 1:]
        self.results = {m.name: float(v) for m, v in zip(self._metrics, row, strict=True)}

    def _compute(self, result: StepResult, data: StepData) -> None:
        for metric in self._metrics:
            metric.reset_state()
            for number, outputs in enumerate(result.outputs):
                weight = data.sample_weights[number] if data.sample_weights else None
                prediction = outputs[0] if len(outputs) == 1 else outputs
                metric.update_state(data.targets[number], prediction, sample_weight=weight)

    def _add_up(self, hub: Hub, is_last: bool) -> None:
        states = [variable for metric in self._metrics for variable in metric.variables]
        values = [np.asarray(tf.convert_to_tensor(state)).tolist() for state in states]
        found = [row for row in hub.gather(values if is_last else None, "the metrics") if row]
        if is_last:
            for number, state in enumerate(states):
                total = np.sum([np.asarray(row[number]) for row in found], axis=0)
                state.assign(total.astype(state.dtype))
