"""Which lines of a program could handle an error: told by source, and by compiled code alone.

The programs are compiled and never run: what matters is where their calls stand.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import textwrap

import pytest

from terra_tf.tracing import handlers

# Each `probe(n)` is an op; those whose number is below 100 are in a block that may handle errors.
PROGRAMS = {
    "plain": """
        def step():
            probe(100)
            for i in range(2):
                probe(101)
    """,
    "try": """
        def step():
            probe(100)
            try:
                probe(1)
                if unknown:
                    probe(2)
            except ValueError as error:
                probe(101)
            else:
                probe(102)
            probe(103)
    """,
    "finally": """
        def step():
            try:
                probe(1)
            finally:
                probe(100)
    """,
    "nested": """
        def step():
            try:
                with tf.GradientTape() as tape:
                    probe(1)
                    try:
                        probe(2)
                    except KeyError:
                        probe(3)
            except (ValueError, TypeError):
                with tf.device("CPU:0"):
                    probe(100)
    """,
    "harmless": """
        def step():
            with tf.GradientTape(persistent=True) as tape:
                probe(100)
                with tf.device(name(1, key="x")), tape.stop_recording():
                    probe(101)
            with lock:
                probe(102)
            with GradientTape():
                probe(103)
            with tf.device(x.name + str(unknown)), tf.name_scope(name=f"{x}"):
                probe(104)
            probe(105)
    """,
    "unknown managers": """
        def step():
            with suppress(ValueError):
                probe(1)
            with manager:
                probe(2)
            with tf.GradientTape() as tape, contextlib.suppress(ValueError):
                probe(3)
            with tf.GradientTape() if unknown else manager:
                probe(4)
            with open(probe).reader():
                probe(5)
            with managers[0]:
                probe(6)
            with suppress(x.device):
                probe(7)
            with scope(unknown).suppress(tf.device):
                probe(8)
            probe(100)
    """,
    "loops": """
        def step():
            while unknown:
                with tf.GradientTape():
                    probe(100)
                    break
                try:
                    probe(1)
                    continue
                except Exception:
                    return probe(101)
            return [probe(102) for _ in range(2)]
    """,
    "generator": """
        def step():
            with tf.GradientTape():
                yield probe(100)
            try:
                yield probe(1)
            finally:
                probe(101)
            yield probe(102)
    """,
}


def frames(code):
    """For each `probe` of a program's code: its number and a frame that stands at its call."""

    class Frame:
        def __init__(self, f_lasti, f_lineno):
            self.f_code, self.f_lasti, self.f_lineno = code, f_lasti, f_lineno

    line = None
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno or line
        if instruction.opname == "CALL":
            yield Frame(instruction.offset, line)


def function_code(code):
    return next(
        found
        for found in code.co_consts
        if isinstance(found, type(code)) and found.co_name == "step"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no table of exceptions")
@pytest.mark.parametrize("name", PROGRAMS)
def test_source_and_compiled_code_say_the_same(name, tmp_path):
    source = textwrap.dedent(PROGRAMS[name])
    probes = {
        node.lineno: node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "probe"
    }
    seen = set()
    for known in (True, False):
        file = tmp_path / "program.py" if known else f"<{name}>"
        if known:
            file.write_text(source)
        code = function_code(compile(source, str(file), "exec"))
        assert bool(linecache.getlines(str(file))) == known
        for frame in frames(code):
            number = probes.get(frame.f_lineno)
            if number is not None:
                found = handlers._has_blocks(code) and handlers._in_block(frame)
                assert found == (number < 100), (known, number)
                seen.add((known, number))
    inner = {102} if name == "loops" else set()  # in the code of a comprehension up to Python 3.11
    assert {number for known, number in seen if not known} >= set(probes.values()) - inner


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no table of exceptions")
def test_a_program_without_source_runs_no_op_in_place_for_its_tape():
    import tensorflow as tf

    import terra_tf as terra

    names = {"tf": tf, "terra": terra, "weight": tf.Variable([1.0, 2.0])}
    exec(
        textwrap.dedent("""
            @terra.function
            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.reshape(weight * x, [2]))
                weight.assign_sub(0.1 * tape.gradient(loss, weight))
                return loss
        """),
        names,
    )
    losses = [float(names["step"](tf.constant(2.0))) for _ in range(6)]
    # loss = 2 (w0 + w1), and each step takes 0.2 of both weights.
    assert losses == pytest.approx([6.0 - 0.8 * n for n in range(6)], rel=1e-5)
    assert names["step"].stats().coexecuted >= 3
    assert "in place" not in terra.explain(names["step"])
