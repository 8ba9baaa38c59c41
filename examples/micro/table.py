"""The Markdown table: a row a program, and below it what one has to know to read it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from .agreement import Agreement
from .measure import EAGER, TERRA, TF_FUNCTION, WARM_UP, Result
from .programs import Program

HEADINGS = (
    "program",
    "eager, ms",
    "Terra, ms",
    "tf.function, ms",
    "eager / Terra",
    "tf.function / Terra",
    "co-executed",
    "Terra equals eager",
    "tf.function differs by",
)


@dataclass(frozen=True)
class Row:
    """A program with its results."""

    program: Program
    results: dict[str, Result]
    agreement: Agreement


def markdown(rows: Sequence[Row], conditions: str) -> str:
    """Returns the table, and the notes that belong to it.

    Args:
        rows: the programs.
        conditions: how they were run.
    """
    alignment = ["---"] + ["---:"] * 6 + ["---", "---:"]
    lines = [HEADINGS, alignment, *(_cells(row) for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{_notes(conditions)}\n{_fallbacks(rows)}"


def _cells(row: Row) -> list[str]:
    times = {mode: result.step_seconds for mode, result in row.results.items()}
    return [
        row.program.title,
        *(f"{1000 * times[mode]:.3g}" for mode in (EAGER, TERRA, TF_FUNCTION)),
        f"{times[EAGER] / times[TERRA]:.2f}",
        f"{times[TF_FUNCTION] / times[TERRA]:.2f}",
        f"{row.results[TERRA].coexecuted_share:.1%}",
        row.agreement.text,
        f"{row.agreement.tf_function:.1e}",
    ]


def _notes(conditions: str) -> str:
    return (
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores. {conditions} "
        f"The modes trained by turns in one process after {WARM_UP} steps of warm-up each; times "
        "are medians over the rounds, of a step. A ratio above 1 means that Terra is faster. "
        "Differences are those of the losses, relative to eager's.\n"
    )


def _fallbacks(rows: Sequence[Row]) -> str:
    """Says why iterations fell back, where any did."""
    lines = []
    for row in rows:
        reasons = row.results[TERRA].fallback_reasons or {}
        if reasons:
            shown = ", ".join(f"{code} ({count})" for code, count in reasons.items())
            lines.append(f"Fallbacks of {row.program.title}: {shown}.\n")
    return "".join(f"\n{line}" for line in lines)
