"""Decides how a sequence is co-executed, before anything is built.

The visible effects of an iteration (variable writes above all) must not happen before Python has
validated the program that far, so they stand behind gates. The line of nodes is cut into *segments*
by *boundaries*; the effects of segment i wait for gate i. There is always a boundary at the end.
There are more where the program looked at a value that an effect had gone into, and where an op
that runs in place has to see the effects before it. An iteration that skips a boundary's block
passes it together with the next one.

`gate[output]` says how many gates must be open before the graph can compute an output.
"""

from __future__ import annotations

import dataclasses
import itertools

from terra_tf.configuration import settings
from terra_tf.generation.shape_values import ShapeValue, shape_values
from terra_tf.tracegraph.sequence import Block, Sequence
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
      selected: outputs that selects may take.
      select_gate: per external that is a select, the largest gate of what it may take.
      uncertain: outputs whose shape depends on values.
      fallible: per node, whether it may fail for some values.
      shape_values: nodes whose values follow from shapes, and are asked for.
      blocks: the sequence's blocks, cut at the boundaries, too.
    """

    gate: list[int]
    selected: set[int]
    uncertain: set[int]
    fallible: list[bool]
    shape_values: dict[int, ShapeValue] = dataclasses.field(default_factory=dict)
    boundaries: list[int] = dataclasses.field(default_factory=list)
    barrier: dict[int, int] = dataclasses.field(default_factory=dict)
    fetched: set[int] = dataclasses.field(default_factory=set)
    select_gate: dict[int, int] = dataclasses.field(default_factory=dict)
    blocks: list[Block] = dataclasses.field(default_factory=list)

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
    """Plans the co-execution of a sequence; puts nodes in place where that is needed.

    Args:
      sequence: a snapshot, which is changed.
    """
    sequence.generalise_selects()
    uncertain, fallible = fail_in_time(sequence)
    gate = [0] * len(sequence.trace.outputs)
    plan = Plan(gate, sequence.selected_outputs(), uncertain, fallible)
    plan.shape_values = shape_values(sequence, uncertain)
    _Planner(sequence, plan).run()
    return plan


def fail_in_time(sequence: Sequence) -> tuple[set[int], list[bool]]:
    """Puts ops in place that may fail before something that cannot be taken back.

    A print, a random draw or a written file after a failed op must not happen, so Python has to
    know in time. Besides ops that may fail by themselves, those count whose shapes depend on values
    or on numbers that vary.

    Returns:
      The outputs whose shape depends on values, and per node, whether it may fail.
    """
    externals = sequence.trace.externals
    uncertain: set[int] = set()

    def is_uncertain(source: Output | Outside) -> bool:
        if isinstance(source, Output):
            return source.index in uncertain
        external = externals[source.index]
        if external.fed and external.dtype in INTEGERS:
            return True
        return not uncertain.isdisjoint(external.alternatives)

    fallible: list[bool] = []
    for node in sequence.trace.nodes:
        takes_uncertain = any(map(is_uncertain, node.inputs))
        if takes_uncertain or makes_shape_of_values(node.op):
            uncertain.update(node.outputs)
        fallible.append(takes_uncertain or may_fail(node.op))
    visible = False
    for node, may in zip(reversed(sequence.trace.nodes), reversed(fallible), strict=True):
        if node.misses:
            continue
        if (visible or settings.sync) and may and not node.in_place:
            node.effect = Effect.LOCAL if node.effect is Effect.PURE else Effect.BARRIER
        visible = visible or effect_of(node.op) is Effect.LOCAL
    return uncertain, fallible


class _Planner:
    def __init__(self, sequence: Sequence, plan: Plan):
        self.sequence = sequence
        self.plan = plan
        self.variable_gate: dict[int, int] = {}  # external -> gate of the variable's value
        self.untouched_gate = 0  # of variables that nothing has touched since the last barrier

    def run(self) -> None:
        nodes = self.sequence.trace.nodes
        reads = sorted(self.sequence.reads, key=lambda place: place[1])
        for k, node in enumerate(nodes):
            while reads and reads[0][1] <= k:
                self._look(reads.pop(0)[0], k)
            self._visit(k, node)
        for output, _ in reads:
            self._look(output, len(nodes))
        self._cut(len(nodes))
        self.plan.blocks = _cut_blocks(self.sequence.blocks(), self.plan.boundaries)

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

    def _gate_of(self, source: Output | Outside) -> int:
        gate = self.plan.gate
        if isinstance(source, Output):
            return gate[source.index]
        external = self.sequence.trace.externals[source.index]
        if external.kind is not Kind.SELECT:
            return 0
        most = max((gate[o] for o in self.plan.selected | external.alternatives), default=0)
        self.plan.select_gate[source.index] = most
        return most

    def _visit(self, k: int, node: Node) -> None:
        effect = node.effect
        inputs = [source.index for source in node.inputs if isinstance(source, Output)]
        own = max(map(self._gate_of, node.inputs), default=0)
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
            before = self.variable_gate.get(variable, self.untouched_gate)
            # Where the assignment may be skipped, the variable keeps the value from before it.
            if node.op != "AssignVariableOp" or node.count < self.sequence.seen:
                own = max(own, before)
            self.variable_gate[variable] = own
        elif effect is Effect.WRITE:
            own = len(self.plan.boundaries) + 1
            for variable in resources_of(node, self.sequence):
                self.variable_gate[variable] = own
        for output in node.outputs:
            self.plan.gate[output] = own


def _cut_blocks(blocks: list[Block], boundaries: list[int]) -> list[Block]:
    """Blocks none of which has a boundary inside."""
    cut = []
    for block in blocks:
        inside = [position for position in boundaries if block.start < position < block.end]
        edges = [block.start, *dict.fromkeys(inside), block.end]
        cut += [Block(a, b, block.optional) for a, b in itertools.pairwise(edges)]
    return cut
