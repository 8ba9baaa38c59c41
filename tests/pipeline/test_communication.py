"""The transports: what arrives and in which order, what waits, and what a lost peer leads to."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from launch import environment

from pipeline import native
from pipeline.communication import native_transport
from pipeline.communication.horovod_transport import pack, unpack
from pipeline.communication.hub import Hub
from pipeline.communication.native_transport import NativeTransport
from pipeline.communication.rendezvous import local_interface
from pipeline.communication.transport import encode
from pipeline.errors import CommunicationError, CommunicationTimeout
from pipeline.schedules import Kind, bpipe

pytestmark = pytest.mark.skipif(native.core is None, reason=native.problem or "")
SECRET = b"0123456789abcdef"
KINDS = ("shared-memory", "tcp")


class Meeting:
    """An exchange of addresses between threads of this process."""

    def __init__(self, size):
        self.addresses = {}
        self.barrier = threading.Barrier(size)

    def exchange_of(self, rank):
        def exchange(address):
            self.addresses[rank] = address
            self.barrier.wait(20)
            return [self.addresses[other] for other in range(len(self.addresses))]

        return exchange


def connect(size=2, kind="shared-memory", timeout=10.0, secrets=None):
    """Transports of all ranks, in this one process, each at its own loopback address."""
    meeting = Meeting(size)
    made, errors = {}, {}

    def run(rank):
        try:
            made[rank] = NativeTransport(
                rank,
                range(size),
                secrets[rank] if secrets else SECRET,
                meeting.exchange_of(rank),
                timeout,
                only_tcp=kind == "tcp",
                interface=f"127.0.0.{rank + 1}",
            )
        except CommunicationError as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[min(errors)]
    return [made[rank] for rank in range(size)]


@pytest.fixture(params=KINDS)
def pair(request):
    transports = connect(kind=request.param)
    assert transports[0].kind_of(1) == transports[1].kind_of(0) == request.param
    yield transports
    for transport in transports:
        transport.close()


def test_every_type_and_shape_arrives(pair):
    left, right = pair
    sent = [
        tf.constant(3.5, tf.float64),
        tf.zeros([0, 4], tf.float16),
        tf.cast(tf.range(24), tf.bfloat16),
        tf.constant([[True], [False]]),
        tf.constant(np.arange(7, dtype=np.uint8)),
        tf.constant([1 + 2j], tf.complex64),
        tf.random.stateless_normal([700, 1000], [1, 2]),  # larger than the ring's pieces
    ]
    left.isend(1, 5, sent)
    got = right.wait(right.irecv(0, 5), "everything")
    assert [t.dtype for t in got] == [t.dtype for t in sent]
    for a, b in zip(got, sent, strict=True):
        assert a.shape == b.shape
        np.testing.assert_array_equal(tf.cast(a, tf.complex128), tf.cast(b, tf.complex128))
    left.isend(1, 6, [])
    assert right.wait(right.irecv(0, 6), "nothing") == []


def test_messages_of_a_tag_keep_their_order_and_tags_do_not_mix(pair):
    left, right = pair
    for number in range(6):
        left.isend(1, number % 2, [tf.constant(number)])
    odd = [right.irecv(0, 1) for _ in range(3)]
    even = [right.irecv(0, 0) for _ in range(3)]
    assert [int(right.wait(t, "odd")[0]) for t in odd] == [1, 3, 5]
    assert [int(right.wait(t, "even")[0]) for t in even] == [0, 2, 4]


def test_both_directions_at_once_do_not_block(pair):
    left, right = pair
    large = tf.ones([3 << 20])
    sends = [left.isend(1, 1, [large]), right.isend(0, 1, [large])]
    receives = [left.irecv(1, 1), right.irecv(0, 1)]
    for transport, transfer in zip(pair, receives, strict=True):
        assert transport.wait(transfer, "large")[0].shape == large.shape
    for transport, transfer in zip(pair, sends, strict=True):
        transport.wait(transfer, "sent")


def test_unbuffered_messages_wait_for_their_receive(pair):
    left, right = pair
    send = left.isend(1, 1, [tf.ones([10])], buffered=False)
    time.sleep(0.2)
    assert not send.done and right.counters().messages_received == 0
    right.wait(right.irecv(0, 1), "asked for")
    left.wait(send, "sent")


def test_window_bounds_what_a_rank_holds_unasked(pair):
    left, right = pair
    piece = tf.ones([native_transport.WINDOW_BYTES // 4 // 2])
    sends = [left.isend(1, tag, [piece]) for tag in range(5)]
    time.sleep(1.0)
    assert right.counters().messages_received == 2, "two pieces fill the window"
    assert [send.done for send in sends] == [True, True, False, False, False]
    # Whatever was asked for travels, the window being full or not; then there is room again.
    for tag in (4, 0, 3, 1, 2):
        assert right.wait(right.irecv(0, tag), f"piece {tag}")[0].shape == piece.shape
    for send in sends:
        left.wait(send, "sent")


def test_a_window_that_was_used_up_comes_back(pair):
    left, right = pair
    piece = tf.ones([native_transport.WINDOW_BYTES // 4 // 2])
    for _ in range(4):
        sends = [left.isend(1, 7, [piece]) for _ in range(2)]
        for send in sends:
            left.wait(send, "buffered")  # without a receive
        for _ in sends:
            right.wait(right.irecv(0, 7), "piece")


def test_transfers_can_follow_each_other_and_be_passed_on():
    left, middle, right = connect(3)
    first = left.isend(1, 1, [tf.constant(1)], buffered=False)
    second = left.isend(1, 2, [tf.constant(2)], after=first)
    later = middle.irecv(0, 2)
    time.sleep(0.2)
    assert not later.done, "the second waits for the first"
    passed = middle.forward(2, 3, middle.irecv(0, 1))
    assert int(right.wait(right.irecv(1, 3), "passed on")[0]) == 1
    assert int(middle.wait(later, "second")[0]) == 2
    middle.wait(passed, "passed on")
    left.wait(second, "sent")
    assert passed.bytes == 4 and passed.finished >= passed.started > 0


def test_waits_end_in_time_and_say_for_what(pair):
    left, _ = pair
    begin = time.monotonic()
    with pytest.raises(CommunicationTimeout, match="RECV_F3<1 before F3.*0.3 s"):
        left.wait(left.irecv(1, 9), "RECV_F3<1 before F3", timeout=0.3)
    assert time.monotonic() - begin < 3


def test_who_gives_up_tells_the_others_why(pair):
    left, right = pair
    waiting = left.irecv(1, 1)
    sending = left.isend(1, 2, [tf.ones([4])], buffered=False)
    right.abort("rank 1 failed in F3: ValueError: no")
    for transfer in (waiting, sending):
        with pytest.raises(CommunicationError, match="B2 .*rank 1 failed in F3: ValueError: no"):
            left.wait(transfer, "B2 ")
    with pytest.raises(CommunicationError, match="failed in F3"):
        left.wait(left.irecv(1, 1), "B2 ")


def test_what_a_closed_peer_has_sent_still_arrives(pair):
    left, right = pair
    right.isend(0, 1, [tf.ones([1 << 20])])
    time.sleep(0.3)
    closing = threading.Thread(target=right.close)
    closing.start()
    assert left.wait(left.irecv(1, 1), "the last message")[0].shape == [1 << 20]
    closing.join()
    with pytest.raises(CommunicationError, match="ended or closed"):
        left.wait(left.irecv(1, 2), "another")


def test_strings_are_refused(pair):
    left, _ = pair
    with pytest.raises(CommunicationError, match="string"):
        left.wait(left.isend(1, 1, [tf.constant("text")]), "text")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_without_the_secret_is_refused(kind):
    with pytest.raises(CommunicationError):
        connect(kind=kind, timeout=1.5, secrets=[SECRET, b"fedcba9876543210"])


def test_a_peer_that_is_busy_is_waited_for_as_long_as_asked():
    name = f"pipeline-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()

        def answer():
            for seconds in (1.0, 2.5):
                connection, _ = listener.accept()
                time.sleep(seconds)
                with contextlib.suppress(OSError):
                    connection.sendall(b"s")  # a socket will do, no rings

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = native.core.Endpoint(1, SECRET, "127.0.0.1", 1 << 20)
        with pytest.raises(RuntimeError, match="rank 0 did not accept"):
            endpoint.connect_local(0, name, 0.3)
        endpoint.connect_local(0, name, 20.0)
        assert endpoint.kind_of(0) == "unix"
        thread.join()
        endpoint.close(0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_hold_up_nobody(kind):
    """Who connects and says nothing, or nonsense, is sent away; peers connect meanwhile."""
    meeting, made, strangers = Meeting(2), {}, []

    def run(rank):
        def exchange(address):
            found = meeting.exchange_of(rank)(address)
            if rank == 0:
                for _ in range(20):
                    stranger = socket.socket(socket.AF_UNIX)
                    stranger.connect("\0" + found[0].unix_name)
                    strangers.append(stranger)
                    strangers.append(socket.create_connection((found[0].interface, found[0].port)))
                    strangers[-1].sendall(b"?" * 1000)
            meeting.barrier.wait(20)
            return found

        made[rank] = NativeTransport(
            rank, [0, 1], SECRET, exchange, 10.0, kind == "tcp", f"127.0.0.{rank + 1}"
        )

    begin = time.monotonic()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - begin < 1.5
    made[0].isend(1, 1, [tf.constant(7)])
    assert int(made[1].wait(made[1].irecv(0, 1), "a message")[0]) == 7
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # sent away
    for transport in made.values():
        transport.close()


def test_sockets_listen_at_the_named_interface_only():
    transports = connect(2)
    listening = Path("/proc/net/tcp").read_text()
    for rank, transport in enumerate(transports):
        endpoint = transport._endpoint
        assert endpoint.interface == f"127.0.0.{rank + 1}"
        at = f"{rank + 1:02X}00007F:{endpoint.port:04X}"
        assert f" {at} 00000000:0000 0A" in listening
        assert f" 00000000:{endpoint.port:04X} " not in listening
        transport.close()


def test_the_interface_is_the_loopback_or_a_named_one(monkeypatch):
    for name in ("PIPELINE_INTERFACE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_IFACE"):
        monkeypatch.delenv(name, raising=False)
    assert local_interface() == "127.0.0.1"
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.1.2.3")
    monkeypatch.setenv("HOROVOD_CROSS_SIZE", "1")
    assert local_interface() == "127.0.0.1"
    monkeypatch.setenv("HOROVOD_CROSS_SIZE", "2")
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    assert local_interface() == "127.0.0.1"
    monkeypatch.setenv("PIPELINE_INTERFACE", "127.0.0.9")
    assert local_interface() == "127.0.0.9"
    monkeypatch.setenv("PIPELINE_INTERFACE", "nosuch0")
    with pytest.raises(ValueError, match="no network interface 'nosuch0'"):
        local_interface()


def test_shared_memory_is_for_this_user_alone_and_named_at_random():
    transports = connect(2)
    found = {}
    for link in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:pipeline-" in link:
            begin, name = link.split()[0], link.split("memfd:")[1].split()[0]
            found[name] = os.stat(f"/proc/self/map_files/{begin}").st_mode & 0o777
    for transport in transports:
        transport.close()
    assert len(found) >= 1
    for name, mode in found.items():
        assert re.fullmatch("pipeline-[0-9a-f]{16}", name) and mode == 0o600


def test_a_transport_that_is_told_of_a_failure_ends_what_is_under_way(pair):
    left, right = pair
    waiting = left.irecv(1, 1)
    left.fail("rank 2 was lost")
    for transfer in (waiting, left.irecv(1, 2), left.isend(1, 3, [tf.ones([1])])):
        with pytest.raises(CommunicationError, match="F2: rank 2 was lost"):
            left.wait(transfer, "F2")


def test_hub_brings_everything_everywhere():
    transports = connect(3)
    hubs = [Hub(t, rank, 3) for rank, t in enumerate(transports)]
    found = {}

    def run(rank):
        found[rank] = (
            hubs[rank].exchange([rank, 2.0], "numbers").tolist(),
            hubs[rank].gather({"rank": rank}, "data"),
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = ([[0, 2], [1, 2], [2, 2]], [{"rank": rank} for rank in range(3)])
    assert found == dict.fromkeys(range(3), expected)


def test_nothing_stays_behind():
    def sockets():
        return Path("/proc/net/unix").read_text().count("@pipeline-")

    def threads():
        return len(os.listdir("/proc/self/task"))

    shared = set(os.listdir("/dev/shm"))
    transports = connect(2)
    before = threads()
    assert sockets() >= 2 and set(os.listdir("/dev/shm")) == shared
    count = sockets()
    for transport in transports:
        transport.close()
    assert sockets() <= count - 2
    assert threads() <= before - 6  # of each endpoint: one that watches, two of the link


PEER = """
import json, os, sys, time
import tensorflow as tf
from pipeline.communication.native_transport import NativeTransport
from pipeline.communication.rendezvous import Address

