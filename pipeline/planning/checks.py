"""Reading what others wrote: each refusal names what holds it and the field, or the file."""

from __future__ import annotations

import json
import math
from os import PathLike
from pathlib import Path
from typing import Any

from pipeline.errors import PlanningError


def number(
    value: Any,
    where: str,
    field: str,
    error: type[PlanningError],
    *,
    infinite: bool = False,
    positive: bool = False,
) -> float:
    """A float that is not negative, from what may be anything.

    Args:
        value: what was given.
        where: what holds it, for example `node 'conv1'`.
        field: its name there.
        error: what to raise.
        infinite: whether infinity is a number here.
        positive: whether 0 is none.

    Raises:
        PlanningError: of the type `error`, if it is no number, not finite or negative.
    """
    at = f"{where}, field {field!r}"
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise error(f"{at}: must be a number, not {value!r}", "no-number", at)
    result = float(value)
    if math.isnan(result):
        raise error(f"{at}: is not a number (nan)", "nan", at)
    if result < 0:
        raise error(f"{at}: must not be negative, but is {value!r}", "negative", at)
    if math.isinf(result) and not infinite:
        raise error(f"{at}: must be finite, but is {value!r}", "infinite", at)
    if positive and result == 0:
        raise error(f"{at}: must be greater than 0", "zero", at)
    return result


def read_json(path: str | PathLike[str], error: type[PlanningError]) -> Any:
    """What a JSON file holds.

    Raises:
        PlanningError: of the type `error`, if it is no JSON.
        OSError: if there is no such file.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as fault:  # of the text, its encoding or its depth
        raise error(f"{path} is not JSON: {fault}", "no-json", str(path)) from None
