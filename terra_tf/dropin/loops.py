"""Watched loops: what a loop of the program tells while it runs, and the iterations it opens.

`rewriting` makes each candidate loop of a program call its Site:

    for x in ITERABLE:                 for x in SITE(iter(ITERABLE)):
        ...                                ...
        break                              SITE.leave(); break
        return value                       return SITE.leave(value)

    while CONDITION:                   for () in SITE.turns():
        ...                                if not CONDITION: SITE.leave(); break
                                           SITE.begin()
                                           ...

One execution of a loop is an Activation, on its thread's stack while it lasts. It notes what each
turn does until `roles` knows what the loop is; where it is a step, each turn is an iteration of a
region of its own. Iterations do not nest: where an inner loop is a step too, the outer iteration
ends before it, and what comes after it is an iteration of another region (a *rest*).

What the program's `for` sees is made of C iterators of Python's, so that no frame of ours is in a
traceback of the program's.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

from terra_tf.dropin.activity import activity, counting, op_calls
from terra_tf.dropin.nests import Nest, merge, settle, sites_of
from terra_tf.dropin.roles import (
    Activity,
    Evidence,
    Role,
    judge_turn,
    may_be_step,
    works_between,
)
from terra_tf.report.log import topic

if TYPE_CHECKING:
    from terra_tf.region import Region

_log = topic("loops")
_PATIENCE = 64  # turns without any op after which an execution is left alone
_IDLE_TRACES = 2  # of iterations without any op, after which they are not opened any more
_SILENT_EXECUTIONS = 8  # executions without any op after which a loop is
_LEFT_ALONE = frozenset((Role.SILENT, Role.PART))
_SITES: dict[tuple[str, int, int], Site] = {}


def sites() -> tuple[Site, ...]:
    """All watched loops of the program, in the order in which they were found."""
    return tuple(_SITES.values())


def site_of(file: str, line: int, column: int, head: str = "", kind: str = "for") -> Site:
    """The site of a loop; made on first use, so that code of it can be pickled."""
    key = (file, line, column)
    if key not in _SITES:
        _SITES[key] = Site(key, head, kind)
    return _SITES[key]


class Site:
    """A loop in the program's text.

    Attributes:
      file: absolute path.
      line: of the loop's head.
      head: the text of that line.
      kind: "for" or "while".
      role: what its turns are.
      reason: why.
      evidence: what was seen of its turns.
    """

    def __init__(self, key: tuple[str, int, int], head: str, kind: str):
        self.file, self.line, self._column = key
        self.head = head
        self.kind = kind
        self.role = Role.WATCHED
        self.reason = ""
        self.evidence = Evidence()
        self.idle: set[Region] = set()  # those in whose iterations nothing happens
        self.split = False  # whether inner loops have become steps because this one does not pay
        self.holds_steps = False  # calls steps that the program itself has made
        self._silent = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return site_of, (self.file, self.line, self._column, self.head, self.kind)

    def __deepcopy__(self, _: Any) -> Site:
        return self

    @property
    def name(self) -> str:
        """What reports call its region."""
        return f"loop at {self.file}:{self.line}"

    # --- called by the program ---

    def __call__(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Watches one execution of a `for` over `iterator`."""
        if self.role in _LEFT_ALONE or _in_a_step_of_its_own():
            return iterator
        guard = _Guard(Activation(self, sys._getframe(1).f_code))
        return itertools.chain.from_iterable(_parts(guard, iterator))

    def turns(self) -> Iterator[tuple[()]]:
        """Watches one execution of a `while`; endless."""
        if self.role in _LEFT_ALONE or _in_a_step_of_its_own():
            return itertools.repeat(())
        guard = _Guard(Activation(self, sys._getframe(1).f_code))
        return itertools.chain.from_iterable(_endless_parts(guard))

    def begin(self) -> None:
        """The condition of a `while` holds: its body begins."""
        if self.role not in _LEFT_ALONE and (activation := self._running()) is not None:
            activation.begin()

    def leave(self, value: Any = None) -> Any:
        """The program leaves the loop by itself; passes `value` through."""
        if self.role not in _LEFT_ALONE and (activation := self._running()) is not None:
            activation.finish()
        return value

    def _running(self) -> Activation | None:
        return next((a for a in reversed(_stack()) if a.site is self), None)

    # --- what is learned ---

    def decide(self, role: Role, reason: str) -> None:
        """Sets the role; one line in the log where it is new."""
        if role is self.role:
            return
        self.role, self.reason = role, reason
        if role is Role.OUTER:  # from here on, what counts is what it does between inner loops
            self.evidence = Evidence(executions=1)
        if role is not Role.PART:
            text = "%s:%d `%s`: %s, because %s"
            _log.info(text, self.file, self.line, self.head, role.value, reason)

    def note_iteration(self, region: Region) -> None:
        """An iteration is over."""
        counters = region.runner.counters
        if counters.ops_per_iteration == 0 and counters.traced >= _IDLE_TRACES:
            self.idle.add(region)

    def note_execution(self, turns: int, ops: int) -> None:
        """An execution is over."""
        if ops:
            self._silent = 0
        elif turns and self.role is Role.WATCHED:
            self._silent += 1
            if self._silent >= _SILENT_EXECUTIONS:
                self.role, self.reason = Role.SILENT, "no TensorFlow op in any of its turns"

    def __repr__(self) -> str:
        return f"<{self.kind} loop at {self.file}:{self.line}: {self.role.value}>"


