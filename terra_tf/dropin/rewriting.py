"""Finds the loops in a program's text whose turns may be iterations, and has them watched.

Only the syntax tree changes, and only as `loops` shows; every line and column stays what it is, so
that tracebacks, warnings, debuggers and `inspect` see the program as it was written. A Site gets
into the code as a constant: no name is added to any namespace of the program's.

A loop is a candidate if its body calls anything that could lead to TensorFlow, and

* neither yields nor awaits: what runs between two turns of a generator is not its own;
* does not lie in a function that something else compiles from its bytecode (Numba).

Comprehensions count as loops, generator expressions do not. A step that was named by hand is a
function whose definition gets one more decorator; then no loop is watched.
"""

from __future__ import annotations

import ast
import secrets
import warnings
from collections.abc import Callable, Iterable
from importlib.util import decode_source
from types import CodeType
from typing import Any

from terra_tf.dropin.loops import site_of

# Calls of these names lead nowhere near TensorFlow.
_PLAIN_NAMES = """
abs all any append bool chr close count dict dir divmod endswith enumerate extend find float format
get getattr hasattr id index insert int isinstance issubclass items join keys len list lower lstrip
max min open ord pop print range readline repr replace reversed round rstrip set setdefault sorted
split splitlines startswith str strip sum super tuple type upper values write zip
"""
_PLAIN_CALLS = frozenset(_PLAIN_NAMES.split())
_COMPILER_NAMES = "njit jit vectorize guvectorize cfunc stencil generated_jit jit_module script"
_COMPILED_BY = frozenset(_COMPILER_NAMES.split())
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_LEAVE = "leave"


