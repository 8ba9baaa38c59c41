"""Where in the user's program an op was called.

A location is the chain of the user's own frames, innermost first, without TensorFlow's, Keras's and
ours. It is taken once per op and only while tracing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
import sysconfig
from types import CodeType, FrameType

import tensorflow as tf

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def _folder(package: str) -> list[str]:
    """Where a package is, without loading it: programs do well without Keras."""
    spec = importlib.util.find_spec(package)
    return [] if spec is None or spec.origin is None else [os.path.dirname(spec.origin)]


_LIBRARIES = tuple(
    path + os.sep
    for path in (
        os.path.dirname(tf.__file__),
        *_folder("keras"),
        *_folder("tf_keras"),
        _OURS,
        sysconfig.get_path("stdlib"),
    )
)
_API = os.path.join(_OURS, "api.py")
_DEPTH = 12  # frames to keep at most
_SITE_PACKAGES = os.path.dirname(os.path.dirname(tf.__file__)) + os.sep


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file belongs to the user's program, not to TensorFlow, Keras, Python or us."""
    if filename.startswith(_SITE_PACKAGES):
        return not filename.startswith(_LIBRARIES)
    return not filename.startswith(_LIBRARIES) and not filename.startswith("<frozen")


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Frames of the user's program.

    Attributes:
      frames: (file, line, function), innermost first.
      inside: how many of them belong to the region, not to what has called it.
    """

    frames: tuple[tuple[str, int, str], ...]
    inside: int = 12

    @property
    def place(self) -> tuple[tuple[str, int, str], ...]:
        """Where in the region, however that was called."""
        return self.frames[: self.inside]

    def __str__(self) -> str:
        if not self.frames:
            return "<no line of yours>"
        file, line, function = self.frames[0]
        return f"{file}:{line} in {function}"


NOWHERE = Location(())


def user_location(loop: CodeType | None = None) -> Location:
    """The location of the call in progress.

    Args:
      loop: the code around the loop whose body is the region, if it is one.
    """
    frames = []
    inside = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _DEPTH:
        code = frame.f_code
        if is_users(code.co_filename):
            frames.append((code.co_filename, frame.f_lineno, code.co_name))
        if inside is None and (code is loop or (code.co_filename == _API and loop is None)):
            inside = len(frames)
        frame = frame.f_back
    return Location(tuple(frames), len(frames) if inside is None else inside)
