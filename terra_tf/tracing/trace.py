"""A trace: all that one iteration did with tensors, as plain data.

A Trace is a list of Nodes in program order. The outputs of all nodes are numbered through, so a
value is named by one integer. What a node's arguments are is said by four small kinds:

    Output(3)         the output number 3 of an earlier node
    Outside(1)        the trace's external number 1: a tensor or number the step did not compute
    Python(value)     a Python value that belongs to the call itself (an attribute, a name)
    Items((...))      a list of the above

A number that differs from call to call belongs to feeds, not to a node's identity (Terra, section
4.1).
"""

from __future__ import annotations

import dataclasses
import enum
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
Shape = tuple[int | None, ...] | None  # None for a size, or a rank, that is not always the same


class Kind(enum.Enum):
    """What an external is."""

    TENSOR = "tensor"  # told apart by identity, always fed
    SMALL = "small"  # a small tensor, told apart by nothing: each use has its own
    NUMBER = "number"  # a Python value where the op takes a tensor
    RESOURCE = "resource"  # a handle: this very object
    SELECT = "select"  # whatever tensor the program passes: traces differ in where it comes from


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
      shape: static shape, with None for sizes in which traces differ.
      varies: it differed between traces, so it is fed.
      alternatives: for SELECT, the outputs that it has been.
    """

    kind: Kind
    dtype: int
    shape: Shape
    tensor: Any = None
    value: Any = None
    content: bytes = b""
    varies: bool = False
    alternatives: frozenset[int] = frozenset()

    @property
    def fed(self) -> bool:
        """Whether a graph gets the value anew in each iteration."""
        return self.varies or self.kind in (Kind.TENSOR, Kind.SELECT)


@dataclasses.dataclass(frozen=True, slots=True)
class OutputInfo:
    """Dtype (enum number) and shape of one op output."""

    dtype: int
    shape: Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What makes a node the same one in different traces, from coarse to fine.

    Attributes:
      family: op type and place in the program; all turns of a loop are one family.
      context: the family, the variable last touched there, and the forward node it belongs to.
      exact: the context and how many nodes of the same context came before.
      order: the smaller it is, the earlier the node probably comes in the program.
    """

    family: int
    context: int
    exact: int
    order: tuple[int, ...] = ()


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
      gradient_of: position of the forward node whose gradient function called it.
      identity: by what it is found again in other traces; see tracegraph/identity.py.
      count: how many traces ran it.
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
    gradient_of: int | None = None
    identity: Identity | None = None
    count: int = 1

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
      made_aside: ids of resources that the iteration made in ops that are not recorded.
    """

    nodes: list[Node] = dataclasses.field(default_factory=list)
    outputs: list[OutputInfo] = dataclasses.field(default_factory=list)
    externals: list[External] = dataclasses.field(default_factory=list)
    reads: dict[int, Read] = dataclasses.field(default_factory=dict)
    kept: dict[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    made_aside: set[int] = dataclasses.field(default_factory=set)

    @property
    def variables_made(self) -> int:
        """How many variables were made in the iteration."""
        return sum(node.op == "VarHandleOp" for node in self.nodes) + len(self.made_aside)

    def producer(self, output: int) -> Node:
        """The node that made an output."""
        return self.nodes[self.producer_position(output)]

    def producer_position(self, output: int) -> int:
        """The position of the node that made an output."""
        low, high = 0, len(self.nodes)
        while high - low > 1:
            middle = (low + high) // 2
            if self.nodes[middle].first_output <= output:
                low = middle
            else:
                high = middle
        return low

    def __str__(self) -> str:
        lines = [(k, 1, f"{k:4d}  {node}   {node.location}") for k, node in enumerate(self.nodes)]
        for read in self.reads.values():
            lines.append((read.position, 0, f"      read %{read.output}   {read.location}"))
        return "\n".join(text for _, _, text in sorted(lines, key=lambda line: line[:2]))
