"""What the runs of a script add up to: do the results agree, how fast is a step, what to know.

Everything here is computed from finished runs and shown elsewhere.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from terra_tf.bench import printed
from terra_tf.bench.process import EAGER, LOOP, ScriptRun
from terra_tf.bench.timing import format_seconds, median_step_seconds

# Exit codes of `terra bench`; 2 is a mistake on the command line.
AGREED = 0
DISAGREED = 1
SCRIPT_FAILED = 3

NO_ITERATIONS = (
    "No iteration was found, so there is no step to time and nothing to co-execute: no loop "
    "computed gradients under a tape or took its items from tf.data. Name the step by "
    "--step module:function, or put @terra.function on it."
)
TOO_FEW_ITERATIONS = "No step started twice, so there is no step time: let the script run longer."
NO_NUMBERS = (
    "The script printed no numbers, so nothing shows that the results are equal. "
    "Print the loss from time to time."
)
NOT_REPEATABLE = (
    "Two eager runs printed different numbers as well: the script does not repeat itself. Seed it "
    "(keras.utils.set_random_seed), and hide times and dates with --ignore."
)
MAYBE_NOT_REPEATABLE = (
    "If the script may print other numbers each time, `--repeat 2` compares eager with eager too. "
    "Times and dates can be hidden with --ignore."
)
NO_STATISTICS = (
    "The Terra run ended without sending its statistics (os._exit?); "
    "the share is that of iterations that started co-executed."
)
NOTHING_COEXECUTED = (
    "No iteration was co-executed. Warnings that Terra prints when the script runs alone, "
    "and the fallback reasons, say why."
)


@dataclass(frozen=True)
class StepSpeed:
    """The speed of one step in both modes; a time is None where the step did not start twice."""

    name: str
    eager_iterations: int
    terra_iterations: int
    eager_seconds: float | None
    terra_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """How many times faster Terra is; None when there is no time to compare."""
        if not self.eager_seconds or not self.terra_seconds:
            return None
        return self.eager_seconds / self.terra_seconds


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison.

    Attributes:
        agreement: of the first pair of runs that disagrees, else of the first pair.
        steps: the speed of each step, the one with the most iterations first.
        eager_wall_seconds: the median time of a whole eager run.
        terra_wall_seconds: the same under Terra.
        coexecuted: how many iterations were co-executed, over all Terra runs.
        iterations: how many iterations there were, over all Terra runs.
        fallback_reasons: code -> count, over all Terra runs, in the order of appearance.
        remarks: what the user should know in addition, as sentences.
    """

    agreement: printed.Agreement
    steps: tuple[StepSpeed, ...]
    eager_wall_seconds: float
    terra_wall_seconds: float
    coexecuted: int
    iterations: int
    fallback_reasons: dict[str, int]
    remarks: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The exit code that this outcome deserves."""
        return AGREED if self.agreement.complete else DISAGREED

    @property
    def coexecuted_share(self) -> float | None:
        """The share of co-executed iterations; None when there were none."""
        return self.coexecuted / self.iterations if self.iterations else None

    def summary(self) -> str:
        """Returns the outcome in one line."""
        parts = [describe_agreement(self.agreement)]
        parts.append(describe_speed(self.steps))
        if self.coexecuted_share is not None:
            parts.append(f"{self.coexecuted_share:.1%} of iterations co-executed")
        word = "OK" if self.agreement.complete else "DIFFERENT"
        return f"terra bench: {word}: " + "; ".join(parts)


def failure_summary(run: ScriptRun) -> str:
    """Returns the one line that ends a comparison in which `run` failed."""
    where = "in plain eager mode" if run.mode == EAGER else "under Terra"
    return f"terra bench: FAILED: the script failed {where} ({run.describe_exit()})"


def describe_agreement(agreement: printed.Agreement) -> str:
    """Says in a phrase how many printed numbers agree."""
    if agreement.total == 0:
        return "no printed numbers to compare"
    if agreement.complete:
        return f"{agreement.agreeing} of {agreement.total} printed numbers agree"
    text = f"only {agreement.agreeing} of {agreement.total} printed numbers agree"
    if agreement.eager_count != agreement.terra_count:
        text += f" (eager printed {agreement.eager_count}, Terra {agreement.terra_count})"
    return text


def describe_speed(steps: Sequence[StepSpeed]) -> str:
    """Says in a phrase how fast the step with the most iterations is."""
    if not steps or steps[0].ratio is None:
        return "no step times"
    step = steps[0]
    others = f" (first of {len(steps)} steps)" if len(steps) > 1 else ""
    return (
        f"{step.name}{others} {format_seconds(step.eager_seconds)} eager, "
        f"{format_seconds(step.terra_seconds)} Terra, ratio {step.ratio:.2f}"
    )


def judge(
    eager_runs: Sequence[ScriptRun],
    terra_runs: Sequence[ScriptRun],
    ignore: Sequence[re.Pattern[str]] = (),
) -> Verdict:
    """Compares finished runs; the first eager run with the first Terra run, and so on.

    Args:
        eager_runs: at least one run, none of which failed.
        terra_runs: as many.
        ignore: patterns of output that is not compared.
    """
    loops = {name for run in terra_runs for name in run.steps}
    for run in eager_runs:
        run.forget_loops(loops)
    agreements = [
        printed.compare(eager.lines, terra.lines, ignore)
        for eager, terra in zip(eager_runs, terra_runs, strict=True)
    ]
    agreement = next((each for each in agreements if not each.complete), agreements[0])
    steps = _step_speeds(eager_runs, terra_runs)
    coexecuted, iterations = _coexecution(terra_runs)
    reasons: Counter[str] = Counter()
    for run in terra_runs:
        reasons.update((run.stats or {}).get("fallback_reasons", {}))
    remarks = [
        *_remarks_on_iterations(eager_runs, terra_runs, steps, coexecuted),
        *_remarks_on_numbers(agreement, eager_runs, ignore),
    ]
    return Verdict(
        agreement=agreement,
        steps=steps,
        eager_wall_seconds=statistics.median(run.wall_seconds for run in eager_runs),
        terra_wall_seconds=statistics.median(run.wall_seconds for run in terra_runs),
        coexecuted=coexecuted,
        iterations=iterations,
        fallback_reasons=dict(reasons),
        remarks=tuple(remarks),
    )


def _step_speeds(
    eager_runs: Sequence[ScriptRun], terra_runs: Sequence[ScriptRun]
) -> tuple[StepSpeed, ...]:
    names = dict.fromkeys(name for run in (*eager_runs, *terra_runs) for name in run.steps)
    speeds = []
    for name in names:
        eager = [run.steps[name] for run in eager_runs if name in run.steps]
        terra = [run.steps[name] for run in terra_runs if name in run.steps]
        speeds.append(
            StepSpeed(
                name=name,
                eager_iterations=sum(times.iterations for times in eager),
                terra_iterations=sum(times.iterations for times in terra),
                eager_seconds=median_step_seconds(eager),
                terra_seconds=median_step_seconds(terra),
            )
        )
    return tuple(sorted(speeds, key=lambda step: -step.eager_iterations))


def _coexecution(terra_runs: Sequence[ScriptRun]) -> tuple[int, int]:
    """Returns how many iterations were co-executed, and how many there were."""
    coexecuted = iterations = 0
    for run in terra_runs:
        iterations += run.iterations
        # An iteration that started co-executed may have fallen back: the statistics know.
        counted = run.phases["coexecuted"] if run.stats is None else run.stats["coexecuted"]
        coexecuted += counted
    return coexecuted, iterations


def _remarks_on_iterations(
    eager_runs: Sequence[ScriptRun],
    terra_runs: Sequence[ScriptRun],
    steps: Sequence[StepSpeed],
    coexecuted: int,
) -> list[str]:
    if not steps:
        return [NO_ITERATIONS]
    remarks = []
    if all(step.ratio is None for step in steps):
        remarks.append(TOO_FEW_ITERATIONS)
    for eager, terra in zip(eager_runs, terra_runs, strict=True):
        if _told(eager) != _told(terra):
            remarks.append(
                f"The eager run had {_told(eager)} iterations, the Terra run {_told(terra)}."
            )
            break
    if any(run.stats is None for run in terra_runs if run.iterations):
        remarks.append(NO_STATISTICS)
    if coexecuted == 0:
        remarks.append(NOTHING_COEXECUTED)
    return remarks


def _told(run: ScriptRun) -> int:
    """Iterations of steps that are no loops: of those, the first ones are only watched."""
    names = [name for name in run.steps if not name.startswith(LOOP)]
    return sum(run.steps[name].iterations for name in names)


def _remarks_on_numbers(
    agreement: printed.Agreement,
    eager_runs: Sequence[ScriptRun],
    ignore: Sequence[re.Pattern[str]],
) -> list[str]:
    if agreement.total == 0:
        return [NO_NUMBERS]
    if not agreement.complete:
        if len(eager_runs) == 1:
            return [MAYBE_NOT_REPEATABLE]
        first, *others = eager_runs
        if all(printed.compare(first.lines, run.lines, ignore).complete for run in others):
            return []
        return [NOT_REPEATABLE]
    if agreement.words is not None:
        return [
            "The numbers agree but the words do not: "
            f"eager printed {agreement.words.eager!r}, Terra {agreement.words.terra!r}."
        ]
    return []
