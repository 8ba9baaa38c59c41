"""Do the modes of a program compute the same? Eager TensorFlow is the truth.

Terra's default numerics have to give eager's bits: every loss, every variable at the end, every
printed line. Convolutions are the one exception: oneDNN computes some of them in another way in
graphs, and training makes small differences grow, so programs with convolutions have a tolerance
for the losses of the warm-up. With TF_ENABLE_ONEDNN_OPTS=0 (`--no-onednn`) they have none.
"""

from __future__ import annotations

import os

import numpy as np

from .measure import Run
from .modes import EAGER, TERRA, TF_FUNCTION
from .programs import Program

# What is left of a comparison when Grappler is let loose, which changes the last digits.
LOOSE = 0.02
# Steps in which a graph that computes something else has to show it; training makes rounding errors
# grow, so that later ones show little.
SOON = 12


def judge(program: Program, runs: dict[str, Run]) -> None:
    """Writes `good`, `verdict` and `difference` into the result of each mode but eager's."""
    eager = runs[EAGER]
    for mode, run in runs.items():
        if mode == EAGER:
            eager.result.verdict = "the truth"
            eager.result.good = bool(np.isfinite(eager.losses).all())
            if not eager.result.good:
                eager.result.verdict = "losses are not finite"
            continue
        result = run.result
        if result.failed is not None:
            result.good, result.verdict = False, f"fails: {result.failed}"
            continue
        length = program.warm_up if mode == TERRA else SOON
        result.difference = largest_difference(eager.losses[:length], run.losses[:length])
        if mode == TERRA:
            result.good, result.verdict = _terra(program, eager, run)
        else:
            result.good, result.verdict = _loosely(eager, run)
        if mode != TF_FUNCTION and result.first_coexecuted is None:
            result.good, result.verdict = False, "co-executed nothing"


def _terra(program: Program, eager: Run, terra: Run) -> tuple[bool, str]:
    count = len(eager.losses)
    variables = _unequal(eager.state, terra.state)
    losses = int((eager.losses != terra.losses).sum())
    if eager.losses.tobytes() == terra.losses.tobytes() and not variables:
        if eager.printed != terra.printed:
            return False, "prints something else"
        return True, f"bit-equal: {count} losses, {len(eager.state)} variables"
    difference = terra.result.difference
    if program.tolerance and os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0":
        shown = f"first {program.warm_up} losses within {difference:.1e} (oneDNN)"
        return difference <= program.tolerance and _as_many_lines(eager, terra), shown
    return False, (
        f"{losses} of {count} losses and {variables} of {len(eager.state)} variables differ, "
        f"losses by up to {largest_difference(eager.losses, terra.losses):.1e}"
    )


def _loosely(eager: Run, other: Run) -> tuple[bool, str]:
    """For modes in which last digits may differ."""
    difference = other.result.difference
    if not _as_many_lines(eager, other):
        return False, (
            f"silently wrong: prints {len(other.printed)} lines, eager {len(eager.printed)}"
        )
    if difference > LOOSE:
        away = np.abs(other.losses - eager.losses) > LOOSE * np.abs(eager.losses)
        return False, (
            f"silently wrong: losses differ by up to {difference:.0%} in {SOON} steps, "
            f"from step {int(away.argmax()) + 1} on"
        )
    return True, f"first {SOON} losses within {difference:.1e}"


def _as_many_lines(eager: Run, other: Run) -> bool:
    return len(eager.printed) == len(other.printed)


def largest_difference(expected: np.ndarray, actual: np.ndarray) -> float:
    """Returns the largest difference, relative to the expected value; NaN is infinitely far."""
    if len(expected) != len(actual):
        return float("inf")
    differences = np.abs(actual - expected) / np.maximum(np.abs(expected), 1e-12)
    return float(np.where(np.isnan(differences), np.inf, differences).max(initial=0.0))


def _unequal(expected: list[np.ndarray], actual: list[np.ndarray]) -> int:
    """Counts the arrays that do not have equal bits."""
    if len(expected) != len(actual):
        return max(abs(len(expected) - len(actual)), 1)
    return sum(
        one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes()
        for one, other in zip(expected, actual, strict=True)
    )
