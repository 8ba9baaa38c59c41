"""What may be spent on learning a step whose co-execution may not pay.

Tracing an iteration takes two to four times as long as running it, and generating a graph as long
as tens of them. Most steps repeat, and then that is soon won back. `Doubt` knows from the traces of
a step that it may not be so; the step then pays out of an `Allowance`, a small part of the time
that it has run, and stays eager until the next attempt is affordable. What co-execution wins goes
to the allowance, so a step that was doubted in vain can soon afford all that it needs.
"""

from __future__ import annotations

import collections
import math
import statistics

from terra_tf.generation.shape_values import follow_from_shapes
from terra_tf.tracegraph.sequence import Sequence
from terra_tf.tracing.trace import Trace

_SHARE = 0.06  # of eager's time
_MEASURED = 3  # eager iterations from which its time is known
_TRACED = 3.0  # times eager's, while no eager iteration was measured
_NODE_SECONDS = 1e-3  # of a graph's generation, at most

_LARGE = 100  # nodes of an iteration, below which what is spent is not noticed
_SOME_LOOKS = 3
_MANY_LOOKS = 24
_NODES_A_LOOK = 12  # with fewer, waiting for values takes longer than eager's ops
_NOVEL = 0.5  # share of a trace's nodes that come from a new place
_NOVEL_TRACES = 3  # in a row


class Doubt:
    """Judges from traces whether a step may be one for which co-execution does not pay.

    Attributes:
      holds: whether there is doubt.
    """

    def __init__(self) -> None:
        self.holds = False
        self._traces = 0
        self._novel = 0  # traces in a row that were mostly new
        self._looks: set[int] = set()  # how often traces looked at values on their way

    def judge(self, trace: Trace, sequence: Sequence) -> None:
        """Takes in a trace that was merged into a sequence."""
        self._traces += 1
        looks = _looks_on_the_way(trace)
        self._looks.add(looks)
        self.holds |= self._is_steered(trace, sequence) or self._never_repeats(sequence)
        if looks >= _MANY_LOOKS and _LARGE <= len(trace.nodes) < _NODES_A_LOOK * looks:
            self.holds = True

    def _is_steered(self, trace: Trace, sequence: Sequence) -> bool:
        """Whether values decide how long an iteration is: a solver's, an episode's."""
        varies = sequence.branched and len(self._looks) > 1
        return varies and min(self._looks) >= _SOME_LOOKS and len(trace.nodes) >= _LARGE

    def _never_repeats(self, sequence: Sequence) -> bool:
        # The first trace often makes variables; so the second one may be the first of its kind.
        is_novel = self._traces > 2 and sequence.novelty >= _NOVEL
        self._novel = self._novel + 1 if is_novel else 0
        return self._novel >= _NOVEL_TRACES and sequence.completed == 0


def _looks_on_the_way(trace: Trace) -> int:
    """At how many places values are looked at with more ops behind; each has to wait there."""
    end = len(trace.nodes)
    places = {read.output: read.position for read in trace.reads.values() if read.position < end}
    if len(places) < _SOME_LOOKS:
        return len(places)
    known = follow_from_shapes(trace)  # gradient code looks at many of these
    return len(
        {
            position
            for output, position in places.items()
            if output not in known and not trace.producer(output).in_place
        }
    )


class Allowance:
    """Compares a step's time with eager's, all iterations together."""

    def __init__(self) -> None:
        self._eager: collections.deque[float] = collections.deque(maxlen=5)
        self._iterations = 0
        self._others = 0  # that did not run eagerly
        self._others_seconds = 0.0
        self._last_other = 0.0

    def note(self, eager: bool, seconds: float) -> None:
        """Takes in an iteration's time."""
        self._iterations += 1
        if eager:
            self._eager.append(seconds)
        elif self._iterations > 1:  # the first one takes longer in eager mode, too
            weight = 2 if self._others == 0 else 1
            self._others += weight
            self._others_seconds += weight * seconds
            self._last_other = seconds

    def rested(self, iterations: int) -> None:
        """Takes in iterations that run eagerly without being measured."""
        self._iterations += iterations

    @property
    def measured(self) -> bool:
        """Whether it is known how long eager takes."""
        return len(self._eager) >= _MEASURED

    @property
    def eager_seconds(self) -> float:
        """How long an eager iteration takes."""
        if self._eager:
            return statistics.median(self._eager)
        return self._others_seconds / max(1, self._others) / _TRACED

    @property
    def spent(self) -> float:
        """Seconds above eager's; negative if co-execution has won."""
        return self._others_seconds - self._others * self.eager_seconds

    @property
    def trace_cost(self) -> float:
        """Seconds that tracing an iteration takes above eager's."""
        return max(0.0, self._last_other - self.eager_seconds)

    @staticmethod
    def build_cost(sequence: Sequence) -> float:
        """Seconds that generating a graph will take."""
        return _NODE_SECONDS * len(sequence.trace.nodes)

    def iterations_until(self, cost: float) -> int:
        """How many more iterations have to run eagerly before a cost is affordable."""
        granted = _SHARE * self.eager_seconds
        if granted == 0.0:
            return 0
        return max(0, math.ceil((self.spent + cost) / granted) - self._iterations)
