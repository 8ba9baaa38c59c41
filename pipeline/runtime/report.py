"""What a pipeline tells about itself after a step: memory, bubble, transfers, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pipeline.runtime.step import StepResult


@dataclass
class Report:
    """This rank's figures; on rank 0, `str()` is a table over all ranks.

    Times are of the latest training step, peaks of all steps so far.

    Attributes:
        rank: this process.
        stage: its stage.
        replica: its replica of the pipeline.
        steps: training steps so far.
        peak_stash_count: the most stashes that were in this process at one moment.
        peak_stash_bytes: the most bytes of stashes that were.
        peak_lent_bytes: the most bytes of stashes that the partner had lent to this rank.
        step_seconds: from the beginning of a step to its reduced gradients.
        compute_seconds: the time in forward and backward passes.
        bubble: the share of the schedule's time in which this rank did not compute.
        transfer_seconds: the time that transfers took, overlapped or not.
        exposed_transfer_seconds: the part of it that computation waited for.
        transfer_cpu_seconds: processor time of the threads that move bytes.
        transport: what messages go over.
        rows: the same figures of all ranks, on rank 0.
    """

    rank: int = 0
    stage: int = 0
    replica: int = 0
    steps: int = 0
    peak_stash_count: int = 0
    peak_stash_bytes: int = 0
    peak_lent_bytes: int = 0
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    bubble: float = 0.0
    transfer_seconds: float = 0.0
    exposed_transfer_seconds: float = 0.0
    transfer_cpu_seconds: float = 0.0
    transport: str = ""
    rows: list[Report] = field(default_factory=list, repr=False)

    def enter(self, result: StepResult, seconds: float, cpu_seconds: float) -> None:
        """Takes in a training step.

        Args:
            result: of the executor.
            seconds: that the schedule took.
            cpu_seconds: of the transport's threads, since the last step.
        """
        self.steps += 1
        self.peak_stash_count = max(self.peak_stash_count, result.peak.count)
        self.peak_stash_bytes = max(self.peak_stash_bytes, result.peak.bytes)
        self.peak_lent_bytes = max(self.peak_lent_bytes, result.peak.lent_bytes)
        self.compute_seconds = result.compute_seconds
        self.bubble = max(0.0, 1.0 - result.compute_seconds / seconds) if seconds else 0.0
        self.transfer_seconds = result.transfer_seconds
        self.exposed_transfer_seconds = result.exposed
        self.transfer_cpu_seconds = cpu_seconds

    def numbers(self) -> list[float]:
        """The figures as ranks send them to each other."""
        return [float(getattr(self, name)) for name in _NUMBERS]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float], transport: str) -> Report:
        """The inverse of `numbers`."""
        kinds = {f.name: f.type for f in fields(cls)}
        values = {
            name: int(number) if kinds[name] == "int" else float(number)
            for name, number in zip(_NUMBERS, numbers, strict=True)
        }
        return cls(**values, transport=transport)

    def __str__(self) -> str:
        rows = self.rows or [self]
        heads = ["rank", "stage", "replica", "stashes", "stash MB", "lent MB"]
        heads += ["step ms", "compute ms", "bubble", "transfer ms", "exposed ms", "transport"]
        lines = [heads]
        for row in rows:
            lines.append(
                [
                    str(row.rank),
                    str(row.stage),
                    str(row.replica),
                    str(row.peak_stash_count),
                    f"{row.peak_stash_bytes / 1e6:.2f}",
                    f"{row.peak_lent_bytes / 1e6:.2f}",
                    f"{row.step_seconds * 1e3:.1f}",
                    f"{row.compute_seconds * 1e3:.1f}",
                    f"{row.bubble:.0%}",
                    f"{row.transfer_seconds * 1e3:.1f}",
                    f"{row.exposed_transfer_seconds * 1e3:.1f}",
                    row.transport,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


_NUMBERS = [f.name for f in fields(Report) if f.name not in ("transport", "rows")]
