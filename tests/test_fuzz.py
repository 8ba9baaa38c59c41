"""The fuzzer: its programs are right under Terra, and a fault planted in Terra is found by it."""

import ast
import collections

import pytest
from fuzz import campaign
from fuzz.generator import generate
from fuzz.minimiser import minimise, symptom
from fuzz.program import check

from terra_tf import tensorflow_internals

SHORT = range(30)
LONG = range(1000, 3000)
LONG_AT_ONCE = 200


def assert_no_difference(seeds):
    report = campaign.search_in_processes(campaign.of_seeds(seeds))
    assert not (report.findings or report.invalid or report.exits), "\n\n".join(
        map(str, [report, *report.findings])
    )
    assert report.programs == len(seeds)
    return report


@pytest.mark.timeout(600)  # 25 s on an idle machine
def test_programs_of_fixed_seeds():
    report = assert_no_difference(SHORT)
    # The comparison means something: many iterations co-execute, many fall back in their middle.
    for phase in ("coexecuted", "fallen_back"):
        assert report.iterations[phase] > 2 * len(SHORT), report
    # Two traces make a graph; programs that seem never to repeat are traced less.
    assert report.iterations["traced"] > 1.5 * len(SHORT), report


@pytest.mark.full
@pytest.mark.parametrize("first", LONG[::LONG_AT_ONCE])
def test_thousands_of_programs(first):
    assert_no_difference(range(first, first + LONG_AT_ONCE))


def test_equal_seeds_make_equal_programs():
    programs = [generate(seed) for seed in range(300)]
    assert programs == [generate(seed) for seed in range(300)]
    assert len(set(programs)) == len(programs)


def test_programs_hold_every_kind_of_statement():
    kinds = collections.Counter(
        type(node).__name__ for seed in range(300) for node in ast.walk(ast.parse(generate(seed)))
    )
    for kind in ("If", "For", "While", "Break", "Continue", "Return", "Raise", "Try", "With"):
        assert kinds[kind] >= 30, kind


# --- faults planted in Terra ----------------------------------------------------------------------


def wrong_op_in_graphs(monkeypatch):
    """Generated graphs compute a sigmoid where eager computes a hyperbolic tangent."""
    create = tensorflow_internals.create_graph_op

    def wrong(graph, op, inputs, attrs):
        return create(graph, "Sigmoid" if op == "Tanh" else op, inputs, attrs)

    monkeypatch.setattr(tensorflow_internals, "create_graph_op", wrong)


def lost_write_in_replays(monkeypatch):
    """A fallback does not execute one kind of assignment again."""
    raw_call = tensorflow_internals.raw_call

    def forgetful(op, inputs, attrs, num_outputs):
        if op == "AssignSubVariableOp":
            return list, ()  # makes no tensors, as the op itself
        return raw_call(op, inputs, attrs, num_outputs)

    monkeypatch.setattr(tensorflow_internals, "raw_call", forgetful)


@pytest.mark.parametrize("plant", [wrong_op_in_graphs, lost_write_in_replays])
def test_planted_fault_is_found_and_minimised(plant, monkeypatch):
    plant(monkeypatch)
    report = campaign.search(campaign.of_seeds(range(100)), check, most_findings=1)
    (finding,) = report.findings
    campaign.shrink(finding, check, seconds=15.0)
    assert len(finding.minimised) < len(finding.source), finding
    assert f"tools/fuzz {finding.name}" in str(finding)
    monkeypatch.undo()
    assert not check(finding.minimised).problems


def test_minimiser_keeps_what_matters_and_nothing_else():
    source = """
def program(terra):
    first = 1
    for turn in range(3):
        if turn > 1:
            first = first + max(turn, 5)
        else:
            print("needless", turn)
    with open("file") as file:
        wanted(first * 2)
    return first
"""
    smallest = minimise(source, lambda text: "wanted(" in text and "max(turn" in text, seconds=30.0)
    assert smallest == "def program(terra):\n    first = max(turn, 5)\n    wanted(first)"


def test_crash_and_hang_are_findings():
    """A program that kills its process, or never ends, costs no other program its result."""
    crash = generate(1).replace(
        "def program(terra):", "import os; os.kill(os.getpid(), 9)\ndef program(terra):"
    )
    programs = [("crash", crash), *campaign.of_seeds([2])]
    report = campaign.search_in_processes(programs)
    assert [symptom(finding.verdict) for finding in report.findings] == ["crash"]
    assert report.programs == 2
