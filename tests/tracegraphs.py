"""Traces made by hand, for the tests of the TraceGraph."""

import numpy as np
import tensorflow as tf

from terra_tf.tracing.effects import Effect
from terra_tf.tracing.location import Location
from terra_tf.tracing.trace import (
    Arg,
    Call,
    External,
    Items,
    Kind,
    Node,
    Output,
    OutputInfo,
    Outside,
    Python,
    Read,
    Result,
    Shape,
    Trace,
)

FLOAT, INT32 = tf.float32.as_datatype_enum, tf.int32.as_datatype_enum


class Program:
    """Writes a trace down, op by op.

    Attributes:
      trace: what was written so far.
    """

    def __init__(self) -> None:
        self.trace = Trace()

    def _external(self, external: External) -> Outside:
        self.trace.externals.append(external)
        return Outside(len(self.trace.externals) - 1)

    def tensor(self, shape: Shape = (2,), kind: Kind = Kind.TENSOR, dtype: int = FLOAT) -> Outside:
        """A tensor from outside."""
        return self._external(External(kind, dtype, shape))

    def number(self, value: object) -> Outside:
        """A Python number where an op takes a tensor."""
        content = np.float32(value).tobytes()
        return self._external(External(Kind.NUMBER, FLOAT, (), tf.constant(value), value, content))

    def variable(self, variable: tf.Variable) -> Outside:
        """The handle of a variable."""
        handle = variable.handle
        return self._external(External(Kind.RESOURCE, 20, (), handle, handle))

    def op(self, op: str, *args: Arg, line: int = 0, shape: Shape = (2,), **more: object) -> Output:
        """Adds a node with one output (`outputs=0` for none); returns that."""
        flat = [x for arg in args for x in (arg.items if isinstance(arg, Items) else [arg])]
        count = more.pop("outputs", 1)
        first = len(self.trace.outputs)
        made = Node(
            op=op,
            call=more.pop("call", Call.FAST_PATH),
            args=args,
            inputs=tuple(x for x in flat if not isinstance(x, Python)),
            attrs=(),
            first_output=first,
            num_outputs=count,
            result=more.pop("result", Result.SINGLE),
            location=Location((("a.py", line, "step"),)),
            **more,
        )
        self.trace.nodes.append(made)
        self.trace.outputs += [OutputInfo(FLOAT, shape)] * count
        return Output(first)

    def assign(self, variable: Outside, value: Output, line: int = 0) -> None:
        """Adds an assignment."""
        self.op("AssignVariableOp", variable, value, line=line, outputs=0, effect=Effect.ASSIGN)

    def read(self, output: Output) -> None:
        """Notes that the program looks at a value now."""
        here = len(self.trace.nodes)
        place = Location((("a.py", here, "step"),))
        self.trace.reads.setdefault(output.index, Read(output.index, here, place))

    def keep(self, *outputs: Output) -> None:
        """Notes what is reachable now."""
        self.trace.kept[len(self.trace.nodes)] = frozenset(output.index for output in outputs)


def chain(ops: str = "Exp", *, shape: Shape = (2,), factor: float = 2.0, lines: str = "") -> Trace:
    """A chain of ops on a tensor, which is multiplied by a number first."""
    program = Program()
    x = program.op("Mul", program.tensor(shape), program.number(factor), shape=shape)
    for k, op in enumerate(ops.split()):
        line = int(lines.split()[k]) if lines else k + 1
        x = program.op(op, x, shape=shape, line=line)
    return program.trace
