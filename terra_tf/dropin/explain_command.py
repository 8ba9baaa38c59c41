"""The subcommand `terra explain`: runs a script as `terra run` does, then says what happened."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

from terra_tf.dropin import command

NAME = "explain"
HELP = "run a script, then say what was co-executed, what was not, and why"

DESCRIPTION = """\
Runs SCRIPT as `terra run` does and reports at its end, also when it fails or is interrupted: which
loops were found to be iterations and why, how much co-executes, each fallback with the lines of the
expected and of the actual op, the lines that wait for values, and what could make it faster.

The report goes to standard output after the script's own output, and as a web page, with the
TraceGraphs and the timeline of both runners drawn, into a file.
"""

EPILOG = """\
examples:
  terra explain train.py --epochs 1
  terra explain --html report.html train.py
  terra explain --no-html train.py

exit code: the script's own
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `terra explain` to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.usage = (
        "terra explain [-h] [--html FILE | --no-html] [--trace FILE] [--step MODULE:FUNCTION] "
        "SCRIPT [ARG ...]"
    )
    page = parser.add_mutually_exclusive_group()
    page.add_argument(
        "--html", metavar="FILE", help="where to write the page (default: terra-SCRIPT.html here)"
    )
    page.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument(
        "--trace", metavar="FILE", help="also write the timeline as a Chrome trace (JSON)"
    )
    command.add_step_argument(parser)
    command.add_script_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs `terra explain`; ends as the script does, after the report."""
    folder = os.getcwd()  # the script may change it
    name = os.path.splitext(os.path.basename(arguments.script))[0]
    html = None
    if not arguments.no_html:
        html = os.path.join(folder, arguments.html or f"terra-{name}.html")
    trace = arguments.trace and os.path.join(folder, arguments.trace)
    started = time.perf_counter()
    try:
        command.run_watched(arguments.script, arguments.arguments, arguments.step)
    finally:
        with contextlib.suppress(BrokenPipeError):
            _report(arguments.script, time.perf_counter() - started, html, trace)
    return 0


def _report(script: str, seconds: float, html: str | None, trace: str | None) -> None:
    from terra_tf.configuration import settings
    from terra_tf.report.program import lines_of_program

    sys.stdout.flush()
    if settings.disabled:
        print("terra explain: TERRA_DISABLE is set, so all was plain eager TensorFlow")
        return
    if "tensorflow" not in sys.modules:
        print("terra explain: the script never loaded TensorFlow, so there is nothing to explain")
        return
    from terra_tf import api
    from terra_tf.report import page

    program = api.report_program(f"terra explain {os.path.basename(script)}", seconds)
    _show([[], *lines_of_program(program)])
    if html is not None:
        with open(html, "w", encoding="utf-8") as file:
            file.write(page.html_page(program))
        _show([[], [("page: ", "bold"), (html, "")]])
    if trace:
        api.timeline(None, trace)
        _show([[("timeline: ", "bold"), (trace, "")]])


def _show(lines: list[list[tuple[str, str]]]) -> None:
    from rich.text import Text

    from terra_tf.bench.display import make_console

    console = make_console()
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=not console.is_terminal)
