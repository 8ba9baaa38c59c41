"""Four ranks, one of which gets into trouble in the third step; each prints what it raised.

Run by `test_failures.py` with the trouble and the rank.
"""

import os
import signal
import sys
import time

import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402

import pipeline  # noqa: E402

TROUBLE, WHO = sys.argv[1], int(sys.argv[2])
step = 0
calls = 0


def troubled(x):
    """The layer of the rank in question; runs as plain Python."""
    global calls
    calls += 1
    if step == 2 and hvd.rank() == WHO and calls % 3 == 0:
        if TROUBLE == "raise":
            raise ArithmeticError("this rank has a bug")
        if TROUBLE == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if TROUBLE == "stop":
            print(f"rank {WHO} stops: {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if TROUBLE == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
    return x


def main():
    global step
    hvd.init()
    layers = []
    for _ in range(hvd.size()):
        layers += [keras.layers.Dense(8), troubled]
    pipe = pipeline.Pipeline(
        layers,
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.SGD(0.1),
        num_stages=hvd.size(),
        num_microbatches=6,
        stage_mode="eager",
        timeout=8.0,
    )
    x = np.ones((12, 8), "float32")
    for step in range(3):
        mine = x[:, :7] if step == 2 and TROUBLE == "shape" and hvd.rank() == WHO else x
        if step == 2:
            print(f"rank {hvd.rank()} begins at {time.monotonic()}", flush=True)
        try:
            pipe.train_step(mine, x)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(f"rank {hvd.rank()} raised at {time.monotonic()}: {text}", flush=True)
            sys.stdout.flush()
            time.sleep(1.0)  # so that the launcher's SIGTERM finds the others done with printing
            os._exit(1)
    print(f"rank {hvd.rank()} went on", flush=True)


if __name__ == "__main__":
    main()
