"""Says which nodes of different traces are the same one (Terra, section 4.1).

Where the program calls an op tells much, but not all. Three kinds of nodes come from one line:

* turns of a loop: told apart by counting;
* ops of one loop over variables (an optimizer's, or a model's over its layers): the variable that
  they update, or that was touched last at that place, belongs to the identity;
* backward ops, which all come from inside one call of `tape.gradient`: they belong to the forward
  node whose gradient function called them.

Identities only propose which nodes to merge; whether merging is right is decided by the alignment.
"""

from __future__ import annotations

import collections

from terra_tf.tracing.effects import Effect
from terra_tf.tracing.trace import Identity, Kind, Node, Output, Outside, Trace

Resources = tuple[int, ...]


def identify(trace: Trace) -> None:
    """Gives an identity to every node that has none.

    Nodes that were copied from a merged sequence, at the beginning of a trace that started as a
    co-executed iteration, keep the one they have.
    """
    seen: collections.Counter[int] = collections.Counter()
    touched: dict[int, Resources] = {}  # place -> resources touched last
    places = [hash(node.location.place) for node in trace.nodes]
    updated = _updated_with(trace, places)
    for k, (node, place) in enumerate(zip(trace.nodes, places, strict=True)):
        resources = _resources(trace, node)
        if resources:
            touched[place] = resources
        if node.identity is None:
            about = resources or updated.get(k) or touched.get(place, ())
            node.identity = _identity(trace, node, place, about, seen)
        seen[node.identity.context] += 1


def _updated_with(trace: Trace, places: list[int]) -> dict[int, Resources]:
    """For nodes that compute what is written to a variable at the same place: that variable."""
    makers = [k for k, node in enumerate(trace.nodes) for _ in range(node.num_outputs)]
    updated: dict[int, Resources] = {}
    for k in range(len(trace.nodes) - 1, -1, -1):
        node = trace.nodes[k]
        if node.effect in (Effect.ASSIGN, Effect.WRITE):
            updated[k] = _resources(trace, node)
        if k not in updated:
            continue
        for source in node.inputs:
            if isinstance(source, Output) and places[makers[source.index]] == places[k]:
                updated[makers[source.index]] = updated[k]
    return updated


def _identity(
    trace: Trace,
    node: Node,
    place: int,
    resources: Resources,
    seen: collections.Counter[int],
) -> Identity:
    forward = None if node.gradient_of is None else trace.nodes[node.gradient_of].identity
    family = hash((node.op, node.call, node.misses, place, forward and forward.family))
    context = hash((family, resources, forward and forward.exact))
    line = node.location.frames[0][1] if node.location.frames else 0
    # Variables are mostly made in the order of their use, and gradients go backward.
    order = tuple(-x for x in forward.order) if forward else resources[-1:]
    return Identity(family, context, hash((context, seen[context])), (line, *order))


def _resources(trace: Trace, node: Node) -> Resources:
    return tuple(
        trace.externals[source.index].tensor._id
        for source in node.inputs
        if isinstance(source, Outside) and trace.externals[source.index].kind is Kind.RESOURCE
    )
