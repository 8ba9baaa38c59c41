"""Do the modes of a program compute the same? Eager TensorFlow is the truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .measure import EAGER, TERRA, TF_FUNCTION, Result
from .programs import Program


@dataclass(frozen=True)
class Agreement:
    """How the results of the other modes compare with eager's.

    Attributes:
        good: whether Terra's results are as equal as the program asks for.
        text: the same, for the table.
        tf_function: the largest relative difference of a loss under `tf.function`.
    """

    good: bool
    text: str
    tf_function: float


def compare(program: Program, results: dict[str, Result]) -> Agreement:
    """Compares the results of one program.

    Losses and the final variables have to have equal bits, or, where the program has a tolerance,
    the losses have to lie within it. Results of a Terra that never co-executed show nothing.
    """
    eager, terra = results[EAGER], results[TERRA]
    tf_function = largest_difference(eager.losses, results[TF_FUNCTION].losses)
    count = len(eager.losses)
    if not np.isfinite(eager.losses).all():
        return Agreement(False, "**NO: eager's losses are not finite**", tf_function)
    if not terra.coexecuted:
        return Agreement(False, "**NO: Terra co-executed nothing**", tf_function)
    difference = largest_difference(eager.losses, terra.losses)
    variables = _unequal(eager.state, terra.state)
    if eager.losses.tobytes() == terra.losses.tobytes() and not variables:
        text = f"bit-equal: {count} losses, {len(eager.state)} variables"
        return Agreement(True, text, tf_function)
    if program.tolerance:
        good = difference <= program.tolerance
        text = f"largest difference {difference:.1e}, tolerance {program.tolerance:.0e}"
        return Agreement(good, text if good else f"**NO: {text}**", tf_function)
    losses = int((eager.losses != terra.losses).sum())
    text = (
        f"**NO: {losses} of {count} losses and {variables} of {len(eager.state)} variables differ, "
        f"losses by up to {difference:.1e}**"
    )
    return Agreement(False, text, tf_function)


def largest_difference(expected: np.ndarray, actual: np.ndarray) -> float:
    """Returns the largest difference, relative to the expected value; NaN is infinitely far."""
    differences = np.abs(actual - expected) / np.maximum(np.abs(expected), 1e-12)
    return float(np.where(np.isnan(differences), np.inf, differences).max())


def _unequal(expected: list[np.ndarray], actual: list[np.ndarray]) -> int:
    """Counts the arrays that do not have equal bits."""
    if len(expected) != len(actual):
        return abs(len(expected) - len(actual))
    return sum(
        one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes()
        for one, other in zip(expected, actual, strict=True)
    )
