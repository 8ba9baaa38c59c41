"""Learns library calls while a walk goes through them op by op.

`learn` makes a call that is not known yet, with a watch on it. Where the watch finds nothing and
the state that the call depends on is the same before and after, the walk gets to know it. Calls
inside of a call are learned as well, since the outer one may turn out to run the user's code.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

from terra_tf import native, tensorflow_internals
from terra_tf.delegation.purity import Profile, Watch
from terra_tf.delegation.state import StateBuilder, TooMuch
from terra_tf.delegation.values import Arguments, Recipe, Results, Undescribable

log = logging.getLogger("terra_tf.delegation")
_ACCESSED, _STOP, _RESTART, _RECORD = 5, 6, 7, 8  # TapeAction of native/tape.h


class _Failed(Exception):
    """The call cannot be delegated; the message says why."""


@dataclasses.dataclass(frozen=True)
class LibraryFunction:
    """A library function that is stood in for.

    Attributes:
      name: for people.
      is_gradient: it is a tape's `gradient`.
      after: what has to be called at the end of a call whose body was skipped.
    """

    name: str
    is_gradient: bool = False
    after: Callable[..., Any] | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.profile = Profile()


_local = _Local()


class _Learning:
    """One call that is being learned."""

    def __init__(self, function: LibraryFunction, hook: Any, args: tuple, keywords: dict):
        self._function = function
        self._hook = hook
        self._walk = native.core.current_walk()
        self._cursor = self._walk.cursor
        self._start = self._walk.path_length
        self._events = len(self._walk.events)
        self._looks = self._walk.looks
        self._first_id = tensorflow_internals.next_id()
        self._taped = native.core.any_tape()
        self._arguments = Arguments(self._walk)
        self.watch = Watch(self._read_matters)
        self._feeds_before = frozenset(self._walk.bound_feeds())
        self._prepare(args, keywords)

    def _prepare(self, args: tuple, keywords: dict) -> None:
        """Notes how everything is before the call."""
        try:
            tapes = [self._tape(args[0])] if self._function.is_gradient else []
            others = (self._arguments.pattern(x) for x in args[len(tapes) :])
            self._patterns = (*tapes, *others)
            self._keywords = tuple(
                (name, self._arguments.pattern(x)) for name, x in keywords.items()
            )
            self._state = StateBuilder()
            self._state.add((*tensorflow_internals.thread_state(), *self._arguments.objects))
        except (Undescribable, TooMuch, _Failed) as error:
            self.watch.note(str(error))

    def _tape(self, tape: Any) -> tuple[Any, ...]:
        self._tape_number = self._walk.tape_number(tensorflow_internals.tape_of(tape))
        if self._tape_number < 0:
            raise _Failed("the tape was made outside of the iteration")
        self._tape_events, self._tape_nodes = self._walk.tape_events(self._tape_number)
        attributes = tensorflow_internals.tape_attributes(tape)
        named = tuple(
            (name, ("tape", self._tape_number) if name == "_tape" else ("value", value))
            for name, value in attributes.items()
        )
        return ("instance", type(tape), named)

    def _read_matters(self, tensor: Any) -> bool:
        """Whether a tensor that was looked at may have another value next time."""
        if any(tensor is leaf for leaf in self._arguments.leaves):
            return True
        output = self._walk.own_output(tensor)
        return self._walk.feed_of(tensor) >= 0 or (output >= 0 and not self._walk.is_known(output))

    # --- after the call ---

    def finish(self, result: Any) -> None:
        """Has the walk know the call, if it may be skipped the next time."""
        walk = self._walk
        if native.core.current_walk() is not walk:
            return  # it has fallen back
        try:
            if self.watch.problem is None:
                spec = self._spec(result)
        except (Undescribable, TooMuch, _Failed) as error:
            self.watch.note(str(error))
        if self.watch.problem is None:
            for module in self.watch.modules.values():
                native.core.watch_module(module)
            walk.learn(self._cursor, self._hook, spec)
            log.debug("%s is delegated from now on", self._function.name)
        else:
            log.debug("%s is not delegated: %s", self._function.name, self.watch.problem)
            walk.not_learned(self._cursor, self._hook, self.watch.hopeless)

    def let_go(self) -> None:
        """Drops the call's tensors: whoever counts references to them must not find these."""
        self.watch.read_matters = bool
        self._arguments = self._state = self._patterns = self._keywords = None

    def _spec(self, result: Any) -> dict[str, Any]:
        walk = self._walk
        nodes = walk.path_from(self._start)
        if any(walk.is_in_place(k) for k in nodes):
            raise _Failed("an op of it runs in place")
        if walk.looks != self._looks:
            raise _Failed("it looks at a value that the graph computes")
        self._watch_thread_locals()
        if not self._state.state.holds():
            raise _Failed(f"it changes {self._state.difference()}")
        own = frozenset(o for k in nodes for o in range(*walk.outputs_of(k)))
        results = Results(walk, self._arguments.leaves, own, self._state, self._was_made_by_python)
        recipe: Recipe = results.recipe(result)
        known, on_the_way, needed = self._feeds(nodes, own)
        spec = {
            "arguments": self._patterns,
            "keywords": self._keywords,
            "leaves": self._arguments.leaves,
            "aliases": self._aliases(),
            "state": self._state.state,
            "nodes": nodes,
            "needs_feeds": needed,
            "feeds": known,
            "feeds_on_the_way": on_the_way,
            "tape_steps": self._tape_steps(),
            "taped": self._taped,
            "tape": None,
            "after": self._function.after,
            "result": recipe,
        }
        if self._function.is_gradient:
            spec["tape"] = self._tape_number
            spec["tape_events"] = self._tape_events
            spec["tape_nodes"] = self._tape_nodes
        return spec

    def _aliases(self) -> list[int]:
        """For each leaf, the first one that is the same tensor."""
        first: dict[int, int] = {}
        return [first.setdefault(id(x), k) for k, x in enumerate(self._arguments.leaves)]

    def _watch_thread_locals(self) -> None:
        """Adds what the modules that ran keep for each thread."""
        modules = self.watch.modules.values()
        self._state.add(
            x for module in modules for x in module.values() if isinstance(x, threading.local)
        )

    def _tape_steps(self) -> list[tuple[int, int, Any]]:
        """What the call does to tapes: (before which of its nodes, action, variable)."""
        steps: list[tuple[int, int, Any]] = []
        stopped = False
        for action, at, about in self._walk.events[self._events :]:
            if action == _ACCESSED:
                steps.append((at - self._start, action, self._walk.variable_at(about)))
            elif action in (_STOP, _RESTART):
                stopped = action == _STOP
                steps.append((at - self._start, action, None))
            elif action != _RECORD or self._taped:
                raise _Failed("it changes what tapes record")
        if stopped:
            raise _Failed("it stops tapes from recording")
        return steps

    def _was_made_by_python(self, tensor: Any) -> bool:
        """Whether the call has made a tensor that no op has made: out of Python values."""
        return tensorflow_internals.tensor_id(tensor) > self._first_id

    def _feeds(
        self, nodes: list[int], own: frozenset[int]
    ) -> tuple[list[tuple], list[tuple], list[int]]:
        """Where the feeds of the nodes come from: (known at the start, on the way, from before)."""
        walk = self._walk
        leaves = {id(leaf): number for number, leaf in enumerate(self._arguments.leaves)}
        known, on_the_way, needed = [], [], []
        for at, feed in walk.feeds_of(nodes):
            value = walk.feed(feed)
            if feed in self._feeds_before:
                needed.append(feed)
            elif id(value) in leaves:
                known.append((at, feed, "leaf", leaves[id(value)]))
            elif (output := walk.own_output(value)) >= 0:
                if output not in own:
                    known.append((at, feed, "output", output))
                elif walk.is_static(output):
                    on_the_way.append((at, feed, "output", output))
                else:
                    raise _Failed("a select takes a value whose shape varies")
            elif walk.is_number(nodes[at], feed) or self._was_made_by_python(value):
                known.append((at, feed, "value", value))
            else:
                raise _Failed("it takes a tensor that is not among its arguments")
        return known, on_the_way, needed


def learn(function: LibraryFunction, original: Any, hook: Any, args: tuple, keywords: dict) -> Any:
    """Makes a call and learns it.

    Args:
      function: what is called.
      original: the library's own function.
      hook: what stands in for it.
      args: positional arguments.
      keywords: the others.
    """
    profile = _local.profile
    with profile.paused():
        learning = _Learning(function, hook, args, keywords)
    native.core.learning_begins()
    profile.start(learning.watch)
    try:
        result = original(*args, **keywords)
    except BaseException:
        learning.let_go()
        raise
    finally:
        profile.stop(learning.watch)
        native.core.learning_ends()
    with profile.paused():
        learning.finish(result)
        learning.let_go()
    return result
