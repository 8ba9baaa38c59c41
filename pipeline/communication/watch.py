"""The watch: which ranks of the job are alive, and the news when one is lost or gives up.

Transports see only their own peers, and Horovod tells nobody anything: a rank that waits in a
collective for a dead one is ended with it. So every rank keeps one more connection, to rank 0,
served by a thread that does nothing else. It carries

    beat      what a rank is doing, every second; silence means that it is stopped or gone
    failed    a pipeline of a rank gives up, and why; rank 0 passes it on to all
    lost      a connection ended without `bye`, so its process did; rank 0 passes it on to all
    ask, told who was silent for how long, for the error of a wait that took too long
    bye       a program that ends as it should

The news is printed at once, by the thread, since the launcher ends the other ranks within a second
of the first; then the pipelines are told, so that whatever waits raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipeline.communication.greeting import admit, present
from pipeline.errors import CommunicationError

_BEAT_SECONDS = 1.0
# A rank that was not heard of for so long is said to be silent; a few beats may come late.
_SILENT_SECONDS = 3.5
# After one failure the others that it leads to are not printed for so long.
_ECHO_SECONDS = 10.0
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class Failure:
    """Why something cannot go on.

    Attributes:
        why: for people.
        rank: where it began; -1 where that is not known.
        kind: `lost` (its process has ended), `silent` (it does not answer in time) or `failed` (it
            raised an exception and says so).
        pipeline: the name of the one pipeline that is concerned; None for all.
    """

    why: str
    rank: int
    kind: str
    pipeline: str | None = None

    @property
    def ends_horovod(self) -> bool:
        """Whether Horovod's collectives, its shutdown included, will never end after it."""
        return self.kind != "failed"


@dataclass
class _Peer:
    """A connection, to rank 0 or on rank 0 to another rank."""

    rank: int
    socket: socket.socket
    received: bytes = b""
    said_bye: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stuck: bool = False


