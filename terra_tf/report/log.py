"""What Terra writes to Python's `logging`: one line per cause, in topics.

    TERRA_LOG=fallback,graphs python train.py

Each topic is the logger `terra_tf.<topic>`, level INFO. `TERRA_LOG` (topics, or `all`) sends them
to standard error; a program listens by `logging.getLogger("terra_tf").setLevel(logging.INFO)`. Else
nothing is written, also where a program shows whatever libraries have to say: what it prints must
not depend on how it is run.
"""

from __future__ import annotations

import logging
import os
import sys

TOPICS = {
    "loops": "which loops `terra run` found to be iterations, and why",
    "graphs": "each generated graph: of which step, how large, how long it took",
    "fallback": "each new place where iterations left their graph, with both lines",
    "retreat": "steps that stay eager for a while, because co-execution did not pay",
    "errors": "ops that failed in a graph and were replayed",
    "keras": "models whose fit, evaluate or predict is co-executed",
}
"""Topic -> what it tells."""


def topic(name: str) -> logging.Logger:
    """The logger of a topic.

    Args:
      name: a key of `TOPICS`.
    """
    assert name in TOPICS, name
    return logging.getLogger(f"terra_tf.{name}")


def listen(names: str) -> None:
    """Sends topics to standard error.

    Args:
      names: topics separated by commas, or `all`; what is no topic is reported there, too.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if "all" in wanted:
        wanted = list(TOPICS)
    if not wanted:
        return
    handler = _StandardError()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    for name in wanted:
        logger = logging.getLogger(f"terra_tf.{name}")
        if name in TOPICS:
            logger.setLevel(logging.INFO)
            logger.addHandler(handler)
            logger.propagate = False
        else:
            print(
                f"terra_tf: TERRA_LOG has no topic {name!r}; there are: {', '.join(TOPICS)}, all",
                file=sys.stderr,
            )


class _StandardError(logging.Handler):
    """Writes to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


logging.getLogger("terra_tf").setLevel(logging.WARNING)
listen(os.environ.get("TERRA_LOG", ""))
