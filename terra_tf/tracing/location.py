"""Where in the user's program an op was called.

A location is the chain of the user's own frames, innermost first, without TensorFlow's, Keras's and
ours. It is taken once per op and only while tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import sysconfig
from types import FrameType

import keras
import tensorflow as tf

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    path + os.sep
    for path in (
        os.path.dirname(tf.__file__),
        os.path.dirname(keras.__file__),
        os.path.join(os.path.dirname(os.path.dirname(tf.__file__)), "tf_keras"),
        _OURS,
        sysconfig.get_path("stdlib"),
    )
)
_SITE_PACKAGES = os.path.dirname(os.path.dirname(tf.__file__)) + os.sep


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file belongs to the user's program, not to TensorFlow, Keras, Python or us."""
    if filename.startswith(_SITE_PACKAGES):
        return not filename.startswith(_LIBRARIES)
    return not filename.startswith(_LIBRARIES) and not filename.startswith("<frozen")


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Frames of the user's program as (file, line, function), innermost first."""

    frames: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        if not self.frames:
            return "<no line of yours>"
        file, line, function = self.frames[0]
        return f"{file}:{line} in {function}"


NOWHERE = Location(())


def user_location(depth: int = 12) -> Location:
    """The location of the call in progress.

    Args:
      depth: how many of the user's frames to keep at most.
    """
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < depth:
        code = frame.f_code
        if is_users(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return Location(tuple(frames))
