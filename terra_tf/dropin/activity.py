"""What a thread does with TensorFlow, counted for `roles`; nothing before the program starts it."""

from __future__ import annotations

import sys
import time

from terra_tf.dropin.roles import Activity

_counting = False  # whether TensorFlow is there and its op calls are counted


def counting() -> bool:
    """Begins to count once the program has started TensorFlow; never starts it by itself."""
    global _counting
    if _counting or "tensorflow" not in sys.modules:
        return _counting
    context = sys.modules.get("tensorflow.python.eager.context")
    if context is None or not hasattr(sys.modules["tensorflow"], "Variable"):
        return False  # it is being imported
    from terra_tf.tensorflow_internals import context_is_ready

    if context_is_ready():
        from terra_tf.region import usable
        from terra_tf.runners.python_runner import initialise

        if usable():
            initialise()
            _counting = usable()
    return _counting


def op_calls() -> int:
    """How many op calls this thread has made since they are counted."""
    if not _counting and not counting():
        return 0
    from terra_tf import native

    return native.core.op_calls()


def activity() -> Activity:
    """What this thread has done since it is counted; the difference of two is a stretch."""
    ops = op_calls()
    if not _counting:
        return Activity(seconds=time.perf_counter())
    from terra_tf.tensorflow_internals import tape_activity

    tapes, gradients = tape_activity()
    return Activity(ops, tapes, gradients, time.perf_counter())
