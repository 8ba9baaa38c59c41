"""Trains one program in all modes by turns, in one process, and times it.

Each mode first trains for the program's warm-up, time for `tf.function` to trace, and for Terra to
trace, to generate its graphs and to judge whether co-execution pays. Then come rounds; in each,
every mode trains for one block of steps per variant (the loss is read every step, every 10 steps),
and the next round begins with another mode. So what slows the machine for a while slows all modes,
and no mode always has the same place.
"""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np

import terra_tf as terra

from .modes import EAGER, TF_FUNCTION, wrap
from .programs import Program
from .results import ModeResult

SEED = 1


@dataclass
class Run:
    """What a mode of a program computed.

    Attributes:
        result: its times and counts.
        losses: those that were read, in order, the warm-up's first.
        state: the values of all variables at the end.
        printed: the lines that the program printed.
    """

    result: ModeResult
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    state: list[np.ndarray] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)


class Trainer:
    """The model of one mode, in training."""

    def __init__(self, program: Program, mode: str) -> None:
        keras.utils.set_random_seed(SEED)
        self.training = program.build()
        self.result = ModeResult()
        self._program = program
        self._mode = mode
        self._tracing: list[float] = []
        self.step = wrap(mode, self.training.step, self._tracing)
        self._printed = io.StringIO()
        self._steps_done = 0
        self._losses: list[float] = []
        self._block_seconds: dict[int, list[float]] = {}  # read every so many steps -> of a step
        self._coexecuted_before = 0
        self._timed_steps = 0

    def warm_up(self) -> None:
        """Trains until the mode has got going."""
        self._guarded(self._warm_up)

    def time_block(self, steps: int, every: int) -> None:
        """Trains for some steps and notes how long a step took."""
        gc.collect()  # garbage of the other modes is not to be paid here
        seconds = self._guarded(lambda: self._train(steps, every))
        if seconds is not None:
            self._block_seconds.setdefault(every, []).append(seconds / steps)
            self._timed_steps += steps

    def _guarded(self, work: Callable[[], float | None]) -> float | None:
        """Does some work, unless the mode has failed; only eager mode may not."""
        if self.result.failed is not None:
            return None
        try:
            with contextlib.redirect_stdout(self._printed):
                return work()
        except Exception as error:
            if self._mode == EAGER:
                raise
            self.result.failed = _first_line(error)
            return None

    def _warm_up(self) -> None:
        self.result.first_call_seconds = self._train(1, 1)
        for number in range(2, self._program.warm_up + 1):
            self._train(1, 1)
            if self.result.first_coexecuted is None and self._stats().coexecuted:
                self.result.first_coexecuted = number
        self._coexecuted_before = self._stats().coexecuted

    def _train(self, steps: int, every: int) -> float:
        batches, losses, step = self.training.batches, self._losses, self.step
        read = True
        start = time.perf_counter()
        for number in range(self._steps_done, self._steps_done + steps):
            loss = step(*batches[number % len(batches)])
            read = (number + 1 - self._steps_done) % every == 0
            if read:
                losses.append(float(loss))
        terra.sync()  # the block ends when all its work is done
        seconds = time.perf_counter() - start
        self._steps_done += steps
        if not read:
            losses.append(float(loss))  # each block gives at least one loss to compare
        return seconds

    def state(self) -> list[np.ndarray]:
        """Returns the values of all variables."""
        return [np.array(variable.numpy()) for variable in self.training.variables()]

    def _stats(self) -> terra.Stats:
        return self.step.stats() if isinstance(self.step, terra.Step) else terra.Stats()

    def run(self) -> Run:
        """Sums the training up."""
        result = self.result
        result.ms = {
            str(every): 1000 * statistics.median(seconds)
            for every, seconds in self._block_seconds.items()
        }
        if isinstance(self.step, terra.Step):
            stats = self._stats()
            timed = max(self._timed_steps, 1)
            result.coexecuted = (stats.coexecuted - self._coexecuted_before) / timed
            result.graphs, result.graph_seconds = stats.graphs, stats.build_seconds
            result.fallbacks = dict(stats.fallback_reasons)
        elif self._mode == TF_FUNCTION:
            result.graphs, result.graph_seconds = len(self._tracing), sum(self._tracing)
        printed = self._printed.getvalue().splitlines()
        return Run(result, np.array(self._losses), self.state(), printed)


def _first_line(error: Exception) -> str:
    """The type of an error and what it says, without the traceback that AutoGraph puts in."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(type(error).__name__ + ":")]
    if told:
        return told[-1]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def measure(
    program: Program,
    modes: Sequence[str],
    rounds: int,
    steps: int,
    read_every: Sequence[int],
    done: Callable[[str], None],
) -> dict[str, Run]:
    """Trains and times a program in all modes.

    Args:
        program: which one.
        modes: which modes.
        rounds: how many blocks each mode is timed for in each variant; 0: warm-up only.
        steps: how many steps a block has.
        read_every: the variants: after how many steps the loss is read.
        done: called before each block, `blocks(...)` times, with what comes next.

    Returns:
        Mode -> what it came to.

    Raises:
        RuntimeError: the modes did not start from equal models.
    """
    trainers = {mode: Trainer(program, mode) for mode in modes}
    _check_start(program, trainers)
    for mode, trainer in trainers.items():
        done(f"{mode}, warm-up")
        trainer.warm_up()
    modes = list(modes)
    for round_number in range(rounds):
        first = round_number % len(modes)
        for every in read_every:
            for mode in modes[first:] + modes[:first]:
                done(f"{mode}, round {round_number + 1} of {rounds}")
                trainers[mode].time_block(steps, every)
    return {mode: trainer.run() for mode, trainer in trainers.items()}


def blocks(modes: Sequence[str], rounds: int, read_every: Sequence[int]) -> int:
    """Returns how many blocks `measure` trains, the warm-up of each mode included."""
    return len(modes) * (rounds * len(read_every) + 1)


def _check_start(program: Program, trainers: dict[str, Trainer]) -> None:
    """Makes sure that all modes begin with the same values."""
    first, *others = (trainer.state() for trainer in trainers.values())
    for other in others:
        same = [a.tobytes() == b.tobytes() for a, b in zip(first, other, strict=True)]
        if not all(same):
            raise RuntimeError(f"{program.name}: the modes start from different values")
