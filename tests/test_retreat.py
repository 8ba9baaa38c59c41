"""Retreat: when a step stays eager, and when it tries again. Time is faked."""

import dataclasses

import pytest

from terra_tf.runners import retreat as module
from terra_tf.runners.retreat import Retreat

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock of the module by one that stands still until it is moved."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(module.time, "perf_counter", lambda: Clock.now)
    return Clock


@dataclasses.dataclass
class Program:
    """A step that takes so long in each mode; drives a Retreat as the PythonRunner does.

    `repeats` says, by number, whether an iteration would run through as co-executed; `traces` is
    how many are traced before the first one can.
    """

    clock: object
    eager: float = 1.0
    graph: float = 0.5
    traces: int = 2
    repeats: object = staticmethod(lambda number: True)
    noise: object = staticmethod(lambda number: 1.0)

    def __post_init__(self):
        self.retreat = Retreat()
        self.modes = []
        self.learnt = 0

    def run(self, iterations):
        """Runs some iterations and returns their modes."""
        for _ in range(iterations):
            self.modes.append(self._iteration(len(self.modes)))
        return self.modes[-iterations:]

    def _iteration(self, number):
        if self.retreat.rests():
            return self._took(self.eager, "rest")
        if self.retreat.stay_eager():
            return self._took(self.eager, "eager")
        if self.learnt < self.traces:
            self.learnt += 1
            self._took(3 * self.eager, "")
            self.retreat.ended(False)
            return "traced"
        through = self.repeats(number)
        self._took(self.graph if through else 2 * self.eager, "")
        self.retreat.ended(through)
        return "coexecuted" if through else "fell back"

    def _took(self, seconds, mode):
        self.clock.now += seconds * self.noise(len(self.modes))
        return mode

    def share(self, mode, last):
        return self.modes[-last:].count(mode) / last


def test_a_step_for_which_it_pays_is_nearly_always_co_executed(clock):
    program = Program(clock, graph=0.3)
    assert program.run(3) == ["traced", "traced", "coexecuted"]
    program.run(2000)
    assert program.retreat.retreats == 0
    assert program.share("coexecuted", 2000) > 0.98
    assert "rest" not in program.modes


def test_a_step_whose_graph_is_slower_rests_soon(clock):
    program = Program(clock, graph=1.5)
    program.run(120)
    assert program.retreat.retreats == 1
    assert program.retreat.resting
    assert program.modes.index("rest") < 80


def test_after_warm_up_a_slow_graph_costs_less_than_a_tenth(clock):
    program = Program(clock, graph=2.0)
    program.run(200)
    start, count = clock.now, 5000
    program.run(count)
    assert (clock.now - start) / count < program.eager / 0.9


def test_a_graph_about_as_fast_as_eager_stays(clock):
    program = Program(clock, graph=1.0)
    program.run(500)
    assert program.retreat.retreats == 0


def test_sequences_that_never_repeat_rest_after_few_iterations(clock):
    program = Program(clock, repeats=lambda number: False)
    program.run(60)
    assert program.retreat.retreats == 1
    assert program.modes.index("rest") <= 30
    assert "coexecuted" not in program.modes


def test_sequences_that_seldom_repeat_rest(clock):
    program = Program(clock, repeats=lambda number: number % 5 == 0)
    program.run(200)
    assert program.retreat.retreats >= 1


def test_sequences_that_mostly_repeat_do_not_rest(clock):
    program = Program(clock, graph=0.3, repeats=lambda number: number % 5 != 0)
    program.run(2000)
    assert program.retreat.retreats == 0
    assert program.share("coexecuted", 1000) > 0.7


def test_rests_double_and_are_bounded(clock):
    program = Program(clock, graph=3.0)
    program.run(40_000)
    rests = lengths(program.modes, "rest")[:-1]  # the last one is cut off
    assert len(rests) >= 6
    assert rests[0] < 200
    for shorter, longer in zip(rests, rests[1:], strict=False):
        assert longer == min(2 * shorter, max(rests))
    assert max(rests) <= 10_000


def test_a_later_try_is_shorter_than_the_first(clock):
    program = Program(clock, repeats=lambda number: False)
    program.run(2000)
    tries = lengths(program.modes, "fell back")
    assert len(tries) >= 3
    assert all(later < tries[0] for later in tries[1:])


def test_co_execution_returns_when_it_pays_again(clock):
    program = Program(clock, graph=3.0)
    program.run(100)
    assert program.retreat.resting
    program.graph = 0.3
    program.run(1500)
    assert program.share("coexecuted", 500) > 0.9
    assert not program.retreat.resting


def test_a_step_that_begins_to_pay_less_is_noticed(clock):
    program = Program(clock, graph=0.5)
    program.run(1000)
    assert program.retreat.retreats == 0
    program.graph = 2.0
    program.run(5000)
    assert program.retreat.retreats >= 1


def test_sequences_that_repeat_from_some_time_on_are_co_executed_then(clock):
    program = Program(clock, graph=0.3, repeats=lambda number: number > 3000)
    program.run(20_000)
    assert program.share("coexecuted", 2000) > 0.95


def test_a_single_slow_iteration_is_no_reason(clock):
    """A garbage collection, a checkpoint or another process now and then."""
    program = Program(clock, graph=0.6, noise=lambda number: 50.0 if number % 37 == 5 else 1.0)
    program.run(3000)
    assert program.retreat.retreats == 0


def test_a_slow_spell_during_the_first_probe_is_no_reason(clock):
    """The machine is four times slower for a while: eager and graph must both be timed again."""
    for start in range(0, 60, 4):
        program = Program(
            clock, graph=0.7, noise=lambda number, s=start: 4.0 if s <= number < s + 6 else 1.0
        )
        program.run(200)
        assert program.retreat.retreats == 0, start


def test_pauses_between_iterations_in_a_rest_change_nothing(clock):
    program = Program(clock, graph=3.0)
    program.run(100)
    assert program.retreat.resting
    clock.now += 1e6
    program.graph = 0.3
    program.run(3000)
    assert program.share("coexecuted", 500) > 0.9


def test_timing_needs_no_sleep_and_no_time_of_its_own(monkeypatch):
    """Resting costs next to nothing: it does not even look at the clock."""
    retreat = Retreat()
    for _ in range(module._HOPELESS):
        if not retreat.stay_eager():
            retreat.ended(False)
    assert retreat.stay_eager() and retreat.resting
    monkeypatch.setattr(module.time, "perf_counter", None)
    assert retreat.rests()


def lengths(modes, mode):
    """Lengths of the runs of one mode; other modes of less than a rest in between do not count."""
    found, count = [], 0
    for this in modes:
        if this == mode:
            count += 1
        elif count:
            found.append(count)
            count = 0
    return [*found, count] if count else found
