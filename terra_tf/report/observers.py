"""Callbacks that learn of every iteration as it starts.

`terra bench` counts and times iterations this way. The core asks `if observers.active:` before it
calls `notify`, so that a program that nobody watches pays for one attribute and one truth test.
This module imports nothing heavy: an observer can be added before TensorFlow is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

# Called as observer(step_name, mode), mode being "eager", "traced", "coexecuted" or `TURN`.
Observer = Callable[[str, str], None]

TURN = "turn"
"""Mode of an eager turn of a loop that Terra might take for iterations."""

# The observers, in the order in which they were added. Changed in place, never replaced.
active: list[Observer] = []


def add(observer: Observer) -> None:
    """Has `observer` called at the start of every iteration.

    It runs on the thread of the iteration, inside the user's program: it must be quick, must not
    run TensorFlow ops and must not raise.

    Args:
        observer: called as `observer(step_name, mode)`.
    """
    active.append(observer)


def remove(observer: Observer) -> None:
    """Stops calling `observer`; one that was never added, or is gone already, is no error."""
    if observer in active:
        active.remove(observer)


def notify(step_name: str, mode: str) -> None:
    """Tells all observers that an iteration of `step_name` starts in `mode`."""
    # A copy, because an observer may remove itself.
    for observer in tuple(active):
        observer(step_name, mode)
