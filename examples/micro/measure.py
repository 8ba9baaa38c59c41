"""Trains one program in all modes by turns, in one process, and times it.

Each mode first trains for `WARM_UP` steps, time for `tf.function` to trace, and for Terra to trace,
to generate its graph and to judge whether co-execution pays. Then come rounds; in each, every mode
trains for a block of steps, and the next round begins with another mode. So what slows the machine
for a while slows all modes, and no mode always has the same place.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

import terra_tf as terra

from .programs import Program

SEED = 1
WARM_UP = 30

EAGER, TERRA, TF_FUNCTION = "eager", "Terra", "tf.function"
MODES: dict[str, Callable] = {
    EAGER: lambda step: step,
    TERRA: terra.function,
    TF_FUNCTION: tf.function,
}


@dataclass(frozen=True)
class Result:
    """What one mode of a program came to.

    Attributes:
        step_seconds: of a step; the median of the rounds.
        losses: those that were read, in order, the warm-up included.
        state: the values of all variables at the end.
        coexecuted: how many iterations ran through as co-executed; Terra only.
        coexecuted_share: their share of the timed iterations.
        fallback_reasons: code -> count since the start; Terra only.
    """

    step_seconds: float
    losses: np.ndarray
    state: list[np.ndarray]
    coexecuted: int = 0
    coexecuted_share: float = 0.0
    fallback_reasons: dict[str, int] | None = None


class Trainer:
    """The model of one mode, in training."""

    def __init__(self, program: Program, mode: str, read_every: int) -> None:
        keras.utils.set_random_seed(SEED)
        self.training = program.build()
        self.step = MODES[mode](self.training.step)
        self._read_every = read_every
        self._steps_done = 0
        self._losses: list[float] = []
        self._block_seconds: list[float] = []  # of one step, a number a round
        self._coexecuted_before = 0
        self._timed_steps = 0

    def warm_up(self) -> None:
        """Trains until the mode has got going."""
        self._train(WARM_UP)
        self._coexecuted_before = self._stats().coexecuted

    def time_block(self, steps: int) -> None:
        """Trains for some steps and notes how long a step took."""
        gc.collect()  # garbage of the other modes is not to be paid here
        self._block_seconds.append(self._train(steps) / steps)
        self._timed_steps += steps

    def _train(self, steps: int) -> float:
        batches, losses, step = self.training.batches, self._losses, self.step
        read = True
        start = time.perf_counter()
        for number in range(self._steps_done, self._steps_done + steps):
            x, y = batches[number % len(batches)]
            loss = step(x, y)
            read = (number + 1) % self._read_every == 0
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
        return [np.array(variable.numpy()) for variable in self.training.state()]

    def _stats(self) -> terra.Stats:
        return self.step.stats() if isinstance(self.step, terra.Step) else terra.Stats()

    def result(self) -> Result:
        """Sums the training up."""
        stats = self._stats()
        return Result(
            step_seconds=statistics.median(self._block_seconds),
            losses=np.array(self._losses),
            state=self.state(),
            coexecuted=stats.coexecuted,
            coexecuted_share=(stats.coexecuted - self._coexecuted_before) / self._timed_steps,
            fallback_reasons=stats.fallback_reasons,
        )


def measure(
    program: Program, rounds: int, steps: int, read_every: int, done: Callable[[str], None]
) -> dict[str, Result]:
    """Trains and times a program in all modes.

    Args:
        program: which one.
        rounds: how many blocks each mode is timed for.
        steps: how many steps a block has.
        read_every: after how many steps the loss is read.
        done: called after each block, `blocks(rounds)` times, with what comes next.

    Returns:
        The result of each mode.

    Raises:
        RuntimeError: the modes did not start from equal models.
    """
    trainers = {mode: Trainer(program, mode, read_every) for mode in MODES}
    _check_start(program, trainers)
    for mode, trainer in trainers.items():
        done(f"{mode}, warm-up")
        trainer.warm_up()
    modes = list(MODES)
    for round_number in range(rounds):
        first = round_number % len(modes)
        for mode in modes[first:] + modes[:first]:
            done(f"{mode}, round {round_number + 1} of {rounds}")
            trainers[mode].time_block(steps)
    return {mode: trainer.result() for mode, trainer in trainers.items()}


def blocks(rounds: int) -> int:
    """Returns how many blocks `measure` trains, the warm-up of each mode included."""
    return len(MODES) * (rounds + 1)


def _check_start(program: Program, trainers: dict[str, Trainer]) -> None:
    """Makes sure that all modes begin with the same values."""
    first, *others = (trainer.state() for trainer in trainers.values())
    for other in others:
        same = [a.tobytes() == b.tobytes() for a, b in zip(first, other, strict=True)]
        if not all(same):
            raise RuntimeError(f"{program.name}: the modes start from different values")
