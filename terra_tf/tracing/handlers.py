"""Finds out whether the user's program could handle an error of the op it is calling.

An op that may fail inside a `try` (or a `with` whose exit could swallow an exception) has to fail
where the handler is, so it is run in place. What counts are the user's frames between the op and
the region; which of their lines lie in such a block is read from their source, once per file. Where
there is no source (standard input, `exec`), their code's table of exceptions tells, from Python
3.11 on; before, an op counts as handled, which is always right.
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
            return _in_block(frame, outside=loop.line)
        if is_users(code.co_filename) and _has_blocks(code) and _in_block(frame):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _has_blocks(code: CodeType) -> bool:
    """Whether the code has any `try` or `with` at all; no source is needed for that."""
    if sys.version_info >= (3, 11):
        return bool(code.co_exceptiontable)
    return any(i.opname in ("SETUP_FINALLY", "SETUP_WITH") for i in dis.get_instructions(code))


def _in_block(frame: FrameType, outside: int = 0) -> bool:
    """Whether a frame is in such a block, of those that do not also hold the line `outside`."""
    code, line = frame.f_code, frame.f_lineno
    blocks = _blocks(code.co_filename)
    if blocks is not None:
        return any(first <= line <= last and not first <= outside <= last for first, last in blocks)
    handlers = _handlers(code)
    if handlers is None:
        return True
    none: frozenset[int] = frozenset()
    loops = [start for start, _, at in code.co_lines() if at == outside]
    around = none.union(*(handlers.get(start, none) for start in loops))
    return not handlers.get(frame.f_lasti, none) <= around


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


# --- without source -------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _handlers(code: CodeType) -> dict[int, frozenset[int]] | None:
    """For each instruction, which ones may handle its error; None if the code does not tell."""
    if sys.version_info < (3, 11):
        return None
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP")]
    at = {instruction.offset: number for number, instruction in enumerate(instructions)}
    bodies: dict[int, int] = {}  # handler -> where what it handles begins
    innermost: dict[int, int] = {}  # instruction -> handler
    for entry in dis.Bytecode(code).exception_entries:
        bodies.setdefault(entry.target, entry.start)
        innermost.update(dict.fromkeys(range(entry.start, entry.end), entry.target))
    counting = set()
    for handler, begin in bodies.items():
        first, second = instructions[at[handler] : at[handler] + 2]
        before = [i for i in instructions if i.offset < begin]
        harmless = second.opname == "WITH_EXCEPT_START" and _enters_harmless(before)
        # The others only clean up.
        if first.opname == "PUSH_EXC_INFO" and not harmless:
            counting.add(handler)
    found = {}
    for offset in innermost:
        handler, chain = innermost.get(offset), set()
        while handler is not None and handler not in chain:  # what is around it handles the rest
            chain.add(handler)
            handler = innermost.get(handler)
        found[offset] = frozenset(chain & counting)
    return found


def _enters_harmless(before: list[dis.Instruction]) -> bool:
    """Whether the context manager that the last of these instructions enters is a harmless one."""
    if before[-1].opname != "BEFORE_WITH":
        return False
    start, depth = len(before) - 1, 0
    while depth < 1:  # back to where its expression begins
        start -= 1
        if start < 0 or before[start].opcode in dis.hasjrel or before[start].opcode in dis.hasjabs:
            return False
        depth += dis.stack_effect(before[start].opcode, before[start].arg)
    expression, names = before[start:-1], []
    depth, is_name = 0, True
    for number, instruction in enumerate(expression):
        depth += dis.stack_effect(instruction.opcode, instruction.arg)
        if instruction.opname == "PUSH_NULL":
            continue
        is_name = is_name and instruction.opname in (_ATTRIBUTES if names else _LOADS)
        if is_name:
            names.append(instruction.argval)
        elif depth <= 1 and number < len(expression) - 1:
            return False  # what was called so far only gives what is entered, or something of it
    return bool(names) and names[-1] in _HARMLESS


_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


_API = str(Path(__file__).parent.parent / "api.py")
