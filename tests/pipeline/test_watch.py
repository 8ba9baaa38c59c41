"""The watch: who is lost, who gives up, who is silent, and who is not let in."""

import os
import socket
import threading
import time

import pytest

from pipeline.communication.collectives import Collectives
from pipeline.communication.watch import Failure, Watch
from pipeline.errors import CommunicationError, CommunicationTimeout

SECRET = b"0123456789abcdef"


class Listener:
    """What a pipeline is to a watch."""

    def __init__(self):
        self.heard = []

    def fail(self, failure):
        self.heard.append(failure)


def meet(size, secrets=None, timeout=5.0):
    """The watches of all ranks, in this one process, and what some of them raised."""
    barrier, rows, made, errors = threading.Barrier(size), {}, {}, {}

    def run(rank):
        def exchange(address):
            rows[rank] = address
            barrier.wait(10)
            return [rows[other] for other in range(size)]

        secret = secrets[rank] if secrets else SECRET
        try:
            made[rank] = Watch(rank, size, secret, "127.0.0.1", exchange, timeout)
        except CommunicationError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return made, errors


def vanish(watch):
    """What the end of a process does to its connections."""
    for peer in list(watch._peers.values()):
        watch._closing = True
        peer.socket.shutdown(socket.SHUT_RDWR)


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_a_lost_rank_is_known_everywhere_at_once(capfd):
    watches, _ = meet(3)
    listeners = {rank: Listener() for rank in (0, 1)}
    for rank, listener in listeners.items():
        watches[rank].subscribe("a", listener.fail)
        watches[rank].activity = f"F3 on rank {rank}"
    begin = time.monotonic()
    vanish(watches[2])
    until(lambda: all(listener.heard for listener in listeners.values()))
    assert time.monotonic() - begin < 2
    for rank, listener in listeners.items():
        (failure,) = listener.heard
        assert failure.rank == 2 and failure.kind == "lost" and failure.ends_horovod
        assert failure.why.startswith("rank 2 was lost: its process has ended")
        assert watches[rank].failure_of("any pipeline") == failure
    printed = capfd.readouterr().err
    for rank in (0, 1):
        assert f"pipeline: rank {rank}: rank 2 was lost" in printed
        assert f"here: F3 on rank {rank}" in printed


def test_rank_zero_can_be_lost_too():
    watches, _ = meet(3)
    vanish(watches[0])
    until(lambda: watches[1].is_failing and watches[2].is_failing)
    assert watches[1].failure_of("a").why.startswith("rank 0 was lost")


def test_who_gives_up_tells_the_same_pipeline_elsewhere():
    watches, _ = meet(3)
    listeners = [Listener(), Listener()]
    watches[0].subscribe("a", listeners[0].fail)
    watches[0].subscribe("b", listeners[1].fail)
    watches[1].give_up(Failure("rank 1 has a bug", 1, "failed", "a"))
    until(lambda: watches[2].is_failing and listeners[0].heard)
    assert watches[2].failure_of("a").why == "rank 1 has a bug"
    assert watches[2].failure_of("b") is None and not listeners[1].heard
    assert not watches[2].failure_of("a").ends_horovod


def test_an_end_that_was_announced_is_no_loss():
    watches, _ = meet(2)
    watches[1].say_bye()
    time.sleep(0.2)
    vanish(watches[1])
    time.sleep(0.3)
    assert not watches[0].is_failing


def test_silence_names_who_is_silent():
    watches, _ = meet(3)
    watches[1].activity, watches[2].activity = "F1", "B2"
    until(lambda: "B2" in watches[1].silence(), 4)
    assert watches[1].silence().startswith("all ranks answer")
    watches[2]._broadcast = lambda *arguments, **options: None  # as if it were stopped
    time.sleep(4)
    assert "rank 2 has not answered for" in watches[1].silence()
    assert "it was in B2" in watches[0].silence()
    assert watches[1].silent_ranks() == watches[0].silent_ranks() == [2]


def test_who_does_not_know_the_secret_is_not_let_in():
    watches, errors = meet(3, [SECRET, b"fedcba9876543210", SECRET], timeout=2.0)
    assert "ranks [1] did not connect" in errors[0]
    assert "rank 1 cannot connect to rank 0" in errors[1]
    assert 1 not in watches


def test_a_rank_does_not_trust_a_stranger_at_rank_zeros_address():
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend():
        connection, _ = listener.accept()
        connection.sendall(os.urandom(16))
        connection.recv(1000)
        connection.sendall(os.urandom(32))

    threading.Thread(target=pretend, daemon=True).start()
    port = listener.getsockname()[1]
    with pytest.raises(CommunicationError, match="does not know the job's secret"):
        Watch(1, 2, SECRET, "127.0.0.1", lambda _: [["127.0.0.1", port], ["", 0]])


def test_strangers_do_not_keep_ranks_out():
    addresses, made, strangers = {}, {}, []
    barrier = threading.Barrier(2)

    def run(rank):
        def exchange(address):
            addresses[rank] = address
            barrier.wait(10)
            if rank == 0:
                for text in (b"GET / HTTP/1.0\r\n\r\n" * 10, b""):
                    stranger = socket.create_connection(address)
                    stranger.sendall(text)
                    strangers.append(stranger)
                    if not text:
                        stranger.close()
            barrier.wait(10)
            return [addresses[0], addresses[1]]

        made[rank] = Watch(rank, 2, SECRET, "127.0.0.1", exchange, 10.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(made) == {0, 1}
    with pytest.raises(OSError):  # nobody listens any more
        socket.create_connection(addresses[0], timeout=1)


def test_collectives_end_in_time_and_say_with_whom():
    watches, _ = meet(2)
    collectives = Collectives("a", 0.3, watches[0])
    assert collectives.run("a sum", [0, 1], lambda: 5) == 5
    with pytest.raises(CommunicationTimeout, match=r"a sum \(with ranks 0, 1\): not done within"):
        collectives.run("a sum", [0, 1], lambda: time.sleep(5))
    slow = Collectives("a", 30.0, watches[0]).start("a sum", [0, 1], lambda: time.sleep(9))
    vanish(watches[1])
    with pytest.raises(CommunicationError, match="a sum .*rank 1 was lost"):
        slow.wait()
    with pytest.raises(ZeroDivisionError):
        Collectives("b", 1.0, None).run("a bug", [], lambda: 1 / 0)
