"""Numbers the slots of an iteration: what Python and the graph hand each other.

Feeds come first, so that feed k is slot k; the other slots follow in the order in which the builder
asks for them.
"""

from __future__ import annotations


class Slots:
    """Slot numbers of one generated graph.

    Attributes:
      external_feeds: external -> feed.
      output_feeds: output of a node in place -> feed.
      fetches: output -> slot.
    """

    def __init__(self, feeds: int):
        """Makes the numbering.

        Args:
          feeds: upper bound of the number of feeds.
        """
        self.num_feeds = feeds
        self._feeds_given = 0
        self._next = feeds
        self.external_feeds: dict[int, int] = {}
        self.output_feeds: dict[int, int] = {}
        self.fetches: dict[int, int] = {}
        self._gates: dict[int, int] = {}
        self._done: dict[int, int] = {}
        self._resume: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self.checked = self._new()

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _new_feed(self) -> int:
        self._feeds_given += 1
        return self._feeds_given - 1

    def feed_of_external(self, external: int) -> int:
        """The feed that carries an external."""
        if external not in self.external_feeds:
            self.external_feeds[external] = self._new_feed()
        return self.external_feeds[external]

    def feed_of_output(self, output: int) -> int:
        """The feed that carries an output of an op in place."""
        if output not in self.output_feeds:
            self.output_feeds[output] = self._new_feed()
        return self.output_feeds[output]

    def fetch(self, output: int) -> int:
        """The slot through which an output leaves the graph."""
        if output not in self.fetches:
            self.fetches[output] = self._new()
        return self.fetches[output]

    def gate(self, segment: int) -> int:
        """The slot that opens a segment's gate."""
        if segment not in self._gates:
            self._gates[segment] = self._new()
        return self._gates[segment]

    def done(self, segment: int) -> int:
        """The slot that says that the effects of a segment are made."""
        if segment not in self._done:
            self._done[segment] = self._new()
        return self._done[segment]

    def resume(self, segment: int) -> int:
        """The slot that says that the op in place after a segment has run."""
        if segment not in self._resume:
            self._resume[segment] = self._new()
        return self._resume[segment]

    def taken(self, block: int) -> int:
        """The slot that says whether a block is taken."""
        if block not in self._taken:
            self._taken[block] = self._new()
        return self._taken[block]

    @property
    def count(self) -> int:
        """How many slots there are."""
        return self._next
