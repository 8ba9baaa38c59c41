"""The first pass: the order in which each rank computes.

Each function returns, for each of p ranks, its compute actions in order, as columns of numbers (see
`schedules.table`). Communication is added by `schedules.communication`, eviction by
`schedules.eviction`.
"""

from __future__ import annotations

import numpy as np

from pipeline.schedules.actions import Kind
from pipeline.schedules.table import Columns, row

# For each rank, its actions in order.
Lines = list[Columns]


def gpipe_order(num_stages: int, num_microbatches: int) -> Lines:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    Gradients accumulate in ascending order of micro-batches, as in 1F1B.
    """
    microbatches = range(num_microbatches)
    line = _joined(row(Kind.FORWARD, microbatches), row(Kind.BACKWARD, microbatches))
    return [line] * num_stages


def one_f_one_b_order(num_stages: int, num_microbatches: int) -> Lines:
    """Backwards as early as they can be (Narayanan et al., PipeDream-Flush, ICML 2021).

    Stage x runs p-1-x forwards ahead, then one forward and one backward by turns.
    """
    forwards = row(Kind.FORWARD, range(num_microbatches))
    backwards = row(Kind.BACKWARD, range(num_microbatches))
    return [_alternate(forwards, backwards, num_stages - 1 - stage) for stage in range(num_stages)]


def interleaved_order(num_stages: int, num_microbatches: int, num_chunks: int) -> Lines:
    """1F1B over several model chunks a rank (Narayanan et al., Megatron-LM, SC 2021).

    Micro-batches go in groups of p, each group through one chunk after the other. A rank runs so
    many forwards ahead that its first backward finds its gradient. Where p does not divide m, the
    order is that of the next greater m which it divides, without the micro-batches that are not
    there: what cannot deadlock with them cannot deadlock without.
    """
    groups = [range(start, start + num_stages) for start in range(0, num_microbatches, num_stages)]
    chunks = range(num_chunks)
    forwards = [row(Kind.FORWARD, group, chunk) for group in groups for chunk in chunks]
    backwards = [row(Kind.BACKWARD, group, chunk) for group in groups for chunk in reversed(chunks)]
    lines = []
    for rank in range(num_stages):
        ahead = 2 * (num_stages - 1 - rank) + (num_chunks - 1) * num_stages
        line = _alternate(_joined(*forwards), _joined(*backwards), ahead)
        lines.append(line[:, line[1] < num_microbatches])
    return lines


def _joined(*parts: Columns) -> Columns:
    return np.concatenate(parts, axis=1)


def _alternate(forwards: Columns, backwards: Columns, ahead: int) -> Columns:
    """`ahead` forwards, then a forward and a backward by turns, then the other backwards."""
    paired = max(0, forwards.shape[1] - ahead)
    turns = np.stack([forwards[:, ahead:], backwards[:, :paired]], axis=2).reshape(4, -1)
    return _joined(forwards[:, :ahead], turns, backwards[:, paired:])
