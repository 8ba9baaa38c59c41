"""The files of a checkpoint: shards of arrays, and the manifest that makes them one.

A checkpoint is a folder:

    checkpoint.json           the manifest: which array is in which shard, with its type, shape and
                              checksum, the shards' sizes and checksums, how far training was, and
                              a checksum of all that
    <token>-<rank>.npz        a shard: NumPy arrays in a zip archive, written by one rank

The manifest is replaced in one step when all its shards are on the disk, and only then the shards
of the one before are deleted. So a process may be killed at any moment, and the folder holds either
the old checkpoint or the new one. Nothing is ever unpickled; `numpy.load` reads a shard as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.errors import CheckpointError

FORMAT = "pipeline checkpoint 2"
MANIFEST = "checkpoint.json"
_LARGEST_MANIFEST = 1 << 30


@dataclass
class Entry:
    """An array of a checkpoint.

    Attributes:
        name: see `checkpoint`.
        dtype: TensorFlow's name of its type.
        shape: its dimensions.
        crc32: of its bytes.
        shard: the name of the file that holds it.
    """

    name: str
    dtype: str
    shape: list[int]
    crc32: int
    shard: str


@dataclass
class Shard:
    """What a rank has written.

    Attributes:
        file: its name in the folder.
        bytes: its size.
        crc32: of the whole file.
        entries: the arrays in it.
    """

    file: str
    bytes: int
    crc32: int
    entries: list[Entry]

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def of_plain(cls, plain: dict[str, Any]) -> Shard:
        """The inverse of `plain`."""
        return cls(**{**plain, "entries": [Entry(**entry) for entry in plain["entries"]]})


def write_shard(folder: Path, file: str, arrays: Iterable[tuple[str, Any]]) -> Shard:
    """Writes arrays, one at a time, to a new file, and waits until they are on the disk.

    Raises:
        OSError: if that is not possible.
    """
    path = folder / file
    entries = []
    try:
        with open(path, "xb") as opened:
            with zipfile.ZipFile(opened, "w", zipfile.ZIP_STORED) as archive:
                for name, value in arrays:
                    entries.append(_write_array(archive, name, value, file))
            opened.flush()
            os.fsync(opened.fileno())
        return Shard(file, path.stat().st_size, _crc32(path), entries)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _crc32(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as opened:
        while piece := opened.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _write_array(archive: zipfile.ZipFile, name: str, value: Any, file: str) -> Entry:
    array = np.ascontiguousarray(value)
    dtype = tf.as_dtype(array.dtype).name
    shape = list(np.shape(value))
    if array.dtype.kind == "V":  # bfloat16 and the like have no name of NumPy's own
        array = array.view(f"u{array.dtype.itemsize}")
    with archive.open(f"{name}.npy", "w", force_zip64=True) as opened:
        np.lib.format.write_array(opened, array.reshape(shape), allow_pickle=False)
    return Entry(name, dtype, shape, zlib.crc32(array.data), file)


def write_text(path: Path, text: str) -> None:
    """Replaces a file's content in one step, on the disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def commit(folder: Path, shards: list[Shard], entries: list[Entry], about: dict[str, Any]) -> None:
    """Makes shards the folder's checkpoint, and removes what was there before.

    Args:
        folder: of the checkpoint.
        shards: written by `write_shard`.
        entries: those of the shards' entries that count; each name once.
        about: what else the manifest keeps, plain data.

    Raises:
        OSError: if that is not possible, or a shard is not there.
    """
    for shard in shards:
        if not (folder / shard.file).is_file():
            raise OSError(f"{folder / shard.file} is not there; do all hosts share this folder?")
    content = {
        "format": FORMAT,
        "about": about,
        "shards": {shard.file: [shard.bytes, shard.crc32] for shard in shards},
        "entries": {e.name: [e.dtype, e.shape, e.crc32, e.shard] for e in entries},
    }
    write_text(folder / MANIFEST, _text(content))
    kept = {shard.file for shard in shards}
    for path in [*folder.glob("*.npz"), *folder.glob(".*.unfinished"), *folder.glob("*.note")]:
        if path.name not in kept:
            with contextlib.suppress(OSError):  # then the next one removes it
                path.unlink()


