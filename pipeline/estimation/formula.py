"""The closed estimate of Huang et al. (Re-evaluating BPipe, arXiv 2401.02088, 2024).

A step of batch size B in micro-batches of b takes T(b) = (B/b + p - 1) · T_stage(b). BPipe's gain
is that a larger micro-batch fits; what that brings at most follows from the efficiency of one stage
at either size. Transfers count as free, so this is an upper bound.
"""

from __future__ import annotations


def step_seconds(batch: float, microbatch: float, num_stages: int, stage_seconds: float) -> float:
    """The time of a step under 1F1B or GPipe.

    Args:
        batch: samples of one replica in a step, B.
        microbatch: samples in a micro-batch, b.
        num_stages: p.
        stage_seconds: forward and backward of one micro-batch through the slowest stage.
    """
    return (batch / microbatch + num_stages - 1) * stage_seconds


def mfu(batch: float, microbatch: float, num_stages: int, stage_mfu: float) -> float:
    """The model FLOPs utilisation of a step, from that of a stage while it computes."""
    return stage_mfu * batch / (batch + microbatch * (num_stages - 1))


def stage_mfu(batch: float, microbatch: float, num_stages: int, step_mfu: float) -> float:
    """The utilisation of a stage while it computes, from that of a step: the inverse of `mfu`."""
    return step_mfu * (batch + microbatch * (num_stages - 1)) / batch


def speedup_bound(
    batch: float,
    num_stages: int,
    microbatches: tuple[float, float],
    stage_mfus: tuple[float, float],
) -> float:
    """How many times faster the first of two micro-batch sizes is than the second, at most.

    MFU(x) / MFU(y) = (B + y(p-1)) / (B + x(p-1)) · MFU_stage(x) / MFU_stage(y).

    Args:
        batch: samples of one replica in a step, B.
        num_stages: p.
        microbatches: the two sizes, x and y.
        stage_mfus: the utilisation of a stage at either size, in the same unit.
    """
    (x, y), (of_x, of_y) = microbatches, stage_mfus
    return mfu(batch, x, num_stages, of_x) / mfu(batch, y, num_stages, of_y)
