"""The subcommand `terra run`: its arguments and its course."""

from __future__ import annotations

import argparse
import os
import re
from types import CodeType
from typing import Any

from terra_tf.configuration import settings
from terra_tf.dropin import importing, models, rewriting, script

NAME = "run"
HELP = "run an unmodified script with its iterations co-executed"

DESCRIPTION = """\
Runs SCRIPT as `python SCRIPT` would, with the turns of its training and evaluation loops, and the
steps of Keras models compiled with run_eagerly=True, co-executed with a graph. Output, exit code
and results are those of `python SCRIPT`.

Which loops are iterations is found out while they run their first turns: those that compute
gradients under a tape, and those whose items come from tf.data and that call ops; `terra explain`
prints what was found. A wrong guess costs speed, never results.
"""

EPILOG = """\
examples:
  terra run train.py --epochs 3                    what follows SCRIPT goes to the script
  terra run --step __main__:train_step train.py    this function is the step, and nothing else
  TERRA_LOG=loops terra run train.py               print which loops were found
  horovodrun -np 2 terra run train.py              on several ranks

exit code: the script's own; 2 for a mistake on the command line of terra itself
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `terra run` to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.usage = "terra run [-h] [--step MODULE:FUNCTION] SCRIPT [ARG ...]"
    add_step_argument(parser)
    add_script_arguments(parser)


def add_step_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--step`."""
    parser.add_argument(
        "--step",
        type=_step,
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="co-execute the calls of this function, and look for no loops; MODULE is __main__ for "
        "the script, FUNCTION may be Class.method; may be given again",
    )


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds SCRIPT and what follows it."""
    parser.add_argument("script", type=_script, metavar="SCRIPT", help="the Python script to run")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARG", help="arguments of the script"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `terra run`; does not return where the script ends by itself."""
    run_watched(arguments.script, arguments.arguments, arguments.step)
    return 0


def run_watched(
    path: str, arguments: list[str], steps: list[tuple[str, str]], *, always: bool = False
) -> None:
    """Runs a script with its iterations co-executed.

    Args:
      path: of the script.
      arguments: its own arguments.
      steps: (module, function) of steps that were named by hand.
      always: change the program even where `TERRA_DISABLE` keeps it eager, so that its steps tell
        of their iterations.

    Raises:
      SystemExit: see `script.run_script`; with a message where a named step does not exist.
      KeyboardInterrupt: see `script.run_script`.
    """
    if settings.disabled and not always:
        script.run_script(path, arguments)
        return
    program = _Program(path, steps)
    program.prepare()
    script.run_script(path, arguments, program.rewrite_script)
    program.check()


class _Program:
    """What is changed in the code of a script and its modules."""

    def __init__(self, path: str, steps: list[tuple[str, str]]):
        self._path = path
        self._own_names = {"__main__", os.path.splitext(os.path.basename(path))[0]}
        self._steps = steps
        self._missing = set(steps)

    def prepare(self) -> None:
        """Sees to what the script will import."""
        if not self._steps:
            importing.after_import(models.CALLBACKS)
        project = importing.Project(self._path)
        named = {module for module, _ in self._steps} - self._own_names
        importing.watch_project(project, self._rewrite_module, named)

    def rewrite_script(self, source: bytes, file: str, _: CodeType) -> CodeType | None:
        """The script's code, changed."""
        return self._rewrite(self._own_names, source, file)

    def _rewrite_module(self, name: str, source: bytes, file: str) -> CodeType | None:
        return self._rewrite({name}, source, file)

    def _rewrite(self, names: set[str], source: bytes, file: str) -> CodeType | None:
        mine = {function for module, function in self._steps if module in names}
        if self._steps and not mine:
            return None
        rewritten = rewriting.rewrite(source, file, mine, _make_step if mine else None)
        found = set() if rewritten is None else rewritten[1]
        if mine - found:
            module, function = min(step for step in self._steps if step[0] in names)
            there = rewriting.functions_in(source, file)
            raise SystemExit(
                f"terra: --step {module}:{function}: {file} defines no function {function!r}; "
                f"it defines: {', '.join(there) or 'none'}"
            )
        self._missing -= {step for step in self._missing if step[0] in names}
        return None if rewritten is None else rewritten[0]

    def check(self) -> None:
        """After the script: whether every named step was there."""
        for module, function in sorted(self._missing):
            raise SystemExit(
                f"terra: --step {module}:{function}: the script never imported {module!r}"
            )


def _make_step(function: Any) -> Any:
    import terra_tf

    return terra_tf.function(function)


def steps_from_text(text: str) -> list[tuple[str, str]]:
    """The steps in MODULE:FUNCTION,MODULE:FUNCTION..."""
    return [_step(part) for part in text.split(",") if part]


def _step(text: str) -> tuple[str, str]:
    if not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:FUNCTION")
    module, _, function = text.partition(":")
    return module, function


def _script(text: str) -> str:
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return text
