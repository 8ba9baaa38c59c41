"""Plans a small model by measuring it, then trains by the plan; see `test_from_plan.py`."""

import json
import os
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import pipeline

SAMPLES = 16


def layers():
    return [keras.layers.Dense(8, activation="tanh") for _ in range(3)] + [keras.layers.Dense(1)]


def data(replica, replicas):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(SAMPLES, n)).astype("float32") for n in (8, 1))
    mine = slice(SAMPLES * replica // replicas, SAMPLES * (replica + 1) // replicas)
    return x[mine], y[mine]


def make(path, **options):
    return pipeline.Pipeline.from_plan(
        path,
        layers(),
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.SGD(0.1),
        **options,
    )


def main():
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    folder = Path(sys.argv[1])
    hvd.init()
    found = {}
    for name in ("measured", "pipeline"):
        pipe = make(folder / f"{name}.json")
        replicas = hvd.size() // pipe.schedule.num_stages
        x, y = data(pipe.replica, replicas)
        losses = [pipe.train_step(x, y) for _ in range(3)]
        found[name] = {"stages": pipe.schedule.num_stages, "losses": losses}
    try:
        make(folder / "other.json")
    except ValueError as error:
        found["other"] = str(error)
    try:
        pipeline.Pipeline.from_plan(folder / "measured.json")
    except ValueError as error:
        found["no_model"] = str(error)
    if hvd.rank() == 0:
        Path(os.environ["PIPELINE_TEST_RESULTS"]).write_text(json.dumps(found))
    hvd.allreduce(tf.zeros(1), name="end")


if __name__ == "__main__":
    main()
