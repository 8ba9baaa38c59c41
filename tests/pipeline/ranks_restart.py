"""A job that goes on from its checkpoint: two stages and one replica or two, eight steps.

Run by `test_restart.py` with a case as JSON: on the first launch one rank is killed at some place
of some step. Rank 0 writes the loss of every step that it has done, and at the end what the job
would have found without any trouble.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import pipeline  # noqa: E402
from pipeline.communication.hub import Hub  # noqa: E402
from pipeline.runtime.executor import _Run  # noqa: E402
from pipeline.runtime.optimizer import Updater, _Reduction  # noqa: E402
from pipeline.runtime.pipeline import Pipeline  # noqa: E402

CASE = json.loads(sys.argv[1])
STEPS = 8
PLACES = {
    "forward": (_Run, "forward"),
    "reduce": (_Reduction, "run"),
    "exchange": (Hub, "exchange"),
    "scatter": (Hub, "_scatter"),
    "optimizer": (Updater, "apply"),
    "ended": (Pipeline, "_apply"),
}


def arm(pipe):
    owner, name = PLACES[CASE["at"]]
    original, calls = getattr(owner, name), 0

    def lethal(*arguments, **options):
        nonlocal calls
        due = pipe.steps == CASE["step"] and pipe._progress.calls >= CASE.get("calls", 0)
        if due:
            calls += 1
            if calls == CASE.get("call", 1):
                os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(owner, name, lethal)


def layers():
    keras.utils.set_random_seed(1)
    return [
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(8, "tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(4),
    ]


def make(**options):
    return pipeline.Pipeline(
        layers(),
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.Adam(1e-2),
        num_stages=2,
        num_microbatches=3,
        timeout=20.0,
        **options,
    )


def train(pipe):
    """Trains to the end; yields each step and its loss."""
    for step in range(pipe.steps, STEPS):
        random = np.random.default_rng([step, pipe.replica])
        x = random.normal(size=(7, 8)).astype("float32")
        yield step, pipe.train_step(x, x[:, :4])


def weights_of(pipe):
    weights = pipe.gather_weights()
    return weights and {name: value.tolist() for name, value in weights.items()}


def main():
    hvd.init()
    attempt = os.environ.get("PIPELINE_ATTEMPT", "0")
    pipe = make(**CASE["options"])
    if hvd.rank() == CASE["who"] and attempt == "0":
        arm(pipe)
    began = pipe.steps
    for step, loss in train(pipe):
        if hvd.rank() == 0:
            with open(f"{sys.argv[2]}.{attempt}", "a") as file:
                file.write(json.dumps([step, loss]) + "\n")
    # The truth: the same job without any trouble.
    whole = make()
    losses = [loss for _, loss in train(whole)]
    results = {
        "began": began,
        "weights": weights_of(pipe),
        "whole_losses": losses,
        "whole_weights": weights_of(whole),
    }
    if hvd.rank() == 0:
        Path(f"{sys.argv[2]}.json").write_text(json.dumps(results))
    hvd.allreduce(tf.zeros(1), name="end")


if __name__ == "__main__":
    main()
