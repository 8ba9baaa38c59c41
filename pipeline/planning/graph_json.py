"""Graphs in JSON files, of two forms, told apart when read.

`planning`, the form of this package, times in seconds:

    {"nodes": [{"id": "conv1", "seconds": 0.002, "bytes": 4096, "group": null}, ...],
     "edges": [{"source": "conv1", "target": "relu1", "bytes": 1024}, ...]}

`dnn-partitioning`, the form of the profiled graphs of "Efficient Algorithms for Device Placement of
DNN Graph Operators" (Tarnawski et al., NeurIPS 2020), times in milliseconds:

    {"nodes": [{"id": 1, "fpgaLatency": 2.0, "cpuLatency": 20.0, "size": 4096, "colorClass": 1,
                "supportedOnFpga": 1, "isBackwardNode": false}, ...],
     "edges": [{"sourceId": 1, "destId": 2, "cost": 0.5, "size": 1024}, ...]}

There `fpgaLatency` is the time on an accelerator (kind `gpu` here), nodes of one `colorClass` must
share a device, and `cost`, the transfer time over the authors' link, is not read: a cluster's
links say what a tensor of `size` bytes takes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from pipeline.errors import GraphError
from pipeline.planning.checks import number, read_json
from pipeline.planning.graph import Edge, Op, OpGraph

FORMS = ("planning", "dnn-partitioning")
MILLISECONDS = 1e3


def load(path: str | PathLike[str]) -> OpGraph:
    """Reads a graph from a JSON file.

    Raises:
        GraphError: if it is no JSON or no graph, naming the node or edge and the field.
        OSError: if there is no such file.
    """
    return from_dict(read_json(path, GraphError))


def save(graph: OpGraph, path: str | PathLike[str], form: str = "planning") -> None:
    """Writes a graph into a JSON file of one of `FORMS`."""
    Path(path).write_text(json.dumps(as_dict(graph, form), indent=1, allow_nan=False))


def from_dict(data: Any) -> OpGraph:
    """A graph from what a JSON file of either form holds.

    Raises:
        GraphError: if it is no graph, naming the node or edge and the field.
    """
    if not isinstance(data, dict):
        raise GraphError(f"a graph is an object with nodes and edges, not {type(data).__name__}")
    nodes, edges = (_list(data, name) for name in ("nodes", "edges"))
    foreign = any("fpgaLatency" in node or "cpuLatency" in node for node in nodes)
    if foreign:
        colors = Counter(str(node.get("colorClass")) for node in nodes)
        read = [
            _foreign_node(node, f"node {_id(node, position)!r}", colors)
            for position, node in enumerate(nodes)
        ]
        keys = ("sourceId", "destId", "size")
    else:
        read = [
            _own_node(node, f"node {_id(node, position)!r}") for position, node in enumerate(nodes)
        ]
        keys = ("source", "target", "bytes")
    return OpGraph(read, (_edge(edge, position, keys) for position, edge in enumerate(edges)))


def as_dict(graph: OpGraph, form: str = "planning") -> dict[str, Any]:
    """What a JSON file of one of `FORMS` holds.

    Raises:
        GraphError: if the form is unknown, or cannot say what the graph says.
    """
    if form not in FORMS:
        raise GraphError(f"no form {form!r} of graphs; there are {', '.join(FORMS)}", "form")
    if form == "dnn-partitioning":
        return _as_foreign(graph)
    nodes = []
    for node in graph.nodes:
        shown: dict[str, Any] = {"id": node.name, "seconds": node.seconds, "bytes": node.bytes}
        if node.group is not None:
            shown["group"] = node.group
        if node.seconds_on:
            shown["seconds_on"] = {
                kind: seconds if math.isfinite(seconds) else None
                for kind, seconds in node.seconds_on.items()
            }
        if node.device is not None:
            shown["device"] = node.device
        if node.backward:
            shown["backward"] = True
        if node.members:
            shown["members"] = list(node.members)
        nodes.append(shown)
    edges = [{"source": e.source, "target": e.target, "bytes": e.bytes} for e in graph.edges]
    return {"nodes": nodes, "edges": edges}


# --- reading -------------------------------------------------------------------------------------


def _list(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if name not in data:
        raise GraphError(f"the graph has no field {name!r}", "missing-field", name)
    found = data[name]
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise GraphError(f"field {name!r} must be a list of objects", "no-list", name)
    return found


def _id(node: dict[str, Any], position: int) -> str:
    where = f"node number {position}"
    found = _field(node, "id", where)
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        at = f"{where}, field 'id'"
        raise GraphError(f"{at}: must be a text or a number, not {found!r}", "name", at)
    return str(found)


def _field(entry: dict[str, Any], name: str, where: str) -> Any:
    if name not in entry:
        at = f"{where}, field {name!r}"
        raise GraphError(f"{at}: is missing", "missing-field", at)
    return entry[name]


def _own_node(node: dict[str, Any], where: str) -> Op:
    seconds_on = node.get("seconds_on", {})
    if not isinstance(seconds_on, dict):
        raise GraphError(f"{where}, field 'seconds_on': must be an object", "no-object", where)
    group = node.get("group")
    members = node.get("members", [])
    if not isinstance(members, list):
        raise GraphError(f"{where}, field 'members': must be a list", "no-list", where)
    return Op(
        name=str(node["id"]),
        seconds=number(_field(node, "seconds", where), where, "seconds", GraphError),
        bytes=number(node.get("bytes", 0), where, "bytes", GraphError),
        group=None if group is None else str(group),
        seconds_on={
            kind: math.inf
            if seconds is None
            else number(seconds, where, f"seconds_on[{kind!r}]", GraphError)
            for kind, seconds in seconds_on.items()
        },
        device=node.get("device"),
        backward=bool(node.get("backward", False)),
        members=tuple(map(str, members)),
    )


def _foreign_node(node: dict[str, Any], where: str, colors: Counter[str]) -> Op:
    seconds_on = {}
    if node.get("cpuLatency") is not None:
        milliseconds = number(node["cpuLatency"], where, "cpuLatency", GraphError)
        seconds_on["cpu"] = milliseconds / MILLISECONDS
    if node.get("supportedOnFpga", 1):
        milliseconds = _field(node, "fpgaLatency", where)
        seconds = number(milliseconds, where, "fpgaLatency", GraphError) / MILLISECONDS
    else:
        seconds_on["gpu"] = math.inf
        if "cpu" not in seconds_on:
            raise GraphError(f"{where}, field 'cpuLatency': is missing", "missing-field", where)
        seconds = seconds_on["cpu"]
    color = node.get("colorClass")
    return Op(
        name=str(node["id"]),
        seconds=seconds,
        bytes=number(node.get("size", 0), where, "size", GraphError),
        group=None if color is None or colors[str(color)] < 2 else str(color),
        seconds_on=seconds_on,
        backward=bool(node.get("isBackwardNode", False)),
    )


def _edge(edge: dict[str, Any], position: int, keys: tuple[str, str, str]) -> Edge:
    where = f"edge number {position}"
    source, target = (str(_field(edge, key, where)) for key in keys[:2])
    where = f"edge {source!r} -> {target!r}"
    size = _field(edge, keys[2], where)
    return Edge(source, target, number(size, where, keys[2], GraphError))


# --- writing -------------------------------------------------------------------------------------


def _as_foreign(graph: OpGraph) -> dict[str, Any]:
    numbers = {group: count for count, group in enumerate(graph.groups, start=1)}
    nodes = []
    for position, node in enumerate(graph.nodes):
        if node.device is not None:
            raise GraphError(
                f"node {node.name!r}, field 'device': the form dnn-partitioning has no such field",
                "form",
                f"node {node.name!r}",
            )
        on_gpu = node.seconds_on.get("gpu", node.seconds)
        cpu = node.seconds_on.get("cpu", node.seconds)
        color = len(numbers) + position + 1 if node.group is None else numbers[node.group]
        nodes.append(
            {
                "id": _foreign_id(node.name),
                "supportedOnFpga": int(math.isfinite(on_gpu)),
                "cpuLatency": cpu * MILLISECONDS,
                "fpgaLatency": (on_gpu if math.isfinite(on_gpu) else 0.0) * MILLISECONDS,
                "isBackwardNode": node.backward,
                "colorClass": color,
                "size": node.bytes,
            }
        )
    edges = [
        {
            "sourceId": _foreign_id(edge.source),
            "destId": _foreign_id(edge.target),
            "cost": 0.0,
            "size": edge.bytes,
        }
        for edge in graph.edges
    ]
    return {"nodes": nodes, "edges": edges}


def _foreign_id(name: str) -> int | str:
    """Numbers stay numbers."""
    return int(name) if name.isdecimal() and str(int(name)) == name else name
