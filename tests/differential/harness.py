"""Runs one row of the table eagerly and co-executed, and says what differs.

A *candidate* is what a program calls `terra`: `Eager` does nothing, `CoExecution` is the package.
`run` makes one run from a freshly seeded state and returns its `Record`; `compare` checks a record
against the eager one; `check` does both runs and adds the proof that co-execution took place.
"""

import contextlib
import dataclasses
import functools
import gc
import random
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from .capture import capture_output
from .observation import Leaf, differences, resolve, snapshot
from .table import Program

SEED = 20210
MOST_DIFFERENCES_SHOWN = 12
FAILS_BY_ITSELF = "the program itself fails in eager mode"


class Candidate(Protocol):
    """What a program may call; see `terra_tf` for the meaning."""

    iterations: int

    def function(self, fn: Callable | None = None, **options: Any) -> Callable: ...
    def iterate(self, iterable: Iterable) -> Iterable: ...
    def disable(self) -> contextlib.AbstractContextManager: ...
    def sync(self) -> None: ...


class Eager:
    """Plain eager TensorFlow: the oracle."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def function(self, fn: Callable | None = None, **options: Any) -> Callable:
        return (lambda decorated: decorated) if fn is None else fn

    def iterate(self, iterable: Iterable) -> Iterable:
        return iterable

    def disable(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def sync(self) -> None:
        """Eager execution has always finished."""

    def stats(self) -> None:
        """There is nothing to prove."""


class CoExecution:
    """The package under test, with the counters of all steps set to zero."""

    def __init__(self, iterations: int) -> None:
        # Imported late: the table's own tests must run where the package does not.
        import terra_tf

        self.iterations = iterations
        self.function = terra_tf.function
        self.iterate = terra_tf.iterate
        self.disable = terra_tf.disable
        self.sync = terra_tf.sync
        self._package = terra_tf
        terra_tf.stats().reset()

    def stats(self) -> dict[str, Any]:
        """The counters of all steps since this candidate was made."""
        self._package.sync()
        return dataclasses.asdict(self._package.stats())


# Name on the command line and between processes -> candidate.
CANDIDATES = {"eager": Eager, "terra": CoExecution}


@dataclasses.dataclass
class Record:
    """Everything that one run let a user see."""

    observations: list[dict[str, Leaf]]
    output: list[str]
    randomness: dict[str, Leaf]
    stats: dict[str, Any] | None
    seconds: float
    error: str | None = None


@dataclasses.dataclass
class Verdict:
    """The outcome of a row: it is right where `problems` is empty."""

    row: str
    problems: list[str]
    stats: dict[str, Any] | None
    eager_seconds: float
    seconds: float


def check(
    row: Program,
    candidate: str = "terra",
    *,
    read: str = "late",
    iterations: int | None = None,
    prove: bool = True,
) -> Verdict:
    """Runs a row eagerly and with a candidate.

    Args:
        row: The program.
        candidate: A key of `CANDIDATES`.
        read: "late" reads the yielded tensors when the program is over, "each" at every yield.
        iterations: Instead of the row's own number.
        prove: Whether the counters have to show what the row says of co-execution.

    Returns:
        What differs, and what the counters do not prove.
    """
    steps = iterations or row.iterations
    eager = run(row, Eager(steps))
    if eager.error:
        problem = f"{FAILS_BY_ITSELF}:\n{eager.error}"
        return Verdict(row.name, [problem], None, eager.seconds, 0.0)
    other = run(row, CANDIDATES[candidate](steps), read=read)
    problems = compare(eager, other, row.tolerance)
    if prove and other.stats is not None:
        problems += missing_proof(row, other.stats)
    return Verdict(row.name, problems, other.stats, eager.seconds, other.seconds)


def run(row: Program, candidate: Candidate, *, read: str = "late") -> Record:
    """Makes one run of a program from a seeded state."""
    _reset_state()
    record = Record([], [], {}, None, 0.0)
    started = time.perf_counter()
    with capture_output() as output:
        try:
            taken = []
            for value in row.build(candidate):
                parts = snapshot(value)
                taken.append(resolve(parts) if read == "each" else parts)
            record.randomness = resolve(snapshot(_draw_from_every_stream()))
            record.observations = [resolve(parts) for parts in taken]
            record.stats = candidate.stats()
        except Exception:
            record.error = traceback.format_exc()
    record.seconds = time.perf_counter() - started
    record.output = output.text.splitlines()
    return record


def compare(expected: Record, actual: Record, tolerance: float = 0.0) -> list[str]:
    """Says in which ways a run differs from the eager one."""
    if actual.error:
        return [f"raised, where eager does not:\n{actual.error}"]
    problems = []
    if len(actual.observations) != len(expected.observations):
        counts = len(expected.observations), len(actual.observations)
        problems.append("expected {} yields, got {}".format(*counts))
    for index, (one, other) in enumerate(
        zip(expected.observations, actual.observations, strict=False)
    ):
        found = differences(one, other, tolerance)
        problems += [f"yield {index}, {line}" for line in found]
    problems += _different_lines(expected.output, actual.output)
    found = differences(expected.randomness, actual.randomness)
    problems += [f"random stream afterwards {line}" for line in found]
    hidden = len(problems) - MOST_DIFFERENCES_SHOWN
    if hidden > 0:
        problems[MOST_DIFFERENCES_SHOWN:] = [f"... and {hidden} more differences"]
    return problems


def missing_proof(row: Program, stats: dict[str, Any]) -> list[str]:
    """Says what the counters should show for this row and do not."""
    problems = []
    coexecuted, fallen_back = stats["coexecuted"], stats["fallen_back"]
    if coexecuted < row.coexecuted:
        problems.append(f"expected at least {row.coexecuted} co-executed iterations: {coexecuted}")
    if not stats["traced"]:
        problems.append("no iteration was traced")
    if fallen_back < row.least_fallbacks:
        problems.append(f"expected at least {row.least_fallbacks} fallbacks: {fallen_back}")
    if row.most_fallbacks is not None and fallen_back > row.most_fallbacks:
        reasons = stats["fallback_reasons"]
        problems.append(
            f"expected at most {row.most_fallbacks} fallbacks: {fallen_back}, {reasons}"
        )
    return problems


def _reset_state() -> None:
    """Seeds every random stream and forgets what an earlier run left in TensorFlow and Keras."""
    _set_imported_modules_aside()
    gc.collect()
    tf.keras.backend.clear_session()
    # Python's, NumPy's, TensorFlow's and Keras's streams. TensorFlow also drops its cached
    # kernels, and with them the streams of ops that have a seed of their own.
    tf.keras.utils.set_random_seed(SEED)
    tf.random.set_global_generator(tf.random.Generator.from_seed(SEED))


@functools.cache
def _set_imported_modules_aside() -> None:
    """Keeps TensorFlow's own objects out of later collections, which take 0.3 s with them."""
    gc.collect()
    gc.freeze()


def _draw_from_every_stream() -> dict[str, Any]:
    """A draw tells where a stream stands, whatever its state looks like inside."""
    keras_random = getattr(tf.keras, "random", None)  # The legacy Keras has no such module.
    return {
        "of TensorFlow": tf.random.uniform([4]),
        "of an op with a seed": tf.random.uniform([4], seed=1),
        "of the global generator": tf.random.get_global_generator().uniform([4]),
        "of Keras": keras_random and keras_random.uniform([4]),
        "of a new Keras layer": tf.keras.layers.Dropout(0.5)(tf.ones([32]), training=True),
        "of NumPy": np.random.random(4),
        "of Python": [random.random() for _ in range(4)],
    }


def _different_lines(expected: list[str], actual: list[str]) -> list[str]:
    if expected == actual:
        return []
    pairs = zip(expected, actual, strict=False)
    same = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    index = min(len(expected), len(actual)) if same is None else same
    shown = [lines[index] if index < len(lines) else None for lines in (expected, actual)]
    counts = f"{len(expected)} lines expected, {len(actual)} printed"
    return [f"printed line {index}: expected {shown[0]!r}, got {shown[1]!r} ({counts})"]
