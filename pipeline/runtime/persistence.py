"""What a `Pipeline` keeps beyond a run: checkpoints, the emergency's too, and Keras's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.communication.hub import Hub
from pipeline.errors import UsageError
from pipeline.runtime import checkpoint, emergency, keras_export, shards
from pipeline.runtime.call_guard import CallGuard
from pipeline.runtime.connection import Job
from pipeline.runtime.deployment import Deployment, Request
from pipeline.runtime.progress import Boundary, Progress


class Persistence:
    """The part of `Pipeline` that writes and reads; `Pipeline` makes what it works with."""

    _request: Request
    _job: Job
    _hub: Hub
    _guard: CallGuard
    _deployment: Deployment | None
    _accumulate: int
    _progress: Progress
    # What is to be restored as soon as the model is built.
    _restoring: checkpoint.Reader | None
    # While weights and states are not those of the same moment, what they were.
    _boundary: Boundary | None
    # What all ranks agreed on at the end of the latest step.
    _agreed: np.ndarray | None
    # Where survivors write, if they do.
    _emergency: Path | None

    def _apply(self, agreed: np.ndarray) -> None:
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """The calls of `train_step` so far."""
        return self._progress.steps

    @property
    def position(self) -> Any:
        """The user's own place in the data."""
        return self._progress.position

    @position.setter
    def position(self, value: Any) -> None:
        self._progress.position = _plain(value)

    def save(self, path: Any, position: Any = None) -> None:
        """Writes a checkpoint that loads with any number of stages; see `checkpoint`.

        Args:
            path: a folder, on a file system that all ranks share. What was saved there stays valid
                until the new checkpoint is whole.
            position: in place of `self.position`.

        Raises:
            CheckpointError: if it cannot be written; training can go on.
        """
        path, position = Path(path), _plain(position)
        with self._guard.call("save"):
            if position is not None:
                self.position = position
            self._save(path)

    def restore(self, path: Any) -> Any:
        """Reads a checkpoint; before the first batch, weights follow when the model is built.

        Returns:
            The `position` that was saved with it.

        Raises:
            CheckpointError: if there is none, or it is damaged, or of another model or optimizer;
                nothing has changed then.
        """
        path = Path(path)
        with self._guard.call("restore"):
            reader = checkpoint.open_together(path, self._hub)
            if self._deployment is not None:
                self._restore(reader)
            else:
                self._restoring = reader
            self._progress = reader.progress
            self._request.model.seed = reader.progress.seed
            return self.position

    def export(self, path: Any) -> None:
        """Writes the whole model from rank 0 as Keras does; see `keras_export`.

        Args:
            path: ends with `.keras` (model and weights) or `.weights.h5` (weights).

        Raises:
            ValueError: if the model cannot be written in this form.
        """
        path = Path(path)
        with self._guard.call("export"):
            keras_export.check_path(path)
            deployment, problem = self._need_deployment(), None
            deployment.gather_weights()
            if self._hub.is_root:
                request = self._request
                problem = keras_export.write(
                    path, request.model, request.source, deployment.input_spec
                )
            problem = self._hub.gather(problem, "the exported model")[0]
            if problem:
                raise UsageError(problem)

    def _save(self, path: Any) -> None:
        checkpoint.save(path, self._need_deployment(), self._hub, self._progress)

    def _go_on_from(self, path: Any) -> None:
        # Rank 0 decides, so that all do the same.
        found = shards.is_checkpoint(path) if self._hub.is_root else None
        if self._hub.gather(found, "the checkpoint to go on from")[0]:
            self.restore(path)

    def _restore(self, reader: Any) -> None:
        reader.restore(self._deployment, self._hub)
        self._progress, self._boundary = reader.progress, None

    def _save_what_is_left(self) -> None:
        """Another rank has failed; see `emergency`."""
        if self._emergency is not None and self._deployment is not None:
            # Once this rank has done its part of a step, what was agreed on is all that it needs.
            has_done = self._boundary is not None and self._progress.calls == self._accumulate
            emergency.save(
                self._emergency,
                self._deployment,
                self._job.watch,
                self._job.secret,
                emergency.Survivor(
                    lambda: self._progress,
                    lambda: self._boundary,
                    self._agreed,
                    self._apply if has_done else None,
                ),
            )

    def _need_deployment(self) -> Deployment:
        if self._deployment is None:
            raise UsageError(
                "the model is built at the first batch; train or call build(x) before this"
            )
        return self._deployment


def _plain(position: Any) -> Any:
    """A place in the data, refused before other ranks count on it if no file can hold it.

    Raises:
        TypeError: if it is not plain data.
    """
    try:
        json.dumps(position)
    except (TypeError, ValueError) as error:
        raise TypeError(f"position must be plain data, as JSON has it: {error}") from None
    return position
