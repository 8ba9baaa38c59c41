"""Runs many fuzzed programs, minimises those that differ, and says what was found."""

import collections
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from differential.harness import Verdict
from differential.worker import Worker

from .generator import ITERATIONS, generate
from .minimiser import minimise, symptom

PROGRAM_SECONDS = 60.0  # one that takes longer hangs; they take a second
MINIMISING_SECONDS = 300.0
# Programs for one process: TensorFlow keeps what it has ever compiled, and the exit of processes is
# tested in this way, too.
_PROGRAMS_A_PROCESS = 100

Check = Callable[[str], Verdict]  # source text -> verdict


@dataclass
class Finding:
    """A program with which Terra and eager differ.

    Attributes:
        name: The arguments with which `tools/fuzz` runs it, such as `--seed 17`.
        source: Its text.
        verdict: The differences.
        minimised: The smallest text that still differs, or None where that was not looked for.
        minimised_verdict: The differences of that text.
    """

    name: str
    source: str
    verdict: Verdict
    minimised: str | None = None
    minimised_verdict: Verdict | None = None

    def __str__(self) -> str:
        source, verdict = self.source, self.verdict
        if self.minimised is not None and self.minimised_verdict is not None:
            source, verdict = self.minimised, self.minimised_verdict
        headline = f"Differs ({symptom(verdict)}); reproduce it by: tools/fuzz {self.name}"
        return "\n".join([headline, *verdict.problems, "", source])


@dataclass
class Report:
    """What a campaign did.

    Attributes:
        programs: How many ran.
        invalid: Names of those that fail in eager mode by themselves: faults of the grammar.
        findings: Those that differ.
        iterations: Phase of an iteration, as in `terra_tf.Stats` -> number of iterations.
        reasons: Fallback code -> number of fallbacks.
        exits: What went wrong when a process that had run programs ended.
    """

    programs: int = 0
    invalid: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    iterations: collections.Counter = field(default_factory=collections.Counter)
    reasons: collections.Counter = field(default_factory=collections.Counter)
    exits: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        share = self.iterations["coexecuted"] / max(sum(self.iterations.values()), 1)
        names = [finding.name for finding in self.findings]
        return "\n".join(
            [
                f"{self.programs} programs, {len(self.findings)} differ {names or ''}",
                f"invalid: {len(self.invalid)} {self.invalid or ''}",
                f"iterations: {dict(self.iterations)} ({share:.0%} co-executed)",
                f"fallbacks: {dict(self.reasons)}",
                *self.exits,
            ]
        )

    def add(self, name: str, verdict: Verdict) -> None:
        """Counts one program."""
        self.programs += 1
        if verdict.problems and not symptom(verdict):
            self.invalid.append(name)
        stats: dict[str, Any] = verdict.stats or {"fallback_reasons": {}}
        for phase in ("traced", "coexecuted", "fallen_back"):
            self.iterations[phase] += stats.get(phase, 0)
        self.reasons.update(stats["fallback_reasons"])


def of_seeds(seeds: Iterable[int], iterations: int = ITERATIONS) -> Iterator[tuple[str, str]]:
    """Names and texts of the programs of some seeds."""
    length = "" if iterations == ITERATIONS else f" --iterations {iterations}"
    return ((f"--seed {seed}{length}", generate(seed, iterations)) for seed in seeds)


def search(
    programs: Iterable[tuple[str, str]],
    check: Check,
    *,
    most_findings: int | None = None,
    tell: Callable[[Finding], None] | None = None,
) -> Report:
    """Runs programs.

    Args:
        programs: Their names and texts.
        check: Runs one.
        most_findings: Stops after so many.
        tell: Called with each finding at once; may minimise it.
    """
    report = Report()
    for name, source in programs:
        verdict = check(source)
        report.add(name, verdict)
        if symptom(verdict):
            report.findings.append(Finding(name, source, verdict))
            if tell:
                tell(report.findings[-1])
            if len(report.findings) == most_findings:
                break
    return report


def search_in_processes(
    programs: Iterable[tuple[str, str]],
    candidate: str = "terra",
    *,
    tell: Callable[[Finding], None] | None = None,
) -> Report:
    """The same in child processes, a new one after each program that differs."""
    with _Children(candidate) as children:
        report = search(programs, children.check, tell=tell)
    report.exits = children.exits
    return report


def shrink(finding: Finding, check: Check, seconds: float = MINIMISING_SECONDS) -> None:
    """Minimises a finding in place."""
    wanted = symptom(finding.verdict)
    verdicts: dict[str, Verdict] = {}

    def interesting(source: str) -> bool:
        verdict = check(source)
        if symptom(verdict) == wanted:
            verdicts[source] = verdict
        return source in verdicts

    smallest = minimise(finding.source, interesting, seconds)
    if smallest in verdicts:
        finding.minimised, finding.minimised_verdict = smallest, verdicts[smallest]


def shrink_in_processes(finding: Finding, candidate: str = "terra") -> None:
    """Minimises a finding in processes of their own.

    One process is used again and again, which is ten times as fast; where a fresh one then does not
    show the fault, every text gets a fresh one. A fault that no fresh process shows comes from what
    earlier programs left behind: it is left as it is.
    """
    for reuse in (True, False):
        with _Children(candidate, reuse=reuse) as children:
            shrink(finding, children.check)
        if finding.minimised is None:
            return
        with _Children(candidate) as children:
            if symptom(children.check(finding.minimised)):
                return
        finding.minimised = finding.minimised_verdict = None


class _Children:
    """Checks programs in a child process, which is renewed now and then."""

    def __init__(self, candidate: str, *, reuse: bool = False) -> None:
        self.exits: list[str] = []
        self._candidate = candidate
        self._worker = Worker("3", __package__, reuse=reuse)
        self._checked = 0

    def __enter__(self) -> "_Children":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def check(self, source: str) -> Verdict:
        """Runs one program."""
        self._checked += 1
        if self._checked % _PROGRAMS_A_PROCESS == 0:
            self._close()
        return self._worker.run(source, PROGRAM_SECONDS, candidate=self._candidate)

    def _close(self) -> None:
        self.exits += filter(None, [self._worker.close()])
