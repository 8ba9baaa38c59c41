"""The exceptions that `terra_tf` raises by itself."""

from __future__ import annotations


class TerraError(Exception):
    """Base of all errors that come from terra_tf and not from your program."""


class NewTraceError(TerraError):
    """Your step did something that no earlier iteration did, and you asked to be told.

    Raised at the op in question by `terra.function(..., on_new_trace="error")` once the step has
    co-executed at least once. Variables and random streams are as eager would have them at that op.
    The message names the op that was expected and the one that came, each with its line in your
    code. To go on, use `on_new_trace="warn"` or the default `"fallback"`: the iteration then
    continues in plain eager mode and Terra learns the new trace.
    """
