"""Settings that hold for the whole process, read by the runners when a step is made or runs.

Users reach them as `terra_tf.settings`.
"""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass
class Settings:
    """Process-wide settings, changed by assigning to `terra_tf.settings`'s attributes.

    Attributes:
      disabled: run everything in plain eager mode (environment `TERRA_DISABLE=1`).
      sync: run each op that may fail where the program calls it, so that its error is raised at
        that very line (environment `TERRA_SYNC=1`); slower, to find an error.
      lead: how many iterations Python may be ahead of the graph (environment `TERRA_LEAD`); 0 makes
        each call wait until the graph before it has ended.
      constant_bytes: tensors from outside the step up to this size (in bytes) that never change are
        baked into the graph behind a guard; larger ones are fed.
      build_after: how many traces have to agree before a graph is generated.
      max_nodes: nodes that a step's TraceGraph may have; what is least recently used goes first.
      max_build_seconds: what generating a step's graphs may have taken, those that it has; the
        same holds.
    """

    disabled: bool = False
    sync: bool = False
    lead: int = 1
    constant_bytes: int = 256
    build_after: int = 2
    max_nodes: int = 200_000
    max_build_seconds: float = 300.0


def _is_on(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _from_environment() -> Settings:
    sync = _is_on("TERRA_SYNC")
    return Settings(
        disabled=_is_on("TERRA_DISABLE"),
        sync=sync,
        lead=0 if sync else int(os.environ.get("TERRA_LEAD", "1")),
    )


settings = _from_environment()
