"""`plan`: searches what `pipeline` can run on a cluster, and ranks it.

Data-parallel replicas × pipeline stages × schedules × micro-batches × what happens to stashes × the
mapping of stages to nodes. Every setting that is not pruned is played through by the simulator of
`pipeline`, with stage costs that were measured (or given) for its cuts; its memory is weights,
gradients and optimizer slots of the worst stage, and the stashes that the simulation holds. Pruned
is what cannot win: recomputation where everything fits without, and settings whose work alone takes
longer than the best found so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipeline.errors import InfeasibleError, PipelineError, PlanningError, ScheduleError
from pipeline.planning.cluster import Cluster
from pipeline.planning.efficiency import ring_seconds
from pipeline.planning.model_costs import MeasuredCosts, ModelCosts, StageCosts
from pipeline.planning.shapes import Shape, order_of, shapes
from pipeline.planning.stage_partition import best_cuts
from pipeline.planning.training_plan import FITS, NO_MEMORY, PRUNED, REFUSED, Plan, Row, Setting
from pipeline.schedules import GENERATORS, Schedule
from pipeline.simulation import Costs, simulate

SCHEDULES = ("1f1b", "bpipe", "interleaved", "v-half", "gpipe")
_CHUNKS = {"interleaved": 2, "v-half": 2}


def plan(
    layers: Any,
    loss: Callable[..., Any],
    optimizer: Any,
    cluster: Cluster,
    batch: tuple[Any, Any],
    *,
    epochs: Callable[[float], float] | None = None,
    batch_sizes: Sequence[int] = (),
    schedules: Sequence[str] = SCHEDULES,
    progress: Callable[[str], None] | None = None,
    prune: bool = True,
) -> Plan:
    """Measures a model and plans how to train it on a cluster.

    The model is measured on a copy, where it can be copied, on one device of this process; nothing
    is launched.

    Args:
        layers: the whole model, as `Pipeline` takes it.
        loss: called as `loss(y_true, y_pred)`.
        optimizer: of Keras.
        cluster: the devices, one a rank; its `cores` if ranks share a machine's processors.
        batch: x and y of one global batch.
        epochs: E(B): settings are then ranked by the time to the target.
        batch_sizes: with E(B), the global batches to choose from; by default that of `batch`.
        schedules: the schedules to choose from.
        progress: hears what is being measured.
        prune: whether to leave out what cannot win; without it, everything is simulated.

    Returns:
        The plan: its winner, all settings, and why.

    Raises:
        InfeasibleError: if nothing fits into memory; the message says what comes closest.
        PlanningError: if an argument cannot be used.
    """
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise PlanningError("batch must be (x, y) of one global batch, field 'batch'", "batch")
    if not callable(loss):
        raise PlanningError(f"loss must be callable, not {loss!r}, field 'loss'", "type", "loss")
    if not callable(getattr(optimizer, "get_config", None)):
        raise PlanningError(
            f"optimizer must be of Keras, not {optimizer!r}, field 'optimizer'", "type", "optimizer"
        )
    x, y = batch
    if x is None or y is None or not _samples(x):
        raise PlanningError("batch must hold samples, field 'batch'", "batch")
    costs = MeasuredCosts(layers, loss, optimizer, x, y)
    sizes = list(batch_sizes) or [_samples(x)]
    found = search(costs, cluster, sizes, epochs, schedules, progress, prune)
    return replace(found, model=(layers, loss, optimizer))


def search(
    costs: ModelCosts,
    cluster: Cluster,
    batch_sizes: Sequence[int],
    epochs: Callable[[float], float] | None = None,
    schedules: Sequence[str] = SCHEDULES,
    progress: Callable[[str], None] | None = None,
    prune: bool = True,
) -> Plan:
    """Plans with the costs of a model; see `plan`.

    Raises:
        InfeasibleError: if nothing fits into memory.
        PlanningError: if an argument cannot be used.
    """
    if not isinstance(cluster, Cluster):
        raise PlanningError(f"cluster must be a Cluster, not {type(cluster).__name__}", "type")
    for name in schedules:
        if name not in GENERATORS:
            raise PlanningError(
                f"no schedule {name!r}; there are {', '.join(GENERATORS)}", "schedule", name
            )
    for size in batch_sizes:
        if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
            raise PlanningError(
                f"a batch size must be a whole number above 0, not {size!r}", "batch", "batch_sizes"
            )
    if len(batch_sizes) > 1 and epochs is None:
        raise PlanningError(
            "several batch sizes can only be compared with E(B), argument 'epochs'",
            "missing-field",
            "epochs",
        )
    rows = _Search(costs, cluster, epochs, schedules, progress, prune).run(batch_sizes)
    order = {FITS: 0, NO_MEMORY: 1, PRUNED: 2, REFUSED: 3}
    rows.sort(key=lambda row: (order[row.status], row.score))
    if not rows or rows[0].status != FITS:
        raise _nothing_fits(rows)
    memories = [d.memory for d in cluster.devices if d.memory is not None]
    return Plan(rows[0], tuple(rows), len(cluster), min(memories, default=None))


class _Search:
    def __init__(
        self,
        costs: ModelCosts,
        cluster: Cluster,
        epochs: Callable[[float], float] | None,
        schedules: Sequence[str],
        progress: Callable[[str], None] | None,
        prune: bool,
    ) -> None:
        self.costs, self.cluster, self.epochs = costs, cluster, epochs
        self.schedules, self.progress, self.prune = schedules, progress, prune
        self.best: Row | None = None

    def run(self, batch_sizes: Sequence[int]) -> list[Row]:
        """All rows."""
        rows = []
        for shape in shapes(self.cluster, self.costs.num_layers, batch_sizes):
            for name in self.schedules if shape.stages > 1 else ("1f1b",):
                rows += self._try(shape, name)
        return rows

    def _try(self, shape: Shape, name: str) -> list[Row]:
        """The rows of a schedule: as little recomputation as the memory asks for."""
        chunks = _CHUNKS.get(name, 1)
        rows: list[Row] = []
        plain = self._setting(shape, name, chunks, 0, ())
        if shape.stages * chunks > self.costs.num_layers:
            return [Row(plain, REFUSED, f"{self.costs.num_layers} layers are too few to cut")]
        try:
            schedule = _make(name, shape, chunks)
        except (ScheduleError, ValueError) as error:
            return [Row(plain, REFUSED, str(error).splitlines()[0])]
        if name == "bpipe" and not schedule.evicts:
            return [Row(plain, PRUNED, "nothing to evict: the same as 1f1b")]
        shape = replace(shape, order=order_of(schedule, self.cluster))
        try:
            cuts = self._cuts(shape, schedule)
        except InfeasibleError as error:
            return [Row(plain, NO_MEMORY, f"weights and optimizer: {error}")]
        for recomputed in range(shape.stages + 1):
            setting = self._setting(shape, name, chunks, recomputed, cuts)
            row = self._evaluate(shape, schedule, setting)
            rows.append(row)
            if row.status in (FITS, PRUNED):
                break
        return rows

    def _setting(
        self, shape: Shape, name: str, chunks: int, recomputed: int, cuts: Sequence[int]
    ) -> Setting:
        # The early stages hold the most stashes, so they recompute first.
        stash = ["recompute" if s < recomputed else "keep" for s in range(shape.stages)]
        return Setting(
            shape.replicas,
            shape.stages,
            name,
            shape.microbatches,
            chunks,
            tuple(stash),
            tuple(cuts),
            shape.batch,
            shape.order,
        )

    def _cuts(self, shape: Shape, schedule: Schedule) -> list[int]:
        parts = schedule.num_virtual_stages
        if parts == 1:
            return []
        place = [schedule.placement.rank_and_chunk(v, shape.stages)[0] for v in range(parts)]
        devices = [self.cluster.devices[shape.order[rank]] for rank in place]
        limits = [
            math.inf if device.memory is None else device.memory / schedule.num_chunks
            for device in devices
        ]
        return best_cuts(
            self.costs.layer_seconds(shape.microbatch),
            parts,
            speeds=[device.speed for device in devices],
            sizes=[self.costs.copies * size for size in self.costs.weight_bytes],
            limits=limits,
        )

    # --- one setting ---------------------------------------------------------------------------

    def _evaluate(self, shape: Shape, schedule: Schedule, setting: Setting) -> Row:
        if self.progress is not None:
            self.progress(f"measuring {setting}")
        stage_costs = self._stage_costs(shape, schedule, setting)
        least = self._least_seconds(shape, stage_costs)
        score = self._score(shape, least)
        if self.prune and self.best is not None and score > self.best.score:
            why = f"its computations alone take {least * 1e3:.4g} ms"
            return Row(setting, PRUNED, why)
        result = simulate(schedule, self._simulated(shape, schedule, stage_costs))
        static = self._static_bytes(shape, schedule, setting)
        peaks = tuple(a + b for a, b in zip(static, result.peak_bytes, strict=True))
        reduction = self._reduction_seconds(shape, schedule, setting)
        step = result.step_time + reduction + self._update_seconds(shape, static)
        busy = (1 - result.bubble) * result.step_time
        row = Row(
            setting,
            FITS,
            "",
            step,
            shape.batch / step if step else math.inf,
            busy,
            result.bubble,
            reduction,
            peaks,
            self._target(shape, step),
        )
        for stage, peak in enumerate(peaks):
            limit = self._memory(shape, stage)
            if peak > limit:
                why = f"stage {stage} needs {peak / 1e6:,.4g} MB of {limit / 1e6:,.4g}"
                return replace(row, status=NO_MEMORY, why=why)
        if self.best is None or row.score < self.best.score:
            self.best = row
        return row

    def _stage_costs(self, shape: Shape, schedule: Schedule, setting: Setting) -> StageCosts:
        """The costs of each virtual stage with its own policy, on its own device."""
        kept = again = self.costs.stages(setting.cuts, shape.microbatch, False)
        if "recompute" in setting.stash:
            again = self.costs.stages(setting.cuts, shape.microbatch, True)
        columns: list[tuple[float, ...]] = []
        for stage in range(schedule.num_virtual_stages):
            rank, _ = schedule.placement.rank_and_chunk(stage, shape.stages)
            costs = again if setting.stash[rank] == "recompute" else kept
            speed = self.cluster.devices[shape.order[rank]].speed
            columns.append(
                (
                    costs.forward[stage] / speed,
                    costs.backward[stage] / speed,
                    costs.stash_bytes[stage],
                    costs.boundary_bytes[stage],
                )
            )
        return StageCosts(*zip(*columns, strict=True))

    def _share(self, shape: Shape) -> tuple[int | None, float]:
        """The cores of a replica, and how many times slower its ranks are where there is not one.

        Replicas that run side by side share the cores evenly.
        """
        if self.cluster.cores is None or self.cluster.cores >= len(self.cluster):
            return None, 1.0
        cores = self.cluster.cores / shape.replicas
        return (1, 1 / cores) if cores < 1 else (int(cores), int(cores) / cores)

    def _least_seconds(self, shape: Shape, costs: StageCosts) -> float:
        """What the computations take if nothing ever waits."""
        cores, slower = self._share(shape)
        work = shape.microbatches * (sum(costs.forward) + sum(costs.backward))
        return work * slower / min(shape.stages, cores or shape.stages)

    def _simulated(self, shape: Shape, schedule: Schedule, costs: StageCosts) -> Costs:
        cores, slower = self._share(shape)
        weight = [seconds / 2 * slower for seconds in costs.backward]
        links = {}
        bandwidth, latency = {}, {}
        for a in range(shape.stages):
            for b in range(shape.stages):
                if a != b:
                    links[a, b] = self.cluster.link(shape.order[a], shape.order[b])
                    bandwidth[a, b] = min(links[a, b].bandwidth, 1e30)
                    latency[a, b] = links[a, b].latency
        return Costs(
            forward=[seconds * slower for seconds in costs.forward],
            backward=[b * slower - w for b, w in zip(costs.backward, weight, strict=True)],
            weight=weight,
            stash_bytes=list(costs.stash_bytes),
            boundary_bytes=list(costs.boundary_bytes),
            bandwidth=bandwidth or None,
            latency=latency or 0.0,
            cores=cores,
        )

    def _weights(self, shape: Shape, schedule: Schedule, setting: Setting) -> list[float]:
        """The bytes of weights on each stage."""
        ends = [0, *setting.cuts, self.costs.num_layers]
        found = [0.0] * shape.stages
        for stage, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
            rank, _ = schedule.placement.rank_and_chunk(stage, shape.stages)
            found[rank] += sum(self.costs.weight_bytes[begin:end])
        return found

    def _static_bytes(self, shape: Shape, schedule: Schedule, setting: Setting) -> list[float]:
        return [self.costs.copies * size for size in self._weights(shape, schedule, setting)]

    def _memory(self, shape: Shape, stage: int) -> float:
        """The least memory of the devices that hold a stage, one for each replica."""
        limits = [
            self.cluster.devices[device].memory for device in shape.order[stage :: shape.stages]
        ]
        return min((math.inf if limit is None else limit for limit in limits), default=math.inf)

    def _reduction_seconds(self, shape: Shape, schedule: Schedule, setting: Setting) -> float:
        """The all-reduce of the stage with the most weights over all replicas."""
        if shape.replicas == 1:
            return 0.0
        link = self.cluster.reduction
        if link is None:
            ranks = shape.order[:: shape.stages]
            pairs = [(a, b) for a, b in zip(ranks, [*ranks[1:], ranks[0]], strict=True) if a != b]
            link = min((self.cluster.link(a, b) for a, b in pairs), key=lambda one: one.bandwidth)
        size = max(self._weights(shape, schedule, setting))
        return ring_seconds(size, shape.replicas, link.bandwidth, link.latency)

    def _update_seconds(self, shape: Shape, static: Sequence[float]) -> float:
        """The optimizer, on the stage that has most to do; ranks that share cores take turns."""
        whole = self.costs.copies * sum(self.costs.weight_bytes)
        if not whole:
            return 0.0
        cores = self.cluster.cores or len(self.cluster)
        shares = [size / whole for size in static]
        together = shape.replicas * sum(shares) / min(cores, len(self.cluster))
        return self.costs.update_seconds * max(max(shares), together)

    def _target(self, shape: Shape, step: float) -> float | None:
        if self.epochs is None:
            return None
        epochs = self.epochs(float(shape.batch))
        if not (isinstance(epochs, (int, float)) and math.isfinite(epochs) and epochs > 0):
            raise PlanningError(
                f"E({shape.batch}) must be a positive number, not {epochs!r}", "epochs", "epochs"
            )
        return epochs * step / shape.batch

    def _score(self, shape: Shape, step: float) -> tuple[float, float]:
        target = self._target(shape, step)
        first = target if target is not None else -(shape.batch / step if step else math.inf)
        return (first, step)


def _make(name: str, shape: Shape, chunks: int) -> Schedule:
    make = GENERATORS[name]
    if name == "interleaved":
        return make(shape.stages, shape.microbatches, chunks)
    return make(shape.stages, shape.microbatches)


def _samples(x: Any) -> int:
    from pipeline.runtime.batches import num_samples

    return num_samples(x, "x")


def _nothing_fits(rows: Sequence[Row]) -> PipelineError:
    if not rows:
        return PlanningError(
            "there is nothing to choose from: the batch has fewer samples than devices", "nothing"
        )
    closest = min(rows, key=lambda row: max(row.peak_bytes, default=math.inf))
    return InfeasibleError(
        f"nothing fits into memory; the closest is {closest.setting}: {closest.why}. Give the "
        "devices more memory, add devices, or make the batch smaller",
        "too-large",
        str(closest.setting),
    )
