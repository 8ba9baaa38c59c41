"""A trace: all that one iteration did with tensors, as plain data.

A Trace is a list of Nodes in program order. The outputs of all nodes are numbered through, so a
value is named by one integer. What a node's arguments are is said by four small kinds:

    Output(3)         the output number 3 of an earlier node
    Outside(1)        the trace's external number 1: a tensor or number the step did not compute
    Python(value)     a Python value that belongs to the call itself (an attribute, a name)
    Items((...))      a list of the above

Traces are compared by `same_structure`, which leaves external values out of account: a number that
differs from call to call belongs to feeds, not to identity (Terra, section 4.1).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

from terra_tf.tracing.effects import Effect, runs_in_place
from terra_tf.tracing.location import NOWHERE, Location


class Call(enum.IntEnum):
    """Which entry point of TensorFlow was called; numbers as in native/program.h."""

    FAST_PATH = 0
    EXECUTE = 1
    EXECUTE_CANCELABLE = 2


class Result(enum.IntEnum):
    """What the call returned; numbers as in native/program.h."""

    NONE = 0
    SINGLE = 1
    LIST = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The output of an earlier node."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outside:
    """One of the trace's externals."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Python:
    """A Python value that belongs to the call itself."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A list or tuple of arguments."""

    items: tuple[Output | Outside | Python, ...]


Arg = Output | Outside | Python | Items


class Kind(enum.Enum):
    """What an external is."""

    TENSOR = "tensor"  # told apart by identity, always fed
    SMALL = "small"  # a small tensor, told apart by nothing: each use has its own
    NUMBER = "number"  # a Python value where the op takes a tensor
    RESOURCE = "resource"  # a handle: this very object


@dataclasses.dataclass(slots=True, eq=False)
class External:
    """A value that an iteration got from outside of its own ops.

    Attributes:
      kind: see Kind.
      tensor: the tensor (for NUMBER: as TensorFlow converted it); None for a TENSOR, which is not
        kept alive.
      value: what the program passed.
      content: bytes of a SMALL or NUMBER value, to see whether it changes.
      dtype: enum number of the dtype.
      shape: static shape; None if it has none (resource).
      varies: it differed between traces, so it is fed.
    """

    kind: Kind
    dtype: int
    shape: tuple[int, ...]
    tensor: Any = None
    value: Any = None
    content: bytes = b""
    varies: bool = False

    @property
    def fed(self) -> bool:
        """Whether a graph gets the value anew in each iteration."""
        return self.kind is Kind.TENSOR or self.varies

    def fits(self, other: External) -> bool:
        """Whether a graph that was made with one can be run with the other."""
        if (self.kind, self.dtype, self.shape) != (other.kind, other.dtype, other.shape):
            return False
        return self.kind is not Kind.RESOURCE or self.tensor is other.tensor


