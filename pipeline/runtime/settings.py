"""What users may write for a pipeline's arguments, and what it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.errors import UsageError
from pipeline.schedules import Schedule
from pipeline.schedules.generators import GENERATORS


def make_schedule(
    wanted: str | Schedule, num_stages: int, num_microbatches: int, num_chunks: int
) -> Schedule:
    """The schedule by its name, or the user's own, proven.

    Raises:
        ValueError: if the name is unknown, or the schedule is for other numbers or cannot be run.
        TypeError: if it is something else.
    """
    if isinstance(wanted, Schedule):
        for what, asked, has in (
            ("stages", num_stages, wanted.num_stages),
            ("micro-batches", num_microbatches, wanted.num_microbatches),
        ):
            if asked != has:
                raise UsageError(f"the schedule has {has} {what}, the pipeline {asked}")
        wanted.validate()
        return wanted
    if not isinstance(wanted, str):
        raise TypeError(f"schedule must be a name or a Schedule, not {wanted!r}")
    generator = GENERATORS.get(wanted)
    if generator is None:
        raise UsageError(f"no schedule {wanted!r}; there are {', '.join(GENERATORS)}")
    if wanted == "interleaved":
        return generator(num_stages, num_microbatches, num_chunks)
    return generator(num_stages, num_microbatches)


def recompute_flags(stash: str | Sequence[str], num_stages: int) -> list[bool]:
    """For each stage, whether it recomputes.

    Raises:
        ValueError: if a policy is unknown or their number is not that of the stages.
    """
    policies: Any = [stash] * num_stages if isinstance(stash, str) else list(stash)
    if len(policies) != num_stages:
        raise UsageError(
            f"stash has {len(policies)} entries for {num_stages} stages; give one for each, or one "
            "for all"
        )
    for policy in policies:
        if policy not in ("keep", "recompute"):
            raise UsageError(f"stash must be 'keep' or 'recompute', not {policy!r}")
    return [policy == "recompute" for policy in policies]