rank, folder = int(sys.argv[1]), sys.argv[2]

def exchange(address):
    with open(f"{folder}/{rank}.tmp", "w") as file:
        json.dump(address, file)
    os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}")
    found = []
    for other in range(2):
        while not os.path.exists(f"{folder}/{other}"):
            time.sleep(0.01)
        with open(f"{folder}/{other}") as file:
            found.append(Address(*json.load(file)))
    return found

options = {"interface": sys.argv[3]} if len(sys.argv) > 3 else {}
transport = NativeTransport(rank, [0, 1], b"0123456789abcdef", exchange, 30, **options)
transport.isend(1 - rank, 1, [tf.constant([rank])])
got = transport.wait(transport.irecv(1 - rank, 1), "hello")
print(transport.kind_of(1 - rank), int(got[0][0]), flush=True)
if "wait" in os.environ.get("PEER", ""):
    try:
        transport.wait(transport.irecv(1 - rank, 2), "what never comes")
    except RuntimeError as error:
        print(time.monotonic(), error)
"""


def peer(folder, rank, *arguments, prefix=(), **more):
    program = Path(folder) / "peer.py"
    program.write_text(textwrap.dedent(PEER))
    return subprocess.Popen(
        [*prefix, sys.executable, str(program), str(rank), str(folder), *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_death_of_a_peer_is_noticed_at_once(tmp_path):
    processes = [peer(tmp_path, rank, PEER="wait") for rank in (0, 1)]
    assert [process.stdout.readline() for process in processes] == [
        "shared-memory 1\n",
        "shared-memory 0\n",
    ]
    processes[1].send_signal(signal.SIGKILL)
    begin = time.monotonic()
    printed, _ = processes[0].communicate(timeout=20)
    noticed, message = printed.split(" ", 1)
    assert float(noticed) - begin < 5
    assert message.startswith("what never comes: the connection to rank 1 was lost")
    processes[1].communicate()


def namespaces_work():
    return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.skipif(not namespaces_work(), reason="needs leave to make network namespaces")
def test_tcp_between_network_namespaces(tmp_path):
    names = [f"pipeline{os.getpid()}{side}" for side in "ab"]
    links = [f"pl{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(
            ["ip", "link", "add", links[0], "type", "veth", "peer", links[1]], check=True
        )
        for number, (name, link) in enumerate(zip(names, links, strict=True)):
            subprocess.run(["ip", "link", "set", link, "netns", name], check=True)
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", link])
            subprocess.run([*inside, "link", "set", link, "up"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no virtual network interfaces here")
    try:
        processes = [
            peer(tmp_path, rank, f"10.77.0.{rank + 1}", prefix=["ip", "netns", "exec", names[rank]])
            for rank in (0, 1)
        ]
        printed = [process.communicate(timeout=60)[0] for process in processes]
        assert printed == ["tcp 1\n", "tcp 0\n"]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name])


def test_packed_messages_unpack_as_they_were():
    sent = [tf.constant([[True, False]]), tf.constant(2.5, tf.bfloat16), tf.zeros([0, 3])]
    got, size = unpack(pack(sent))
    assert size == 2 + 2
    for a, b in zip(got, sent, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(tf.cast(a, tf.float64), tf.cast(b, tf.float64))


def test_tags_of_a_schedule_are_distinct():
    schedule = bpipe(8, 32)
    sends = [
        schedule.tag(rank, action)
        for rank, line in enumerate(schedule.actions)
        for action in line
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.EVICT, Kind.RETURN)
    ]
    assert len({encode(*tag) for tag in sends}) == len(sends)
    assert json.dumps(encode("F", 2**20 - 1, 2**16 - 1))  # and fit into 64 bits
    assert encode("F", 2**20 - 1, 2**16 - 1) < 2**63
