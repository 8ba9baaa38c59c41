"""Measures the memory of a program in one mode, in a process of its own.

    python -m examples.bench.isolated PROGRAM MODE    # what `tools/bench --memory` starts

The peak of the whole process counts, and how much of it training has added to the built model.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

from . import modes, programs

STEPS = 60
TIMEOUT_SECONDS = 600


def peak_of(program: programs.Program, mode: str) -> tuple[float, float]:
    """Runs the program in a new process.

    Returns:
        The most memory that it held, and by how much training raised it, in 10^6 bytes.

    Raises:
        RuntimeError: the process failed; the text is the end of what it printed.
    """
    short = next(name for name, known in modes.NAMES.items() if known == mode)
    done = subprocess.run(
        [sys.executable, "-m", __name__, program.name, short],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{program.name}, {mode}: {done.stderr.strip()[-500:]}")
    numbers = json.loads(done.stdout.splitlines()[-1])
    return numbers["peak_mb"], numbers["training_mb"]


def _memory(field: str) -> float:
    """A field of /proc/self/status, in 10^6 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"this system does not tell {field}")


def main() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras

    import terra_tf as terra

    (program,) = programs.choose(sys.argv[1])
    keras.utils.set_random_seed(1)
    training = program.build()
    step = modes.wrap(modes.NAMES[sys.argv[2]], training.step, [])
    before = _memory("VmRSS")
    with contextlib.redirect_stdout(io.StringIO()):
        for number in range(max(STEPS, len(training.batches))):
            loss = step(*training.batches[number % len(training.batches)])
            float(loss)
        terra.sync()
    peak = _memory("VmHWM")
    print(json.dumps({"peak_mb": peak, "training_mb": peak - before}))


if __name__ == "__main__":
    main()
