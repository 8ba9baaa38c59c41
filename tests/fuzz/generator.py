"""Makes the source text of a program from a seed, by filling in the templates of `grammar`.

A scope knows the names that the text may use at one point, by type. It is copied for every nested
block, so that what only one branch defines is not used after it; a block may give a name that was
there before another value, so that paths meet again with values of their own.
"""

import random
import re
import textwrap
from dataclasses import dataclass, field

from . import grammar

ITERATIONS = 12  # steps of a program, unless the caller says otherwise
_PLACEHOLDER = re.compile(r"\$(?:(new|old):)?(\w+)")
_MOST_NESTED = 3  # blocks
_DEEPEST = 3  # expressions
_REUSE = 0.5  # of a name rather than another expression, where there is one
# How the caller and its step belong together.
_FORMS = 6 * ["function"] + 2 * ["iterate"] + ["two", "failing"]


@dataclass
class _Scope:
    """What may be written at one point of the text."""

    names: dict[str, list[str]] = field(default_factory=dict)  # type -> names, oldest first
    result: str = "result"  # type that the function in progress returns; "" where it must not
    in_loop: bool = False  # whether `break` and `continue` are possible
    loops: int = 0  # loops around this point
    nested: int = 0  # blocks around this point

    def inner(self, **changes: object) -> "_Scope":
        """The scope of a block in this one."""
        names = {kind: list(names) for kind, names in self.names.items()}
        inner = _Scope(names, self.result, self.in_loop, self.loops, self.nested + 1)
        for name, value in changes.items():
            setattr(inner, name, value)
        return inner

    def add(self, kind: str, name: str) -> None:
        self.names.setdefault(kind, []).append(name)


def generate(seed: int, iterations: int = ITERATIONS) -> str:
    """The source text of a program; equal seeds make equal texts."""
    return _Generator(seed, iterations).program()


