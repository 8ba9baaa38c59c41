"""Marks in the op sequence that are no ops of TensorFlow's.

A mark goes through the same hook as an op, so that it is recorded, expected and matched like one,
and stands as a barrier: all effects before it are visible after it.
"""

from __future__ import annotations

from terra_tf import native
from terra_tf.tracing.trace import Call


def _nothing(*_: object) -> None:
    return None


def _mark(name: str) -> None:
    native.core.Hook(int(Call.FAST_PATH), _nothing)(None, name, None)


def disable_begins() -> None:
    """The start of a `terra_tf.disable` block: what it sees must be there."""
    _mark("terra_disable_begins")


def disable_ends() -> None:
    """The end of a `terra_tf.disable` block: what it did must be seen from here on."""
    _mark("terra_disable_ends")
