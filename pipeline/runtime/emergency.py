"""The emergency checkpoint: what the other ranks write when one has failed.

With two replicas or more, every stage is held by several ranks, so the survivors have the whole
model between them. They cannot rely on rank 0, nor on Horovod, nor on each other's connections, so
they meet in the checkpoint's folder:

1. Each leaves a note: after how many steps its weights are, and if it has ended the latest step,
   what the ranks agreed on at its end.
2. A rank that had done its part of that step, but had not heard what was agreed on, ends it too.
3. Each writes all that it holds as a shard, and a note of what is in it.
4. Whoever first sees that shards of the same step have the whole model makes them the checkpoint.

All notes are of one moment or of two neighbouring ones, and every rank can do step 2 if one could.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.communication.watch import Watch, say
from pipeline.runtime import checkpoint
from pipeline.runtime.deployment import Deployment
from pipeline.runtime.progress import Boundary, Progress
from pipeline.runtime.shards import Entry, Folder, Shard, commit, write_shard, write_text

# The launcher gives the ranks five seconds after the first one's end.
_NOTES_SECONDS = 1.5
_SHARDS_SECONDS = 30.0
_LOOK_SECONDS = 0.02


@dataclass
class Survivor:
    """A rank that still holds its part.

    Attributes:
        progress: of its weights and, unless there is a boundary, of all.
        boundary: while a step is under way, the moment before it.
        agreed: what the ranks agreed on at the end of the latest step that this rank has ended.
        end_step: ends the step under way by what was agreed on; None if this rank's part of it is
            not done.
    """

    progress: Callable[[], Progress]
    boundary: Callable[[], Boundary | None]
    agreed: np.ndarray | None
    end_step: Callable[[np.ndarray], None] | None

    @property
    def steps(self) -> int:
        """After how many steps its weights are."""
        boundary = self.boundary()
        return (boundary.progress if boundary is not None else self.progress()).steps


def save(
    folder: Path, deployment: Deployment, watch: Watch, secret: bytes, survivor: Survivor
) -> bool:
    """Writes a checkpoint together with all ranks that have not failed.

    Args:
        folder: of the checkpoint.
        deployment: of this rank.
        watch: knows which ranks have failed.
        secret: of the job; names of this checkpoint's files derive from it.
        survivor: this rank.

    Returns:
        Whether it is complete. Nothing is raised: an error is on its way already.
    """
    begin = time.monotonic()
    try:
        meeting = _Meeting(folder, deployment, watch, secret)
        _catch_up(meeting, survivor)
        meeting.write(survivor)
        complete = meeting.finish()
    except Exception as error:  # must not hide the error that led here
        say(watch.rank, f"no emergency checkpoint: {type(error).__name__}: {error}")
        return False
    seconds = time.monotonic() - begin
    if complete:
        say(
            watch.rank,
            f"emergency checkpoint after step {survivor.steps}: {folder} ({seconds:.1f} s)",
        )
    else:
        say(watch.rank, "no emergency checkpoint: the ranks left do not hold the whole model")
    return complete


def _catch_up(meeting: _Meeting, survivor: Survivor) -> None:
    """Ends the step under way, if another rank has."""
    agreed = None if survivor.agreed is None else survivor.agreed.tolist()
    meeting.leave("begin", {"steps": survivor.steps, "agreed": agreed})
    notes = meeting.notes("begin", _NOTES_SECONDS)
    if not notes:
        return  # the others have made the checkpoint
    latest = max(notes, key=lambda note: note["steps"])
    if survivor.steps < latest["steps"] and survivor.end_step is not None and latest["agreed"]:
        survivor.end_step(np.asarray(latest["agreed"]))


class _Meeting:
    """The files by which the survivors talk."""

    def __init__(self, folder: Path, deployment: Deployment, watch: Watch, secret: bytes) -> None:
        self._folder, self._deployment, self._watch = folder, deployment, watch
        name = deployment.collectives.name.encode()
        self._token = hashlib.blake2b(secret + name, digest_size=8, person=b"emergency").hexdigest()
        self._survivors = sorted(set(range(watch.size)) - watch.failed_ranks())
        folder.mkdir(parents=True, exist_ok=True)

    def leave(self, what: str, note: dict[str, Any]) -> None:
        """Leaves a note."""
        name = f"{self._token}-{self._watch.rank:05d}.{what}.note"
        write_text(self._folder / name, json.dumps(note))

    def notes(self, what: str, seconds: float) -> list[dict[str, Any]]:
        """All survivors' notes of a kind, or those that are there after some time."""
        end = time.monotonic() + seconds
        while True:
            paths = sorted(self._folder.glob(f"{self._token}-*.{what}.note"))
            if len(paths) >= len(self._survivors) or time.monotonic() > end or self._is_there():
                return self._read(paths)
            time.sleep(_LOOK_SECONDS)

    def write(self, survivor: Survivor) -> None:
        """Writes this rank's shard, and a note of it."""
        boundary = survivor.boundary()
        progress = survivor.progress() if boundary is None else boundary.progress
        file = f"{self._token}-{self._watch.rank:05d}.npz"
        states = None if boundary is None else boundary.states
        arrays = checkpoint.arrays_of(self._deployment, False, every=True, states=states)
        shard = write_shard(self._folder, file, arrays)
        note = {"progress": asdict(progress), "shard": shard.plain()}
        self.leave("end", note)

    def finish(self) -> bool:
        """Makes the checkpoint as soon as the shards suffice; whether one is there."""
        wanted = checkpoint.names_of(self._deployment)
        end = time.monotonic() + _SHARDS_SECONDS
        while True:
            if self._is_there():
                return True
            notes = self._read(sorted(self._folder.glob(f"{self._token}-*.end.note")))
            steps = {note["progress"]["steps"] for note in notes}
            for number in sorted(steps, reverse=True):
                self._commit([n for n in notes if n["progress"]["steps"] == number], wanted)
            locked = (self._folder / f"{self._token}.lock.note").exists()
            if (len(notes) >= len(self._survivors) and not locked) or time.monotonic() > end:
                return self._is_there()
            time.sleep(_LOOK_SECONDS)

    @staticmethod
    def _read(paths: list[Path]) -> list[dict[str, Any]]:
        found = []
        for path in paths:
            try:
                found.append(json.loads(path.read_text()))
            except FileNotFoundError:  # another one has made the checkpoint
                return []
        return found

    def _commit(self, notes: list[dict[str, Any]], wanted: set[str]) -> None:
        """Makes shards the checkpoint if they suffice and nobody else does it."""
        entries: dict[str, Entry] = {}
        shards = [Shard.of_plain(note["shard"]) for note in notes]
        for shard in shards:
            for entry in shard.entries:
                entries.setdefault(entry.name, entry)
        if not wanted <= set(entries):
            return
        try:
            (self._folder / f"{self._token}.lock.note").touch(exist_ok=False)
        except FileExistsError:
            return
        if self._is_there():
            return
        used = {entry.shard for entry in entries.values()}
        kept = [shard for shard in shards if shard.file in used]
        commit(self._folder, kept, list(entries.values()), notes[0]["progress"])

    def _is_there(self) -> bool:
        try:
            entries = Folder(self._folder).entries.values()
        except ValueError:
            return False
        return any(entry.shard.startswith(self._token) for entry in entries)
