"""The bar chart: how many times as fast as eager each mode is, a panel for each variant."""

from __future__ import annotations

from pathlib import Path

from .modes import EAGER
from .results import Results

_BAR_INCHES = 0.22


def save(results: Results, path: Path) -> None:
    """Writes a PNG.

    Args:
        results: what to show; modes that failed on a program have no bar there.
        path: where to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = [mode for mode in results.modes() if mode != EAGER]
    variants = results.read_every
    width = max(6.0, 2.0 + _BAR_INCHES * len(results.programs) * (len(modes) + 1))
    figure, rows = pyplot.subplots(
        len(variants), squeeze=False, sharex=True, figsize=(width, 1.0 + 2.6 * len(variants))
    )
    for axes, every in zip(rows[:, 0], variants, strict=True):
        _draw(axes, results, modes, every)
    rows[0, 0].legend(ncols=len(modes), loc="upper left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes, results: Results, modes: list[str], every: str) -> None:
    """Draws one variant."""
    size = 0.8 / max(len(modes), 1)
    for number, mode in enumerate(modes):
        speeds = [program.speed(mode, every) or 0.0 for program in results.programs]
        places = [k + (number - (len(modes) - 1) / 2) * size for k in range(len(speeds))]
        bars = axes.bar(places, speeds, size, label=mode)
        shown = [f"{speed:.1f}" if speed else "" for speed in speeds]
        axes.bar_label(bars, shown, fontsize=6, padding=1)
    axes.axhline(1.0, color="black", linewidth=0.8)  # eager
    axes.set_yscale("log")
    axes.margins(y=0.25)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(
        range(len(results.programs)),
        [program.title for program in results.programs],
        rotation=30,
        ha="right",
    )
    reads = "every step" if every == "1" else f"every {every} steps"
    axes.set_ylabel("speed, eager = 1")
    axes.set_title(f"loss read {reads}", fontsize=9, loc="right")
