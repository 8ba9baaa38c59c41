"""Runs one rank's line of a schedule: computes, sends, receives, lends stashes and takes them back.

What each action means is stated in `schedules.actions`. Communication is posted and goes on by
itself; an action that needs a message waits for it. The executor knows nothing of the optimizer or
of replicas: it takes micro-batches and leaves gradients in the stages' accumulators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from pipeline import tensorflow_internals
from pipeline.communication.transport import Transfer, Transport, encode
from pipeline.runtime.ledger import Holding, Ledger
from pipeline.runtime.stage import Forward, MicroBatch, Stage, Tensors
from pipeline.runtime.step import Event, StepData, StepResult
from pipeline.schedules import Action, Kind, Schedule

_FORWARD_ONLY = frozenset({Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD})


class Executor:
    """One rank of one pipeline replica.

    Args:
        schedule: what to do.
        rank: this rank's line.
        stages: for each chunk its stage.
        transport: connected to all peers of the line.
        peer_of: the transport's name of a rank of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Sequence[Stage],
        transport: Transport,
        peer_of: Callable[[int], int],
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.stages = list(stages)
        self.transport = transport
        self.peer_of = peer_of
        self.line = schedule.actions[rank]
        # (chunk, micro-batch) of the stashes that are lent.
        self.leaving = {(a.chunk, a.microbatch) for a in self.line if a.kind is Kind.EVICT}
        # What this rank is at: an action, or the text of a wait.
        self.at: Action | str = ""

    @property
    def activity(self) -> str:
        """What this rank is at, for people."""
        if isinstance(self.at, Action):
            return f"stage {self.rank}, {self.at} of micro-batch {self.at.microbatch}"
        return self.at

    def train(
        self,
        data: StepData,
        keep_outputs: bool = False,
        on_chunk_done: Callable[[int], None] | None = None,
    ) -> StepResult:
        """Runs the whole line.

        Args:
            data: the micro-batches.
            keep_outputs: whether the last stage's outputs are wanted.
            on_chunk_done: called with a chunk as soon as its gradients are complete.
        """
        run = _Run(self, data, training=True, keep_outputs=keep_outputs)
        run.on_chunk_done = on_chunk_done
        return run.run(self.line)

    def infer(self, data: StepData, keep_outputs: bool = False) -> StepResult:
        """Runs the line's forward passes without training; fewer micro-batches may be given."""
        line = [
            action
            for action in self.line
            if action.kind in _FORWARD_ONLY and action.microbatch < len(data.sizes)
        ]
        return _Run(self, data, training=False, keep_outputs=keep_outputs).run(line)


Posted = tuple[Transfer, Action]
"""A transfer and the action that posted it."""


@dataclass
class _Stash:
    """A micro-batch between its forward pass and its last use.

    Attributes:
        plan: of the forward pass.
        tensors: the stash while it is here.
        holding: the ledger's entry.
        load: what brings it back.
        passed_on: what the backward pass leaves for the weights' gradients.
    """

    plan: Any
    tensors: Tensors | None
    holding: Holding
    load: Posted | None = None
    passed_on: Any = None


