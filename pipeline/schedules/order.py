"""The first pass: the order in which each rank computes.

Each function returns, for each of p ranks, its compute actions in order. Communication is added by
`schedules.communication`, eviction by `schedules.eviction`.
"""

from __future__ import annotations

from itertools import chain

from pipeline.schedules.actions import Action, Kind

# For each rank, its actions in order.
Lines = list[list[Action]]


def gpipe_order(num_stages: int, num_microbatches: int) -> Lines:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    Gradients accumulate in ascending order of micro-batches, as in 1F1B.
    """
    forwards = _row(Kind.FORWARD, num_microbatches)
    backwards = _row(Kind.BACKWARD, num_microbatches)
    return [forwards + backwards for _ in range(num_stages)]


def one_f_one_b_order(num_stages: int, num_microbatches: int) -> Lines:
    """Backwards as early as they can be (Narayanan et al., PipeDream-Flush, ICML 2021).

    Stage x runs p-1-x forwards ahead, then one forward and one backward by turns.
    """
    forwards = _row(Kind.FORWARD, num_microbatches)
    backwards = _row(Kind.BACKWARD, num_microbatches)
    return [_alternate(forwards, backwards, num_stages - 1 - stage) for stage in range(num_stages)]


def interleaved_order(num_stages: int, num_microbatches: int, num_chunks: int) -> Lines:
    """1F1B over several model chunks a rank (Narayanan et al., Megatron-LM, SC 2021).

    Micro-batches go in groups of p, each group through one chunk after the other. A rank runs so
    many forwards ahead that its first backward finds its gradient. Where p does not divide m, the
    order is that of the next greater m which it divides, without the micro-batches that are not
    there: what cannot deadlock with them cannot deadlock without.
    """
    groups = [range(start, start + num_stages) for start in range(0, num_microbatches, num_stages)]
    forwards = [
        Action(Kind.FORWARD, microbatch, chunk)
        for group in groups
        for chunk in range(num_chunks)
        for microbatch in group
    ]
    backwards = [
        Action(Kind.BACKWARD, microbatch, chunk)
        for group in groups
        for chunk in reversed(range(num_chunks))
        for microbatch in group
    ]
    lines = []
    for rank in range(num_stages):
        ahead = 2 * (num_stages - 1 - rank) + (num_chunks - 1) * num_stages
        line = _alternate(forwards, backwards, ahead)
        lines.append([action for action in line if action.microbatch < num_microbatches])
    return lines


def _row(kind: Kind, num_microbatches: int, chunk: int = 0) -> list[Action]:
    return [Action(kind, microbatch, chunk) for microbatch in range(num_microbatches)]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward by turns, then the other backwards."""
    turns = chain.from_iterable(zip(forwards[ahead:], backwards))  # noqa: B905 - ends unequal
    paired = max(0, len(forwards) - ahead)
    return [*forwards[:ahead], *turns, *backwards[paired:]]
