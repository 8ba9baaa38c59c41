"""A job in which one rank gets into trouble in its third step; each rank prints what it raised.

Run by `test_failures.py` with a case as JSON: what the trouble is, on which rank, and the action in
which it begins. The errors then take their natural way: out of the program.
"""

import json
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
from pipeline.communication.hub import Hub  # noqa: E402
from pipeline.runtime import checkpoint  # noqa: E402
from pipeline.runtime.deployment import Deployment  # noqa: E402
from pipeline.runtime.executor import _Run  # noqa: E402
from pipeline.runtime.optimizer import Updater, _Reduction  # noqa: E402

CASE = json.loads(sys.argv[1])
# Where trouble begins → the function that the rank is in then.
PLACES = {
    "forward": (_Run, "forward"),
    "backward": (_Run, "backward"),
    "weight": (_Run, "weight"),
    "send": (_Run, "send"),
    "receive": (_Run, "receive"),
    "evict": (_Run, "evict"),
    "load": (_Run, "load"),
    "accept": (_Run, "accept"),
    "return": (_Run, "give_back"),
    "reduce": (_Reduction, "run"),
    "exchange": (Hub, "exchange"),
    "optimizer": (Updater, "apply"),
    "checkpoint": (checkpoint, "write_shard"),
    "commit": (checkpoint, "commit"),
    "build": (Deployment, "_make_stages"),
}
step = 0


def trouble():
    kind = CASE["trouble"]
    print(f"rank {hvd.rank()} in trouble at {time.monotonic()}", flush=True)
    if kind == "raise":
        raise ArithmeticError("this rank has a bug")
    if kind == "exit":
        sys.exit(3)
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}[kind]
    os.kill(os.getpid(), number)
    time.sleep(0.05)


def arm():
    """Has a call of the function, in the third step, lead to trouble."""
    owner, name = PLACES[CASE["at"]]
    original, calls = getattr(owner, name), 0

    def troubled(*arguments, **options):
        nonlocal calls
        due = step == 2 or CASE["at"] == "build"
        calls += due
        if due and calls == CASE.get("call", 1):
            trouble()
        return original(*arguments, **options)

    setattr(owner, name, troubled)


def layers():
    keras.utils.set_random_seed(1)
    return [keras.layers.Dense(8, "tanh", name=f"dense{n}") for n in range(8)]


def run():
    global step
    mine = hvd.rank() == CASE["who"]
    if mine and CASE.get("at") in PLACES:
        arm()
    options = {
        "num_stages": hvd.size(),
        "num_microbatches": 6,
        "schedule": "bpipe",
        "timeout": 8.0 if CASE.get("at") == "build" else 120.0,
        **CASE.get("options", {}),
    }
    pipe = pipeline.Pipeline(
        layers(),
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.Adam(0.1),
        **options,
    )
    endpoint = getattr(pipe._transport, "_endpoint", None)
    if endpoint is not None:
        print(f"rank {hvd.rank()} listens: {endpoint.unix_name} {endpoint.port}", flush=True)
    x = np.ones((12, 8), "float32")
    for step in range(5):
        given, y = x, x
        if mine and step == 2:
            given = {"features": x[:, :7], "samples": x[:7]}.get(CASE.get("shape"), x)
            y = x[:7] if CASE.get("shape") == "samples" else x
            if CASE.get("shape"):
                print(f"rank {hvd.rank()} in trouble at {time.monotonic()}", flush=True)
            if CASE.get("at") == "between":
                trouble()
        pipe.train_step(given, y)
        # The first steps trace and compile, which may take longer on a busy machine.
        pipe._transport.timeout = pipe._request.collectives.timeout = 8.0
        if CASE.get("save") and step >= 1:
            pipe.save(CASE["save"])
        if CASE.get("also") == "predict":
            pipe.predict(x)
        if CASE.get("also") == "sleep":
            if hvd.rank() == 0 and step == 2:
                print(f"rank {hvd.rank()} in trouble at {time.monotonic()}", flush=True)
            time.sleep(1.0)
    print(f"rank {hvd.rank()} went on", flush=True)


def main():
    hvd.init()
    try:
        run()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"rank {hvd.rank()} raised at {time.monotonic()}: {text}", flush=True)
        raise


if __name__ == "__main__":
    main()
