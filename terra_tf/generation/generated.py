"""A GeneratedGraph: the graph function of a sequence and the Program that goes with it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.generation.builder import GraphBuilder
from terra_tf.generation.compilation import Compilation
from terra_tf.generation.plan import Plan, make_plan
from terra_tf.generation.program import ProgramWriter
from terra_tf.generation.slots import Slots
from terra_tf.tracegraph.sequence import Sequence


@dataclasses.dataclass
class GeneratedGraph:
    """What both runners execute for one sequence.

    Attributes:
      sequence: the state of the sequence from which it was generated.
      concrete: the graph as a ConcreteFunction, for people.
      program: the matcher's checklist.
      plan: which parts run where.
      slots: the numbering of feeds and fetches.
      seconds: what generating it took.
      config: serialized ConfigProto that it runs with.
      compilation: what XLA compiles; None if it is not to compile anything.
    """

    sequence: Sequence
    concrete: Any
    program: Any
    plan: Plan
    slots: Slots
    seconds: float
    config: bytes
    compilation: Compilation | None


def generate(
    sequence: Sequence, name: str, exact: bool = True, xla: bool = False
) -> GeneratedGraph:
    """Generates the graph of a sequence.

    Args:
      sequence: merged traces of one structure.
      name: name of the step, for people who look at the graph.
      exact: keep results bit-equal to eager.
      xla: let XLA compile what it can.
    """
    start = time.perf_counter()
    sequence = sequence.snapshot()
    plan = make_plan(sequence)
    slots = Slots(len(sequence.trace.externals) + len(sequence.trace.outputs))
    compilation = Compilation() if xla else None
    builder = GraphBuilder(sequence, plan, slots, compilation)
    function = tensorflow_internals.GeneratedFunction(
        f"terra_{name}", tf.TensorSpec([], tf.int64), builder.build
    )
    config = tensorflow_internals.function_config(exact)
    writer = ProgramWriter(sequence, plan, slots, builder)
    program = writer.write(function.name, config, function.captures)
    seconds = time.perf_counter() - start
    return GeneratedGraph(
        sequence, function.concrete, program, plan, slots, seconds, config, compilation
    )
