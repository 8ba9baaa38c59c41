"""Captures printed text where both Python and TensorFlow's C++ code print it: at the descriptor.

`tf.print(..., output_stream=sys.stdout)` writes past Python's `sys.stdout`, and its order with
Python's own prints is part of what a program does. So descriptor 1 goes to a file for as long as
the program runs, and `sys.stdout` to the same file, without a buffer in between.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator


class Output:
    """What was printed; `text` is set when the capture is over."""

    def __init__(self) -> None:
        self.text = ""


@contextlib.contextmanager
def capture_output() -> Iterator[Output]:
    """Redirects standard output, Python's and the process's, until the block is left."""
    output = Output()
    python_stdout = sys.stdout
    python_stdout.flush()
    process_stdout = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        # The copied descriptor shares its offset with descriptor 1: one file, one order.
        sys.stdout = io.TextIOWrapper(
            io.FileIO(os.dup(1), "w"), encoding="utf-8", write_through=True
        )
        try:
            yield output
        finally:
            sys.stdout.close()
            sys.stdout = python_stdout
            os.dup2(process_stdout, 1)
            os.close(process_stdout)
            file.seek(0)
            output.text = file.read().decode("utf-8", errors="replace")
