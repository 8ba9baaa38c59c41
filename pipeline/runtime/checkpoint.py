"""Checkpoints: one file with every weight, state and optimizer slot under a global name.

The file is a zip archive of NumPy arrays, as `numpy.load` reads it without unpickling anything, and
a JSON entry with the step and the format. Names are those of the model, not of ranks, so it can be
read with any number of stages, replicas or chunks. Rank 0 writes it, one array at a time, beside
the final name and renames it when it is whole.

    weights/<item>/<number>            a weight or state
    slots/<item>/<number>/<slot>       what the optimizer keeps for a weight
    optimizer/<name>                   what it keeps for all, for example `iterations`

Random numbers need no entry: they derive from the step.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.errors import CheckpointError
from pipeline.runtime.deployment import Deployment
from pipeline.runtime.model import raw

_FORMAT = "pipeline checkpoint 1"
_ABOUT = "about.json"


def save(path: Any, deployment: Deployment, state: dict[str, float]) -> None:
    """Writes a checkpoint; all ranks together.

    Args:
        path: the file; what was there stays until the new one is whole.
        deployment: of this rank.
        state: numbers of the pipeline's own.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    archive = None
    if deployment.rank == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        archive = zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED)
    try:
        for name, value in _entries(deployment):
            if archive is not None:
                _write(archive, name, value)
        if archive is not None:
            about = {"format": _FORMAT, **state}
            archive.writestr(_ABOUT, json.dumps(about))
            archive.close()
            _to_disk(unfinished)
            unfinished.replace(target)
            _to_disk(target.parent)
    finally:
        if archive is not None:
            archive.close()
            unfinished.unlink(missing_ok=True)
    # Nobody goes on, and reads perhaps, before the file is there.
    deployment.meet("the end of the checkpoint")


def _entries(deployment: Deployment) -> Iterator[tuple[str, Any]]:
    """The names and, on rank 0, the values of all arrays, in the same order on all ranks."""
    optimizer = deployment.updater.slots
    for key in sorted(deployment.holders):
        place = f"{key[0]}/{key[1]}"
        names = deployment.slot_names if key in deployment.trainable else []

        def read(variable: Any, names: list[str] = names) -> list[tf.Tensor]:
            found = optimizer.of_weight(variable) if names else {}
            return [tf.convert_to_tensor(raw(v)) for v in [variable, *(found[n] for n in names)]]

        values = deployment.fetch(key, read)
        yield from zip(
            [f"weights/{place}", *(f"slots/{place}/{name}" for name in names)],
            values or [None] * (1 + len(names)),
            strict=True,
        )
    yield from deployment.shared_slots()


def _write(archive: zipfile.ZipFile, name: str, value: Any) -> None:
    array = np.asarray(value)
    if array.dtype.kind == "V":  # bfloat16 and the like have no name of NumPy's own
        array = array.view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """A checkpoint to read from; each rank reads what it holds.

    Args:
        path: the file.

    Raises:
        CheckpointError: if it is not a checkpoint or is damaged.
    """

    def __init__(self, path: Any) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
            self._about = json.loads(self._archive.read(_ABOUT))
        except FileNotFoundError:
            raise CheckpointError(f"there is no checkpoint {path}") from None
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path} is not a checkpoint of a pipeline: {error}") from error
        if self._about.get("format") != _FORMAT:
            raise CheckpointError(f"{path} has the format {self._about.get('format')!r}")
        self._path = path

    def restore(self, deployment: Deployment) -> dict[str, float]:
        """Puts the values of this rank's variables in place; returns the pipeline's own numbers."""
        for key, variable in deployment.variables():
            place = f"{key[0]}/{key[1]}"
            self._assign(variable, f"weights/{place}")
            for name, slot in deployment.updater.slots.of_weight(variable).items():
                self._assign(slot, f"slots/{place}/{name}")
        for name, value in deployment.updater.slots.shared().items():
            self._assign(value, f"optimizer/{name}")
        return {name: value for name, value in self._about.items() if name != "format"}

    def _assign(self, variable: Any, name: str) -> None:
        target = raw(variable)
        try:
            with self._archive.open(f"{name}.npy") as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except KeyError:
            raise CheckpointError(
                f"{self._path} has no {name}: it is of another model or another optimizer"
            ) from None
        except (ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self._path} is damaged at {name}: {error}") from error
        if array.shape != tuple(target.shape):
            raise CheckpointError(
                f"{self._path} has {name} of the shape {list(array.shape)}, the model "
                f"{target.shape.as_list()}: it is of another model"
            )
        if array.dtype != target.dtype.as_numpy_dtype:
            array = array.view(target.dtype.as_numpy_dtype)
        target.assign(array)
