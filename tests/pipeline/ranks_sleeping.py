"""A program for four ranks whose stages only sleep, so that as many cores as ranks are not needed.

Run by `test_simulation_of_a_run.py`; finds, for each schedule, the time of the fastest of several
steps and what each rank computed and held in it.
"""

import sys
import time

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from ranks_common import case, main

import pipeline

FORWARD = 0.04  # seconds
BACKWARD = 0.06
SCHEDULES = ("1f1b", "bpipe")
NUM_MICROBATCHES = 8
STEPS = 4


@tf.custom_gradient
def sleep(x):
    time.sleep(FORWARD)

    def gradient(upstream):
        time.sleep(BACKWARD)
        return upstream

    return tf.identity(x), gradient


class Sleeping(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return sleep(x * self.scale)


def measure(schedule):
    pipe = pipeline.Pipeline(
        [Sleeping() for _ in range(hvd.size())],
        loss=lambda y_true, y_pred: tf.reduce_mean((y_true - y_pred) ** 2),
        optimizer=keras.optimizers.SGD(0.01),
        num_stages=hvd.size(),
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        partition="uniform",
        stage_mode="eager",
    )
    batch = tf.ones((NUM_MICROBATCHES, 4))
    fastest = None
    for _ in range(STEPS):
        start = time.monotonic()
        pipe.train_step(batch, tf.zeros_like(batch))
        seconds = time.monotonic() - start
        rows = pipe.report().rows  # on rank 0
        if rows and (fastest is None or seconds < fastest["seconds"]):
            computed = [row.compute_seconds for row in sorted(rows, key=lambda row: row.stage)]
            peaks = [row.peak_stash_count for row in sorted(rows, key=lambda row: row.stage)]
            fastest = {"seconds": seconds, "computed": computed, "peaks": peaks}
    return fastest


@case
def steps_of_stages_that_sleep():
    measured = {schedule: measure(schedule) for schedule in SCHEDULES}
    return {"forward": FORWARD, "microbatches": NUM_MICROBATCHES, "measured": measured}


if __name__ == "__main__":
    main(sys.argv[1:])
