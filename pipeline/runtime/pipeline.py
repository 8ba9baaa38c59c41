"""`Pipeline`: what a user makes and calls. Each call is the same on every rank of the job."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.communication.collectives import Collectives
from pipeline.communication.hub import Hub
from pipeline.communication.transport import Transport
from pipeline.errors import BatchError, UsageError
from pipeline.runtime.batches import check_batch, sizes_of, split
from pipeline.runtime.call_guard import CallGuard
from pipeline.runtime.connection import connect, join_job
from pipeline.runtime.deployment import Deployment, Request
from pipeline.runtime.metrics import Metrics
from pipeline.runtime.model import Model
from pipeline.runtime.optimizer import check_optimizer
from pipeline.runtime.persistence import Persistence
from pipeline.runtime.places import Place, find_nodes, place_stages
from pipeline.runtime.progress import Boundary, Progress
from pipeline.runtime.report import Report
from pipeline.runtime.settings import (
    check_keeping,
    check_settings,
    make_schedule,
    recompute_flags,
)
from pipeline.runtime.step import StepData, StepResult
from pipeline.runtime.structure import flatten

_number = itertools.count()


class Pipeline(Persistence):
    """A model that trains in p stages, one a rank, on r = hvd.size() / p replicas.

        pipe = pipeline.Pipeline(layers, loss=loss, optimizer=optimizer, num_stages=4,
                                 num_microbatches=8, schedule="bpipe")
        for x, y in batches:
            loss = pipe.train_step(x, y)

    All ranks make it with the same arguments, after `hvd.init()`, and call its methods equally
    often; each rank of a replica passes the same x and y, replicas pass different ones. Layers are
    built at the first call, each only on the rank where it is placed.

    Args:
        layers: the whole model, a list of Keras layers and callables or a `Sequential`.
        loss: called as `loss(y_true, y_pred)`; the mean over its samples.
        optimizer: of Keras 3 or tf_keras; not a `hvd.DistributedOptimizer`.
        num_stages: the number of stages p; it divides `hvd.size()`.
        num_microbatches: the number of micro-batches m that each batch is split into.
        schedule: `gpipe`, `1f1b`, `interleaved`, `bpipe`, `v-half`, or a `Schedule`.
        stash: `keep` what the backward pass needs, or `recompute` it; for all stages, or a list
            with one for each.
        partition: `uniform`, `parameters`, `time`, or the index of the first layer of each later
            virtual stage.
        timeout: seconds that any wait for another rank may take.
        accumulate: the number of calls of `train_step` for one step of the optimizer.
        num_chunks: the number of model chunks v a rank, for `interleaved`.
        stage_mode: how stages run: as compiled `function`s, `eager`, or co-executed by `terra`.
        seed: determines dropout masks and the initial values of unbuilt layers.
        metrics: Keras metrics, see `metric_results`.
        transport: `auto` (shared memory on one host, TCP between hosts), `tcp` or `horovod`.
        checkpoint: a folder. If it holds a checkpoint, training goes on from there: `steps` then
            says how many calls of `train_step` are done.
        save_every: the calls of `train_step` after each of which `checkpoint` is written; 0: none.
        emergency: True, or another folder than `checkpoint`. When a rank fails, the others write a
            checkpoint there before they raise, if they still hold every stage between them: so with
            two replicas or more.

    Raises:
        ValueError: if an argument cannot be used, or Horovod is not initialised.
        TypeError: if an argument has the wrong type.

    Attributes:
        stage: the stage of this rank.
        replica: the replica that this rank belongs to, `hvd.rank() // num_stages`.
        mapping: the rank and node of every stage; BPipe's partners share a node where they can.
        schedule: the `Schedule`.
        steps: the calls of `train_step` so far, those before a restored checkpoint included.
        position: plain data (as JSON has it) of your own that checkpoints keep, for example where
            the next batch comes from.
    """

    def __init__(
        self,
        layers: Any,
        *,
        loss: Callable[..., Any],
        optimizer: Any,
        num_stages: int,
        num_microbatches: int,
        schedule: Any = "bpipe",
        stash: str | Sequence[str] = "keep",
        partition: str | Sequence[int] = "uniform",
        timeout: float = 60.0,
        accumulate: int = 1,
        num_chunks: int = 2,
        stage_mode: str = "function",
        seed: int = 0,
        metrics: Sequence[Any] = (),
        transport: str = "auto",
        checkpoint: Any = None,
        save_every: int = 0,
        emergency: Any = None,
    ) -> None:
        import horovod.tensorflow as hvd

        if not hvd.is_initialized():
            raise UsageError("call hvd.init() before making a Pipeline")
        check_settings(partition, stage_mode, accumulate, timeout, seed)
        if not callable(loss):
            raise TypeError(f"loss must be callable as loss(y_true, y_pred), not {loss!r}")
        check_optimizer(optimizer)
        self.schedule = make_schedule(schedule, num_stages, num_microbatches, num_chunks)
        rank, size = hvd.rank(), hvd.size()
        if size % num_stages:
            raise UsageError(
                f"the job has {size} ranks, which {num_stages} stages do not divide; start it with "
                f"a multiple of {num_stages}: horovodrun -np {num_stages} ..."
            )
        check_keeping(checkpoint, save_every, emergency, size // num_stages)
        collectives = Collectives(f"pipeline{next(_number)}", float(timeout), None)
        nodes = collectives.run("which ranks share a host", [], lambda: find_nodes(size))
        self.mapping = place_stages(self.schedule, nodes)
        self._place = Place(rank, self.mapping)
        self.stage, self.replica = self._place.stage, self._place.replica
        self._request = Request(
            Model(layers, seed, eager=stage_mode != "function"),
            layers,
            loss,
            optimizer,
            self.schedule,
            recompute_flags(stash, num_stages),
            partition,
            stage_mode,
            collectives,
        )
        self._accumulate = accumulate
        self._metrics = Metrics(metrics)
        self._job = join_job(rank, size, float(timeout))
        collectives.watch = self._job.watch
        self._transport: Transport = connect(
            self.schedule, self._place, size, transport, collectives, self._job.secret
        )
        self._hub = Hub(self._transport, rank, size)
        self._guard = CallGuard(
            collectives.name,
            rank,
            self._transport,
            self._job.watch,
            self._save_what_is_left,
            stage_mode,
        )
        self._deployment, self._restoring = None, None
        self._progress = Progress(seed=seed)
        folder = checkpoint if emergency is True else emergency
        self._emergency = Path(folder) if folder else None
        self._checkpoint, self._save_every = checkpoint, save_every
        self._boundary, self._agreed = None, None
        self._report = Report(rank, self.stage, self.replica, transport=self._transport_name())
        self._transports: list[str] = []
        self._cpu_seconds = 0.0
        self._latest = StepResult()
        if checkpoint is not None:
            self._go_on_from(checkpoint)

    @classmethod
    def from_plan(
        cls,
        plan: Any,
        layers: Any = None,
        *,
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        **options: Any,
    ) -> Pipeline:
        """A pipeline as `pipeline.planning.plan` planned it.

        Args:
            plan: a `Plan`, or the path of one that was saved.
            layers: the model that was planned for; by default the plan's own, unless it is of a
                file. `loss` and `optimizer` likewise.
            loss: as for `Pipeline`.
            optimizer: as for `Pipeline`.
            **options: arguments of `Pipeline` that a plan does not decide.

        Raises:
            ValueError: if the plan is for another number of ranks, or has no model.
        """
        from pipeline.planning.deployment import arguments_of

        return cls(**arguments_of(plan, layers, loss, optimizer), **options)

    # --- training ------------------------------------------------------------------------------

    def train_step(self, x: Any, y: Any, sample_weight: Any = None) -> float:
        """Trains on one batch.

        Args:
            x: inputs of this replica, arrays [samples, ...] in any structure that the first layer
                takes. The first stage reads them; all ranks count them.
            y: the targets, in any structure that the loss takes; the last stage reads them.
            sample_weight: as Keras losses take it, [samples].

        Returns:
            The mean loss of the global batch, with what layers add, on every rank.

        Raises:
            ValueError: if there are fewer samples than micro-batches.
            CommunicationError: if another rank failed.
        """
        begin = time.monotonic()
        with self._guard.call("train_step"):
            others = {"y": y, "sample_weight": sample_weight}
            count, total = self._count(x, others, self.schedule.num_microbatches)
            deployment = self._deployed(x, count)
            progress = self._progress
            if progress.calls == 0:
                progress.reference = total
                if self._emergency is not None:
                    self._boundary = Boundary(progress, deployment.states)
            sizes = sizes_of(count, self.schedule.num_microbatches)
            scale = progress.loss_scale or deployment.updater.initial_loss_scale
            scales = [scale * size / progress.reference for size in sizes]
            data = self._data(x, y, sample_weight, sizes, scales)
            started = time.monotonic()
            updating = progress.calls + 1 == self._accumulate
            result = deployment.executor.train(
                data,
                keep_outputs=bool(self._metrics),
                on_chunk_done=deployment.updater.start_reduction if updating else None,
            )
            schedule_seconds = time.monotonic() - started
            loss = self._finish_step(deployment, result, count, total, schedule_seconds, begin)
            self._metrics.update(self._hub, self._is_last, result, data, self._place)
            if self._save_every and progress.steps % self._save_every == 0:
                self._save(self._checkpoint)
            return loss

    def _finish_step(
        self,
        deployment: Deployment,
        result: StepResult,
        count: int,
        total: float,
        schedule_seconds: float,
        begin: float,
    ) -> float:
        """Reduces, exchanges what all ranks have to know, updates; returns the loss.

        All that other ranks are needed for comes before the update. So if one of them is lost, the
        weights of each of the others are those before the step or those after it.
        """
        updater, progress = deployment.updater, self._progress
        updating = progress.calls + 1 == self._accumulate
        squares, finite = 0.0, True
        if updating:
            deployment.executor.at = "the sum of gradients"
            updater.finish_reductions()
            deployment.averages.compute()
            if updater.needs_agreement:
                squares, finite = updater.squares_and_finite()
        cpu_seconds = self._transport.counters().cpu_seconds
        self._report.enter(result, schedule_seconds, cpu_seconds - self._cpu_seconds)
        self._report.step_seconds = time.monotonic() - begin
        self._cpu_seconds = cpu_seconds
        deployment.executor.at = "the end of the step"
        progress.calls += 1
        progress.samples += total
        rows = self._hub.exchange(
            [result.loss, squares, float(finite), float(count), *self._report.numbers()],
            "the end of the step",
        )
        self._check_counts(rows[:, 3])
        self._report.rows = [
            Report.of_numbers(row[4:], name)
            for row, name in zip(rows, self._transports, strict=True)
        ]
        self._apply(rows)
        if updater.is_scaling:
            # A rank without weights has no optimizer that knows; the others agree.
            scales = self._hub.exchange([updater.loss_scale], "the loss scale")
            progress.loss_scale = float(scales.max())
        self._latest = result
        return float(rows[:, 0].sum()) / total

    def _apply(self, agreed: np.ndarray) -> None:
        """Ends a call of `train_step` by what the ranks agreed on; needs no other rank."""
        progress, deployment = self._progress, self._deployment
        if progress.calls == self._accumulate:
            deployment.executor.at = "the optimizer"
            factor = progress.reference / progress.samples
            deployment.updater.apply(
                deployment.used_weights(),
                factor,
                float(agreed[:, 1].sum()),
                bool(agreed[:, 2].all()),
            )
            deployment.averages.assign()
            progress.calls, progress.samples = 0, 0.0
            self._boundary = None
        progress.steps += 1
        self._agreed = agreed

    def _check_counts(self, counts: np.ndarray) -> None:
        """All ranks of a replica must have been given the same batch."""
        for replica in range(self._place.num_replicas):
            mine = counts[self._place.num_stages * replica :][: self._place.num_stages]
            if len(set(mine)) > 1:
                raise BatchError(
                    f"the ranks of replica {replica} were given batches of different sizes: "
                    f"{', '.join(str(int(count)) for count in mine)} samples on its ranks, in "
                    "order; pass the same x and y on all of them"
                )

    # --- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, x: Any, y: Any, sample_weight: Any = None, replica_only: bool = False
    ) -> float:
        """The mean loss of the global batch without training, on every rank.

        A batch with fewer samples than micro-batches is split into as many as it has samples.

        Args:
            x: as `train_step` takes it.
            y: the same.
            sample_weight: the same.
            replica_only: the mean over this replica's batch instead. Then only its own ranks call
                this, as often as they like; metrics stay as they are.
        """
        others = {"y": y, "sample_weight": sample_weight}
        with self._guard.call("evaluate"):
            if replica_only:
                self._need_deployment()
                count = check_batch(x, others, 1)
                total = float(count)
            else:
                count, total = self._count(x, others, 1)
            deployment = self._deployed(x, count)
            sizes = sizes_of(count, min(count, self.schedule.num_microbatches))
            data = self._data(x, y, sample_weight, sizes, [])
            keeps_outputs = bool(self._metrics) and not replica_only
            result = deployment.executor.infer(data, keep_outputs=keeps_outputs)
            if replica_only:
                return deployment.sum_over_stages(result.loss) / total
            rows = self._hub.exchange([result.loss], "the loss of evaluate")
            self._metrics.update(self._hub, self._is_last, result, data, self._place)
            return float(rows[:, 0].sum()) / total

    def predict(self, x: Any, gather: bool = False) -> Any:
        """The model's outputs for this replica's x.

        Args:
            x: inputs.
            gather: bring them to every rank of the replica.

        Returns:
            The outputs on the last stage's rank, or with `gather` everywhere; else None.
        """
        with self._guard.call("predict"):
            count = check_batch(x, {}, 1)
            deployment = self._deployed(x, count)
            sizes = sizes_of(count, min(count, self.schedule.num_microbatches))
            data = self._data(x, None, None, sizes, [])
            result = deployment.executor.infer(data, keep_outputs=True)
            outputs = None
            if self._is_last:
                flat = [tf.concat(parts, 0) for parts in zip(*result.outputs, strict=True)]
                outputs = deployment.pack_outputs(flat)
            if gather:
                outputs = deployment.spread(outputs)
            return outputs

    def metric_results(self) -> dict[str, float]:
        """The metrics over the global batch of the latest `train_step` or `evaluate`, by name."""
        return dict(self._metrics.results)

    # --- weights and state ---------------------------------------------------------------------

    def build(self, x: Any) -> None:
        """Places and builds the model for inputs like `x`, as the first call would."""
        with self._guard.call("build"):
            self._deployed(x, check_batch(x, {}, 1))

    def gather_weights(self) -> dict[str, np.ndarray] | None:
        """Brings all weights to rank 0: into its layer objects where these are built.

        Returns:
            On rank 0 the values by global name, in the order of the model; else None.
        """
        with self._guard.call("gather_weights"):
            return self._need_deployment().gather_weights()

    # --- telling -------------------------------------------------------------------------------

    def report(self) -> Report:
        """This rank's figures; on rank 0, `str()` of it is the table over all ranks."""
        shown = Report.of_numbers(self._report.numbers(), self._report.transport)
        if self._place.rank == 0:
            shown.rows = list(self._report.rows)
        return shown

    def timeline(self) -> Any:
        """The course of the latest step on all ranks, as `pipeline.simulate` would return it.

        Returns:
            On rank 0 a `Simulation` with measured times, which draws itself by `plot(path)` and
            writes itself by `chrome_trace(path)`; else None.
        """
        from pipeline.runtime.timeline import record

        with self._guard.call("timeline"):
            return record(self.schedule, self.mapping.ranks, self._hub, self._latest)

    @property
    def num_traces(self) -> int:
        """How often this rank's stages were traced so far."""
        if self._deployment is None:
            return 0
        return sum(stage.num_traces for stage in self._deployment.executor.stages)

    def close(self) -> None:
        """Ends the connections; the pipeline cannot be used after it."""
        self._guard.close()
        self._transport.close()

    # --- inside --------------------------------------------------------------------------------

    @property
    def _is_last(self) -> bool:
        last = self.schedule.num_virtual_stages - 1
        return self.schedule.placement.rank_and_chunk(last, self._place.num_stages)[0] == self.stage

    def _transport_name(self) -> str:
        kinds = {self._transport.kind_of(rank) for rank in range(self._place.rank)}
        kinds |= {
            self._transport.kind_of(rank)
            for rank in range(
                self._place.rank + 1, self._place.num_stages * self._place.num_replicas
            )
        }
        return "+".join(sorted(kinds - {""})) or "none"

    def _count(self, x: Any, others: dict[str, Any], least: int) -> tuple[int, float]:
        """This replica's samples, and those of all replicas."""
        if self._place.num_replicas == 1:
            count = check_batch(x, others, least)
            return count, float(count)
        problem = None
        try:
            count = check_batch(x, others, least)
        except ValueError as error:
            problem, count = error, -1
        counts = self._hub.exchange([float(count)], "the number of samples")[:, 0]
        if problem is not None:
            raise problem
        if (counts < 0).any():
            rank = int(np.argmin(counts))
            raise UsageError(
                f"replica {rank // self._place.num_stages} refused its batch; the step was not done"
            )
        return count, float(counts[:: self._place.num_stages].sum())

    def _deployed(self, x: Any, count: int) -> Deployment:
        if self._deployment is None:
            size = sizes_of(count, min(count, self.schedule.num_microbatches))[0]
            self._deployment = Deployment(
                self._request, self._place, self._transport, self._hub, x, size
            )
            self._transports = self._hub.gather(self._report.transport, "the transports")
            self._guard.doing = lambda e=self._deployment.executor: e.activity
        if self._restoring is not None:
            self._restore(self._restoring)
            self._restoring = None
        return self._deployment

    def _data(
        self, x: Any, y: Any, sample_weight: Any, sizes: list[int], scales: list[float]
    ) -> StepData:
        inputs = targets = weights = None
        if self.schedule.placement.rank_and_chunk(0, self._place.num_stages)[0] == self.stage:
            inputs = [flatten(part) for part in split(x, sizes)]
        if self._is_last and y is not None:
            targets = split(y, sizes)
            weights = None if sample_weight is None else split(sample_weight, sizes)
        return StepData(inputs, targets, weights, sizes, scales, self.steps)
