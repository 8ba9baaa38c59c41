"""Runs rows of the table in the foreground: `python -m tests.differential ROW ... [options]`."""

import argparse
import os
import subprocess
import sys

from . import harness
from .table import Program, load
from .worker import serve


def main() -> int:
    """The command line; the exit code is the number of rows that are not right, at most 100."""
    arguments = _parse()
    table = load()
    if arguments.serve:
        serve(*arguments.serve, lambda row, **options: harness.check(table[row], **options))
        return 0
    if arguments.list:
        for row in table.values():
            print(f"{row.module:16} {row.name:34} {row.subject}")
        return 0
    rows = [table[name] for name in arguments.rows or table]
    here = "2" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "3"
    wrong = sum(not _run(row, arguments) for row in rows if here in row.generations)
    if here == "3" and any("2" in row.generations for row in rows):
        legacy = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
        wrong += subprocess.run(
            [sys.executable, "-m", __package__, *sys.argv[1:]], env=legacy
        ).returncode
    return min(wrong, 100)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("rows", nargs="*", help="names; all rows where there is none")
    parser.add_argument("--list", action="store_true", help="show the table and do nothing")
    parser.add_argument("--candidate", choices=[*harness.CANDIDATES], default="terra")
    parser.add_argument("--read", choices=["late", "each"], default="late")
    parser.add_argument("--iterations", type=int, help="instead of the row's own number")
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(row: Program, arguments: argparse.Namespace) -> bool:
    verdict = harness.check(
        row, arguments.candidate, read=arguments.read, iterations=arguments.iterations
    )
    word = "WRONG" if verdict.problems else "right"
    times = f"eager {verdict.eager_seconds:.2f} s, {arguments.candidate} {verdict.seconds:.2f} s"
    print(f"{word}  {row.name}  ({times})", flush=True)
    for problem in verdict.problems:
        print("       " + problem.replace("\n", "\n       "))
    if verdict.stats:
        names = ("traced", "coexecuted", "fallen_back", "fallback_reasons")
        print("       " + ", ".join(f"{name} {verdict.stats[name]}" for name in names))
    return not verdict.problems


if __name__ == "__main__":
    sys.exit(main())