class Watch:
    """This rank's part of the watch; one a process.

    Args:
        rank: this process.
        size: the number of ranks.
        secret: bytes that only the job's ranks know.
        interface: the IPv4 address that rank 0 listens at.
        exchange: gives this rank's `[address, port]` to all and returns those of all ranks.
        timeout: seconds in which all ranks have to connect.

    Attributes:
        activity: what this rank is doing, as text or a function that returns it.

    Raises:
        CommunicationError: if the ranks cannot connect.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        secret: bytes,
        interface: str,
        exchange: Callable[[list[Any]], list[list[Any]]],
        timeout: float = 60.0,
    ) -> None:
        self.rank, self.size = rank, size
        self.activity: str | Callable[[], str] = "starting"
        self._secret = secret
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.RLock()
        self._failures: list[Failure] = []
        self._latest_failure = self._said = -_ECHO_SECONDS
        self._on_failure: list[Callable[[Failure], None]] = []
        self._subscribers: list[tuple[str, weakref.WeakMethod[Callable[[Failure], None]]]] = []
        # Rank → when it was last heard of, and what it was doing; on rank 0.
        self._heard: dict[int, tuple[float, str]] = {}
        self._told: list[Any] | None = None
        self._told_event = threading.Event()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._meet(interface, exchange, timeout)
        os.register_at_fork(after_in_child=self._forget_connections)
        threading.Thread(target=self._serve, name="pipeline-watch", daemon=True).start()

    # --- what others ask and tell --------------------------------------------------------------

    def failure_of(self, pipeline: str) -> Failure | None:
        """Why a pipeline cannot go on, if it cannot."""
        with self._lock:
            return next((f for f in self._failures if f.pipeline in (None, pipeline)), None)

    def failed_ranks(self) -> set[int]:
        """The ranks that were lost, are silent or raised an exception."""
        with self._lock:
            return {failure.rank for failure in self._failures} - {-1}

    @property
    def is_failing(self) -> bool:
        """Whether anything of the job has failed."""
        return bool(self._failures)

    def subscribe(self, pipeline: str, method: Callable[[Failure], None]) -> None:
        """Has a bound method called, by another thread, when a pipeline fails; held weakly."""
        with self._lock:
            self._subscribers = [s for s in self._subscribers if s[1]() is not None]
            self._subscribers.append((pipeline, weakref.WeakMethod(method)))

    def on_failure(self, function: Callable[[Failure], None]) -> None:
        """Has a function called, by another thread, at every failure."""
        self._on_failure.append(function)

    def give_up(self, failure: Failure) -> None:
        """Tells all ranks of a failure of this one."""
        if self._enter(failure, aloud=False):
            self._broadcast(_failed(failure), besides=self.rank)

    def has_said(self) -> bool:
        """Whether this rank has printed why it fails, in the last moments."""
        return time.monotonic() < self._said + _ECHO_SECONDS

    def say(self, text: str) -> None:
        """Prints why this rank fails."""
        self._said = time.monotonic()
        say(self.rank, text)

    def notice(self, failure: Failure) -> None:
        """Takes in a failure that this rank alone has to know of."""
        self._enter(failure)

    def silence(self) -> str:
        """Which ranks are silent, or what all are doing: for the error of a long wait."""
        table = self._table() if self.rank == 0 else self._ask()
        if table is None:
            return "rank 0 does not answer: it is stopped, or its host is gone"
        others = [row for row in table if row[0] != self.rank]
        silent = [row for row in others if row[1] > _SILENT_SECONDS]
        if silent:
            return "; ".join(
                f"rank {rank} has not answered for {seconds:.0f} s: it is stopped, or its host is "
                f"gone (it was in {activity})"
                for rank, seconds, activity in silent
            )
        doing = "; ".join(f"rank {rank}: {activity}" for rank, _, activity in others[:16])
        return f"all ranks answer ({doing})"

    def silent_ranks(self) -> list[int]:
        """The ranks that do not answer."""
        table = self._table() if self.rank == 0 else self._ask()
        if table is None:
            return [0]
        return [rank for rank, seconds, _ in table if seconds > _SILENT_SECONDS]

    def say_bye(self) -> None:
        """This program ends as it should: what follows is no loss."""
        self._closing = True
        self._broadcast({"kind": "bye"}, besides=self.rank)

    # --- meeting -------------------------------------------------------------------------------

    def _meet(
        self,
        interface: str,
        exchange: Callable[[list[Any]], list[list[Any]]],
        timeout: float,
    ) -> None:
        if self.rank == 0:
            with socket.create_server((interface, 0), backlog=self.size) as listener:
                exchange([interface, listener.getsockname()[1]])
                self._accept_all(listener, time.monotonic() + timeout)
        else:
            address, port = exchange(["", 0])[0]
            self._connect(address, port, timeout)
        for peer in self._peers.values():
            peer.socket.settimeout(1.0)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _accept_all(self, listener: socket.socket, deadline: float) -> None:
        now = time.monotonic()
        while len(self._peers) < self.size - 1:
            listener.settimeout(max(0.0, deadline - time.monotonic()) or 0.001)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, self.size)) - set(self._peers))
                raise CommunicationError(f"ranks {missing} did not connect to rank 0") from None
            rank = admit(connection, self._secret)
            if rank is None or rank in self._peers or not 0 < rank < self.size:
                connection.close()
                continue
            self._peers[rank] = _Peer(rank, connection)
            self._heard[rank] = now, "starting"

    def _connect(self, address: str, port: int, timeout: float) -> None:
        try:
            connection = socket.create_connection((address, port), timeout=timeout)
            present(connection, self._secret, self.rank)
        except OSError as error:
            raise CommunicationError(
                f"rank {self.rank} cannot connect to rank 0 at {address}:{port}: {error}"
            ) from None
        self._peers[0] = _Peer(0, connection)

    def _forget_connections(self) -> None:
        """In a forked child: as long as it held them, nobody would see this process end."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                os.close(peer.socket.detach())

    # --- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        next_beat = 0.0
        while self._peers and not self._closing:
            for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                self._read(key.data)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                if self.rank != 0:
                    self._broadcast({"kind": "beat", "doing": self._doing()}, besides=self.rank)

    def _doing(self) -> str:
        try:
            text = self.activity() if callable(self.activity) else self.activity
        except Exception as error:  # a description is no reason to stop watching
            text = f"(unknown: {error})"
        return text[:500]

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended(peer)
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        if len(peer.received) > _LONGEST_LINE:
            self._ended(peer)
            return
        for line in lines:
            try:
                self._hear(peer, json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue  # not ours; the other end will show what is wrong with it

    def _ended(self, peer: _Peer) -> None:
        with self._lock:
            self._peers.pop(peer.rank, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.said_bye or self._closing:
            return
        _, doing = self._heard.get(peer.rank, (0.0, ""))
        last = f" (it was last heard of in {doing})" if doing else ""
        failure = Failure(
            f"rank {peer.rank} was lost: its process has ended{last}", peer.rank, "lost"
        )
        self._broadcast(_failed(failure), besides=peer.rank)
        self._enter(failure)

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "beat":
            self._heard[peer.rank] = time.monotonic(), str(message["doing"])
        elif kind == "failed":
            failure = Failure(
                str(message["why"]), int(message["rank"]), message["how"], message["pipeline"]
            )
            if self.rank == 0:
                self._broadcast(message, besides=peer.rank)
            self._enter(failure)
        elif kind == "ask":
            self._send(peer, {"kind": "told", "table": self._table()})
        elif kind == "told":
            self._told = message["table"]
            self._told_event.set()
        elif kind == "bye":
            peer.said_bye = True

    def _enter(self, failure: Failure, aloud: bool = True) -> bool:
        """Takes a failure in; False if nothing new follows from it."""
        with self._lock:
            about = (failure.rank, failure.kind, failure.pipeline)
            if about in [(f.rank, f.kind, f.pipeline) for f in self._failures]:
                return False
            # What fails within seconds of another failure follows from it.
            now = time.monotonic()
            is_news, self._latest_failure = now > self._latest_failure + _ECHO_SECONDS, now
            self._failures.append(failure)
            subscribers = [(name, method()) for name, method in self._subscribers]
        if is_news and aloud:
            self.say(f"{failure.why}; here: {self._doing()}")
        for function in self._on_failure:
            function(failure)
        for name, method in subscribers:
            if method is not None and failure.pipeline in (None, name):
                method(failure)
        return True

    # --- messages ------------------------------------------------------------------------------

    def _broadcast(self, message: dict[str, Any], besides: int) -> None:
        with self._lock:
            peers = [peer for rank, peer in self._peers.items() if rank != besides]
        for peer in peers:
            self._send(peer, message)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with peer.lock:
            if peer.is_stuck:
                return
            try:
                peer.socket.sendall(line)
            except OSError:
                # Its end shows when it is read; a stopped one takes nothing, and half a line was
                # sent perhaps, so that nothing can follow.
                peer.is_stuck = True

    def _table(self) -> list[tuple[int, float, str]]:
        """For each rank how long it has been silent, and what it was doing; on rank 0."""
        now = time.monotonic()
        rows = [(rank, now - at, doing) for rank, (at, doing) in sorted(self._heard.items())]
        return [(0, 0.0, self._doing()), *rows]

    def _ask(self) -> list[tuple[int, float, str]] | None:
        self._told, _ = None, self._told_event.clear()
        self._broadcast({"kind": "ask"}, besides=self.rank)
        self._told_event.wait(_BEAT_SECONDS)
        return None if self._told is None else [tuple(row) for row in self._told]


def say(rank: int, text: str) -> None:
    """Prints a line to standard error in one piece, past Python's own buffers and locks."""
    with contextlib.suppress(OSError):
        os.write(2, f"pipeline: rank {rank}: {text}\n".encode())


def _failed(failure: Failure) -> dict[str, Any]:
    return {
        "kind": "failed",
        "why": failure.why[:2000],
        "rank": failure.rank,
        "how": failure.kind,
        "pipeline": failure.pipeline,
    }
