"""What users may write for a pipeline's arguments, and what it means."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.errors import UsageError
from pipeline.schedules import Schedule
from pipeline.schedules.generators import GENERATORS

_STAGE_MODES = ("function", "eager", "terra")
_PARTITIONS = ("uniform", "parameters", "time")


def check_settings(
    partition: Any, stage_mode: Any, accumulate: Any, timeout: Any, seed: Any
) -> None:
    """Refuses settings that mean nothing.

    Raises:
        ValueError: if one does.
        TypeError: if one is of a wrong type.
    """
    wanted = f"partition must be one of {', '.join(_PARTITIONS)} or a list of cut indices"
    if isinstance(partition, str) and partition not in _PARTITIONS:
        raise UsageError(f"{wanted}, not {partition!r}")
    if not isinstance(partition, Iterable):
        raise TypeError(f"{wanted}, not {partition!r}")
    if stage_mode not in _STAGE_MODES:
        raise UsageError(f"stage_mode must be one of {', '.join(_STAGE_MODES)}, not {stage_mode!r}")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise UsageError(f"accumulate must be a positive int, not {accumulate!r}")
    if not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an int, not {seed!r}")
    if not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not 0 < timeout < math.inf:
        raise UsageError(f"timeout must be positive and finite seconds, not {timeout!r}")


def check_keeping(checkpoint: Any, save_every: Any, emergency: Any, num_replicas: int) -> None:
    """Refuses settings of checkpoints that cannot work together.

    Raises:
        ValueError: if they cannot.
    """
    if not isinstance(save_every, int) or save_every < 0:
        raise UsageError(f"save_every must be a number of steps, not {save_every!r}")
    if (save_every or emergency is True) and checkpoint is None:
        raise UsageError("save_every and emergency=True need checkpoint=, the folder to write to")
    if emergency and num_replicas == 1:
        raise UsageError(
            "emergency needs two replicas or more: with one, nobody else has the weights of a rank "
            "that is lost; start the job with twice as many ranks"
        )


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
        TypeError: if it is something else.
    """
    if not isinstance(stash, Iterable):
        raise TypeError(f"stash must be 'keep' or 'recompute', or a list of these, not {stash!r}")
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
