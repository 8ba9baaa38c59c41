"""Checkpoints: every weight, state and optimizer slot under a global name, saved and read by all.

Each rank writes what it is the first to hold as its own shard, and reads what it holds, from
whatever shard has it. Names are those of the model, not of ranks, so a checkpoint can be read with
any number of stages, replicas or chunks; `shards` has the files.

    weights/<item>/<number>            a weight or state
    slots/<item>/<number>/<slot>       what the optimizer keeps for a weight
    optimizer/<name>                   what it keeps for all, for example `iterations`
    gradients/<item>/<number>/<rank>   accumulated on a rank, between two steps of the optimizer

Random numbers need no entry: they derive from the seed and the step.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from pipeline.communication.hub import Hub
from pipeline.errors import CheckpointError
from pipeline.runtime.deployment import Deployment
from pipeline.runtime.model import Key, raw
from pipeline.runtime.progress import Progress
from pipeline.runtime.shards import Folder, Shard, commit, write_shard

T = TypeVar("T")


def save(path: Any, deployment: Deployment, hub: Hub, progress: Progress) -> None:
    """Writes a checkpoint; all ranks together.

    Args:
        path: its folder; what was there stays until the new one is whole.
        deployment: of this rank.
        hub: of the pipeline.
        progress: how far training is.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write.
    """
    folder = Path(path)
    token = _agree(hub, "the checkpoint's folder", lambda: _begin(folder) if hub.is_root else "")[0]
    file = f"{token}-{deployment.rank:05d}.npz"

    def write() -> dict[str, Any]:
        return write_shard(folder, file, arrays_of(deployment, progress.calls > 0)).plain()

    written = _agree(hub, "the checkpoint's shards", write)

    def finish() -> None:
        shards = [Shard.of_plain(plain) for plain in written]
        entries = [entry for shard in shards for entry in shard.entries]
        commit(folder, shards, entries, asdict(progress))

    _agree(hub, "the end of the checkpoint", lambda: finish() if hub.is_root else None)


def _begin(folder: Path) -> str:
    """Makes the folder; returns the beginning of the new shards' names."""
    folder.mkdir(parents=True, exist_ok=True)
    return secrets.token_hex(8)


def _agree(hub: Hub, what: str, work: Callable[[], T]) -> list[T]:
    """What `work` returns on every rank, or an error on every rank if it fails on one."""
    problem, result = None, None
    try:
        result = work()
    except (OSError, CheckpointError) as error:
        problem = str(error)
    rows = hub.gather([problem, result], what)
    for rank, (found, _) in enumerate(rows):
        if found is not None:
            raise CheckpointError(found if rows[0][0] == found else f"rank {rank}: {found}")
    return [result for _, result in rows]


