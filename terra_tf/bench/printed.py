"""The numbers that a script printed, and whether two runs printed the same.

Co-execution promises eager's results to the last bit, so numbers are compared as they were
printed, by exact value and in order. `True` and `False` count as numbers, because a condition that
came out differently is a wrong result too. The words around the numbers do not decide, but the
first line where they differ is found as well.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

SHOWN_DIFFERENCES = 3

# Sequences by which terminals are told of colours and cursor movements.
_TERMINAL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# Numbers that stand alone: not the 2 of conv2d, not the .0 of version 2.21.0. Addresses, as in
# <object at 0x7f...>, match as a whole and are left out: they differ from process to process.
_NUMBER = re.compile(
    r"""
    (?<![\w.])
    (?: (?P<address> 0x[0-9a-f]+ )
      | (?P<number> [-+]? (?: \d+\.?\d* | \.\d+ ) (?: e[-+]?\d+ )? )
      | (?P<special> [-+]? (?: nan | inf(?:inity)? ) \b )
      | (?P<truth> (?: true | false ) \b )
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class PrintedNumber:
    """One number in a script's output.

    Attributes:
        text: as it was printed, in lower case.
        line: the index of its line.
        value: its exact value; None for what has none, such as `True`.
    """

    text: str
    line: int
    value: Decimal | None

    def agrees_with(self, other: PrintedNumber) -> bool:
        """Tells whether both are the same number: 0.5 and 0.50 are, 0.0 and -0.0 are not."""
        if self.text == other.text:
            return True
        if self.value is None or other.value is None:
            return False
        same_sign = self.value.is_signed() == other.value.is_signed()
        return same_sign and self.value == other.value

    def distance(self, other: PrintedNumber) -> float:
        """Returns the absolute difference; infinity where it cannot be told."""
        if self.value is None or other.value is None:
            return math.inf
        difference = abs(float(self.value) - float(other.value))
        return math.inf if math.isnan(difference) else difference


@dataclass(frozen=True)
class Difference:
    """A line of one run and its counterpart of the other run that differ.

    A side is None when that run printed nothing more to compare.
    """

    eager: str | None
    terra: str | None


@dataclass(frozen=True)
class Agreement:
    """How the numbers of an eager run and of a Terra run compare.

    Attributes:
        eager_count: how many numbers the eager run printed.
        terra_count: how many the Terra run printed.
        agreeing: how many agree, position by position.
        largest_difference: among the positions that both have; 0 when all of them agree.
        differences: the first lines whose numbers differ.
        words: the first lines that differ when numbers are left aside.
    """

    eager_count: int
    terra_count: int
    agreeing: int
    largest_difference: float
    differences: tuple[Difference, ...]
    words: Difference | None

    @property
    def total(self) -> int:
        """How many positions there are: the longer of both outputs."""
        return max(self.eager_count, self.terra_count)

    @property
    def complete(self) -> bool:
        """Whether both runs printed the same numbers."""
        return self.agreeing == self.total


def numbers_in(lines: Sequence[str], ignore: Sequence[re.Pattern[str]] = ()) -> list[PrintedNumber]:
    """Returns the numbers in a script's output, in order.

    Args:
        lines: the output.
        ignore: patterns; what they match is cut out of a line before numbers are looked for.
    """
    found = []
    for index, line in enumerate(lines):
        for match in _NUMBER.finditer(_compared_part(line, ignore)):
            if match["address"] is None:
                text = match[0].lower()
                found.append(PrintedNumber(text, index, _exact_value(text)))
    return found


def compare(
    eager_lines: Sequence[str],
    terra_lines: Sequence[str],
    ignore: Sequence[re.Pattern[str]] = (),
) -> Agreement:
    """Compares what an eager run and a Terra run of the same script printed."""
    eager = numbers_in(eager_lines, ignore)
    terra = numbers_in(terra_lines, ignore)
    common = list(zip(eager, terra, strict=False))
    differing = [(left, right) for left, right in common if not left.agrees_with(right)]
    agreeing = len(common) - len(differing)

    # Where one output is longer, its next number has no counterpart.
    pairs: list[tuple[PrintedNumber | None, PrintedNumber | None]] = list(differing)
    if len(eager) > len(common):
        pairs.append((eager[len(common)], None))
    if len(terra) > len(common):
        pairs.append((None, terra[len(common)]))
    shown = dict.fromkeys(
        (left.line if left else None, right.line if right else None) for left, right in pairs
    )
    return Agreement(
        eager_count=len(eager),
        terra_count=len(terra),
        agreeing=agreeing,
        largest_difference=max((left.distance(right) for left, right in differing), default=0.0),
        differences=tuple(
            Difference(
                None if left is None else eager_lines[left],
                None if right is None else terra_lines[right],
            )
            for left, right in list(shown)[:SHOWN_DIFFERENCES]
        ),
        words=_first_difference_in_words(eager_lines, terra_lines, ignore),
    )


def last_lines_with_numbers(
    lines: Sequence[str], count: int, ignore: Sequence[re.Pattern[str]] = ()
) -> list[str]:
    """Returns the last `count` lines that hold a number, in order."""
    found: list[str] = []
    for line in reversed(lines):
        if len(found) == count:
            break
        if numbers_in([line], ignore):
            found.append(line)
    return found[::-1]


def _compared_part(line: str, ignore: Sequence[re.Pattern[str]]) -> str:
    line = _TERMINAL_SEQUENCE.sub("", line)
    for pattern in ignore:
        line = pattern.sub(" ", line)
    return line


def _first_difference_in_words(
    eager_lines: Sequence[str], terra_lines: Sequence[str], ignore: Sequence[re.Pattern[str]]
) -> Difference | None:
    for eager, terra in itertools.zip_longest(eager_lines, terra_lines):
        words = [
            None if line is None else _NUMBER.sub("0", _compared_part(line, ignore)).split()
            for line in (eager, terra)
        ]
        if words[0] != words[1]:
            return Difference(eager, terra)
    return None


def _exact_value(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None
