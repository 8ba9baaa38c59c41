"""Decides how a sequence is co-executed, before anything is built.

The visible effects of an iteration (variable writes above all) must not happen before Python has
validated the program that far, so they stand behind gates. The trace is cut into *segments* by
*boundaries*; the effects of segment i wait for gate i. There is always a boundary at the end. There
are more where the program looked at a value that an effect had gone into, and where an op that runs
in place has to see the effects before it.

`gate[output]` says how many gates must be open before the graph can compute an output.
"""

from __future__ import annotations

import dataclasses

from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.effects import INTEGERS, Effect, effect_of, makes_shape_of_values, may_fail
from terra_tf.tracing.trace import Kind, Node, Output, Outside


@dataclasses.dataclass
class Plan:
    """How a sequence is co-executed.

    Attributes:
      boundaries: ascending positions (a boundary at k lies before node k); the last is the end.
      barrier: for nodes in place that need it, the number of the boundary right before them.
      gate: per output.
      fetched: outputs that leave the graph.
      fallible: per node, whether it may fail for some values.
    """

    boundaries: list[int]
    barrier: dict[int, int]
    gate: list[int]
    fetched: set[int]
    fallible: list[bool]

    def __str__(self) -> str:
        cuts = ", ".join(map(str, self.boundaries))
        return f"boundaries at {cuts}; {len(self.fetched)} fetched of {len(self.gate)} outputs"


def resources_of(node: Node, sequence: Sequence) -> list[int]:
    """The externals that are resource handles among a node's inputs."""
    return [
        source.index
        for source in node.inputs
        if isinstance(source, Outside)
        and sequence.trace.externals[source.index].kind is Kind.RESOURCE
    ]


def make_plan(sequence: Sequence) -> Plan:
    """Plans the co-execution of a sequence; puts nodes in place where that is needed."""
    return _Planner(sequence, fail_in_time(sequence)).plan


def fail_in_time(sequence: Sequence) -> list[bool]:
    """Puts ops in place that may fail before something that cannot be taken back.

    A print, a random draw or a written file after a failed op must not happen, so Python has to
    know in time. Besides ops that may fail by themselves, those count whose shapes depend on values
    or on numbers that vary.

    Returns:
      Per node, whether it may fail.
    """
    externals = sequence.trace.externals
    uncertain: set[int] = set()
    fallible: list[bool] = []
    for node in sequence.trace.nodes:
        takes_uncertain = any(
            source.index in uncertain
            if isinstance(source, Output)
            else externals[source.index].fed and externals[source.index].dtype in INTEGERS
            for source in node.inputs
        )
        if takes_uncertain or makes_shape_of_values(node.op):
            uncertain.update(node.outputs)
        fallible.append(takes_uncertain or may_fail(node.op))
    visible = False
    for node, may in zip(reversed(sequence.trace.nodes), reversed(fallible), strict=True):
        if node.misses:
            continue
        if visible and may and not node.in_place:
            node.effect = Effect.LOCAL if node.effect is Effect.PURE else Effect.BARRIER
        visible = visible or effect_of(node.op) is Effect.LOCAL
    return fallible


class _Planner:
    def __init__(self, sequence: Sequence, fallible: list[bool]):
        self.sequence = sequence
        trace = sequence.trace
        self.plan = Plan([], {}, [0] * len(trace.outputs), set(), fallible)
        self.variable_gate: dict[int, int] = {}  # external -> gate of the variable's value
        self.untouched_gate = 0  # of variables that nothing has touched since the last barrier
        reads = sorted(sequence.reads.values(), key=lambda read: read.position)
        for k, node in enumerate(trace.nodes):
            while reads and reads[0].position <= k:
                self._look(reads.pop(0).output, k)
            self._visit(k, node)
        for read in reads:
            self._look(read.output, len(trace.nodes))
        self._cut(len(trace.nodes))

    def _in_place(self, output: int) -> bool:
        return self.sequence.trace.nodes[self.sequence.producers[output]].in_place

    def _cut(self, position: int) -> None:
        self.plan.boundaries.append(position)
        kept = self.sequence.kept.get(position)
        if kept is None:  # nobody has looked here, so all that is there may be held
            kept = frozenset(o for o, k in enumerate(self.sequence.producers) if k < position)
        self.plan.fetched.update(output for output in kept if not self._in_place(output))

    def _look(self, output: int, position: int) -> None:
        """Python needs an output's value at a position."""
        if self._in_place(output):
            return
        self.plan.fetched.add(output)
        if self.plan.gate[output] > len(self.plan.boundaries):
            self._cut(position)

    def _visit(self, k: int, node: Node) -> None:
        effect = node.effect
        gate = self.plan.gate
        inputs = [source.index for source in node.inputs if isinstance(source, Output)]
        own = max((gate[i] for i in inputs), default=0)
        if node.in_place:
            for i in inputs:
                self._look(i, k)
            if effect is Effect.BARRIER:
                if not self.plan.boundaries or self.plan.boundaries[-1] != k:
                    self._cut(k)
                self.plan.barrier[k] = len(self.plan.boundaries) - 1
                self.variable_gate.clear()
                self.untouched_gate = len(self.plan.boundaries)
            own = 0
        elif effect is Effect.READ:
            (variable,) = resources_of(node, self.sequence)
            own = max(own, self.variable_gate.get(variable, self.untouched_gate))
        elif effect is Effect.ASSIGN:
            (variable,) = resources_of(node, self.sequence)
            if node.op != "AssignVariableOp":
                own = max(own, self.variable_gate.get(variable, self.untouched_gate))
            self.variable_gate[variable] = own
        elif effect is Effect.WRITE:
            own = len(self.plan.boundaries) + 1
            for variable in resources_of(node, self.sequence):
                self.variable_gate[variable] = own
        for output in node.outputs:
            gate[output] = own