def is_checkpoint(path: Any) -> bool:
    """Whether a checkpoint was ever completed in a folder."""
    return (Path(path) / MANIFEST).exists()


def _text(content: dict[str, Any]) -> str:
    """The manifest's text, with the checksum of its content at the end."""
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": checksum}, indent=1)


class Folder:
    """A checkpoint to read from.

    Args:
        path: the folder.

    Attributes:
        about: what `commit` was given.
        entries: the arrays by name.

    Raises:
        CheckpointError: if there is none, or its manifest is damaged or of another program.
    """

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        content, text = self._read_manifest()
        try:
            content.pop("sha256")
            if content["format"] != FORMAT:
                raise CheckpointError(
                    f"{self.path} has the format {content['format']!r}; this version reads "
                    f"{FORMAT!r}"
                )
            if text != _text(content):
                raise CheckpointError(
                    f"{self.path} is damaged: {MANIFEST} does not have the checksum it names"
                )
            self.about: dict[str, Any] = content["about"]
            self.entries = {n: Entry(n, *row) for n, row in content["entries"].items()}
            self._shards: dict[str, list[int]] = content["shards"]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / MANIFEST} is not of a pipeline's checkpoint: it lacks {error}"
            ) from None
        self._archives: dict[str, zipfile.ZipFile] = {}

    def _read_manifest(self) -> tuple[dict[str, Any], str]:
        if not self.path.exists():
            raise CheckpointError(f"there is no checkpoint {self.path}")
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            raise CheckpointError(
                f"{self.path} is not a checkpoint of a pipeline: it has no file {MANIFEST}"
            )
        try:
            if manifest.stat().st_size > _LARGEST_MANIFEST:
                raise ValueError("it is too large")
            text = manifest.read_text("utf-8")
            content = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is damaged: {MANIFEST}: {error}") from None
        if not isinstance(content, dict) or "format" not in content:
            raise CheckpointError(f"{manifest} is not of a pipeline's checkpoint")
        return content, text

    def read(self, name: str) -> np.ndarray:
        """An array, in the type and shape that the manifest names.

        Raises:
            CheckpointError: if it is not there, or is damaged.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no {name}")
        place = f"{self.path} is damaged at {name} in {entry.shard}"
        try:
            with self._archive(entry.shard).open(f"{name}.npy") as opened:
                array = np.lib.format.read_array(opened, allow_pickle=False)
                opened.read()  # to the end, where zipfile compares its own checksum
            if zlib.crc32(np.ascontiguousarray(array).data) != entry.crc32:
                raise CheckpointError(f"{place}: it does not have the checksum in {MANIFEST}")
            wanted = tf.as_dtype(entry.dtype).as_numpy_dtype
            if array.dtype != wanted:
                array = array.view(wanted)
            if list(array.shape) != entry.shape:
                raise CheckpointError(f"{place}: it has the shape {list(array.shape)}")
        except CheckpointError:
            raise
        # A damaged archive makes zipfile and numpy raise whatever they come upon.
        except Exception as error:
            raise CheckpointError(f"{place}: {type(error).__name__}: {error}") from None
        return array

    def _archive(self, file: str) -> zipfile.ZipFile:
        if file not in self._archives:
            path = self.path / file
            if Path(file).name != file or file not in self._shards:
                raise CheckpointError(f"{self.path} is damaged: {MANIFEST} names a file {file!r}")
            if not path.is_file():
                raise CheckpointError(f"{self.path} is incomplete: it has no file {file}")
            size, checksum = self._shards[file]
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"{self.path} is damaged: {file} has {path.stat().st_size} bytes instead of "
                    f"{size}"
                )
            if _crc32(path) != checksum:
                raise CheckpointError(
                    f"{self.path} is damaged: {file} does not have the checksum in {MANIFEST}"
                )
            self._archives[file] = zipfile.ZipFile(path)
        return self._archives[file]

    def close(self) -> None:
        """Closes its files."""
        for archive in self._archives.values():
            archive.close()
        self._archives.clear()
