"""The child process of `terra bench`: `python -m terra_tf.bench.child SCRIPT [ARGS...]`.

Runs the script as `python SCRIPT ARGS...` would: as the module `__main__`, with its own
`sys.argv`, the script's folder first in `sys.path`, and tracebacks that begin in the script. Loads
no TensorFlow before the script does, because scripts set environment variables that TensorFlow
reads once.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
from importlib.machinery import SourceFileLoader

from terra_tf.bench import channel
from terra_tf.report import observers


def main() -> None:
    """Runs the script that the command line names, and reports its iterations to the parent."""
    sys.argv[:] = sys.argv[1:]
    path = os.path.abspath(sys.argv[0])
    sys.path[0] = os.path.dirname(path)
    # As on a terminal: a line is out when it is printed.
    sys.stdout.reconfigure(line_buffering=True)
    sender = channel.sender_from_environment()
    observers.add(sender.iteration_started)
    try:
        run_script(path)
        if sender.iterations:  # otherwise there may be no TensorFlow in this process
            send_stats(sender)
    finally:
        observers.remove(sender.iteration_started)
        sender.close()


def run_script(path: str) -> None:
    """Runs the script `path`; an error in it ends the process as it would end the script.

    This does not use `runpy`, which takes `__main__` away again when the script's last line is
    done, while exit handlers and threads of the script still need it.
    """
    loader = SourceFileLoader("__main__", path)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader
    sys.modules["__main__"] = module
    try:
        code = loader.source_to_code(loader.get_data(path), path)
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except BaseException as error:
        frames = script_frames(error.__traceback__, path)
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def script_frames(frames: types.TracebackType | None, path: str) -> types.TracebackType | None:
    """Returns the part of a traceback that begins in the script; None for a syntax error."""
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    return frames


def send_stats(sender: channel.Sender) -> None:
    """Waits for the iterations that still run, then sends the statistics of all of them."""
    import terra_tf

    terra_tf.sync()
    sender.send_stats(dataclasses.asdict(terra_tf.stats()))


if __name__ == "__main__":
    main()
