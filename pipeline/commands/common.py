"""What several subcommands share: how a schedule is named, number lists, JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipeline.schedules import GENERATORS, Schedule

WITH_CHUNKS = ("interleaved", "bpipe")  # the schedules that take a number of chunks


def add_schedule_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Adds the arguments that name a schedule, or several, and their size."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="SCHEDULE",
        help=(
            f"{', '.join(GENERATORS)}; or a file with a schedule's text form, - for stdin"
            f"{' (several may be given)' if several else ''}; "
            "numbers after it are P, M and V, as in: bpipe 4 8"
        ),
    )
    parser.add_argument("-p", "--stages", type=positive, metavar="P", help="number of stages")
    parser.add_argument(
        "-m", "--microbatches", type=positive, metavar="M", help="number of micro-batches"
    )
    parser.add_argument(
        "-v",
        "--chunks",
        type=positive,
        metavar="V",
        help="model chunks a rank, for interleaved (2 by default) and bpipe (1)",
    )


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def read_schedules(arguments: argparse.Namespace) -> list[Schedule]:
    """The schedules that the arguments name: made, or read from files.

    Raises:
        ValueError: if a size is missing or a file is not there.
        ScheduleError: if a file's text is not a schedule, or a schedule cannot be run.
    """
    names = [word for word in arguments.words if not word.isdecimal()]
    sizes = [int(word) for word in arguments.words if word.isdecimal()]
    options = (arguments.stages, arguments.microbatches, arguments.chunks)
    if len(sizes) > len(options) or not names:
        raise ValueError("name a schedule and its size, as in: bpipe 4 8")
    sizes += [0] * (len(options) - len(sizes))
    given = [option or size for option, size in zip(options, sizes, strict=True)]
    return [_read_schedule(name, *given) for name in names]


def read_schedule(arguments: argparse.Namespace) -> Schedule:
    """The one schedule that the arguments name; see `read_schedules`."""
    schedules = read_schedules(arguments)
    if len(schedules) > 1:
        raise ValueError("this command takes one schedule")
    return schedules[0]


def _read_schedule(name: str, stages: int, microbatches: int, chunks: int) -> Schedule:
    make = GENERATORS.get(name)
    if make is None:
        if name == "-":
            return Schedule.parse(sys.stdin.read())
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"{name!r} is neither a file nor one of {', '.join(GENERATORS)}")
        return Schedule.parse(path.read_text(), path.stem)
    if not stages or not microbatches:
        raise ValueError(f"{name} needs its number of stages, -p, and of micro-batches, -m")
    if chunks and name in WITH_CHUNKS:
        return make(stages, microbatches, chunks)
    return make(stages, microbatches)


def print_json(value: Any) -> None:
    """Prints a value as JSON."""
    print(json.dumps(value, indent=2))


def positive(text: str) -> int:
    """Reads a whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """Reads a whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def numbers(text: str) -> float | list[float]:
    """Reads one number, or several with commas."""
    try:
        values = [float(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor several with commas"
        ) from None
    return values[0] if len(values) == 1 else values


def whole_numbers(text: str) -> int | list[int]:
    """Reads one whole number, or several with commas."""
    values = [whole(item) for item in text.split(",")]
    return values[0] if len(values) == 1 else values