def rewrite(
    source: bytes | str,
    file: str,
    steps: Iterable[str] = (),
    decorator: Callable[[Any], Any] | None = None,
    make_site: Callable[..., Any] = site_of,
) -> tuple[CodeType, set[str]] | None:
    """Compiles a program with its loops watched, or with its steps made ones of Terra's.

    Args:
      source: the program, without syntax errors.
      file: what its code objects name as their file.
      steps: qualified names of functions to decorate; then loops are left alone.
      decorator: what to decorate them with.
      make_site: makes what a loop tells of its turns; see `loops.site_of`.

    Returns:
      The code and the steps that were found, or None where there is nothing to change.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # shown already, when the program was compiled as it is
        tree = ast.parse(source, file)
        lines = _lines(source)
        changer = (
            _Steps(set(steps), decorator) if decorator else _Loops(tree, file, lines, make_site)
        )
        changer.visit(tree)
        if not changer.objects:
            return None
        code = compile(tree, file, "exec", dont_inherit=True)
    return _with_objects(code, changer.objects), changer.found


def _lines(source: bytes | str) -> list[str]:
    return (source if isinstance(source, str) else decode_source(source)).splitlines()


def _with_objects(code: CodeType, objects: dict[bytes, Any]) -> CodeType:
    """Puts objects into the place of the constants that stand for them."""
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constant = _with_objects(constant, objects)
        elif isinstance(constant, bytes):
            constant = objects.get(constant, constant)
        constants.append(constant)
    return code.replace(co_consts=tuple(constants))


class _Changer(ast.NodeTransformer):
    """Changes a tree; objects stand in it as constants of unique bytes.

    Attributes:
      objects: what each of these constants stands for.
      found: names of functions that were looked for and found.
    """

    def __init__(self) -> None:
        self.objects: dict[bytes, Any] = {}
        self.found: set[str] = set()
        self._salt = secrets.token_bytes(12)

    def _constant(self, value: Any, like: ast.expr) -> ast.Constant:
        marker = b"%s terra %d" % (self._salt, len(self.objects))
        self.objects[marker] = value
        return ast.copy_location(ast.Constant(marker), like)


class _Steps(_Changer):
    """Decorates functions by their qualified name."""

    def __init__(self, names: set[str], decorator: Callable[[Any], Any]):
        super().__init__()
        self._names = names
        self._decorator = decorator
        self._scope: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        name = ".".join([*self._scope, node.name])
        if name in self._names:
            self.found.add(name)
            where = node.decorator_list[0] if node.decorator_list else _place_of(node)
            node.decorator_list.insert(0, self._constant(self._decorator, where))
        self._scope.append(node.name)
        self.generic_visit(node)
        self._scope.pop()
        return node


def _place_of(node: ast.FunctionDef) -> ast.expr:
    return ast.copy_location(ast.Constant(None), node)


class _Loops(_Changer):
    """Has candidate loops watched."""

    def __init__(
        self, tree: ast.Module, file: str, lines: list[str], make_site: Callable[..., Any]
    ):
        super().__init__()
        self._make_site = make_site
        self._file = file
        self._lines = lines
        self._compiled = _names_compiled(tree)
        # Of the function that is being visited: its candidate loops, outermost first; None for a
        # loop that is no candidate.
        self._around: list[ast.expr | None] = []

    # --- scopes ---

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in self._compiled or any(map(_compiles, node.decorator_list)):
            return node
        return self._visit_scope(node)

    def _visit_scope(self, node: ast.AST) -> ast.AST:
        around, self._around = self._around, []
        self.generic_visit(node)
        self._around = around
        return node

    visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _visit_scope

    # --- loops ---

    def visit_For(self, node: ast.For) -> ast.AST:
        site = self._site(node, "for") if _is_candidate(node.body) else None
        node.iter = self.visit(node.iter)
        if site is not None:
            node.iter = self._watched(site, node, node.iter)
        self._visit_body(node, site)
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        test = node.test
        if node.orelse or not _is_candidate([*node.body, ast.Expr(test)]):
            node.test = self.visit(test)
            self._visit_body(node, None)
            return node
        site = self._site(node, "while")
        node.test = self.visit(test)
        self._visit_body(node, site)
        head: list[ast.stmt] = [self._tell(site, "begin", test)]
        if not (isinstance(test, ast.Constant) and test.value):
            left = [self._tell(site, _LEAVE, test), ast.copy_location(ast.Break(), test)]
            stay = ast.copy_location(ast.Pass(), test)
            head.insert(0, ast.copy_location(ast.If(node.test, [stay], left), test))
        nothing = ast.copy_location(ast.Tuple([], ast.Store()), test)
        turns = self._call(self._method(site, "turns", test), [])
        return ast.copy_location(ast.For(nothing, turns, head + node.body, []), node)

    def _visit_body(self, node: ast.For | ast.While, site: ast.expr | None) -> None:
        self._around.append(site)
        node.body = self._visit_all(node.body)
        self._around.pop()
        node.orelse = self._visit_all(node.orelse)

    def _visit_all(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        visited: list[ast.stmt] = []
        for statement in statements:
            new = self.visit(statement)
            visited += new if isinstance(new, list) else [new]
        return visited

    def visit_Break(self, node: ast.Break) -> ast.AST | list[ast.stmt]:
        site = self._around[-1] if self._around else None
        return node if site is None else [self._tell(site, _LEAVE, node), node]

    def visit_Return(self, node: ast.Return) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        site = next((site for site in self._around if site is not None), None)
        if site is None:
            return node
        if node.value is None:
            return [self._tell(site, _LEAVE, node), node]
        node.value = self._call(self._method(site, _LEAVE, node.value), [node.value])
        return node

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp) -> ast.AST:
        return self._visit_comprehension(node, [node.elt])

    visit_SetComp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self._visit_comprehension(node, [node.key, node.value])

    def _visit_comprehension(self, node: Any, body: list[ast.expr]) -> ast.AST:
        (clause, *more) = node.generators
        whole = [ast.Expr(part) for part in [*body, *clause.ifs]]
        candidate = not more and not clause.is_async and _is_candidate(whole)
        site = self._site(node, "for") if candidate else None
        self.generic_visit(node)
        if site is not None:
            clause.iter = self._watched(site, node, clause.iter)
        return node

    # --- pieces ---

    def _site(self, node: Any, kind: str) -> ast.Constant:
        where = node.iter if isinstance(node, ast.For) else node
        number = node.lineno
        head = self._lines[number - 1].strip() if number <= len(self._lines) else ""
        site = self._make_site(self._file, number, node.col_offset, head.removesuffix(":"), kind)
        return self._constant(site, where)

    def _watched(self, site: ast.expr, loop: ast.AST, iterable: ast.expr) -> ast.expr:
        """`SITE(iter(ITERABLE))`, placed where Python places the look for an iterator."""
        iterator = ast.Call(self._constant(iter, iterable), [iterable], [])
        return self._call(site, [ast.copy_location(iterator, loop)])

    def _call(self, function: ast.expr, arguments: list[ast.expr]) -> ast.Call:
        where = arguments[0] if arguments else function
        return ast.copy_location(ast.Call(function, arguments, []), where)

    def _method(self, site: ast.expr, name: str, where: ast.AST) -> ast.expr:
        self_ = ast.copy_location(ast.Constant(site.value), where)
        return ast.copy_location(ast.Attribute(self_, name, ast.Load()), where)

    def _tell(self, site: ast.expr, name: str, where: ast.AST) -> ast.stmt:
        call = ast.copy_location(ast.Call(self._method(site, name, where), [], []), where)
        return ast.copy_location(ast.Expr(call), where)


# --- what is a candidate ---


def _is_candidate(body: list[ast.stmt]) -> bool:
    promising = False
    for node in _walk(body):
        if isinstance(node, _SUSPENDING):
            return False
        promising = promising or _leads_to_ops(node)
    return promising


def _walk(body: Iterable[ast.AST]) -> Iterable[ast.AST]:
    """All nodes that run as a part of a body: not what functions in it do when they are called."""
    for node in body:
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _walk(ast.iter_child_nodes(node))


def _leads_to_ops(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _name_of(node.func) not in _PLAIN_CALLS
    return isinstance(node, (ast.With, ast.MatMult))


def _name_of(expression: ast.expr) -> str | None:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else None


def _compiles(decorator: ast.expr) -> bool:
    if isinstance(decorator, ast.Call):
        decorator = decorator.func
    return _name_of(decorator) in _COMPILED_BY


def _names_compiled(tree: ast.Module) -> set[str]:
    """Functions that are passed by name to what compiles bytecode: `fast = njit(slow)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _compiles(node)]
    return {arg.id for call in calls for arg in call.args if isinstance(arg, ast.Name)}


def functions_in(source: bytes | str, file: str) -> list[str]:
    """The qualified names of the functions that a program defines, for a message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source, file)
    names: list[str] = []

    def collect(nodes: Iterable[ast.AST], scope: str) -> None:
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                if isinstance(node, ast.FunctionDef):
                    names.append(scope + node.name)
                collect(node.body, f"{scope}{node.name}.")
            elif isinstance(node, ast.stmt):
                collect(ast.iter_child_nodes(node), scope)

    collect(tree.body, "")
    return names
