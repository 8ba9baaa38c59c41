"""Small rows of the table: a plain step function and the inputs that its calls switch between.

    @case([1], [4], [0])
    def loop_with_break(s, n):
        \"\"\"A loop that a tensor ends early.\"\"\"
        total = tf.constant(0)
        for i in range(n):
            total += i
            if total > 2:
                break
        return total

The step is called with each list of arguments four times in a row, so that it co-executes, and then
with all of them by turns, so that one call finds another path than the last one took. `s` is the
program's state, new in each run: `s.v` is a variable, `s.log` a list; a step may set more of it.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .table import program

_IN_A_ROW, _BY_TURNS = 4, 2


def case(
    *inputs: Sequence[Any],
    raises: type[Exception] | tuple[type[Exception], ...] = (),
    state: Callable[[], dict[str, Any]] = dict,
    **options: Any,
) -> Callable[[Callable], Callable]:
    """Makes a row of the step that it decorates.

    Args:
        *inputs: Arguments of the step; Python numbers stay Python numbers.
        raises: What calls may raise; it is compared like a result.
        state: Makes what the state holds besides `v` and `log`.
        **options: Those of `table.program`.
    """

    def add(step: Callable) -> Callable:
        def build(terra):
            s = types.SimpleNamespace(v=tf.Variable(1.0), log=[], **state())
            candidate = terra.function(lambda *arguments: step(s, *arguments))
            for arguments in _order(inputs):
                try:
                    result = candidate(*arguments)
                    terra.sync()
                except raises as error:
                    result = error
                yield result
            yield s.v, s.log

        build.__name__, build.__doc__ = step.__name__, step.__doc__
        build.__module__ = step.__module__
        calls = len(_order(inputs))
        # Learning takes two calls, each further way through the step about one, and the first probe
        # of eager's speed four; a call that raises never runs through.
        least = calls // 6 if raises else 3 * calls // 5
        row = {"coexecuted": least, "fallbacks": (0, None), **options}
        return program(iterations=calls, **row)(build)

    return add


def _order(inputs: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    stretches = [arguments for arguments in inputs for _ in range(_IN_A_ROW)]
    return stretches + _BY_TURNS * list(inputs)
