"""The modes: what is done with a program's step before it is called."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

EAGER, TERRA, FAST, XLA, TF_FUNCTION = "eager", "Terra", "Terra fast", "Terra XLA", "tf.function"
NAMES = {"eager": EAGER, "terra": TERRA, "fast": FAST, "xla": XLA, "tf.function": TF_FUNCTION}
DEFAULT = (EAGER, TERRA, FAST, TF_FUNCTION)


def choose(names: str | None) -> tuple[str, ...]:
    """The modes of that names, with commas between, eager first: it is what others are held to.

    Raises:
        ValueError: there is no such mode.
    """
    if names is None:
        return DEFAULT
    unknown = [name for name in names.split(",") if name not in NAMES]
    if unknown:
        raise ValueError(f"no mode {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    return tuple(dict.fromkeys([EAGER, *(NAMES[name] for name in names.split(","))]))


def wrap(mode: str, step: Callable[..., Any], tracing_seconds: list[float]) -> Callable[..., Any]:
    """The step as the mode runs it.

    Args:
        mode: one of this module's names.
        step: a program's own step.
        tracing_seconds: gets a number for each time that `tf.function` traces the step.
    """
    import tensorflow as tf

    import terra_tf as terra

    if mode == TERRA:
        return terra.function(step)
    if mode == FAST:
        return terra.function(step, numerics="fast")
    if mode == XLA:
        return terra.function(step, xla=True)
    if mode == EAGER:
        return step

    def traced(*batch: Any) -> Any:
        start = time.perf_counter()
        result = step(*batch)
        tracing_seconds.append(time.perf_counter() - start)
        return result

    # What varies in shape would else be traced once for every shape.
    return tf.function(traced, reduce_retracing=True)
