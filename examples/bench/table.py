"""The Markdown report: tables of times and of what else was seen, and how to read them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from .modes import EAGER, TERRA, TF_FUNCTION
from .programs import PAPER
from .results import ModeResult, ProgramResult, Results

NONE = "-"


def markdown(results: Results) -> str:
    """Returns the whole report."""
    parts = [times(results, every) for every in results.read_every]
    parts += [learning(results), verdicts(results), results.conditions]
    parts += [summary(results), fallbacks(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    alignment = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, alignment, *rows))


def times(results: Results, every: str) -> str:
    """Milliseconds of a step, and ratios of speed."""
    modes = results.modes()
    ratios: dict[str, Callable[[ProgramResult], float | None]] = {}
    if TERRA in modes:
        ratios["eager / Terra"] = lambda program: program.speed(TERRA, every)
        if TF_FUNCTION in modes:
            ratios["tf.function / Terra"] = lambda p: p.speed(TERRA, every, base=TF_FUNCTION)
    rows = []
    for program in results.programs:
        row = [program.title]
        row += [_number(program.ms(mode, every), "{:.3g}") for mode in modes]
        row += [_number(ratio(program), "{:.2f}") for ratio in ratios.values()]
        rows.append(row)
    heading = f"The loss is read every {'step' if every == '1' else every + ' steps'}:"
    columns = ["program", *(f"{mode}, ms" for mode in modes), *ratios]
    return f"{heading}\n\n{_table(columns, rows)}"


def _number(value: float | None, pattern: str) -> str:
    return NONE if value is None else pattern.format(value)


def learning(results: Results) -> str:
    """How soon Terra co-executes, what its graphs cost, and memory where it was measured."""
    if TERRA not in results.modes():
        return ""
    with_memory = any(r.peak_mb for p in results.programs for r in p.modes.values())
    headings = ["program", "co-executed", "first", "graphs", "s a graph", "s a trace"]
    if with_memory:
        headings += [f"{mode}, MB" for mode in results.modes()]
        headings += ["Terra / tf.function"]
    rows = []
    for program in results.programs:
        terra = program.modes[TERRA]
        tf_function = program.modes.get(TF_FUNCTION, ModeResult(failed="not run"))
        row = [
            program.title,
            _number(terra.coexecuted, "{:.1%}"),
            _number(terra.first_coexecuted, "{}"),
            str(terra.graphs),
            _number(seconds_of_a_graph(terra), "{:.2f}"),
            _number(seconds_of_a_graph(tf_function), "{:.2f}"),
        ]
        if with_memory:
            row += [_memory(program.modes.get(mode)) for mode in results.modes()]
            row += [_number(memory_ratio(program), "{:.2f}")]
        rows.append(row)
    return _table(headings, rows)


def seconds_of_a_graph(result: ModeResult) -> float | None:
    """What generating, or tracing, one graph took."""
    if result.failed is not None or not result.graphs:
        return None
    return result.graph_seconds / result.graphs


def memory_ratio(program: ProgramResult) -> float | None:
    """Peak memory of Terra's process relative to that of `tf.function`'s."""
    terra, other = (program.modes.get(mode, ModeResult()) for mode in (TERRA, TF_FUNCTION))
    return terra.peak_mb / other.peak_mb if terra.peak_mb and other.peak_mb else None


def _memory(result: ModeResult | None) -> str:
    if result is None or result.peak_mb is None or result.training_mb is None:
        return NONE
    return f"{result.peak_mb:.0f} (+{result.training_mb:.0f})"


def verdicts(results: Results) -> str:
    """How the results of each mode compare with eager's."""
    modes = [mode for mode in results.modes() if mode != EAGER]
    rows = []
    for program in results.programs:
        row = [program.title]
        for mode in modes:
            result = program.modes[mode]
            text = result.verdict.replace("|", "\\|")
            row.append(text if result.good else f"**{text}**")
        rows.append(row)
    return _table(["program", *modes], rows, left=1 + len(modes))


def summary(results: Results) -> str:
    """Geometric means over the paper's programs, and over those that `tf.function` runs rightly."""
    lines = []
    for every in results.read_every:
        reads = "the loss read every step" if every == "1" else f"read every {every} steps"
        paper = [program for program in results.programs if program.group == PAPER]
        over_eager = [s for p in paper if (s := p.speed(TERRA, every))]
        if over_eager:
            lines.append(
                f"Terra over eager, {len(over_eager)} programs of the paper, {reads}: "
                f"{_spread(over_eager)}, {sum(s >= 3 for s in over_eager)} of them at least 3."
            )
        right = [p for p in results.programs if p.modes.get(TF_FUNCTION, _MISSING).good]
        over_graph = [s for p in right if (s := p.speed(TERRA, every, base=TF_FUNCTION))]
        if over_graph:
            lines.append(
                f"Terra over tf.function, {len(over_graph)} programs that it runs rightly, "
                f"{reads}: {_spread(over_graph)}."
            )
    return "\n".join(f"* {line}" for line in lines)


_MISSING = ModeResult(good=False)


def _spread(ratios: Sequence[float]) -> str:
    mean = statistics.geometric_mean(ratios)
    return f"geometric mean {mean:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}"


def fallbacks(results: Results) -> str:
    """Says why iterations fell back, where any did."""
    lines = []
    for program in results.programs:
        reasons = program.modes.get(TERRA, ModeResult()).fallbacks
        if reasons:
            shown = ", ".join(f"{code} ({count})" for code, count in reasons.items())
            lines.append(f"* Fallbacks of {program.title}: {shown}.")
    return "\n".join(lines)
