"""The portable transport: every message is an `alltoall` in a process set of two ranks.

It needs nothing but Horovod and is slow: each message waits for Horovod's cycle, is packed into one
tensor of bytes, and holds a thread while it is under way. A message is a collective of both ranks
under one name, so it moves when both have posted it: nothing is ever buffered.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf

from pipeline.communication.process_sets import process_set
from pipeline.communication.transport import TransportCounters
from pipeline.errors import CommunicationError, CommunicationTimeout

_HEADER = np.dtype("<i8")


class HorovodTransfer:
    """A message under way in a thread of its own; see `Transfer`."""

    def __init__(self) -> None:
        self.tensors: list[tf.Tensor] = []
        self.problem: Exception | None = None
        self.bytes = 0
        self.posted = time.monotonic_ns()
        self.peer_posted = 0
        self.started = 0
        self.finished = 0
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def run(self, work: Callable[[HorovodTransfer], None], after: HorovodTransfer | None) -> None:
        """Does the work when `after` has ended; what it raises is kept for who waits."""
        try:
            if after is not None:
                after.wait(None)
                if after.problem is not None:
                    raise after.problem
                self.posted = time.monotonic_ns()
            work(self)
        except Exception as error:  # whatever Horovod raises belongs to who waits
            self.problem = self.problem or error
        self.finished = time.monotonic_ns()
        self._ended.set()

    def wait(self, seconds: float | None) -> bool:
        """Whether it has ended within that time; None waits without end."""
        return self._ended.wait(seconds)

    def fail(self, why: str) -> None:
        """Has whoever waits go on; its thread may be stuck in Horovod as long as it likes."""
        if not self._ended.is_set():
            self.problem = self.problem or CommunicationError(why)
            self._ended.set()


class HorovodTransport:
    """Messages over Horovod alone; see `Transport` for the methods.

    Args:
        rank: this process's rank.
        pairs: every pair of ranks in the job that talks to each other; the same on all ranks.
        name: part of the collectives' names; the same on all ranks.
        timeout: seconds that a wait may take.
        make_set: makes the process set of some ranks; a collective.
    """

    name = "horovod"

    def __init__(
        self,
        rank: int,
        pairs: Iterable[tuple[int, int]],
        name: str,
        timeout: float = 60.0,
        make_set: Callable[[Iterable[int]], object] = process_set,
    ) -> None:
        self.timeout = timeout
        self.silence: Callable[[], str] = str
        self.reason: Callable[[], str] = str
        self._rank = rank
        self._prefix = name
        self._sets = {}
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
            group = make_set((low, high))
            if rank in (low, high):
                self._sets[low + high - rank] = group
        self._alltoalls = _Alltoalls()
        # Collective's name → a lock: a name can be used by one message at a time.
        self._turns: dict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()
        self._counters = TransportCounters()
        self._broken: str | None = None
        self._under_way: weakref.WeakSet[HorovodTransfer] = weakref.WeakSet()

    def isend(
        self,
        peer: int,
        tag: int,
        tensors: Sequence[tf.Tensor],
        buffered: bool = True,
        after: HorovodTransfer | None = None,
    ) -> HorovodTransfer:
        """See `Transport`."""
        message = pack(tensors)
        size = sum(tensor.dtype.size * int(tf.size(tensor)) for tensor in tensors)

        def send(transfer: HorovodTransfer) -> None:
            self._exchange(transfer, self._rank, peer, tag, message)
            transfer.bytes = size
            self._counters.messages_sent += 1
            self._counters.bytes_sent += size

        return self._start(send, peer, after)

    def irecv(self, peer: int, tag: int, after: HorovodTransfer | None = None) -> HorovodTransfer:
        """See `Transport`."""

        def receive(transfer: HorovodTransfer) -> None:
            nothing = tf.zeros([0], tf.uint8)
            message = self._exchange(transfer, peer, self._rank, tag, nothing)
            transfer.tensors, transfer.bytes = unpack(message)
            self._counters.messages_received += 1
            self._counters.bytes_received += transfer.bytes

        return self._start(receive, peer, after)

    def forward(self, peer: int, tag: int, received: HorovodTransfer) -> HorovodTransfer:
        """See `Transport`."""

        def send(transfer: HorovodTransfer) -> None:
            tensors, received.tensors = received.tensors, []
            transfer.bytes = received.bytes
            self._exchange(transfer, self._rank, peer, tag, pack(tensors))
            self._counters.messages_sent += 1
            self._counters.bytes_sent += transfer.bytes

        return self._start(send, peer, received)

    def wait(
        self, transfer: HorovodTransfer, what: str, timeout: float | None = None
    ) -> list[tf.Tensor]:
        """See `Transport`."""
        seconds = self.timeout if timeout is None else timeout
        if not transfer.wait(seconds):
            raise CommunicationTimeout(f"{what}: nothing came within {seconds:g} s{self.silence()}")
        if transfer.problem is not None:
            why: object = transfer.problem
            if not isinstance(why, CommunicationError):
                why = self.reason() or why
            raise CommunicationError(f"{what}: {why}") from transfer.problem
        tensors, transfer.tensors = transfer.tensors, []
        return tensors

    def kind_of(self, peer: int) -> str:
        """See `Transport`."""
        return "horovod" if peer in self._sets else ""

    def counters(self) -> TransportCounters:
        """See `Transport`."""
        return self._counters

    def abort(self, why: str) -> None:
        """Ends what is under way here; peers learn why from the watch."""
        self.fail(why)

    def fail(self, why: str) -> None:
        """See `Transport`."""
        with self._lock:
            self._broken = self._broken or why
            under_way = list(self._under_way)
        for transfer in under_way:
            transfer.fail(why)

    def close(self) -> None:
        """A thread ends with its message, or with the process; the session with the last one."""

    def _start(
        self,
        work: Callable[[HorovodTransfer], None],
        peer: int,
        after: HorovodTransfer | None,
    ) -> HorovodTransfer:
        if peer not in self._sets:
            raise CommunicationError(f"not connected to rank {peer}")
        transfer = HorovodTransfer()
        with self._lock:
            self._under_way.add(transfer)
        if self._broken is not None:
            transfer.fail(self._broken)
            return transfer
        threading.Thread(
            target=transfer.run, args=(work, after), name="pipeline-horovod", daemon=True
        ).start()
        return transfer

    def _exchange(
        self, transfer: HorovodTransfer, sender: int, receiver: int, tag: int, message: tf.Tensor
    ) -> tf.Tensor:
        """Runs the collective of one message; returns what came for this rank."""
        name = f"{self._prefix}/{sender}>{receiver}/{tag}"
        # A process set sorts its ranks.
        size = message.shape[0]
        splits = np.array([size, 0] if receiver < sender else [0, size], np.int32)
        with self._lock:
            turn = self._turns[name]
        with turn:
            alltoall = self._alltoalls.get(name, self._sets[sender + receiver - self._rank])
            transfer.started = time.monotonic_ns()
            return tf.convert_to_tensor(alltoall(message.numpy(), splits))


class _Alltoalls:
    """Collectives by name, in a session whose threads are its own.

    Eager Horovod ops ignore their names. A function's ops run in TensorFlow's pool, and after the
    loss of a rank a call of Horovod may block for good: computations must not wait for its thread.
    """

    def __init__(self) -> None:
        config = tf.compat.v1.ConfigProto(
            use_per_session_threads=True, inter_op_parallelism_threads=1, device_count={"GPU": 0}
        )
        self._graph = tf.Graph()
        self._session = tf.compat.v1.Session(graph=self._graph, config=config)
        self._lock = threading.Lock()
        self._made: dict[str, Callable[..., np.ndarray]] = {}

    def get(self, name: str, group: object) -> Callable[..., np.ndarray]:
        """A function that gives what came, of bytes and how many of them go to which rank."""
        import horovod.tensorflow as hvd

        with self._lock, self._graph.as_default():
            if name not in self._made:
                message = tf.compat.v1.placeholder(tf.uint8, [None])
                splits = tf.compat.v1.placeholder(tf.int32, [2])
                received, _ = hvd.alltoall(message, splits, name=name, process_set=group)
                self._made[name] = self._session.make_callable(received, [message, splits])
            return self._made[name]


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """One vector of bytes: the number of tensors, for each its type, rank and shape, the data."""
    header = [len(tensors)]
    pieces = []
    for tensor in tensors:
        tensor = tf.convert_to_tensor(tensor)
        header += [tensor.dtype.as_datatype_enum, len(tensor.shape), *tensor.shape]
        plain = tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor
        pieces.append(tf.reshape(tf.bitcast(plain, tf.uint8), [-1]))
    head = np.frombuffer(np.array([len(header), *header], _HEADER).tobytes(), np.uint8)
    return tf.concat([tf.constant(head), *pieces], axis=0)


def unpack(message: tf.Tensor) -> tuple[list[tf.Tensor], int]:
    """The tensors of a packed message, and how many bytes they have."""
    words = int(np.frombuffer(message[: _HEADER.itemsize].numpy().tobytes(), _HEADER)[0])
    start = (1 + words) * _HEADER.itemsize
    header = np.frombuffer(message[_HEADER.itemsize : start].numpy().tobytes(), _HEADER).tolist()
    tensors = []
    place, offset = 1, start
    for _ in range(header[0]):
        dtype, rank = tf.as_dtype(header[place]), header[place + 1]
        shape = header[place + 2 : place + 2 + rank]
        place += 2 + rank
        size = int(np.prod(shape, dtype=np.int64)) * dtype.size
        data = message[offset : offset + size]
        offset += size
        if dtype == tf.bool:
            tensors.append(tf.cast(tf.reshape(data, shape), tf.bool))
        elif dtype.size == 1:
            tensors.append(tf.reshape(tf.bitcast(data, dtype), shape))
        else:
            tensors.append(tf.bitcast(tf.reshape(data, [*shape, dtype.size]), dtype))
    return tensors, offset - start