class _Guard:
    """Tells an activation that another item is wanted, or that the loop is gone."""

    __slots__ = ("activation",)

    def __init__(self, activation: Activation):
        self.activation = activation

    def __iter__(self) -> _Guard:
        return self

    def __next__(self) -> tuple[()]:
        self.activation.leave()
        return ()

    def __del__(self) -> None:
        # After the loop's end there is nothing left to do; else an exception has ended it.
        self.activation.drop()


def _parts(guard: _Guard, iterator: Iterator[Any]) -> Iterator[Iterator[Any]]:
    activation = guard.activation
    yield map(activation.enter, guard, itertools.islice(iterator, _PATIENCE))
    if activation.turns == _PATIENCE:  # else the iterator has ended, and is not to be asked again
        if activation.is_silent():
            yield iterator
        else:
            yield map(activation.enter, guard, iterator)
    activation.finish()


def _endless_parts(guard: _Guard) -> Iterator[Iterator[tuple[()]]]:
    yield itertools.islice(guard, _PATIENCE)
    yield itertools.repeat(()) if guard.activation.is_silent() else guard


class Activation:
    """One execution of a watched loop.

    Attributes:
      site: the loop.
      turns: how many have begun.
      region: the region of the iteration that is open, if any.
      inside: the nest of loops that were executed in its turns, as nested dicts of sites.
    """

    def __init__(self, site: Site, code: CodeType):
        self.site = site
        self.turns = 0
        self.region: Region | None = None
        self.inside: Nest = {}
        self._code = code
        self._stack = _stack()
        self._began = self._mark = activity()
        self._counted = counting()  # whether ops were counted from the turn's start
        self._fetched = 0
        self._inner = Activity()  # of the turn: inner loops that are, or are around, steps
        self._around_steps = False
        self._in_turn = False
        self._new_inside = False
        self._over = False
        site.evidence.executions += 1
        self._stack.append(self)

    # --- turns ---

    def enter(self, _: Any, item: Any) -> Any:
        """A turn begins with `item`, which is returned."""
        self.turns += 1
        self._in_turn = True
        if self.site.role is Role.STEP:
            self._open(None, item)
        elif not self._over:
            self._fetched = op_calls() - self._mark.ops
        return item

    def begin(self) -> None:
        """A turn of a `while` begins, unless it is one of another execution of the same loop."""
        if not self._in_turn:
            self.enter(None, None)

    def leave(self) -> None:
        """A turn has ended, or the first one is about to begin."""
        if self._in_turn:
            self._in_turn = False
            self._end_iteration()
            if not self._over:
                self._note_turn()
        elif not self._over:
            self._mark, self._counted = activity(), counting()

    def finish(self) -> None:
        """The loop has ended; goes on with the iteration around it, if there is one."""
        if self._over:
            return
        for inner in self._stack[self._stack.index(self) + 1 :][::-1]:
            inner.leave()
            inner.drop()
        self.leave()
        self.drop()
        if self._stack:
            self._stack[-1]._resume(self.site)

    def drop(self) -> None:
        """The loop is gone: what its last turn did stands."""
        if self.region is not None:
            region, self.region = self.region, None
            region.runner.abort()
        if self._over:
            return
        self._over = True
        if self in self._stack:
            del self._stack[self._stack.index(self) :]
        everything = activity() - self._began
        self.site.note_execution(self.turns, everything.ops)
        if self._stack:
            self._stack[-1]._note_inner(self, everything)

    def is_silent(self) -> bool:
        """Whether no op was called since the loop began, so that it need not be watched."""
        self.leave()
        if self.site.role is not Role.WATCHED or op_calls() != self._began.ops:
            return False
        self.drop()
        return True

    # --- iterations ---

    def _open(self, after: Site | None, item: Any) -> None:
        from terra_tf.runners.signature import signature
        from terra_tf.tensorflow_internals import tape_is_active

        if self._over or tape_is_active():
            return
        for outer in self._stack:
            if outer is not self and outer.region is not None:
                outer._end_iteration()
        region = self._region(after)
        if region in self.site.idle or not region.outermost():
            return
        if region.runner.rests():
            self._split()
            return
        key, tensors = signature((item,), {})
        self.region = region
        try:
            region.runner.begin(key, tensors)
        except BaseException:
            self._abort()
            raise

    def _split(self) -> None:
        """Iterations do not pay, so the loops inside them are given a chance, once."""
        site = self.site
        if site.split:
            return
        site.split = True
        for inner in sites_of(self.inside):
            if inner.role is Role.PART and may_be_step(inner.evidence):
                inner.decide(Role.STEP, "the iterations around it do not pay, and it may")

    def _region(self, after: Site | None) -> Region:
        from terra_tf.region import loop_region
        from terra_tf.tracing.handlers import Loop

        site = self.site
        name = site.name
        if after is not None:
            name += f", rest after the loop at {after.file}:{after.line}"
        loop = Loop(self._code, site.line)
        # Threads that run the same loop have variables of their own, most often.
        return loop_region((site, after, threading.get_ident()), name, loop)

    def _end_iteration(self) -> None:
        if self.region is None:
            return
        try:
            self.region.runner.end()
        except BaseException:
            self._abort()
            raise
        region, self.region = self.region, None
        self.site.note_iteration(region)

    def _abort(self) -> None:
        region, self.region = self.region, None
        region.runner.abort()

    def _resume(self, after: Site) -> None:
        """Goes on after an inner loop, in an iteration of its own."""
        if self._in_turn and self.region is None and self.site.role is Role.STEP:
            self._open(after, None)

    def give_way(self) -> None:
        """The program calls a step of its own in a turn."""
        site = self.site
        self._around_steps = True
        if not site.holds_steps:
            site.holds_steps = True
            site.decide(Role.OUTER, "its turns call steps that the program has made")
        self._end_iteration()

    # --- what is learned ---

    def _note_inner(self, inner: Activation, everything: Activity) -> None:
        merge(self.inside.setdefault(inner.site, {}), inner.inside)
        if inner.site.role in (Role.STEP, Role.OUTER):
            self._inner.add(everything)
            self._around_steps = True
        elif inner.site.role is Role.WATCHED:
            self._new_inside = True

    def _note_turn(self) -> None:
        site = self.site
        if site.role is Role.STEP and not self._new_inside:
            self._inner, self._around_steps = Activity(), False
            self._mark, self._counted = activity(), counting()
            return
        now = activity()
        total = now - self._mark
        own = total - self._inner
        counted, self._counted = self._counted, counting()
        around_steps, self._around_steps = self._around_steps, False
        self._mark, self._inner = now, Activity()
        if counted:
            self._judge(total, own, around_steps)

    def _judge(self, total: Activity, own: Activity, around_steps: bool) -> None:
        site, evidence = self.site, self.site.evidence
        if not (site.role is Role.OUTER and self._new_inside):
            evidence.turns += 1
            evidence.total.add(total)
            evidence.own.add(own)
        if site.role is not Role.STEP and not site.holds_steps:
            judged = judge_turn(own, self._fetched, around_steps)
            # What is known to be around iterations, or part of one, only becomes one by its tape.
            if judged is not None and (site.role is Role.WATCHED or judged[0] is Role.STEP):
                site.decide(*judged)
            elif site.role is Role.OUTER and works_between(site.evidence):
                site.decide(Role.STEP, "it does much between the loops inside its turns")
        if self._stack and self._stack[0] is self:
            settle(site, self.inside, covered=False)
            self._new_inside = False


# --- what the thread does ---


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Activation] = []
        self.resting_steps = 0  # steps of the program's that stay eager and are in progress


_thread = _Thread()


def _stack() -> list[Activation]:
    return _thread.stack


def _in_a_step_of_its_own() -> bool:
    """Whether this thread is in a step that the program has made: then no loop matters."""
    if _thread.resting_steps:
        return True
    if _thread.stack or not counting():
        return False
    from terra_tf import native

    return native.core.in_region()


def call_resting(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a step of the program's that stays eager; the loops in it are left alone, too."""
    _thread.resting_steps += 1
    try:
        return step(*args, **kwargs)
    finally:
        _thread.resting_steps -= 1


def watching() -> bool:
    """Whether this thread is in a watched loop."""
    return bool(_thread.stack)


def step_called() -> None:
    """The program calls a step of its own (`terra_tf.function`, a Keras model's)."""
    for activation in _thread.stack:
        activation.give_way()
