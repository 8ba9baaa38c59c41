"""Finds out whether the user's program could handle an error of the op it is calling.

An op that may fail inside a `try` (or a `with` whose exit could swallow an exception) has to fail
where the handler is, so it is run in place. What counts are the user's frames between the op and
the region; which of their lines lie in such a block is read from their source, once per file. Where
there is no source, an op counts as handled, which is always right.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType

from terra_tf.tracing.location import is_users

# Context managers that never swallow an exception.
_HARMLESS_NAMES = """
ForwardAccumulator GradientTape Lock Profile StringIO Trace as_default control_dependencies
device disable experimental_mode init_scope lock name_scope open record_if scope stop_recording
suspend variable_creator_scope
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """Where the loop is whose body is a region: the code around it, and its line there."""

    code: CodeType
    line: int


def may_be_handled(loop: Loop | None) -> bool:
    """Whether an exception raised by the call in progress could be caught inside the region.

    Args:
      loop: where the region's loop is, if it is the body of one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _API and code.co_name == "__call__":
            return False
        if loop is not None and code is loop.code:
            return _in_block(code.co_filename, frame.f_lineno, outside=loop.line)
        users = is_users(code.co_filename)
        if users and _has_blocks(code) and _in_block(code.co_filename, frame.f_lineno):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _has_blocks(code: CodeType) -> bool:
    """Whether the code has any `try` or `with` at all; no source is needed for that."""
    if sys.version_info >= (3, 11):
        return bool(code.co_exceptiontable)
    return any(i.opname in ("SETUP_FINALLY", "SETUP_WITH") for i in dis.get_instructions(code))


def _in_block(filename: str, line: int, outside: int = 0) -> bool:
    """Whether a line is in such a block, of those that do not also hold the line `outside`."""
    blocks = _blocks(filename)
    if blocks is None:
        return True
    return any(first <= line <= last and not first <= outside <= last for first, last in blocks)


@functools.lru_cache(maxsize=256)
def _blocks(filename: str) -> tuple[tuple[int, int], ...] | None:
    """Line ranges of the blocks whose exceptions may be caught; None if there is no source."""
    source = "".join(linecache.getlines(filename))
    if not source:
        return None
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    found = []
    for node in ast.walk(tree):
        # `finally` alone runs code of the user's, too.
        unknown_with = isinstance(node, ast.With) and not all(map(_is_harmless, node.items))
        if isinstance(node, ast.Try) or unknown_with:
            found.append((node.body[0].lineno, node.body[-1].end_lineno or node.lineno))
    return tuple(found)


def _is_harmless(item: ast.withitem) -> bool:
    expression = item.context_expr
    if isinstance(expression, ast.Call):
        expression = expression.func
    if isinstance(expression, ast.Attribute):
        return expression.attr in _HARMLESS
    return isinstance(expression, ast.Name) and expression.id in _HARMLESS


_API = str(Path(__file__).parent.parent / "api.py")
