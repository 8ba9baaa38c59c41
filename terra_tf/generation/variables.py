"""What a generated graph knows of variables while it is built.

Variables are handled as values: an assignment gives the variable a new symbolic value, later reads
in the same iteration use that value, and what the variable itself gets is committed behind the
segment's gate. Ops that update variables in place wait behind the gate as a whole. Order between
reads and writes is kept by control edges made by hand. What happens in a block that may be skipped
counts after it through a merge, which is there whether the block was taken or not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.generation.blocks import OpenBlock

Operations = tuple[tf.Operation, ...]


@dataclasses.dataclass(frozen=True)
class Variable:
    """What is known of one variable at one point of the program.

    Attributes:
      value: its symbolic value, if an assignment has made one.
      dirty: `value` is not committed yet.
      assigned: whether it was assigned at all, where only some blocks do that; None where it was.
      reads: reads of the variable since it was last written.
      writes: after what it has to be read, and written again.
    """

    value: tf.Tensor | None = None
    dirty: bool = False
    assigned: tf.Tensor | None = None
    reads: Operations = ()
    writes: Operations = ()


class Variables:
    """All variables of a graph; they are named by the external that is their handle."""

    def __init__(self, graph: tf.Graph, handle: Callable[[int], tf.Tensor]):
        """Makes the record of a graph that has touched none.

        Args:
          graph: to which ops are added.
          handle: gives the graph's tensor for a handle.
        """
        self._graph = graph
        self._handle = handle
        self._known: dict[int, Variable] = {}
        self._untouched: Operations = ()  # what a variable's first access comes after
        self._before: tuple[dict[int, Variable], Operations] = ({}, ())

    def _of(self, resource: int) -> Variable:
        return self._known.get(resource) or Variable(writes=self._untouched)

    def _set(self, resource: int, **changes: object) -> None:
        self._known[resource] = dataclasses.replace(self._of(resource), **changes)

    def _after(self, operations: Iterable[tf.Operation]) -> tf.control_dependencies:
        return self._graph.control_dependencies(list(operations))

    # --- accesses ---

    def known_value(self, resource: int) -> tf.Tensor | None:
        """The symbolic value of a variable, if it was assigned."""
        return self._of(resource).value

    def read(self, resource: int, make: Callable[[], tf.Operation]) -> tf.Operation:
        """Adds an op that reads a variable which has no symbolic value."""
        variable = self._of(resource)
        with self._after(variable.writes):
            operation = make()
        self._set(resource, reads=(*variable.reads, operation))
        return operation

    def value(self, resource: int, dtype: tf.DType) -> tf.Tensor:
        """The value of a variable, read if need be."""
        known = self.known_value(resource)
        if known is not None:
            return known
        return self.read(resource, lambda: self._read_op(resource, dtype)).outputs[0]

    def _read_op(self, resource: int, dtype: tf.DType) -> tf.Operation:
        return tensorflow_internals.create_graph_op(
            self._graph, "ReadVariableOp", [self._handle(resource)], {"dtype": dtype}
        )

    def assign(self, resource: int, value: tf.Tensor) -> None:
        """Gives a variable a symbolic value."""
        self._set(resource, value=value, dirty=True, assigned=None)

    def write(
        self, resources: list[int], gate: tf.Operation, make: Callable[[], tf.Operation]
    ) -> Operations:
        """Adds an op that updates variables in place; returns all writes that were added."""
        added = [self.commit(r, gate) for r in resources if self._of(r).dirty]
        before = [gate]
        for resource in resources:
            before += [*self._of(resource).writes, *self._of(resource).reads]
        with self._after(before):
            operation = make()
        for resource in resources:
            self._set(
                resource, value=None, dirty=False, assigned=None, reads=(), writes=(operation,)
            )
        return (*added, operation)

    def commit(self, resource: int, gate: tf.Operation) -> tf.Operation:
        """Gives a variable its symbolic value, behind a gate.

        One that no block has assigned is not written: another thread may have changed it meanwhile.
        """
        variable = self._of(resource)
        before = [gate, *variable.writes, *variable.reads]
        if variable.assigned is None:
            operation = self._assign_op(resource, variable.value, before)
        else:
            block = OpenBlock(self._graph, variable.assigned)
            value = block.if_taken(variable.value)
            end = block.end([self._assign_op(resource, value, [*before, block.taken])])
            # Where nothing is written, the end has waited for nothing that came before.
            with self._after([*variable.writes, *variable.reads, end]):
                operation = tf.no_op()
        self._set(resource, dirty=False, assigned=None, reads=(), writes=(operation,))
        return operation

    def _assign_op(
        self, resource: int, value: tf.Tensor, before: list[tf.Operation]
    ) -> tf.Operation:
        with self._after(before):
            return tensorflow_internals.create_graph_op(
                self._graph,
                "AssignVariableOp",
                [self._handle(resource), value],
                {"dtype": value.dtype},
            )

    def dirty(self, among: Iterable[int] | None = None) -> list[int]:
        """Variables whose symbolic value is not committed."""
        return [r for r in (self._known if among is None else among) if self._of(r).dirty]

    def reads(self) -> list[tf.Operation]:
        """Reads of what variables hold, which nothing that comes after may have changed by then."""
        return [operation for variable in self._known.values() for operation in variable.reads]

    def forget(self, resumed: tf.Operation) -> None:
        """What runs in place may change any variable: nothing known before counts after it."""
        for resource in self._known:
            self._known[resource] = Variable(writes=(resumed,))
        self._untouched = (resumed,)

    # --- blocks that may be skipped ---

    def open_block(self) -> None:
        """Begins a block that may be skipped; no variable that it updates in place is dirty."""
        self._before = (dict(self._known), self._untouched)

    def close_block(self, block: OpenBlock) -> None:
        """Ends the block: what it did counts only if it was taken."""
        before, untouched = self._before
        changed = {
            resource: before.get(resource) or Variable(writes=untouched)
            for resource, variable in self._known.items()
            if before.get(resource) is not variable
        }
        reads = {r: _new(self._of(r).reads, old.reads) for r, old in changed.items()}
        writes = {r: _new(self._of(r).writes, old.writes) for r, old in changed.items()}
        ends = [op for ops in (*reads.values(), *writes.values()) for op in ops]
        ends += _new(self._untouched, untouched)
        end = (block.end(ends),) if ends else ()
        for resource, old in changed.items():
            new = self._of(resource)
            joined = dataclasses.replace(
                old,
                reads=old.reads + (end if reads[resource] else ()),
                writes=old.writes + (end if writes[resource] else ()),
            )
            if new.value is None:
                joined = dataclasses.replace(joined, value=None)
            elif new.value is not old.value:
                joined = self._join(block, resource, joined, new.value)
            self._known[resource] = joined
        if self._untouched != untouched:
            self._untouched = untouched + end

    def _join(
        self, block: OpenBlock, resource: int, joined: Variable, assigned: tf.Tensor
    ) -> Variable:
        reads = joined.reads
        if joined.value is not None:
            other = block.unless_taken(joined.value)
        else:
            with self._after([block.skipped, *joined.writes]):
                other = self._read_op(resource, assigned.dtype).outputs[0]
        if not joined.dirty:
            ever = block.decision
        elif joined.assigned is not None:
            ever = tf.logical_or(joined.assigned, block.decision)
        else:
            ever = None
        value = block.merge(block.if_taken(assigned), other)
        if joined.value is None:
            reads += (value.op,)
        return dataclasses.replace(joined, value=value, dirty=True, assigned=ever, reads=reads)


def _new(operations: Operations, known: Operations) -> list[tf.Operation]:
    return [operation for operation in operations if operation not in known]
