"""One training step with large stashes and small weights; what each rank's memory shows of them.

Run by `test_memory.py` with the names of schedules; for each, all ranks' ledgers, the growth of
their resident memory during a step, and processor time, are measured by turns.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import pipeline  # noqa: E402

ROUNDS = 4


def status(field):
    """A field of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def make(schedule, width, microbatches, work):
    keras.utils.set_random_seed(0)
    stages = hvd.size()
    layers = []
    for _ in range(stages):
        dense = [keras.layers.Dense(width, activation="tanh") for _ in range(work)]
        layers.append(keras.Sequential(dense))
    return pipeline.Pipeline(
        layers,
        loss=lambda y, p: tf.reduce_mean(tf.square(p - y)),
        optimizer=keras.optimizers.SGD(0.01),
        num_stages=stages,
        num_microbatches=microbatches,
        schedule=schedule,
        timeout=200.0,
    )


def main(schedules, width, rows, microbatches, work):
    hvd.init()
    random = np.random.default_rng(0)
    x = random.normal(size=(microbatches, rows, width)).astype("float32")
    pipes = {name: make(name, width, microbatches, work) for name in schedules}
    found = {}
    for name, pipe in pipes.items():
        losses = [pipe.train_step(x, x)]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = status("VmRSS")
        losses.append(pipe.train_step(x, x))
        growth = status("VmHWM") - before
        mine = pipe.report()
        found[name] = {
            "losses": losses,
            "ranks": pipe._hub.gather(
                [mine.peak_stash_count, mine.peak_stash_bytes, growth], "the test"
            ),
            "transport": mine.transport,
            "seconds": [],
            "cpu": [],
        }
    for _ in range(ROUNDS):
        for name, pipe in pipes.items():
            begin, used = time.monotonic(), time.process_time()
            pipe.train_step(x, x)
            used = time.process_time() - used
            total = sum(pipe._hub.gather(used, "the test"))
            found[name]["seconds"].append(time.monotonic() - begin)
            found[name]["cpu"].append(total)
    if hvd.rank() == 0:
        Path(os.environ["PIPELINE_TEST_RESULTS"]).write_text(json.dumps(found))
    hvd.allreduce(tf.zeros(1), name="end")


if __name__ == "__main__":
    main(sys.argv[1].split(","), *map(int, sys.argv[2:]))
