"""Cuts a program that differs down to what makes it differ.

Works on the syntax tree of any program's text, so it knows nothing of the grammar: it drops
statements, puts the body of a branch or loop in its place, and replaces expressions by parts of
them, for as long as `interesting` says that the smaller text still shows the same.
"""

import ast
import copy
import re
import time
from collections.abc import Callable, Iterator

from differential.harness import FAILS_BY_ITSELF, Verdict

_BODIES = ("body", "orelse", "finalbody")


def symptom(verdict: Verdict) -> str:
    """What kind of fault a verdict shows, in a word or two; "" for none of Terra's.

    A cut may turn one wrong value into another one, but not a crash into a wrong value.
    """
    if not verdict.problems:
        return ""
    first = verdict.problems[0]
    if first.startswith(FAILS_BY_ITSELF):
        return ""
    if first.startswith("raised, where eager does not"):
        error = first.strip().splitlines()[-1].partition(":")[0]
        raised = re.findall(r"^([\w.]*(?:Error|Exception|Planned))\b", first, re.M)
        return f"raised {raised[-1] if raised else error}"
    if first.startswith("the process"):
        return "hang" if "no answer" in first else "crash"
    return "other results"


def minimise(source: str, interesting: Callable[[str], bool], seconds: float) -> str:
    """The smallest text found.

    Args:
        source: A program that is interesting.
        interesting: Whether a smaller text still shows the fault.
        seconds: Time to stop after, with the smallest text until then.
    """
    deadline = time.monotonic() + seconds
    tree = ast.parse(source)
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        number = 0
        # A cut that succeeds moves the later ones forward: the same number is the next cut.
        while time.monotonic() < deadline and (smaller := _cut(tree, number)) is not None:
            if interesting(ast.unparse(smaller)):
                tree, progress = smaller, True
            else:
                number += 1
    return ast.unparse(tree)


def _cut(tree: ast.Module, number: int) -> ast.Module | None:
    """A copy of the tree with the cut of that number made; None where there are fewer cuts."""
    tree = copy.deepcopy(tree)
    for index, make in enumerate(_cuts(tree)):
        if index == number:
            make()
            return tree
    return None


def _cuts(tree: ast.Module) -> Iterator[Callable[[], None]]:
    """All cuts, the largest ones first."""
    nodes = list(ast.walk(tree))
    for node in nodes:
        for statements in _lists_of_statements(node):
            yield from _droppings(statements)
    for node in nodes:
        for statements in _lists_of_statements(node):
            for index, statement in enumerate(statements):
                for inner in _lists_of_statements(statement):
                    if not isinstance(statement, ast.FunctionDef):
                        yield _setter(statements, slice(index, index + 1), inner)
    for node in nodes:
        yield from _replacements(node)


def _lists_of_statements(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in _BODIES:
        # A lambda and a conditional expression have a `body` too, which is no list.
        if isinstance(getattr(node, name, None), list) and getattr(node, name):
            yield getattr(node, name)
    for handler in getattr(node, "handlers", []):
        yield handler.body


def _droppings(statements: list[ast.stmt]) -> Iterator[Callable[[], None]]:
    size = len(statements)
    while size:
        for start in range(0, len(statements), size):
            dropped = statements[start : start + size]
            if not all(isinstance(statement, ast.Pass) for statement in dropped):
                rest = [] if len(dropped) < len(statements) else [ast.Pass()]
                yield _setter(statements, slice(start, start + size), rest)
        size //= 2


def _replacements(node: ast.AST) -> Iterator[Callable[[], None]]:
    """Puts a part of an expression in its place, or a part of a list of inputs."""
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            for part in _parts(value):
                yield _field_setter(node, name, part)
        elif isinstance(value, list) and value and isinstance(value[0], ast.expr):
            for index, item in enumerate(value):
                for part in _parts(item):
                    yield _setter(value, slice(index, index + 1), [part])
                if isinstance(node, (ast.List, ast.BoolOp)) and len(value) > 1:
                    yield _setter(value, slice(index, index + 1), [])


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    if isinstance(value, ast.Call):
        parts = [*value.args, *(keyword.value for keyword in value.keywords)]
    elif isinstance(value, (ast.BinOp, ast.IfExp, ast.Subscript, ast.BoolOp, ast.Compare)):
        parts = list(ast.iter_child_nodes(value))
    else:
        return
    for part in parts:
        if isinstance(part, ast.expr) and not isinstance(part, (ast.Slice, ast.Lambda)):
            yield part


def _setter(items: list, where: slice, new: list) -> Callable[[], None]:
    def make() -> None:
        items[where] = new

    return make


def _field_setter(node: ast.AST, name: str, value: ast.expr) -> Callable[[], None]:
    return lambda: setattr(node, name, value)