class _Generator:
    def __init__(self, seed: int, iterations: int) -> None:
        self._seed = seed
        self._iterations = iterations
        self._random = random.Random(f"fuzz {seed}")
        self._budget = self._random.randint(4, 26)  # statements
        self._made = 0  # names
        # Most programs vary little from step to step, since what never repeats never co-executes.
        self._steadiness = self._random.choice([0.0, 0.7, 0.9, 0.97])
        self._calls: dict[str, list[str]] = {}  # type -> expressions that call helpers

    # --- the program ---

    def program(self) -> str:
        """The whole text."""
        form = self._random.choice(_FORMS)
        body = [self._helper(helper) for helper in self._some(grammar.HELPERS, 2)]
        body += [
            self._step(name, form) for name in (["step", "other"] if form == "two" else ["step"])
        ]
        body.append(self._caller(form))
        text = "\n".join(body)
        keras_parts = any(name in text for name in grammar.KERAS)
        lines = [
            f'"""Fuzzed program {self._seed}."""',
            "import random, sys",
            "import numpy as np",
            "import tensorflow as tf",
            "from fuzz.state import Planned, State, batches",
            f"SETTINGS = {self._settings()}",
            "def program(terra):",
            f"    s = State({self._seed}, keras_parts={keras_parts})",
            textwrap.indent(text, "    "),
        ]
        return "\n".join(lines) + "\n"

    def _step(self, name: str, form: str) -> str:
        scope = _Scope()
        scope.add("batch", "x")
        block = self._block(scope, at_least=self._budget // (2 if form == "two" else 1))
        result = self._expression("result", scope)
        if form == "failing":
            # The last op fails where nobody sees it: the caller learns of it when it waits.
            result = "tf.gather(x, s.count + s.turn % 5)"
        lines = [f"def {name}(x):", textwrap.indent(block, "    "), f"    return {result}"]
        if form != "iterate":
            lines.insert(0, "@terra.function" + self._random.choice(["", "", "(max_graphs=2)"]))
        return "\n".join(lines)

    def _caller(self, form: str) -> str:
        inputs, call, errors = self._inputs(), ["yield step(x)"], "Planned"
        if form == "iterate":
            inputs = f"terra.iterate({inputs})"
        elif form == "two":
            call = ["yield step(x) if s.turn % 2 else other(x)", "yield other(x)"]
        elif form == "failing":
            call = ["result = step(x)", "terra.sync()", "yield result"]
            errors = "(Planned, tf.errors.OpError)"
        lines = [f"for s.turn, x in enumerate({inputs}):", "    try:"]
        lines += [f"        {line}" for line in call]
        lines += [f"    except {errors} as error:", "        yield error"]
        lines += [f"    {line}" for line in self._some(grammar.BETWEEN, 2)]
        return "\n".join([*lines, "yield s.everything()"])

    def _settings(self) -> dict[str, int]:
        """Terra's settings and the harness's: more graphs, other orders of events."""
        return {
            "build_after": self._random.choice([1, 1, 2]),
            "lead": self._random.choice([0, 1, 1, 2]),
            "read_each": self._random.random() < 0.3,
        }

    def _inputs(self) -> str:
        turns = range(self._iterations)
        kind = self._random.random()
        if kind < 0.5:
            sizes = [self._random.randint(1, 6)] * len(turns)
        elif kind < 0.7:  # a ragged last batch, again and again
            sizes = [3 if turn % 4 == 3 else 5 for turn in turns]
        else:
            sizes = [self._random.randint(1, 6) for _ in turns]
        return f"batches({self._seed}, {sizes})"

    def _helper(self, helper: tuple[str, dict[str, str], str]) -> str:
        template, parameters, result = helper
        # A generator may only return nothing.
        scope = _Scope(result="" if result == "list" else result, nested=1)
        for name, kind in parameters.items():
            scope.add(kind, name)
        text = self._fill(template, scope)
        kind, call = grammar.CALLS[re.match(r"def (\w+)", template)[1]]
        self._calls.setdefault(kind, []).append(call)
        return text

    # --- statements ---

    def _block(self, scope: _Scope, at_least: int = 1) -> str:
        wanted = max(at_least, self._random.choice([1, 1, 2, 2, 3]))
        lines = []
        while wanted > 0 and (self._budget > 0 or not lines):
            self._budget -= 1
            wanted -= 1
            lines.append(self._fill(self._template(scope), scope))
        return "\n".join(lines)

    def _template(self, scope: _Scope) -> str:
        while True:
            text = self._weighted(self._table(scope))
            if _names_needed(text) <= scope.names.keys():
                return text

    def _table(self, scope: _Scope) -> list[tuple[int, str]]:
        kind = self._random.random()
        if scope.in_loop and kind < 0.12:
            return grammar.IN_LOOPS
        if scope.result and scope.nested and kind < 0.17:
            return grammar.LEAVING
        if scope.nested < _MOST_NESTED and self._budget > 0:
            if kind < 0.25 and scope.loops < 2:
                return grammar.LOOPS
            if kind < 0.45:
                return grammar.COMPOUND
        return grammar.SIMPLE

    def _fill(self, template: str, scope: _Scope) -> str:
        """The template as text; what it defines for good is added to the scope."""
        local = scope.inner(nested=scope.nested)
        aliases: list[str] = []
        lines = []
        for line in template.split("\n"):
            text, defined = self._fill_line(line, local, aliases)
            lines.append(text)
            # Only what stands at the margin has certainly been executed by the end.
            certain = not line.startswith(" ") and not line.endswith(":")
            for kind, name in defined:
                local.add(kind, name)
                if certain:
                    scope.add(kind, name)
        return "\n".join(lines)

    def _fill_line(
        self, line: str, scope: _Scope, aliases: list[str]
    ) -> tuple[str, list[tuple[str, str]]]:
        """The line as text, and the (type, name) of what it defines, for the lines after it."""
        content = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if content in ("$block", "$body", "$risky", "$handler"):
            return textwrap.indent(self._statements(content[1:], scope), indent), []
        defined: list[tuple[str, str]] = []

        def fill(match: re.Match) -> str:
            how, what = match.groups()
            if how == "new":
                self._made += 1
                aliases.append(f"{what}{self._made}")
                defined.append((what, aliases[-1]))
                return aliases[-1]
            if how == "old":
                aliases.append(self._random.choice(scope.names[what]))
                return aliases[-1]
            if what.isdigit():
                return aliases[int(what) - 1]
            kind = scope.result if what == "result" else what
            return self._literal(kind) or self._expression(kind, scope)

        return indent + _PLACEHOLDER.sub(fill, content), defined

    def _statements(self, what: str, scope: _Scope) -> str:
        if what == "handler":
            return self._random.choice(grammar.HANDLERS)
        if what == "risky":
            possible = [row for row in grammar.RISKY if _names_needed(row[1]) <= scope.names.keys()]
            return self._fill(self._weighted(possible), scope)
        if what == "body":
            return self._block(scope.inner(in_loop=True, loops=scope.loops + 1))
        return self._block(scope.inner())

    # --- expressions ---

    def _expression(self, kind: str, scope: _Scope, depth: int = _DEEPEST) -> str:
        names = scope.names.get(kind, [])
        if names and (depth == 0 or self._random.random() < _REUSE):
            # Recent names are likelier, so that values flow through the program.
            return self._random.choice(names[-3:])
        if kind in grammar.STEADY and self._random.random() < self._steadiness:
            return self._random.choice(grammar.STEADY[kind])
        deep = grammar.EXPRESSIONS.get(kind, []) + self._calls.get(kind, [])
        leaves = grammar.LEAVES.get(kind, [])
        if leaves and (depth == 0 or not deep or self._random.random() < 0.3):
            text = self._random.choice(leaves)
        else:
            text = self._random.choice(deep)
        return _PLACEHOLDER.sub(
            lambda m: self._literal(m[2]) or self._expression(m[2], scope, max(depth - 1, 0)), text
        )

    def _literal(self, what: str) -> str:
        if what == "p":
            return str(self._random.choice([0.1, 0.3, 0.5, 0.5, 0.9]))
        if what == "c":
            return str(self._random.choice([-1.0, -0.3, 0.0, 0.2, 0.5, 1.5]))
        if what == "n":
            return str(self._random.randint(0, 4))
        return grammar.ERRORS if what == "errors" else ""

    # --- choices ---

    def _weighted(self, table: list[tuple[int, str]]) -> str:
        return self._random.choices([text for _, text in table], [weight for weight, _ in table])[0]

    def _some(self, table: list, most: int) -> list:
        count = self._random.choice([0] + list(range(most + 1)))
        return self._random.sample(table, count)


def _names_needed(template: str) -> set[str]:
    """The types of which names have to exist already."""
    return set(re.findall(r"\$old:(\w+)", template))
