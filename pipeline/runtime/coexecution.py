"""How a pipeline behaves inside a step that `terra_tf` co-executes."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext


def plainly(stage_mode: str) -> AbstractContextManager[None]:
    """Around a call of a pipeline, which runs plainly inside a co-executed step.

    Messages have to leave when they are sent, and stages that keep stashes look at their ops one by
    one. Only stages that are co-executed themselves are left to `terra_tf`.
    """
    terra = sys.modules.get("terra_tf")
    if terra is None or stage_mode == "terra":
        return nullcontext()
    return terra.disable()
