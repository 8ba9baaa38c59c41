"""Random graphs, and the best makespan by trying everything."""

import itertools
import math
import random

from pipeline.planning import Cluster, Device, Edge, Link, Op, OpGraph


def random_graph(rng: random.Random, size: int, groups: bool = False, kinds: bool = False):
    """A graph of so many operations, with whole numbers so that sums are exact."""
    nodes = [
        Op(
            f"n{i}",
            float(rng.choice([0, 1, 2, 3, 5, 8])),
            float(rng.randint(0, 10)),
            group=rng.choice([None, None, "a", "b"]) if groups else None,
            seconds_on={"cpu": float(rng.randint(1, 12))} if kinds and rng.random() < 0.5 else {},
        )
        for i in range(size)
    ]
    edges = [
        Edge(f"n{a}", f"n{b}", float(rng.choice([0, 1, 2, 4, 10])))
        for a, b in itertools.combinations(range(size), 2)
        if rng.random() < 0.4
    ]
    order = list(range(size))
    rng.shuffle(order)  # the list need not be in topological order
    return OpGraph([nodes[i] for i in order], edges)


def layered(rng: random.Random, layers: int, width: int) -> OpGraph:
    """A graph of branches that meet, too large to be proven in a second."""
    nodes, edges = [], []
    for layer in range(layers):
        for branch in range(width):
            name = f"{layer}.{branch}"
            nodes.append(Op(name, rng.uniform(1, 10) * 1e-3, rng.uniform(1, 10)))
            for other in range(width):
                if layer and (other == branch or rng.random() < 0.3):
                    edges.append(Edge(f"{layer - 1}.{other}", name, rng.uniform(1, 10) * 1e6))
    return OpGraph(nodes, edges)


def random_cluster(rng: random.Random, devices: int, memory: float | None = None):
    """Unequal devices and links."""
    made = [
        Device(f"d{i}", memory, rng.choice([1.0, 2.0, 0.5]), rng.choice(["gpu", "cpu"]))
        for i in range(devices)
    ]
    links = {
        (a, b): Link(rng.choice([1.0, 2.0, math.inf]), rng.choice([0.0, 1.0]))
        for a, b in itertools.permutations(range(devices), 2)
    }
    return Cluster(tuple(made), links=links)


def best_makespan(graph: OpGraph, cluster: Cluster) -> float:
    """The least makespan over all assignments and all orders; infinite if there is none."""
    names = [node.name for node in graph.nodes]
    orders = list(topological_orders(graph))
    best = math.inf
    for assignment in itertools.product(range(len(cluster)), repeat=len(graph)):
        device_of = dict(zip(names, assignment, strict=True))
        if is_allowed(graph, cluster, device_of):
            for order in orders:
                best = min(best, semi_active(graph, cluster, device_of, order, best))
    return best


def topological_orders(graph: OpGraph):
    """All orders in which the operations may run."""
    needs = {node.name: set() for node in graph.nodes}
    for edge in graph.edges:
        needs[edge.target].add(edge.source)

    def extend(done: list[str]):
        if len(done) == len(needs):
            yield list(done)
        for name, sources in needs.items():
            if name not in done and sources <= set(done):
                yield from extend([*done, name])

    yield from extend([])


def is_allowed(graph: OpGraph, cluster: Cluster, device_of: dict) -> bool:
    held = [0.0] * len(cluster)
    of_group = {}
    for node in graph.nodes:
        device = device_of[node.name]
        held[device] += node.bytes
        if node.group is not None and of_group.setdefault(node.group, device) != device:
            return False
        if math.isinf(node.seconds_on.get(cluster.devices[device].kind, 0.0)):
            return False
        if node.device not in (None, device):
            return False
    return all(
        device.memory is None or used <= device.memory
        for device, used in zip(cluster.devices, held, strict=True)
    )


def semi_active(graph, cluster, device_of, order, best):
    """When all is done if operations start in this order, each as early as it can."""
    free = [0.0] * len(cluster)
    end = {}
    incoming = {name: [] for name in order}
    for edge in graph.edges:
        incoming[edge.target].append(edge)
    for name in order:
        device = device_of[name]
        start = free[device]
        for edge in incoming[name]:
            source = device_of[edge.source]
            delay = 0.0
            if source != device:
                link = cluster.links.get((source, device), cluster.local)
                delay = link.latency + (edge.bytes / link.bandwidth if edge.bytes else 0.0)
            start = max(start, end[edge.source] + delay)
        node, where = graph[name], cluster.devices[device]
        seconds = node.seconds_on.get(where.kind, node.seconds / where.speed)
        end[name] = free[device] = start + seconds
        if end[name] >= best:
            return math.inf
    return max(end.values(), default=0.0)
