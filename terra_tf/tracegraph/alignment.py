"""Aligns a trace with the merged nodes of a sequence: which of its nodes are there already.

An alignment maps nodes of the trace to merged nodes in ascending order, so that the trace is a path
through the merged nodes that skips some of them and adds others. It is found in three steps: what a
walk has matched already, then a longest increasing subsequence over exact identities, then, in the
gaps that remain, a longest common subsequence over contexts. Any alignment gives right results,
since every arg of a merged node that differs becomes a select; a good one gives small graphs.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Callable, Sequence

import numpy as np

from terra_tf.tracing.trace import Node

_LARGEST_GAP = 1 << 20  # cells of the table for one gap; larger ones are left unaligned

Alignment = list[int | None]
Shareable = Callable[[Node, Node], bool]


def align(
    merged: Sequence[Node], nodes: Sequence[Node], known: Sequence[int], shareable: Shareable
) -> Alignment:
    """Positions of the merged nodes that the nodes of a trace are, or None for new ones.

    Args:
      merged: nodes of the sequence.
      nodes: nodes of the trace, with identities.
      known: positions for the first nodes of the trace, where a walk has matched them.
      shareable: whether a merged node can stand for a node of the trace.
    """
    alignment: Alignment = [*known, *[None] * (len(nodes) - len(known))]
    start = known[-1] + 1 if known else 0
    prefix = _common_prefix(merged[start:], nodes[len(known) :], shareable)
    for i in range(prefix):
        alignment[len(known) + i] = start + i
    for t, m in _increasing(merged, nodes, start + prefix, len(known) + prefix, shareable):
        alignment[t] = m
    _fill_gaps(merged, nodes, alignment, shareable)
    return alignment


def _common_prefix(merged: Sequence[Node], nodes: Sequence[Node], shareable: Shareable) -> int:
    length = 0
    for a, b in zip(merged, nodes, strict=False):
        if a.identity.exact != b.identity.exact or not shareable(a, b):
            break
        length += 1
    return length


def _increasing(
    merged: Sequence[Node],
    nodes: Sequence[Node],
    first_merged: int,
    first_node: int,
    shareable: Shareable,
) -> list[tuple[int, int]]:
    """Longest increasing pairs of equal exact identity (Hunt and Szymanski, 1977)."""
    places: dict[int, list[int]] = collections.defaultdict(list)
    for m in range(len(merged) - 1, first_merged - 1, -1):
        places[merged[m].identity.exact].append(m)
    tails: list[int] = []  # last merged position of the best chain of each length
    ends: list[int] = []  # the pair that it ends with
    pairs: list[tuple[int, int, int]] = []  # (node, merged, pair before)
    for t in range(first_node, len(nodes)):
        for m in places.get(nodes[t].identity.exact, ()):  # descending: one of them per chain
            if not shareable(merged[m], nodes[t]):
                continue
            length = bisect.bisect_left(tails, m)
            pairs.append((t, m, ends[length - 1] if length else -1))
            if length == len(tails):
                tails.append(m)
                ends.append(len(pairs) - 1)
            else:
                tails[length] = m
                ends[length] = len(pairs) - 1
    found = []
    last = ends[-1] if ends else -1
    while last >= 0:
        t, m, last = pairs[last]
        found.append((t, m))
    return found[::-1]


def _fill_gaps(
    merged: Sequence[Node], nodes: Sequence[Node], alignment: Alignment, shareable: Shareable
) -> None:
    """Aligns what lies between aligned nodes, by context."""
    t, m = 0, 0
    while t < len(nodes):
        if alignment[t] is not None:
            m = alignment[t] + 1
            t += 1
            continue
        end = t
        while end < len(nodes) and alignment[end] is None:
            end += 1
        end_m = alignment[end] if end < len(nodes) else len(merged)
        if 0 < (end - t) * (end_m - m) <= _LARGEST_GAP:
            for i, j in _common(merged[m:end_m], nodes[t:end], shareable):
                alignment[t + i] = m + j
        t = end


def _common(
    merged: Sequence[Node], nodes: Sequence[Node], shareable: Shareable
) -> list[tuple[int, int]]:
    """Longest common subsequence over contexts, as (node, merged) pairs."""
    columns = np.array([node.identity.context for node in merged])
    table = np.zeros((len(nodes) + 1, len(merged) + 1), np.int32)
    for i, node in enumerate(nodes):
        taken = table[i, :-1] + (columns == node.identity.context)
        np.maximum(table[i, 1:], taken, out=table[i + 1, 1:])
        np.maximum.accumulate(table[i + 1], out=table[i + 1])
    pairs = []
    i, j = len(nodes), len(merged)
    while i and j:
        if table[i, j] == table[i - 1, j]:
            i -= 1
        elif table[i, j] == table[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            if shareable(merged[j], nodes[i]):
                pairs.append((i, j))
    return pairs[::-1]