def arrays_of(
    deployment: Deployment,
    with_gradients: bool,
    every: bool = False,
    states: dict[int, tf.Tensor] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """This rank's arrays by name, one at a time.

    Args:
        deployment: of this rank.
        with_gradients: whether accumulated gradients are among them.
        every: all that the rank holds; otherwise what it is the first to hold.
        states: by `id`, what to take in place of a variable's own value.
    """
    slots = deployment.updater.slots
    for key, variable in deployment.variables():
        place = f"{key[0]}/{key[1]}"
        if with_gradients and key in deployment.trainable:
            accumulator = deployment.updater.accumulator_of(variable)
            yield f"gradients/{place}/{deployment.rank}", accumulator.numpy()
        if not every and deployment.holders[key][0] != deployment.rank:
            continue
        value = (states or {}).get(id(variable))
        yield f"weights/{place}", _numpy(variable if value is None else value)
        for name, slot in slots.of_weight(variable).items():
            yield f"slots/{place}/{name}", _numpy(slot)
    if every or deployment.rank == deployment.slots_from:
        for name, value in slots.shared().items():
            yield f"optimizer/{name}", _numpy(value)


def _numpy(variable: Any) -> np.ndarray:
    return tf.convert_to_tensor(raw(variable)).numpy()


def names_of(deployment: Deployment) -> set[str]:
    """The names of all arrays of a complete checkpoint of the model, but for gradients."""
    names = {f"optimizer/{name}" for name in deployment.shared_names}
    for key in deployment.holders:
        place = f"{key[0]}/{key[1]}"
        names.add(f"weights/{place}")
        if key in deployment.trainable:
            names |= {f"slots/{place}/{name}" for name in deployment.slot_names[key]}
    return names


def open_together(path: Any, hub: Hub) -> Reader:
    """Opens a checkpoint on all ranks, or on none.

    Raises:
        CheckpointError: if it is none, or is damaged.
    """
    readers: list[Reader] = []
    _agree(hub, "the checkpoint", lambda: readers.append(Reader(path)))
    return readers[0]


class Reader:
    """A checkpoint to read from; each rank reads what it holds.

    Args:
        path: its folder.

    Attributes:
        progress: how far training was.

    Raises:
        CheckpointError: if it is not a checkpoint or its manifest is damaged.
    """

    def __init__(self, path: Any) -> None:
        self._folder = Folder(path)
        try:
            self.progress = Progress(**self._folder.about)
        except TypeError as error:
            raise CheckpointError(f"{path} is of another version: {error}") from None

    def restore(self, deployment: Deployment, hub: Hub) -> None:
        """Puts the values of this rank's variables in place; all ranks together.

        Raises:
            CheckpointError: on all ranks, if the checkpoint does not fit or is damaged; nothing
                has changed then.
        """
        self._check_names(deployment)
        _agree(hub, "the check of the checkpoint", lambda: self._visit(deployment, _check))
        self._visit(deployment, _assign)
        deployment.reseed(self.progress.seed)
        self._restore_gradients(deployment)
        self._folder.close()

    def _check_names(self, deployment: Deployment) -> None:
        expected = names_of(deployment)
        found = {name for name in self._folder.entries if not name.startswith("gradients/")}
        for kind, what in (
            ("weights", "model"),
            ("slots", "optimizer"),
            ("optimizer", "optimizer"),
        ):
            missing, surplus = (
                sorted(name for name in names if name.startswith(f"{kind}/"))
                for names in (expected - found, found - expected)
            )
            if missing or surplus:
                parts = [f"it has no {', '.join(missing[:3])}"] if missing else []
                parts += [f"this one has no {', '.join(surplus[:3])}"] if surplus else []
                raise CheckpointError(
                    f"{self._folder.path} is of another {what}: {'; '.join(parts)} (and "
                    f"{max(0, len(missing) - 3) + max(0, len(surplus) - 3)} more)"
                )

    def _visit(self, deployment: Deployment, visit: Callable[[Any, np.ndarray, str], None]) -> None:
        """Calls a function with each of this rank's variables, its value and where that is from."""
        slots = deployment.updater.slots
        for key, variable in deployment.variables():
            place = f"{key[0]}/{key[1]}"
            pairs = [(variable, f"weights/{place}")]
            pairs += [(s, f"slots/{place}/{n}") for n, s in slots.of_weight(variable).items()]
            for target, name in pairs:
                visit(raw(target), self._folder.read(name), f"{self._folder.path}: {name}")
        for name, value in slots.shared().items():
            name = f"optimizer/{name}"
            visit(raw(value), self._folder.read(name), f"{self._folder.path}: {name}")

    def _restore_gradients(self, deployment: Deployment) -> None:
        """Each rank takes up its own, if ranks hold what they held; else the first takes all."""
        saved: dict[Key, list[int]] = {}
        for name in self._folder.entries:
            if name.startswith("gradients/"):
                item, number, rank = map(int, name.split("/")[1:])
                saved.setdefault((item, number), []).append(rank)
        for key, variable in deployment.variables():
            if key not in deployment.trainable:
                continue
            accumulator = deployment.updater.accumulator_of(variable)
            holders, ranks = deployment.holders[key], sorted(saved.get(key, []))
            mine = [deployment.rank] if ranks == sorted(holders) else []
            if ranks != sorted(holders) and holders[0] == deployment.rank:
                mine = ranks
            total = tf.zeros_like(accumulator)
            for rank in mine:
                total += self._folder.read(f"gradients/{key[0]}/{key[1]}/{rank}")
            accumulator.assign(total)


def _check(variable: tf.Variable, array: np.ndarray, name: str) -> None:
    if array.shape != tuple(variable.shape):
        raise CheckpointError(
            f"{name} has the shape {list(array.shape)}, the model {variable.shape.as_list()}: the "
            "checkpoint is of another model"
        )
    if array.dtype != variable.dtype.as_numpy_dtype:
        raise CheckpointError(
            f"{name} has the type {array.dtype}, the model {variable.dtype.name}: the checkpoint "
            "is of another model"
        )


def _assign(variable: tf.Variable, array: np.ndarray, name: str) -> None:
    variable.assign(array)
