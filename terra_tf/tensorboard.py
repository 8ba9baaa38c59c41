"""Terra's counters in TensorBoard, beside the loss.

    writer = terra.tensorboard.Writer("logs")
    for epoch in range(10):
        ...
        writer.write(epoch)
    writer.close()

In a Keras `fit`, `terra_tf.keras.CountersCallback` does the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from terra_tf import api
from terra_tf.report.counters import Stats


class Writer:
    """Writes what has been counted since the last time, as scalars `terra/...`.

        >>> import tempfile, tensorflow as tf, terra_tf as terra
        >>> step = terra.function(lambda x: x + 1.0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = terra.tensorboard.Writer(folder, step)
        ...     for turn in range(6):
        ...         result = step(tf.constant(float(turn)))
        ...     writer.write(step=0)
        ...     writer.close()

    Iterations, graphs, feeds, fetches and waits are written as what was added since the last call;
    the share of co-executed iterations, and the size of the TraceGraph, as they are; each reason
    for a fallback as `terra/fallbacks/<code>`.
    """

    def __init__(self, log_dir: str, step: api.Step | None = None):
        """Makes a writer.

        Args:
          log_dir: folder of the event files.
          step: whose counters; default: all steps together.
        """
        self._of = api.stats if step is None else step.stats
        self._last: dict[str, float] = {}
        with api.disable():
            self._writer = tf.summary.create_file_writer(str(log_dir))

    def write(self, step: int) -> None:
        """Writes one point of each scalar.

        Args:
          step: the point's place on the axis, e.g. the epoch.
        """
        with api.disable(), self._writer.as_default():
            for name, value in self._scalars().items():
                tf.summary.write(f"terra/{name}", np.float32(value), step, _scalar())
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        with api.disable():
            self._writer.close()

    def _scalars(self) -> dict[str, float]:
        totals = _flat(self._of())
        sizes = {name: totals.pop(name) for name in ("traces", "nodes", "branches", "loops")}
        sizes["ops_per_iteration"] = totals.pop("ops_per_iteration")
        # A reset in between makes a total smaller; then all of it is new.
        added = {}
        for name, total in totals.items():
            before = self._last.get(name, 0.0)
            added[name] = total - before if total >= before else total
        self._last = totals
        iterations = added["traced"] + added["coexecuted"] + added["fallen_back"]
        if iterations:
            sizes["coexecuted_share"] = added["coexecuted"] / iterations
        return {**added, **sizes}


def _scalar() -> Any:
    """What makes TensorBoard draw a value as a scalar; works without TensorBoard's package."""
    metadata = tf.compat.v1.Summary.Value().metadata
    metadata.plugin_data.plugin_name = "scalars"
    return metadata


def _flat(stats: Stats) -> dict[str, float]:
    values: dict[str, Any] = dataclasses.asdict(stats)
    reasons = values.pop("fallback_reasons")
    flat = {name: float(value) for name, value in values.items()}
    return flat | {f"fallbacks/{code}": float(count) for code, count in reasons.items()}
