"""The table of programs: a row is a generator function with the decorator `@program`.

`load()` imports every module below `programs/`, so a new file there is found by itself.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Builder = Callable[[Any], Iterator[Any]]

# Name of a row -> the row.
_ROWS: dict[str, "Program"] = {}


@dataclass(frozen=True)
class Program:
    """One row: a program and what co-executing it must look like.

    Attributes:
        name: The builder's name; unique in the table.
        build: The generator function. Its argument is a candidate of `harness`.
        iterations: Steps to make.
        coexecuted: The least number of co-executed iterations.
        least_fallbacks: The least number of iterations that fall back.
        most_fallbacks: The most of them, or None where any number is right.
        tolerance: Relative and absolute tolerance of floating-point values; 0 is bit for bit.
        keras: "3", "2" (the legacy Keras), or "both" for a program that uses `tf.keras`.
    """

    name: str
    build: Builder
    iterations: int
    coexecuted: int
    least_fallbacks: int
    most_fallbacks: int | None
    tolerance: float
    keras: str

    @property
    def subject(self) -> str:
        """The first line of the builder's docstring."""
        return (self.build.__doc__ or "").strip().splitlines()[0]

    @property
    def module(self) -> str:
        """The file of `programs/` that holds the row."""
        return self.build.__module__.rpartition(".")[2]

    @property
    def generations(self) -> tuple[str, ...]:
        """The Keras generations that this row runs with."""
        return ("3", "2") if self.keras == "both" else (self.keras,)


def program(
    *,
    name: str | None = None,
    iterations: int = 12,
    coexecuted: int = 8,
    fallbacks: tuple[int, int | None] = (0, 0),
    tolerance: float = 0.0,
    keras: str = "3",
) -> Callable[[Builder], Builder]:
    """Adds the decorated generator function to the table; see `Program` for the arguments."""
    if keras not in ("2", "3", "both"):
        raise ValueError(f'keras is "2", "3" or "both", not {keras!r}')
    if coexecuted >= iterations:
        raise ValueError(f"{coexecuted} of {iterations} iterations: the first one is traced")

    def add(build: Builder) -> Builder:
        row = Program(
            name=name or build.__name__,
            build=build,
            iterations=iterations,
            coexecuted=coexecuted,
            least_fallbacks=fallbacks[0],
            most_fallbacks=fallbacks[1],
            tolerance=tolerance,
            keras=keras,
        )
        if row.name in _ROWS:
            raise ValueError(f"there are two programs called {row.name!r}")
        if not row.build.__doc__:
            raise ValueError(f"{row.name}: say in a docstring what the program is about")
        _ROWS[row.name] = row
        return build

    return add


def load() -> dict[str, Program]:
    """Imports all modules of `programs/`.

    Returns:
        The table, name -> row, in the order of files and of functions in them.
    """
    from . import programs

    for module in sorted(found.name for found in pkgutil.iter_modules(programs.__path__)):
        importlib.import_module(f"{programs.__name__}.{module}")
    return dict(_ROWS)
