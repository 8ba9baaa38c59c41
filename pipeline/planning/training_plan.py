"""Plan: what to launch, what was compared, and why the winner wins; plain data that prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pipeline.errors import PlanningError
from pipeline.planning.checks import read_json

FITS, NO_MEMORY, PRUNED, REFUSED = "fits", "out of memory", "pruned", "cannot run"


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        replicas: dp, pipelines that train side by side.
        stages: pp, the stages of each.
        schedule: its name.
        microbatches: m of each replica's batch.
        chunks: model chunks of a rank.
        stash: for each stage, `keep` or `recompute`; a schedule of BPipe evicts what is kept.
        cuts: the first layer of each later virtual stage.
        batch: samples of all replicas in a step.
        order: for each replica and stage in order, the device of the cluster that it runs on.
    """

    replicas: int
    stages: int
    schedule: str
    microbatches: int
    chunks: int
    stash: tuple[str, ...]
    cuts: tuple[int, ...]
    batch: int
    order: tuple[int, ...] = ()

    @property
    def policy(self) -> str:
        """What happens to stashes, in a word or two."""
        count = sum(policy == "recompute" for policy in self.stash)
        kept = "evict" if self.schedule == "bpipe" else "keep"
        if count == 0:
            return kept
        return "recompute" if count == len(self.stash) else f"recompute {count}, {kept}"

    def __str__(self) -> str:
        return (
            f"dp {self.replicas} x pp {self.stages}, {self.schedule}, m={self.microbatches}, "
            f"{self.policy}"
        )


@dataclass(frozen=True)
class Row:
    """A setting and what is to be expected of it.

    Attributes:
        setting: the setting.
        status: `fits`, `out of memory`, `pruned` or `cannot run`.
        why: what that means here.
        step_seconds: the time of a step; 0 where it was not simulated.
        samples_per_second: over all replicas.
        compute_seconds: of the step, the part that the slowest rank computes.
        bubble: the share of time in which ranks do not compute, within the schedule.
        reduction_seconds: of gradients over the replicas.
        peak_bytes: for each stage, what it holds at most.
        target_seconds: until the target, in units of an epoch's samples over a sample's time; None
            without E(B).
    """

    setting: Setting
    status: str
    why: str = ""
    step_seconds: float = 0.0
    samples_per_second: float = 0.0
    compute_seconds: float = 0.0
    bubble: float = 0.0
    reduction_seconds: float = 0.0
    peak_bytes: tuple[float, ...] = ()
    target_seconds: float | None = None

    @property
    def score(self) -> tuple[float, float]:
        """Smaller is better."""
        if self.target_seconds is not None:
            return (self.target_seconds, self.step_seconds)
        return (-self.samples_per_second, self.step_seconds)


