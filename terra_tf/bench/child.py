"""The child process of `terra bench`: `python -m terra_tf.bench.child SCRIPT [ARGS...]`.

Runs the script as `python SCRIPT ARGS...` would or, under Terra, as `terra run` does. In the eager
run nothing is co-executed, but every loop that Terra might take for iterations tells of its turns,
so that both runs have step times. Loads no TensorFlow before the script does, because scripts set
environment variables that TensorFlow reads once.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from terra_tf.bench import channel
from terra_tf.configuration import settings
from terra_tf.dropin import command, script, tellers
from terra_tf.report import observers


def main() -> None:
    """Runs the script that the command line names, and reports its iterations to the parent."""
    path, *arguments = sys.argv[1:]
    # As on a terminal: a line is out when it is printed.
    sys.stdout.reconfigure(line_buffering=True)
    sender = channel.sender_from_environment()
    steps = command.steps_from_text(os.environ.pop(channel.STEPS_VARIABLE, ""))
    observers.add(sender.iteration_started)
    try:
        if settings.disabled and not steps:
            tellers.prepare(path)
            script.run_script(path, arguments, tellers.rewrite_script)
        else:
            command.run_watched(path, arguments, steps, always=True)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        try:
            if sender.iterations:  # otherwise there may be no TensorFlow in this process
                send_stats(sender)
        finally:
            observers.remove(sender.iteration_started)
            sender.close()


def send_stats(sender: channel.Sender) -> None:
    """Waits for the iterations that still run, then sends the statistics of all of them."""
    import terra_tf

    if not settings.disabled:
        terra_tf.sync()
    sender.send_stats(dataclasses.asdict(terra_tf.stats()))


if __name__ == "__main__":
    main()
