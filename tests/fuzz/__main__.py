"""The command line: `tools/fuzz`."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from differential.harness import CANDIDATES
from differential.worker import serve

from . import campaign
from .generator import ITERATIONS, generate


def main() -> int:
    """Runs what the command line asks for; the exit code is 1 where anything is not right."""
    arguments = _parse()
    if arguments.serve:
        from .program import check

        serve(*arguments.serve, check)
        return 0
    if arguments.seed is not None and arguments.show:
        print(generate(arguments.seed, arguments.iterations))
        return 0
    if arguments.file:
        programs = [(f"--file {arguments.file}", arguments.file.read_text())]
    elif arguments.seed is not None:
        programs = campaign.of_seeds([arguments.seed], arguments.iterations)
    else:
        seeds = range(arguments.first, arguments.first + arguments.count)
        programs = campaign.of_seeds(seeds, arguments.iterations)
    report = campaign.search_in_processes(
        _counted(programs), arguments.candidate, tell=lambda finding: _tell(finding, arguments)
    )
    print(report)
    return 1 if report.findings or report.invalid or report.exits else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/fuzz",
        description="Random eager programs, run eagerly and co-executed, compared bit for bit.",
    )
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=200, help="programs, one for each seed")
    parser.add_argument("--seed", type=int, help="one program")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="steps of a program")
    parser.add_argument("--show", action="store_true", help="with --seed: print it, run nothing")
    parser.add_argument("--file", type=Path, help="a program that was printed before")
    parser.add_argument("--candidate", choices=[*CANDIDATES], default="terra")
    parser.add_argument("--whole", action="store_true", help="do not minimise what differs")
    parser.add_argument("--serve", nargs=2, type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _counted(programs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Says now and then how far it is."""
    for count, program in enumerate(programs):
        if count and count % 50 == 0:
            print(f"{count} programs ...", file=sys.stderr, flush=True)
        yield program


def _tell(finding: campaign.Finding, arguments: argparse.Namespace) -> None:
    if not arguments.whole:
        print(f"minimising {finding.name} ...", flush=True)
        campaign.shrink_in_processes(finding, arguments.candidate)
    print(finding, flush=True)


if __name__ == "__main__":
    sys.exit(main())
