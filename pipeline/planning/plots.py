"""Pictures of the planner, drawn with matplotlib."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.planning.hybrid import HybridModel
    from pipeline.planning.placement import Placement

_FORWARD, _BACKWARD = "#4878a8", "#d08850"


def plot_placement(placement: Placement, path: str | PathLike[str]) -> None:
    """Draws what each device does over time into a PNG file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure, axes = _figure(12, 1.2 + 0.6 * len(placement.cluster))
    for device, line in enumerate(placement.lines()):
        for backward, color in ((False, _FORWARD), (True, _BACKWARD)):
            spans = [
                (placement.start[name] * 1e3, (placement.end(name) - placement.start[name]) * 1e3)
                for name in line
                if placement.graph[name].backward is backward
            ]
            axes.broken_barh(
                spans, (device - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.3
            )
    axes.set_yticks(range(len(placement.cluster)), [d.name for d in placement.cluster.devices])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.axvline(placement.bound * 1e3, color="gray", linestyle=":", linewidth=1)
    axes.set_title(
        f"{len(placement.graph)} operations, {placement.makespan * 1e3:.4g} ms, "
        f"{placement.speedup:.2f} times one device, gap {placement.gap:.1%}"
    )
    _save(figure, path)


def plot_hybrid(
    model: HybridModel, devices: list[int], path: str | PathLike[str], title: str
) -> None:
    """Draws the speed-up of data parallelism and of hybrids over devices into a PNG file.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure, axes = _figure(8, 5)
    for ways in model.ways:
        points = [
            (count, model.speedup(count, ways))
            for count in devices
            if model.can_predict(count, ways)
        ]
        if points:
            label = "data parallel" if ways == 1 else f"hybrid, {ways}-way model parallel"
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up of training to the target")
    axes.set_xticks(devices, [str(count) for count in devices])
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(title)
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # Not pyplot: it would choose a window system and keep figures alive.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, path: str | PathLike[str]) -> None:
    figure.savefig(path, format="png", dpi=120)
