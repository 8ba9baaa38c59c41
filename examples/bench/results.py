"""What a run of the benchmark comes to, as data that can be kept in a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from .modes import EAGER


@dataclasses.dataclass
class ModeResult:
    """One program in one mode.

    Attributes:
        ms: "1", "10" (the loss is read every so many steps) -> milliseconds of a step; the median
            over the rounds.
        failed: what went wrong, if the mode cannot run the program.
        good: whether its results are as equal to eager's as they have to be.
        verdict: how they compare with eager's, in words.
        difference: the largest difference of a loss of the warm-up, relative to eager's.
        coexecuted: their share of the timed iterations; Terra only.
        first_coexecuted: the number of the first such iteration, from 1 on; Terra only.
        graphs: how many graphs were generated or traced.
        graph_seconds: what generating or tracing them took, without TensorFlow's own compilation.
        first_call_seconds: what the first call took.
        fallbacks: reason code -> count; Terra only.
        peak_mb: the most memory that a process of its own held, in 10^6 bytes; None: not measured.
        training_mb: how much of that training added to the built model.
    """

    ms: dict[str, float] = dataclasses.field(default_factory=dict)
    failed: str | None = None
    good: bool = True
    verdict: str = ""
    difference: float = 0.0
    coexecuted: float | None = None
    first_coexecuted: int | None = None
    graphs: int = 0
    graph_seconds: float = 0.0
    first_call_seconds: float = 0.0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    peak_mb: float | None = None
    training_mb: float | None = None


@dataclasses.dataclass
class ProgramResult:
    """One program in all modes.

    Attributes:
        name: what `--programs` calls it.
        title: what the table calls it.
        group: "paper" or "micro".
        modes: mode -> its result.
    """

    name: str
    title: str
    group: str
    modes: dict[str, ModeResult]

    def ms(self, mode: str, every: str) -> float | None:
        """Milliseconds of a step, if the mode ran."""
        result = self.modes.get(mode)
        return result.ms.get(every) if result is not None and result.failed is None else None

    def speed(self, mode: str, every: str, base: str = EAGER) -> float | None:
        """How many times as fast as `base` a mode is, if both ran."""
        ours, theirs = self.ms(mode, every), self.ms(base, every)
        return theirs / ours if ours and theirs else None


@dataclasses.dataclass
class Results:
    """A whole run.

    Attributes:
        conditions: how the programs were run, in words.
        read_every: the variants, as in `ModeResult.ms`.
        programs: in the order of the table.
    """

    conditions: str
    read_every: list[str]
    programs: list[ProgramResult]

    def modes(self) -> list[str]:
        """The modes of any program, in order."""
        return list(dict.fromkeys(mode for program in self.programs for mode in program.modes))

    def save(self, path: Path) -> None:
        """Writes JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            programs = [
                ProgramResult(
                    **{
                        **program,
                        "modes": {m: ModeResult(**r) for m, r in program["modes"].items()},
                    }
                )
                for program in content["programs"]
            ]
            return cls(content["conditions"], content["read_every"], programs)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of this benchmark: {error}") from error
