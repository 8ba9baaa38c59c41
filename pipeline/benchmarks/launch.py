"""Starts the ranks of a benchmark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSIDE = "PIPELINE_BENCHMARK_RANK"
"""Set in the environment of a benchmark's ranks."""


_ENVIRONMENT = {INSIDE: "1", "OMP_NUM_THREADS": "1"}


def is_rank() -> bool:
    """Whether this process is a rank and not the one that the user started."""
    return INSIDE in os.environ


def run_ranks(module: str, ranks: int, arguments: Sequence[str], quiet: bool = False) -> list[str]:
    """Runs a module on so many ranks, with one thread for an op.

    Args:
        module: its name.
        ranks: how many.
        arguments: of the command line.
        quiet: do not print what the ranks print.

    Returns:
        The lines that they printed.

    Raises:
        SystemExit: if the job fails.
    """
    horovodrun = Path(sys.executable).parent / "horovodrun"
    command = [str(horovodrun), "-np", str(ranks), "--gloo", sys.executable, "-m", module]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"} | os.environ | _ENVIRONMENT
    process = subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        # The launcher writes the rank before each line.
        head, mark, rest = line.partition("<stdout>:")
        lines.append(rest if mark and head.startswith("[") else line)
        if not quiet:
            print(lines[-1], end="", flush=True)
    if process.wait() != 0:
        raise SystemExit(f"{module} failed on its ranks:\n{''.join(lines)}")
    return lines
