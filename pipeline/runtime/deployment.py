"""From the user's list of layers to stages that can run: done once, at the first batch.

All ranks go through the same steps together:

1. Cut the model into virtual stages (`partition`).
2. Build each virtual stage where it is placed. What flows between items is handed from stage to
   stage, so that no rank has to build what it does not hold.
3. Tell each other which weights each rank holds. Ranks that hold the same ones, replicas and
   stages with tied weights, get a process set, and start from the values of the first of them.
4. Make the stages, the gradients' accumulators and the optimizer's variables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.communication.collectives import Collectives
from pipeline.communication.hub import Hub
from pipeline.communication.process_sets import process_set
from pipeline.communication.transport import Transport, encode
from pipeline.errors import ModelError
from pipeline.runtime.body import StageBody
from pipeline.runtime.eager_stage import CoexecutedStage, EagerStage
from pipeline.runtime.executor import Executor
from pipeline.runtime.model import Key, Model, raw
from pipeline.runtime.optimizer import Group, StateAverage, Updater
from pipeline.runtime.partition import balanced_cuts, check_cuts, measure_costs, uniform_cuts
from pipeline.runtime.places import Place
from pipeline.runtime.stage import FunctionStage, Stage
from pipeline.runtime.structure import Spec, decode, spec_of
from pipeline.schedules import Schedule

_SPECS = encode("SPECS")
_OUTPUTS = encode("OUTPUTS")
_FETCH = encode("FETCH")
_SUM = encode("SUM")


@dataclass
class Request:
    """What a user asked for, as far as building needs it.

    Attributes:
        model: the whole model.
        source: what the user passed as the model.
        loss: called as `loss(y_true, y_pred)`.
        optimizer: of Keras 3 or tf_keras.
        schedule: what the ranks of a replica do.
        recompute: for each rank of a replica, whether its stages recompute.
        partition: `uniform`, `parameters`, `time` or explicit cuts.
        stage_mode: `function`, `eager` or `terra`.
        collectives: of this pipeline; their name is the same on all ranks.
    """

    model: Model
    source: Any
    loss: Callable[..., Any]
    optimizer: Any
    schedule: Schedule
    recompute: Sequence[bool]
    partition: str | Sequence[int]
    stage_mode: str
    collectives: Collectives


class Deployment:
    """A pipeline's part on this rank, ready to run.

    Attributes:
        cuts: where the model was cut.
        weights: the trainable variables here, each once.
        states: the others here, each once.
        rank: Horovod's.
        trainable: the keys of all trainable variables of the model.
        holders: for each key, the ranks that hold the variable.
        slot_names: for each trainable key, what the optimizer keeps for it.
        shared_names: what it keeps for all weights.
        input_spec: of the model's input.
        slots_from: the first rank where that is.
        keys: for the `id` of each variable here, its key.
        executor: runs the schedule.
        updater: the gradients and the optimizer.
        averages: of states over replicas.
        collectives: of the pipeline.
    """

    def __init__(
        self, request: Request, place: Place, transport: Transport, hub: Hub, inputs: Any, size: int
    ) -> None:
        self._request, self._place = request, place
        self.collectives = request.collectives
        self._transport, self._hub = transport, hub
        self.rank = place.rank
        model, schedule = request.model, request.schedule
        sample = tf.nest.map_structure(lambda part: tf.convert_to_tensor(part[:1]), inputs)
        self.cuts = self._find_cuts(inputs, size)
        bounds = [0, *self.cuts, len(model)]
        self.input_spec = spec_of(sample)
        specs = self._build(bounds, self.input_spec)

        items = [
            model.items[index]
            for chunk in range(schedule.num_chunks)
            for index in range(*self._bounds_of(bounds, chunk))
        ]
        self.weights = model.variables_of(items, trainable=True)
        self.states = model.variables_of(items, trainable=False)
        self.keys: dict[int, Key] = model.keys()
        self._place_variables()
        self._make_stages(bounds, specs)

    # --- where what is -------------------------------------------------------------------------

    def _find_cuts(self, inputs: Any, size: int) -> list[int]:
        parts = self._request.schedule.num_virtual_stages
        model, partition = self._request.model, self._request.partition
        if len(model) < parts:
            raise ModelError(
                f"the model has {len(model)} layers, too few for {parts} stages (times chunks)"
            )
        if not isinstance(partition, str):
            return check_cuts(partition, len(model), parts)
        if partition == "uniform" or parts == 1:
            return uniform_cuts(len(model), parts)
        cuts: list[int] = []
        if self._place.rank == 0:
            microbatch = tf.nest.map_structure(lambda part: part[:size], inputs)
            costs = measure_costs(model, microbatch, by_time=partition == "time")
            cuts = balanced_cuts(costs, parts)
        return self._hub.gather(cuts, "the partition of the model")[0]

    def _bounds_of(self, bounds: list[int], chunk: int) -> tuple[int, int]:
        stage = self._request.schedule.virtual_stage(self._place.stage, chunk)
        return bounds[stage], bounds[stage + 1]

    def _build(self, bounds: list[int], first: Spec) -> dict[int, Spec]:
        """Builds the items of this rank; returns the input spec of each of its virtual stages."""
        schedule, place = self._request.schedule, self._place
        inputs: dict[int, Spec] = {}
        specs = [first]
        for stage in range(schedule.num_virtual_stages):
            owner, _ = schedule.placement.rank_and_chunk(stage, place.num_stages)
            if owner != place.stage:
                continue
            before = schedule.placement.rank_and_chunk(stage - 1, place.num_stages)[0]
            if stage > 0 and before != place.stage:
                specs = self._receive_specs(before, stage)
            inputs[stage] = specs[-1]
            specs = self._request.model.build(bounds[stage], bounds[stage + 1], specs)
            self._output_spec = specs[-1]
            self._specs = specs
            if stage + 1 < schedule.num_virtual_stages:
                after = schedule.placement.rank_and_chunk(stage + 1, place.num_stages)[0]
                if after != place.stage:
                    text = np.frombuffer(json.dumps(specs).encode(), np.uint8)
                    self._transport.isend(place.peer(after), _SPECS, [tf.constant(text)])
        return inputs

    def _receive_specs(self, before: int, stage: int) -> list[Spec]:
        transfer = self._transport.irecv(self._place.peer(before), _SPECS)
        what = f"what flows into virtual stage {stage}"
        (text,) = self._transport.wait(transfer, what)
        return [Spec(*spec) for spec in json.loads(text.numpy().tobytes())]

    # --- variables that several ranks hold -----------------------------------------------------

    def _place_variables(self) -> None:
        """Finds which ranks share which variables, and has them start from the same values."""
        self._by_key = {self.keys[id(v)]: v for v in [*self.weights, *self.states]}
        mine = [sorted(self.keys[id(v)] for v in group) for group in (self.weights, self.states)]
        held = self._hub.gather(mine, "which weights each rank holds")
        holders: dict[Key, list[int]] = {}
        self.trainable = {tuple(key) for weights, _ in held for key in weights}
        for rank, (weights, states) in enumerate(held):
            for key in [*weights, *states]:
                holders.setdefault(tuple(key), []).append(rank)
        self.holders = holders
        shared = sorted({tuple(ranks) for ranks in holders.values() if len(ranks) > 1})
        # Making a process set is a collective of all ranks, members or not.
        self._sets = self._run(
            "making process sets", lambda: {ranks: process_set(ranks) for ranks in shared}
        )
        for number, ranks in enumerate(shared):
            if self._place.rank in ranks:
                keys = sorted(key for key in self._by_key if tuple(holders[key]) == ranks)
                variables = [raw(self._by_key[key]) for key in keys]
                name = f"{self._request.collectives.name}/initial/{number}"
                work = partial(_broadcast, variables, ranks[0], self._sets[ranks], name)
                self._run("the broadcast of initial weights", work, ranks)

    def _run(self, what: str, work: Callable[[], Any], ranks: Sequence[int] = ()) -> Any:
        return self._request.collectives.run(what, ranks, work)

    def _groups(self, variables: Sequence[Any]) -> list[Group]:
        """The sets of ranks that share some of these variables with this rank.

        The order of sets and variables is the same on all ranks of a set.
        """
        groups = []
        for ranks, members in sorted(self._sets.items()):
            if self._place.rank in ranks:
                numbers = [
                    number
                    for number, variable in enumerate(variables)
                    if tuple(self.holders[self.keys[id(variable)]]) == ranks
                ]
                numbers.sort(key=lambda number: self.keys[id(variables[number])])
                groups.append(Group(ranks, members, numbers))
        return groups

    def _chunks_of_weights(self, bodies: Sequence[StageBody]) -> list[int | None]:
        """For each weight the chunk whose backward pass completes its gradient on all its ranks.

        None where more than one chunk or more than one stage uses it.
        """
        users: dict[int, set[int]] = {}
        for chunk, body in enumerate(bodies):
            for weight in body.weights:
                users.setdefault(id(weight), set()).add(chunk)
        found: list[int | None] = []
        for weight in self.weights:
            stages = set(map(self._place.stage_of, self.holders[self.keys[id(weight)]]))
            alone = len(users[id(weight)]) == len(stages) == 1
            found.append(min(users[id(weight)]) if alone else None)
        return found

    # --- what runs -----------------------------------------------------------------------------

    def _make_stages(self, bounds: list[int], specs: dict[int, Spec]) -> None:
        request, place, schedule = self._request, self._place, self._request.schedule
        bodies = []
        for chunk in range(schedule.num_chunks):
            number = schedule.virtual_stage(place.stage, chunk)
            items = request.model.items[bounds[number] : bounds[number + 1]]
            loss = request.loss if number == schedule.num_virtual_stages - 1 else None
            bodies.append(StageBody(request.model, items, specs[number], loss))
        home = [self.holders[self.keys[id(w)]][0] == place.rank for w in self.weights]
        self.updater = Updater(
            request.optimizer,
            self.weights,
            home,
            self._groups(self.weights),
            self._chunks_of_weights(bodies),
            request.collectives,
        )
        self.averages = StateAverage(self.states, self._groups(self.states), request.collectives)
        slots = self.updater.slots
        mine = [[self.keys[id(w)], list(slots.of_weight(w))] for w in self.weights]
        known = self._hub.gather([mine, sorted(slots.shared())], "the optimizer's slots")
        self.slot_names: dict[Key, list[str]] = {
            tuple(key): names for of_weights, _ in known for key, names in of_weights
        }
        # Of the first rank that has weights: only there the optimizer is built.
        self.slots_from = next((rank for rank, (_, names) in enumerate(known) if names), 0)
        self.shared_names = known[self.slots_from][1]
        accumulators = {
            id(weight): accumulator
            for weight, accumulator in zip(self.weights, self.updater.accumulators, strict=True)
        }
        stages = [
            self._make_stage(
                body,
                [accumulators[id(weight)] for weight in body.weights],
                sends_back=schedule.virtual_stage(place.stage, chunk) > 0,
            )
            for chunk, body in enumerate(bodies)
        ]
        self.executor = Executor(schedule, place.stage, stages, self._transport, place.peer)

    def _make_stage(
        self, body: StageBody, accumulators: list[tf.Variable], sends_back: bool
    ) -> Stage:
        policy = (
            self._request.recompute[self._place.stage],
            self._request.schedule.splits_backward,
            sends_back,
        )
        if self._request.stage_mode == "function":
            return FunctionStage(body, accumulators, *policy)
        if self._request.stage_mode == "eager":
            return EagerStage(body, accumulators, *policy)
        import terra_tf

        return CoexecutedStage(body, accumulators, *policy, terra_tf.function)

    # --- bringing things together --------------------------------------------------------------

    def pack_outputs(self, flat: list[tf.Tensor]) -> Any:
        """The model's output in its structure, on the last stage's rank."""
        return self._output_spec.pack(flat)

    def spread(self, outputs: Any) -> Any:
        """Brings the last stage's outputs to every rank of the replica."""
        place, schedule = self._place, self._request.schedule
        last = schedule.num_virtual_stages - 1
        owner, _ = schedule.placement.rank_and_chunk(last, place.num_stages)
        # On from stage to neighbour stage, since these are connected; from the last one outwards.
        if place.stage == owner:
            flat = tf.nest.flatten(outputs)
            skeleton = np.frombuffer(json.dumps(self._output_spec.skeleton).encode(), np.uint8)
            message = [tf.constant(skeleton), *flat]
        else:
            toward = place.stage + (1 if owner > place.stage else -1)
            transfer = self._transport.irecv(place.peer(toward), _OUTPUTS)
            message = self._transport.wait(transfer, "the outputs of predict")
        for neighbour in (place.stage - 1, place.stage + 1):
            onward = abs(neighbour - owner) > abs(place.stage - owner)
            if onward and 0 <= neighbour < place.num_stages:
                self._transport.isend(place.peer(neighbour), _OUTPUTS, message)
        return decode(json.loads(message[0].numpy().tobytes()), list(message[1:]))

    def sum_over_stages(self, value: float) -> float:
        """The sum of a number over the ranks of this replica, on each of them."""
        place, total = self._place, value

        def received(neighbour: int) -> float:
            transfer = self._transport.irecv(place.peer(neighbour), _SUM)
            return float(self._transport.wait(transfer, "the loss of the replica")[0])

        def send(neighbour: int) -> None:
            message = [tf.constant(total, tf.float64)]
            self._transport.isend(place.peer(neighbour), _SUM, message)

        # From the first stage to the last, which then has it all, and back.
        if place.stage > 0:
            total += received(place.stage - 1)
        if place.stage < place.num_stages - 1:
            send(place.stage + 1)
            total = received(place.stage + 1)
        if place.stage > 0:
            send(place.stage - 1)
        return total

    def gather_weights(self) -> dict[str, np.ndarray] | None:
        """See `Pipeline.gather_weights`."""
        values = {}
        for key in sorted(self.holders):
            value = self.fetch(key, lambda variable: [tf.convert_to_tensor(raw(variable))])
            if value is not None:
                values[key] = value[0].numpy()
        specs = max(self._hub.gather(self._specs, "what flows in the model"), key=len)
        if self._place.rank != 0:
            return None
        self._request.model.build(0, len(self._request.model), [Spec(*spec) for spec in specs])
        known = dict(self._variables_anywhere())
        for key, value in values.items():
            if key in known:
                raw(known[key]).assign(value)
        return {f"{index}/{number}": value for (index, number), value in values.items()}

    def fetch(self, key: Key, read: Callable[[Any], list[tf.Tensor]]) -> list[tf.Tensor] | None:
        """What `read` makes of a variable on the first rank that holds it, on rank 0.

        All ranks call this for the same keys in the same order.
        """
        owner = self.holders[key][0]
        if self.rank == owner:
            tensors = read(self._by_key[key])
            if owner == 0:
                return tensors
            # What does not fit into the window waits in the variables, so finish before going on.
            self._transport.wait(
                self._transport.isend(0, _FETCH, tensors), "rank 0 to take weights"
            )
        elif self.rank == 0:
            transfer = self._transport.irecv(owner, _FETCH)
            return self._transport.wait(transfer, f"weights of rank {owner}")
        return None

    def variables(self) -> list[tuple[Key, Any]]:
        """This rank's variables with their keys."""
        return sorted(self._by_key.items())

    def reseed(self, seed: int) -> None:
        """Random numbers derive from another seed of the pipeline from now on."""
        self._request.model.seed = seed
        for stage in self.executor.stages:
            random = stage.body.random
            random.states = [
                (item, state, (seed, *origin[1:])) for item, state, origin in random.states
            ]

    def _variables_anywhere(self) -> list[tuple[Key, Any]]:
        """All variables that exist in this process, those of other stages included."""
        model = self._request.model
        everything = [
            variable
            for item in model.items
            if item.is_built
            for variable in item.variables(True) + item.variables(False)
        ]
        return [(self._request.model.keys()[id(variable)], variable) for variable in everything]

    def used_weights(self) -> list[bool]:
        """For each weight, whether some loss depends on it; shared ones count as if it did."""
        used: set[int] = set()
        for stage in self.executor.stages:
            used |= {id(body_weight) for body_weight in stage.used_weights()}
        return [
            id(weight) in used or len(self.holders[self.keys[id(weight)]]) > 1
            for weight in self.weights
        ]


def _broadcast(variables: list[tf.Variable], root: int, members: Any, name: str) -> None:
    import horovod.tensorflow as hvd

    @tf.function(autograph=False)
    def run() -> None:
        for number, variable in enumerate(variables):
            value = hvd.broadcast(
                tf.convert_to_tensor(variable),
                root_rank=root,
                name=f"{name}/{number}",
                process_set=members,
            )
            variable.assign(value)

    run()
