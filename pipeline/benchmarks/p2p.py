"""Messages between two ranks of one host: each transport beside a plain memory copy.

A message goes there and back; half of that time is what one message takes. Transports and the copy
take turns in one run, so that whatever else the machine does meets all of them. The figures are the
best of the rounds, which is what the transport can do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import numpy as np

from pipeline.benchmarks.launch import is_rank, run_ranks

# Bytes of a message → how many of them make one measurement.
SIZES = {1 << 10: 50, 1 << 20: 20, 16 << 20: 5, 64 << 20: 3}
TRANSPORTS = ("shared-memory", "tcp", "horovod")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="tools/bench_p2p", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns that each one takes")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    return parser.parse_args(arguments)


def measure(rounds: int) -> dict[str, dict[int, float]]:
    """Seconds for one message by transport and size, and for a copy under `memcpy`; on rank 0."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from pipeline.communication.horovod_transport import HorovodTransport
    from pipeline.communication.native_transport import NativeTransport
    from pipeline.communication.rendezvous import exchange_over_horovod, shared_secret

    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    rank, peer = hvd.rank(), 1 - hvd.rank()
    secret = shared_secret()
    transports = {
        "shared-memory": NativeTransport(rank, [peer], secret, exchange_over_horovod),
        "tcp": NativeTransport(rank, [peer], secret, exchange_over_horovod, only_tcp=True),
        "horovod": HorovodTransport(rank, [(0, 1)], "bench"),
    }

    def there_and_back(transport, message: tf.Tensor, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            if rank == 0:
                transport.isend(peer, 1, [message])
                transport.wait(transport.irecv(peer, 2), "the answer")
            else:
                transport.isend(peer, 2, transport.wait(transport.irecv(peer, 1), "a message"))
        return (time.perf_counter() - begin) / count / 2

    found: dict[str, dict[int, list[float]]] = {name: {} for name in ("memcpy", *transports)}
    for size, count in SIZES.items():
        message = tf.zeros([size // 4])
        for round_number in range(rounds + 1):
            if rank == 0:
                found["memcpy"].setdefault(size, []).append(copy_seconds(size, count))
            for name, transport in transports.items():
                seconds = there_and_back(transport, message, count)
                found[name].setdefault(size, [])
                if round_number > 0:  # the first one warms up
                    found[name][size].append(seconds)
    hvd.allreduce(tf.zeros(1), name="end")
    return {name: {size: min(s) for size, s in sizes.items()} for name, sizes in found.items()}


def copy_seconds(size: int, count: int) -> float:
    """Seconds of a memory copy."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def table(found: dict[str, dict[int, float]]) -> str:
    """The figures for people: microseconds for small messages, GB/s for the others."""
    lines = [f"{'':14}" + "".join(f"{name_of(size):>14}" for size in SIZES)]
    for name in ("memcpy", *TRANSPORTS):
        cells = []
        for size in SIZES:
            seconds = found[name][size]
            small = size < 1 << 16
            cells.append(f"{seconds * 1e6:.0f} us" if small else f"{size / seconds / 1e9:.1f} GB/s")
        lines.append(f"{name:14}" + "".join(f"{cell:>14}" for cell in cells))
    own, horovod, copy = found["shared-memory"], found["horovod"], found["memcpy"]
    large, small = 64 << 20, 1 << 10
    lines += [
        "",
        f"64 MB, shared memory against a memory copy: {copy[large] / own[large]:.2f}",
        f"64 MB, shared memory against Horovod: {horovod[large] / own[large]:.1f} times as fast",
        f"1 KB, shared memory against Horovod: {horovod[small] / own[small]:.1f} times as fast",
    ]
    return "\n".join(lines)


def name_of(size: int) -> str:
    """A size for people."""
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def on_rank(options: argparse.Namespace) -> None:
    """What each rank does."""
    found = measure(options.rounds)
    import horovod.tensorflow as hvd

    if hvd.rank() == 0:
        print(json.dumps(found) if options.json else table(found), flush=True)


def main(arguments: list[str]) -> int:
    """Starts two ranks, or is one."""
    options = parse(arguments)
    if is_rank():
        on_rank(options)
        return 0
    run_ranks("pipeline.benchmarks.p2p", 2, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