@dataclasses.dataclass(frozen=True, slots=True)
class OutputInfo:
    """Dtype (enum number) and shape of one op output in this trace."""

    dtype: int
    shape: tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One op call.

    Attributes:
      op: op type; empty for the call of a function, whose name may change with every call.
      call: the entry point.
      args: what was passed, in the entry point's own order (after its three fixed arguments).
      inputs: the op's flat tensor inputs.
      attrs: complete attributes, alternating names and values.
      first_output: number of its first output.
      num_outputs: how many outputs it has.
      result: what the call returned.
      groups: sizes of the lists in a nested result, -1 for a tensor; empty if nothing is nested.
      effect: what it does besides computing its outputs.
      fails: the call raised an error.
      misses: the fast path refused the call; what the slow path did follows as nodes.
      location: the user's line.
    """

    op: str
    call: Call
    args: tuple[Arg, ...]
    inputs: tuple[Output | Outside, ...]
    attrs: tuple[Any, ...]
    first_output: int
    num_outputs: int
    result: Result
    groups: tuple[int, ...] = ()
    effect: Effect = Effect.PURE
    misses: bool = False
    fails: bool = False
    location: Location = NOWHERE

    @property
    def in_place(self) -> bool:
        """Whether it runs eagerly where the program calls it."""
        return runs_in_place(self.effect)

    @property
    def outputs(self) -> range:
        """Numbers of its outputs."""
        return range(self.first_output, self.first_output + self.num_outputs)

    def __str__(self) -> str:
        if self.misses:
            return f"({self.op} misses the fast path)"
        made = ", ".join(f"%{i}" for i in self.outputs) or "()"
        got = ", ".join(
            f"%{x.index}" if isinstance(x, Output) else f"@{x.index}" for x in self.inputs
        )
        return f"{made} = {self.op}({got})"


@dataclasses.dataclass(slots=True)
class Read:
    """The program looked at an output's value.

    Attributes:
      output: which one.
      position: how many nodes came before the first look.
      location: the user's line.
    """

    output: int
    position: int
    location: Location


@dataclasses.dataclass(eq=False)
class Trace:
    """One iteration.

    Attributes:
      nodes: op calls in program order.
      outputs: all op outputs, numbered through.
      externals: all values from outside.
      reads: first look at each output that the program looked at, by output.
      kept: outputs that were still reachable from Python, by position: for every place where
        effects may have to become visible, and at the end (position `len(nodes)`).
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    outputs: list[OutputInfo] = dataclasses.field(default_factory=list)
    externals: list[External] = dataclasses.field(default_factory=list)
    reads: dict[int, Read] = dataclasses.field(default_factory=dict)
    kept: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)

    def producer(self, output: int) -> Node:
        """The node that made an output."""
        low, high = 0, len(self.nodes)
        while high - low > 1:
            middle = (low + high) // 2
            if self.nodes[middle].first_output <= output:
                low = middle
            else:
                high = middle
        return self.nodes[low]

    def __str__(self) -> str:
        lines = [(k, 1, f"{k:4d}  {node}   {node.location}") for k, node in enumerate(self.nodes)]
        for read in self.reads.values():
            lines.append((read.position, 0, f"      read %{read.output}   {read.location}"))
        return "\n".join(text for _, _, text in sorted(lines, key=lambda line: line[:2]))


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same_value, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except (ValueError, TypeError):
        return False


def _same_arg(a: Arg, b: Arg) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Python):
        return _same_value(a.value, b.value)
    if isinstance(a, Items):
        return len(a.items) == len(b.items) and all(map(_same_arg, a.items, b.items))
    return a.index == b.index


def _same_node(a: Node, b: Node) -> bool:
    alike = (
        a.op == b.op
        and a.call == b.call
        and a.misses == b.misses
        and a.fails == b.fails
        and a.num_outputs == b.num_outputs
        and a.result == b.result
        and a.groups == b.groups
    )
    if not alike or a.in_place:  # what runs in place takes whatever it is given
        return alike
    return (
        a.effect == b.effect
        and a.inputs == b.inputs
        and len(a.args) == len(b.args)
        and all(map(_same_arg, a.args, b.args))
    )


def first_difference(a: Trace, b: Trace) -> int | None:
    """Position of the first node in which two traces differ, or None if they agree.

    Values of externals do not count, but their kinds, dtypes and shapes do.
    """
    for k, (x, y) in enumerate(_zip_longest(a.nodes, b.nodes)):
        if x is None or y is None or not _same_node(x, y):
            return k
        for source in x.inputs:
            if isinstance(source, Outside) and not a.externals[source.index].fits(
                b.externals[source.index]
            ):
                return k
    return None


def same_structure(a: Trace, b: Trace) -> bool:
    """Whether one graph can serve both traces."""
    return first_difference(a, b) is None


def _zip_longest(a: list[Node], b: list[Node]) -> Iterator[tuple[Node | None, Node | None]]:
    for k in range(max(len(a), len(b))):
        yield (a[k] if k < len(a) else None), (b[k] if k < len(b) else None)
