"""The picture of simulated steps: what every rank does over time, and what it holds.

For each rank, a row of forwards, backwards and weight gradients as boxes with the micro-batch's
number (darker for later model chunks), below them the rank's stash transfers as bars, at both of
their ends, and below those the curve of the stashes it holds. Several simulations stand above each
other with the same scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from pipeline.schedules import Kind
from pipeline.schedules.actions import STASH
from pipeline.simulation.result import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# For the chunks of a rank in turn; colours that can be told apart without red and green.
COLOURS = {
    Kind.FORWARD: ("#8ecae6", "#5a9ec9"),
    Kind.BACKWARD: ("#ffd166", "#e5a832"),
    Kind.WEIGHT: ("#cdd5ae", "#a3b18a"),
    Kind.EVICT: ("#c1121f",),
    Kind.RETURN: ("#6a4c93",),
}
LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "weight gradient",
    Kind.EVICT: "evict",
    Kind.RETURN: "load",
}
MEMORY = "#9aa5b1"
# Heights in a rank's row, which is 1 high: its boxes, the bars of its transfers, its curve.
BOX, BAR, CURVE = 0.44, 0.08, 0.38
# Inches: a row, the width of a picture, what titles and axes need.
ROW, LEAST_WIDTH, MOST_WIDTH, MARGIN = 0.42, 6.0, 11.0, 0.75
MOST_NUMBERS = 900  # boxes; with more, their numbers cannot be read
DIGIT = 0.054  # of a box's number
DPI = 110
# A transfer that takes no time is drawn this share of the step wide.
LEAST_TRANSFER = 0.003


def plot(simulations: Sequence[Simulation], path: str | PathLike[str]) -> None:
    """Draws simulations side by side into a PNG file.

    Args:
        simulations: at least one.
        path: the file to write.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is nothing to draw.
    """
    if not simulations:
        raise ValueError("there is no simulation to draw; pass at least one")
    figure_class = _figure_class()
    longest = max(result.step_time for result in simulations) or 1.0
    most_held = max(max(result.peak_count) for result in simulations)
    # The narrowest computation should have room for its number.
    shortest = min(
        (box.end - box.start for result in simulations for box in result.computations), default=0
    )
    width = min(MOST_WIDTH, max(LEAST_WIDTH, 0.16 * longest / shortest)) if shortest else MOST_WIDTH
    heights = [ROW * result.schedule.num_stages + MARGIN for result in simulations]
    figure = figure_class(figsize=(width, sum(heights) + 0.4), dpi=DPI, layout="constrained")
    axes = figure.subplots(
        len(simulations), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for (part,), result in zip(axes, simulations, strict=True):
        _draw(part, result, longest, most_held)
    axes[-1][0].set_xlabel("seconds")
    figure.legend(
        *_legend(simulations), loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )
    figure.savefig(path, format="png")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "pictures need matplotlib; install it, or the project with its extra `pipeline`"
        ) from None
    return Figure  # without pyplot, which would choose a window system and keep the figure


def _draw(axes: Axes, result: Simulation, longest: float, most_held: int) -> None:
    _draw_computations(axes, result, longest)
    _draw_stash_transfers(axes, result, LEAST_TRANSFER * longest)
    _draw_held(axes, result, most_held)
    axes.set_title(
        f"{result.schedule.name}: step {result.step_time:.4g} s, bubble {result.bubble:.1%}, "
        f"no rank holds more than {max(result.peak_count)} stashes",
        fontsize=10,
        loc="left",
    )
    num_stages = result.schedule.num_stages
    axes.set_yticks([rank + BOX / 2 for rank in range(num_stages)], range(num_stages))
    axes.set_ylim(num_stages, -0.1)
    axes.set_ylabel("rank")
    axes.set_xlim(0, longest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, labelbottom=True)


def _draw_computations(axes: Axes, result: Simulation, longest: float) -> None:
    for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT):
        boxes = [box for box in result.computations if box.action.kind is kind]
        axes.barh(
            [box.rank for box in boxes],
            [box.end - box.start for box in boxes],
            left=[box.start for box in boxes],
            height=BOX,
            align="edge",
            color=[_shade(kind, box.action.chunk) for box in boxes],
            edgecolor="white",
            linewidth=0.4,
        )
    if len(result.computations) > MOST_NUMBERS:
        return
    inches = 0.9 * axes.figure.get_figwidth() / longest  # of a second
    for action, rank, start, end in result.computations:
        if (end - start) * inches < DIGIT * len(str(action.microbatch)):
            continue  # it would run into the next one's
        axes.text(
            (start + end) / 2,
            rank + BOX / 2,
            str(action.microbatch),
            ha="center",
            va="center",
            fontsize=6.5,
        )


def _draw_stash_transfers(axes: Axes, result: Simulation, least: float) -> None:
    for kind in (Kind.EVICT, Kind.RETURN):
        moves = [move for move in result.transfers if move.action.kind is kind]
        for ranks in ([move.source for move in moves], [move.target for move in moves]):
            axes.barh(
                [rank + BOX for rank in ranks],
                [max(move.end - move.start, least) for move in moves],
                left=[move.start for move in moves],
                height=BAR,
                align="edge",
                color=_shade(kind, 0),
            )


def _draw_held(axes: Axes, result: Simulation, most_held: int) -> None:
    """The curve of what each rank holds, upwards from the bottom of its row."""
    unit = CURVE / max(1, most_held)
    for rank, held in enumerate(result.memory):
        bottom = rank + BOX + BAR + CURVE
        axes.fill_between(
            [0.0, *(item.time for item in held), result.step_time],
            bottom,
            [bottom - unit * count for count in (0, *(item.count for item in held), 0)],
            step="post",
            color=MEMORY,
            linewidth=0,
        )
        axes.annotate(
            f"most {result.peak_count[rank]}",
            (1.0, bottom - CURVE / 2),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )


def _shade(kind: Kind, chunk: int) -> str:
    shades = COLOURS[kind]
    return shades[min(chunk, len(shades) - 1)]


def _legend(simulations: Sequence[Simulation]) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    kinds = {box.action.kind for result in simulations for box in result.computations}
    kinds |= {move.action.kind for result in simulations for move in result.transfers} & set(STASH)
    shown = [kind for kind in COLOURS if kind in kinds]
    patches = [Patch(color=_shade(kind, 0)) for kind in shown]
    return [*patches, Patch(color=MEMORY)], [*(LABELS[kind] for kind in shown), "stashes held"]
