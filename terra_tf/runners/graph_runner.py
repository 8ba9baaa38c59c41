"""The GraphRunner of the calling thread.

Each Python thread that runs a step has a native GraphRunner of its own, so that a graph that waits
for one thread's Python never holds up another's. It lives as long as the thread.
"""

from __future__ import annotations

import threading
from typing import Any

from terra_tf import native

_local = threading.local()


def graph_runner() -> Any:
    """This thread's GraphRunner; started on first use."""
    runner = getattr(_local, "runner", None)
    if runner is None:
        runner = _local.runner = native.core.GraphRunner()
    return runner


def stop() -> None:
    """Ends this thread's GraphRunner after what was launched has finished."""
    _local.runner = None