@dataclass(frozen=True)
class Plan:
    """The chosen setting, and all others.

    Attributes:
        best: the winner.
        rows: all settings, the best first, then what ran out of memory, was pruned or refused.
        devices: how many there are.
        memory: bytes of the smallest device, or None.
        model: what `Pipeline.from_plan` needs beside the setting: layers, loss, optimizer; not
            written into files.
    """

    best: Row
    rows: tuple[Row, ...]
    devices: int
    memory: float | None = None
    model: tuple[Any, Any, Any] | None = field(default=None, repr=False, compare=False)

    @property
    def setting(self) -> Setting:
        """The winner's setting."""
        return self.best.setting

    def launch_line(self, script: str = "train.py") -> str:
        """The command that launches a script with this plan on one host."""
        ranks = self.setting.replicas * self.setting.stages
        return f"terra-pipeline run -np {ranks} {script}"

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Pipeline` that the plan decides."""
        setting = self.setting
        return {
            "num_stages": setting.stages,
            "num_microbatches": setting.microbatches,
            "schedule": setting.schedule,
            "stash": list(setting.stash),
            "partition": list(setting.cuts) if setting.cuts else "uniform",
            "num_chunks": setting.chunks,
        }

    def fitting(self) -> list[Row]:
        """What fits, the best first."""
        return [row for row in self.rows if row.status == FITS]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "devices": self.devices,
            "memory": self.memory,
            "launch": self.launch_line(),
            "best": asdict(self.best),
            "rows": [asdict(row) for row in self.rows],
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Writes it into a JSON file, without the model."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=1))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Reads a JSON file.

        Raises:
            PlanningError: if it holds no plan.
        """
        data = read_json(path, PlanningError)
        try:
            rows = tuple(map(_row, data["rows"]))
            return cls(_row(data["best"]), rows, data["devices"], data["memory"])
        except (KeyError, TypeError, ValueError) as error:
            raise PlanningError(f"{path} holds no plan: {error!r}", "no-plan", str(path)) from None

    def explain(self) -> str:
        """Why the winner wins."""
        best, fitting = self.best, self.fitting()
        lines = [f"best: {best.setting}"]
        unit = "s to the target" if best.target_seconds is not None else "samples/s"
        lines.append(
            f"  predicted {best.samples_per_second:.5g} samples/s, {_where_time_goes(best)}"
        )
        rivals = {
            "data parallelism alone": [r for r in fitting if r.setting.stages == 1],
            "pipelines without BPipe": [
                r for r in fitting if r.setting.stages > 1 and r.setting.schedule != "bpipe"
            ],
            "pipelines with BPipe": [r for r in fitting if r.setting.schedule == "bpipe"],
        }
        for name, rows in rivals.items():
            others = [row for row in rows if row is not best]
            if best in rows and not others:
                continue
            if not rows:
                lines.append(f"  {name}: {_why_none(name, self.rows)}")
            elif best not in rows:
                ratio = _ratio(best, rows[0])
                lines.append(
                    f"  {name}: at best {rows[0].setting}, {ratio:.2f} times worse in {unit}; "
                    f"{_where_time_goes(rows[0])}"
                )
        lines.append(f"launch: {self.launch_line()}")
        order = self.setting.order
        if order != tuple(range(len(order))):
            lines.append(f"  stages, in order, are put on devices {', '.join(map(str, order))}")
        return "\n".join(lines)

    def table(self, most: int = 25) -> str:
        """The settings as a table, the best first."""
        heads = ("dp", "pp", "schedule", "m", "stash", "batch", "samples/s", "step ms", "bubble")
        heads += ("reduce ms", "peak MB", "")
        table = [heads]
        for row in self.rows[:most]:
            setting = row.setting
            known = bool(row.step_seconds)
            table.append(
                (
                    str(setting.replicas),
                    str(setting.stages),
                    setting.schedule,
                    str(setting.microbatches),
                    setting.policy,
                    str(setting.batch),
                    f"{row.samples_per_second:.4g}" if known else "-",
                    f"{row.step_seconds * 1e3:.4g}" if known else "-",
                    f"{row.bubble:.0%}" if known else "-",
                    f"{row.reduction_seconds * 1e3:.3g}" if known else "-",
                    f"{max(row.peak_bytes) / 1e6:.4g}" if row.peak_bytes else "-",
                    "" if row.status == FITS else f"{row.status}: {row.why}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        if len(self.rows) > most:
            lines.append(f"... {len(self.rows) - most} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.explain()}"


def _row(data: dict[str, Any]) -> Row:
    setting = dict(data["setting"])
    for name in ("stash", "cuts", "order"):
        setting[name] = tuple(setting[name])
    return Row(**{**data, "setting": Setting(**setting), "peak_bytes": tuple(data["peak_bytes"])})


def _ratio(best: Row, other: Row) -> float:
    if best.target_seconds and other.target_seconds:
        return other.target_seconds / best.target_seconds
    return best.samples_per_second / other.samples_per_second


def _where_time_goes(row: Row) -> str:
    return (
        f"step {row.step_seconds * 1e3:.4g} ms: bubble {row.bubble:.0%}, "
        f"reduction {row.reduction_seconds * 1e3:.3g} ms"
    )


def _why_none(name: str, rows: Sequence[Row]) -> str:
    kinds = {
        "data parallelism alone": lambda s: s.stages == 1,
        "pipelines without BPipe": lambda s: s.stages > 1 and s.schedule != "bpipe",
        "pipelines with BPipe": lambda s: s.schedule == "bpipe",
    }
    tried = [row for row in rows if kinds[name](row.setting)]
    if not tried:
        return "none for so many devices and layers"
    reasons = sorted({f"{row.status}: {row.why}" for row in tried})
    return f"none fits ({reasons[0]})"
