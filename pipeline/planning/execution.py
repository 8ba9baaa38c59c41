"""`execute`: runs a placed step on the devices of TensorFlow, in the order that was planned.

The step's graph is built anew with a device on every node. A device runs one operation at a time in
the order of the placement: each of its nodes waits for the one before. TensorFlow itself sends
tensors from device to device. The same code runs on GPUs and on logical CPU devices:

    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.errors import PlacementError
from pipeline.planning.cluster import Cluster, Device, Link
from pipeline.planning.placement import Placement
from pipeline.planning.step_graph import StepGraph
from pipeline.planning.tracing import Tracer


@dataclass(frozen=True)
class Measurement:
    """What a placed step took.

    Attributes:
        makespan: seconds from the start of the first operation to the end of the last; the median.
        wall: seconds of a call, Python and TensorFlow's dispatch included; the median.
        calls: how many were measured.
    """

    makespan: float
    wall: float
    calls: int


class PlacedStep:
    """A step on its devices; called like the step.

    Args:
        step: the traced step.
        device_of: operation → the name of its TensorFlow device.
        lines: for each device, its operations in order.
    """

    def __init__(
        self, step: StepGraph, device_of: Mapping[str, str], lines: Sequence[Sequence[str]]
    ) -> None:
        self.step = step
        self._graph_def = _placed(step, device_of, lines)
        self._function = tf.function(self._run, autograph=False)

    def __call__(self, *args: Any) -> Any:
        """Runs the step.

        Returns:
            What the step returns.
        """
        flat = self.step.flat_args(args)
        with tensorflow_internals.literal_graphs():
            outputs = self._function(flat)
        structure = self.step.concrete.structured_outputs
        if structure is None:
            return None
        flat_structure = tf.nest.flatten(structure, expand_composites=True)
        tensors = iter(outputs)
        values = [next(tensors) if isinstance(p, tf.Tensor) else p for p in flat_structure]
        return tf.nest.pack_sequence_as(structure, values, expand_composites=True)

    def measure(self, *args: Any, calls: int = 15) -> Measurement:
        """Runs the step several times and tells what it took.

        Args:
            *args: the arguments of the step.
            calls: how many runs to measure.
        """
        flat = self.step.flat_args(args)
        with tensorflow_internals.literal_graphs():
            for _ in range(3):
                _finish(self._function(flat))
            walls = []
            for _ in range(calls):
                begin = time.perf_counter()
                _finish(self._function(flat))
                walls.append(time.perf_counter() - begin)
            names = set(self.step.names)
            with Tracer() as tracer:
                for _ in range(calls):
                    with tracer.call():
                        _finish(self._function(flat))
        spans = [trace.span(names) for trace in tracer.traces()]
        return Measurement(statistics.median(spans), statistics.median(walls), calls)

    def _run(self, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        concrete = self.step.concrete
        given = [*flat, *map(tensorflow_internals.capture, concrete.captured_inputs)]
        mapping = {
            f"{inside.op.name}:0": value
            for inside, value in zip(concrete.inputs, given, strict=True)
        }
        wanted = [tensor.name for tensor in concrete.outputs]
        texts = {text for node in self._graph_def.node for text in node.input}
        used = {text if ":" in text else f"{text}:0" for text in texts}
        results = tf.graph_util.import_graph_def(
            self._graph_def,
            input_map={name: value for name, value in mapping.items() if name in used},
            return_elements=[name for name in wanted if name not in mapping],
            name="",
        )
        found = iter(results)
        return [mapping[n] if n in mapping else next(found) for n in wanted]


def execute(
    placement: Placement, fn: Callable[..., Any], *args: Any, devices: Sequence[str] | None = None
) -> PlacedStep | Any:
    """Makes a step run where a placement says.

    Args:
        placement: of the graph that `OpGraph.profile(fn, *args)` gave, fused or not.
        fn: the step: a `tf.function`, a callable, or a step of `terra_tf`.
        *args: what it is called with: its shapes are those of the placed step.
        devices: TensorFlow's names of the devices; by default those in the placement's cluster.

    Returns:
        A callable that runs the step on its devices, with the same results.

    Raises:
        PlacementError: if the placement is of another graph, or a device is not there.
    """
    names = list(devices or (device.name for device in placement.cluster.devices))
    _check_devices(names, len(placement.cluster))
    step = StepGraph(fn, args)
    rank = {name: number for number, name in enumerate(step.names)}
    lines: list[list[str]] = []
    device_of: dict[str, str] = {}
    for device, line in enumerate(placement.lines()):
        members = [m for name in line for m in _members(placement, name, rank)]
        lines.append(members)
        device_of.update(dict.fromkeys(members, names[device]))
    missing = [name for name in step.names if name not in device_of]
    unknown = [name for name in device_of if name not in rank]
    if missing or unknown:
        name = (missing or unknown)[0]
        raise PlacementError(
            f"the placement is of another step: {name!r} is not in "
            + ("the placement" if missing else "the step"),
            "other-step",
            f"node {name!r}",
        )
    return PlacedStep(step, device_of, lines)


def logical_cluster(kind: str = "CPU", *, link: Link | None = None) -> Cluster:
    """The logical devices that TensorFlow has here, with their link as measured.

    Args:
        kind: `CPU` or `GPU`.
        link: of any two devices; None: measured.

    Raises:
        ClusterError: if there is none of that kind.
    """
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    made = tuple(Device(_short(name), kind=kind.lower()) for name in names)
    cluster = Cluster(made, link or Link())
    if link is None and len(made) > 1:
        cluster = Cluster(made, measure_link(made[0].name, made[1].name))
    return cluster


def measure_link(first: str, second: str, hops: int = 40) -> Link:
    """The latency and the bandwidth of the link between two of TensorFlow's devices.

    A tensor goes to and fro many times, a small one and a large one.
    """
    small, large = 1, 1 << 20
    seconds = {}
    for size in (small, large):

        def bounce(x: tf.Tensor, there: bool) -> tf.Tensor:
            for hop in range(hops):
                with tf.device(second if there and hop % 2 else first):
                    x = tf.raw_ops.Identity(input=x)
            return x

        times = {}
        for there in (False, True):
            run = tf.function(lambda x, there=there: bounce(x, there), autograph=False)
            with tf.device(first):
                x = tf.zeros([size], tf.float32)
            with tensorflow_internals.literal_graphs():
                _finish(run(x))
                walls = []
                for _ in range(30):
                    begin = time.perf_counter()
                    _finish(run(x))
                    walls.append(time.perf_counter() - begin)
            times[there] = statistics.median(walls)
        seconds[size] = max(0.0, times[True] - times[False]) / hops
    extra = seconds[large] - seconds[small]
    bandwidth = 4 * (large - small) / extra if extra > 0.2 * seconds[small] else float("inf")
    return Link(bandwidth, seconds[small])


def _finish(outputs: Any) -> None:
    for tensor in tf.nest.flatten(outputs):
        if tensor.dtype not in (tf.resource, tf.variant):
            tensor.numpy()


def _members(placement: Placement, name: str, rank: Mapping[str, int]) -> list[str]:
    members = placement.graph[name].members or (name,)
    return sorted(members, key=lambda member: rank.get(member, 0))


def _short(name: str) -> str:
    """`/device:CPU:0`, of whatever stands before it."""
    return name[name.index("/device:") :] if "/device:" in name else name


def _check_devices(names: Sequence[str], count: int) -> None:
    if len(names) != count:
        raise PlacementError(
            f"the placement has {count} devices, {len(names)} were named", "no-device"
        )
    there = {_short(device.name) for device in tf.config.list_logical_devices()}
    for name in names:
        if _short(name) not in there:
            raise PlacementError(
                f"TensorFlow has no device {name!r} here; it has {', '.join(sorted(there))}. "
                "Name others by devices=, or make logical ones by "
                "tf.config.set_logical_device_configuration",
                "no-device",
                f"device {name!r}",
            )


def _placed(
    step: StepGraph, device_of: Mapping[str, str], lines: Sequence[Sequence[str]]
) -> tf.compat.v1.GraphDef:
    """The step's nodes with their devices and the order of each device."""
    before = {
        second: first for line in lines for first, second in zip(line, line[1:], strict=False)
    }
    placed = tf.compat.v1.GraphDef(versions=step.graph_def.versions)
    placed.library.CopyFrom(step.graph_def.library)
    copies: set[tuple[str, str]] = set()
    outputs = {tensor.op.name for tensor in step.concrete.outputs}
    inputs = {tensor.op.name for tensor in step.concrete.inputs}
    home = next(iter(device_of.values()), "")
    for node in step.graph_def.node:
        constant = node.name in outputs and step.is_free(node.name)
        if node.name in inputs or constant:
            kept = placed.node.add()
            kept.CopyFrom(node)
            if constant and node.name not in inputs:
                kept.device = home
    for name in step.names:
        node = placed.node.add()
        node.CopyFrom(step.nodes[name])
        node.device = device_of[name]
        if "_class" in node.attr:  # what should sit together is for the placement to say
            del node.attr["_class"]
        for number, text in enumerate(node.input):
            source = text.lstrip("^").partition(":")[0]
            if source not in inputs and step.is_free(source):
                copies.add((source, node.device))
                node.input[number] = text.replace(source, _copy_name(source, node.device), 1)
        if name in before and f"^{before[name]}" not in node.input:
            node.input.append(f"^{before[name]}")
    for source, device in sorted(copies):
        node = placed.node.add()
        node.CopyFrom(copy.deepcopy(step.nodes[source]))
        node.name, node.device = _copy_name(source, device), device
        del node.input[:]
        if "_class" in node.attr:
            del node.attr["_class"]
    return placed


def _copy_name(name: str, device: str) -> str:
    return f"{name}/on_{device.strip('/').replace(':', '_').replace('/', '_')}"