class _Run:
    """The state of one step; one method for each kind of action."""

    def __init__(
        self, executor: Executor, data: StepData, training: bool, keep_outputs: bool
    ) -> None:
        self.executor = executor
        self.schedule = executor.schedule
        self.transport = executor.transport
        self.data = data
        self.training = training
        self.keep_outputs = keep_outputs
        self.result = StepResult()
        self.ledger = Ledger()
        last = self.schedule.num_virtual_stages - 1
        self.last_stage = last
        # (virtual stage that made it, micro-batch) → tensors made here, or the receive of them.
        self.activations: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], Any] = {}
        # (chunk, micro-batch) → its stash.
        self.stashes: dict[tuple[int, int], _Stash] = {}
        # (owner, chunk there, micro-batch) → what was lent to this rank.
        self.lent: dict[tuple[int, int, int], tuple[Transfer, Holding]] = {}
        # The evictions that no forward pass has waited for, with the number of computations before.
        self.evictions: list[tuple[int, Action, Transfer]] = []
        # Partner → the last stash transfer with it: they run one at a time.
        self.last_with: dict[int, Transfer] = {}
        self.posted: list[tuple[Action, Transfer]] = []
        self.num_computed = 0
        # Chunk → how many micro-batches' gradients it has still to compute.
        self.num_left = dict.fromkeys(range(len(executor.stages)), len(data.sizes))
        self.on_chunk_done: Callable[[int], None] | None = None

    def run(self, line: Sequence[Action]) -> StepResult:
        """Executes the line and waits until all that it posted is through."""
        execute = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.WEIGHT: self.weight,
            Kind.SEND_FORWARD: self.send,
            Kind.SEND_BACKWARD: self.send,
            Kind.RECV_FORWARD: self.receive,
            Kind.RECV_BACKWARD: self.receive,
            Kind.EVICT: self.evict,
            Kind.LOAD: self.load,
            Kind.ACCEPT: self.accept,
            Kind.RETURN: self.give_back,
        }
        for action in line:
            self.executor.at = action
            try:
                execute[action.kind](action)
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(f"in action {action} of stage {self.executor.rank}")
                raise
        self.finish()
        return self.result

    # --- computation ---------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        """F: waits for the input and for memory."""
        stage = self.stage_number(action)
        inputs = self.inputs_of(action, stage)
        self.await_evictions(action)
        data = self.data_of(action, stage)
        begin = time.monotonic_ns()
        computing = self.executor.stages[action.chunk]
        if self.training:
            made = computing.forward(inputs, data)
        else:
            inferred = computing.infer(inputs, data)
            made = Forward(inferred.outputs, inferred.loss, inferred.layer_losses, [], None)
        self.computed(action, begin)
        size = self.data.sizes[action.microbatch]
        for loss in (made.loss, made.layer_losses):
            if loss is not None:
                self.result.loss += size * float(loss)
        if self.training:
            size = made.held_bytes + sum(map(tensorflow_internals.nbytes, made.stash))
            self.result.stash_bytes = max(self.result.stash_bytes, size)
            holding = self.ledger.make(size, begin)
            self.stashes[action.chunk, action.microbatch] = _Stash(made.plan, made.stash, holding)
        if stage < self.last_stage:
            self.activations[stage, action.microbatch] = made.outputs
        elif self.keep_outputs:
            self.result.outputs.append(made.outputs)

    def inputs_of(self, action: Action, stage: int) -> Tensors:
        """The flat inputs of a forward pass."""
        if stage == 0:
            return self.data.inputs[action.microbatch]
        return self.taken(self.activations, stage - 1, action)

    def data_of(self, action: Action, stage: int) -> MicroBatch:
        """The user's data that a forward pass reads besides its inputs."""
        microbatch = action.microbatch
        random = self.executor.stages[action.chunk].body.random
        seeds = tf.constant(random.values(self.data.step, microbatch))
        leaves = (action.chunk, microbatch) in self.executor.leaving
        if stage < self.last_stage or self.data.targets is None:
            return MicroBatch(None, None, seeds, leaves)
        weights = self.data.sample_weights
        weight = weights[microbatch] if weights else None
        return MicroBatch(self.data.targets[microbatch], weight, seeds, leaves)

    def backward(self, action: Action) -> None:
        """B: waits for the gradient of the output and for a stash that was evicted."""
        stage = self.stage_number(action)
        gradients: Tensors = []
        if stage < self.last_stage:
            gradients = self.taken(self.gradients, stage + 1, action)
        stash = self.stashes[action.chunk, action.microbatch]
        if stash.load is not None:
            stash.tensors = self.wait(*stash.load, action)
            stash.load = None
        scale = tf.constant(self.data.scales[action.microbatch], tf.float64)
        tensors, stash.tensors = stash.tensors, None
        begin = time.monotonic_ns()
        computing = self.executor.stages[action.chunk]
        made, stash.passed_on = computing.backward(stash.plan, tensors, gradients, scale)
        self.computed(action, begin)
        del tensors
        if stage > 0:
            self.gradients[stage, action.microbatch] = made
        if not self.schedule.splits_backward:
            self.release(action)

    def weight(self, action: Action) -> None:
        """W."""
        stash = self.stashes[action.chunk, action.microbatch]
        begin = time.monotonic_ns()
        self.executor.stages[action.chunk].weight(stash.plan, stash.passed_on)
        self.computed(action, begin)
        self.release(action)

    def release(self, action: Action) -> None:
        """The stash has served."""
        self.stashes.pop((action.chunk, action.microbatch)).holding.release()
        self.num_left[action.chunk] -= 1
        if self.num_left[action.chunk] == 0 and self.on_chunk_done is not None:
            self.on_chunk_done(action.chunk)

    def computed(self, action: Action, begin: int) -> None:
        """Enters a computation that ends now."""
        self.num_computed += 1
        self.result.events.append(Event(str(action), "compute", begin, time.monotonic_ns()))

    # --- communication -------------------------------------------------------------------------

    def send(self, action: Action) -> None:
        """SEND_F and SEND_B."""
        made = self.activations if action.kind is Kind.SEND_FORWARD else self.gradients
        tensors = made.pop((self.stage_number(action), action.microbatch))
        peer = self.executor.peer_of(action.peer)
        self.post(action, self.transport.isend(peer, self.tag(action), tensors))

    def receive(self, action: Action) -> None:
        """RECV_F and RECV_B."""
        stage = self.stage_number(action)
        peer = self.executor.peer_of(action.peer)
        transfer = self.post(action, self.transport.irecv(peer, self.tag(action)))
        if action.kind is Kind.RECV_FORWARD:
            self.activations[stage - 1, action.microbatch] = transfer, action
        else:
            self.gradients[stage + 1, action.microbatch] = transfer, action

    def evict(self, action: Action) -> None:
        """EVICT: the partner takes the stash as soon as the transfers before are through."""
        stash = self.stashes[action.chunk, action.microbatch]
        peer = self.executor.peer_of(action.peer)
        transfer = self.transport.isend(
            peer, self.tag(action), stash.tensors, buffered=False, after=self.last_with.get(peer)
        )
        stash.tensors = None
        stash.holding.departure = transfer
        self.last_with[peer] = self.post(action, transfer)
        self.evictions.append((self.num_computed, action, transfer))

    def load(self, action: Action) -> None:
        """LOAD: the stash comes back as soon as the transfers before are through."""
        stash = self.stashes[action.chunk, action.microbatch]
        peer = self.executor.peer_of(action.peer)
        transfer = self.transport.irecv(peer, self.tag(action), self.last_with.get(peer))
        stash.load = transfer, action
        stash.holding = self.ledger.arrive(transfer, lent=False)
        self.last_with[peer] = self.post(action, transfer)

    def accept(self, action: Action) -> None:
        """ACCEPT: the stash comes when the partner sends it, after the transfers before."""
        peer = self.executor.peer_of(action.peer)
        transfer = self.transport.irecv(peer, self.tag(action), self.last_with.get(peer))
        holding = self.ledger.arrive(transfer, lent=True)
        self.lent[action.peer, action.chunk, action.microbatch] = transfer, holding
        self.last_with[peer] = self.post(action, transfer)

    def give_back(self, action: Action) -> None:
        """RETURN: the stash goes when the partner asks for it, after the transfers before."""
        received, holding = self.lent.pop((action.peer, action.chunk, action.microbatch))
        peer = self.executor.peer_of(action.peer)
        transfer = self.transport.forward(peer, self.tag(action), received)
        holding.departure = transfer
        self.last_with[peer] = self.post(action, transfer)

    def post(self, action: Action, transfer: Transfer) -> Transfer:
        """Remembers a transfer until the end of the step."""
        self.posted.append((action, transfer))
        return transfer

    # --- waiting -------------------------------------------------------------------------------

    def taken(self, made: dict[tuple[int, int], Any], stage: int, action: Action) -> Tensors:
        """What another virtual stage made for a computation: here, or received."""
        found = made.pop((stage, action.microbatch))
        if isinstance(found, list):
            return found
        return self.wait(*found, action)

    def await_evictions(self, action: Action) -> None:
        """Waits until every eviction that has had a computation to hide behind is complete."""
        while self.evictions and self.evictions[0][0] < self.num_computed:
            _, evicted, transfer = self.evictions.pop(0)
            self.wait(transfer, evicted, action)

    def wait(self, transfer: Transfer, posted: Action, action: Action) -> Tensors:
        """Waits for a transfer on behalf of an action, and accounts for the time.

        Args:
            transfer: to wait for.
            posted: the action that posted it.
            action: the one that needs it.
        """
        begin = time.monotonic_ns()
        tensors = self.await_(transfer, f"before {action}, waited for {self.described(posted)}")
        self.executor.at = action
        end = time.monotonic_ns()
        # Before the peer had it ready, the wait is a bubble and not the transfer's fault.
        ready = transfer.peer_posted or transfer.started
        self.result.exposed += 1e-9 * max(0, min(end, transfer.finished) - max(begin, ready))
        self.result.events.append(Event(f"{action} after {posted}", "wait", begin, end))
        return list(tensors)

    def await_(self, transfer: Transfer, what: str) -> Sequence[tf.Tensor]:
        """Waits for a transfer; `what` says what this stage is at."""
        self.executor.at = f"stage {self.executor.rank}, {what}"
        return self.transport.wait(transfer, self.executor.at)

    def described(self, posted: Action) -> str:
        """An action of communication with its micro-batch and the peer's rank in the job."""
        rank = self.executor.peer_of(posted.peer)
        return f"{posted} (micro-batch {posted.microbatch}, rank {rank})"

    def finish(self) -> None:
        """Waits for what is still on its way and takes stock."""
        for action, transfer in self.posted:
            if not transfer.done:
                self.await_(
                    transfer, f"at the end of the step, waited for {self.described(action)}"
                )
            kind = "receive" if "<" in str(action) else "send"
            self.result.events.append(Event(str(action), kind, transfer.started, transfer.finished))
        self.result.peak = self.ledger.peak()

    # --- names ---------------------------------------------------------------------------------

    def stage_number(self, action: Action) -> int:
        """The virtual stage of an action's chunk."""
        return self.schedule.virtual_stage(self.executor.rank, action.chunk)

    def tag(self, action: Action) -> int:
        """The transport's tag of a communication."""
        return encode(*self.schedule.tag(self.executor.rank, action))
