"""Horovod's process sets: groups of ranks, made once each and kept.

Making one is a collective over all ranks. Horovod allows it after `hvd.init()` only if
`HOROVOD_DYNAMIC_PROCESS_SETS` was set before; importing `pipeline` sets it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from pipeline.errors import PipelineError

# Sorted ranks → the set. Horovod refuses to make the same one twice.
_sets: dict[tuple[int, ...], Any] = {}


def allow_dynamic_process_sets() -> None:
    """Has `hvd.init()`, if it comes later, allow process sets to be made at any time."""
    os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")


def process_set(ranks: Iterable[int]) -> Any:
    """The process set of `ranks`; a collective over all ranks, members or not.

    Raises:
        PipelineError: if Horovod was initialised without leave to make process sets.
    """
    import horovod.tensorflow as hvd

    members = tuple(sorted(set(ranks)))
    if len(members) == hvd.size():
        return hvd.global_process_set
    if members not in _sets:
        try:
            _sets[members] = hvd.add_process_set(list(members))
        except ValueError as error:
            raise PipelineError(
                f"Horovod makes no process set of the ranks {list(members)} ({error}); import "
                "pipeline before hvd.init(), or set HOROVOD_DYNAMIC_PROCESS_SETS=1"
            ) from error
    return _sets[members]
