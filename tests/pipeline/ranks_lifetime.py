"""Programs for four ranks: several pipelines, checkpoints, threads, memory, a long run.

Run by `test_lifetime.py`; the truth and the models are those of `ranks_runtime.py`.
"""

import gc
import os
import shutil
import sys
import threading
import time
import weakref
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from ranks_runtime import (
    call,
    case,
    compare,
    crossentropy,
    data,
    difference,
    gpt,
    main,
    make,
    mlp,
    one_process,
    sgd,
    tokens,
    train,
)

import pipeline


def folder(name):
    """A path that all ranks know."""
    return hvd.broadcast_object(f"{os.environ['PIPELINE_TEST_RESULTS']}.{name}", 0)


def resident():
    """Bytes of this process in memory, after everything unused was given back."""
    gc.collect()
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- several pipelines ----------------------------------------------------------------------------


@case
def two_pipelines_train_in_turns():
    batches = data(steps=4)
    truths = [one_process(mlp(), sgd(rate), batches) for rate in (0.1, 0.05)]
    pipes = [make(mlp(), sgd(0.1)), make(mlp(), sgd(0.05), num_stages=2, num_microbatches=4)]
    losses = [[], []]
    mine = slice(0, 11) if hvd.rank() < 2 else slice(11, 22)
    for x, y in batches:
        losses[0].append(pipes[0].train_step(x, y))
        losses[1].append(pipes[1].train_step(x[mine], y[mine]))
    first = compare(pipes[0], losses[0], truths[0])
    second = compare(pipes[1], losses[1], truths[1])
    return {**first, **{f"{name}_2": value for name, value in second.items()}}


@case
def evaluation_on_fewer_ranks():
    x, y = data(steps=1)[0]
    layers = mlp()
    pipe, _ = train(layers, sgd(), [(x, y)] * 2)
    path = folder("fewer")
    pipe.save(path)
    everywhere = pipe.evaluate(x, y)
    small = make(mlp(), sgd(), num_stages=2)
    small.restore(path)
    small.build(x)
    found = []
    if small.replica == 1:  # these two ranks alone, and different numbers of times
        found = [small.evaluate(x, y, replica_only=True) for _ in range(3)]
        small.predict(x)
    alone = make(mlp(), sgd(), num_stages=1)
    alone.restore(path)
    alone.build(x)
    if hvd.rank() == 2:
        found.append(alone.evaluate(x, y, replica_only=True))
    rows = pipe._hub.gather(found, "the test")
    after = pipe.train_step(x, y)
    return {
        "counts": [len(row) for row in rows],
        "loss": max(difference(value, everywhere) for row in rows for value in row),
        "trains_on": after > 0,
    }


@case
def another_thread_is_refused():
    x, y = data(steps=1)[0]
    pipe = make(mlp(), sgd())
    first = pipe.train_step(x, y)
    errors, losses = [], []

    def slow(y_true, y_pred):
        return crossentropy(y_true, y_pred)

    def work():
        for _ in range(20):
            losses.append(pipe.train_step(x, y))

    thread = threading.Thread(target=work)
    thread.start()
    while not losses:
        time.sleep(0.001)
    while thread.is_alive():
        try:
            pipe.predict(x)
            break  # between two calls of the other thread; the others must do the same: refuse it
        except pipeline.PipelineError as error:
            errors.append(str(error))
            break
    thread.join()
    truth = one_process(mlp(), sgd(), [(x, y)] * 21)
    return {
        "refused": bool(errors) and "another thread" in errors[0],
        "loss": difference([first, *losses], truth[0]),
    }


@case
def memory_comes_back():
    def cycle():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(4)]
        pipe = make(layers, keras.optimizers.Adam(1e-4), loss=keras.losses.MeanSquaredError())
        x = np.ones((8, 2048), "float32")
        pipe.train_step(x, x)
        watched = weakref.ref(pipe)
        held = resident()
        pipe.close()
        del pipe, layers
        keras.backend.clear_session()
        gc.collect()
        return watched() is None, held, resident()

    cycle()
    results = [cycle() for _ in range(4)]
    weights = 2048 * 2048 * 4
    growth = results[-1][2] - results[0][2]
    return {
        "collected": all(gone for gone, _, _ in results),
        # Weights, gradients and two slots: each step back is at least three of the four.
        "returned": all(held - left > 2 * weights for _, held, left in results),
        "growth": growth / weights,
    }


# --- checkpoints ----------------------------------------------------------------------------------


@case
def checkpoint_of_replicas():
    path = folder("replicas")
    batches = tokens(steps=3)
    mine = slice(0, 8) if hvd.rank() < 2 else slice(8, 16)
    shards = [(x[mine], y[mine]) for x, y in batches]
    options = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b"}
    adam = keras.optimizers.Adam
    whole, losses = train(gpt(), adam(1e-2), shards, **options)
    first, _ = train(gpt(), adam(1e-2), shards[:2], **options)
    first.save(path, position={"file": "a", "offset": 2})
    again = make(gpt(build=False), adam(1e-2), seed=5, **options)
    position = again.restore(path)
    resumed = [again.train_step(*batch) for batch in shards[2:]]
    four = make(gpt(build=False), adam(1e-2))
    four.restore(path)
    outputs = [p.predict(batches[0][0], gather=True) for p in (first, four)]
    end = whole.gather_weights(), again.gather_weights()
    if hvd.rank() != 0:
        return {}
    return {
        "position": position == again.position == {"file": "a", "offset": 2},
        "steps": again.steps,
        "resumed_bit_equal": resumed == losses[2:]
        and all((end[0][k] == end[1][k]).all() for k in end[0]),
        "outputs": difference(outputs[1], outputs[0]),
    }


@case
def checkpoint_between_accumulated_calls():
    path = folder("accumulated")
    batches = data(steps=6)
    whole, losses = train(mlp(), sgd(), batches, accumulate=3)
    first, _ = train(mlp(), sgd(), batches[:4], accumulate=3)
    first.save(path)
    again = make(mlp(), sgd(), accumulate=3)
    again.restore(path)
    resumed = [again.train_step(*batch) for batch in batches[4:]]
    other = make(mlp(), sgd(), accumulate=3, num_stages=2)
    other.restore(path)
    mine = slice(0, 11) if hvd.rank() < 2 else slice(11, 22)
    for x, y in batches[4:]:
        other.train_step(x[mine], y[mine])
    end = [p.gather_weights() for p in (whole, again, other)]
    if hvd.rank() != 0:
        return {}
    return {
        "bit_equal": resumed == losses[4:] and all((end[0][k] == end[1][k]).all() for k in end[0]),
        "other_p": max(difference(end[2][k], end[0][k]) for k in end[0]),
    }


@case
def bad_checkpoints_are_refused():
    """What is wrong is said on all ranks, nothing has changed, and the pipeline goes on."""
    path = folder("bad")
    x, y = data(steps=1)[0]
    pipe, _ = train(mlp(), sgd(), [(x, y)])
    pipe.save(path)
    before = pipe.predict(x, gather=True)
    messages = []

    def refuse(bad, prepare=lambda p: None, user=pipe):
        target = f"{path}.{len(messages)}"
        if hvd.rank() == 0:
            if bad == "copy":
                shutil.copytree(path, target)
            prepare(Path(target))
        hvd.allreduce(tf.zeros(1))
        try:
            user.restore(target)
            messages.append("accepted")
        except pipeline.errors.CheckpointError as error:
            messages.append(str(error))

    def largest(folder):
        return max(folder.glob("*.npz"), key=lambda p: p.stat().st_size)

    def flip(folder):
        file = largest(folder)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def cut(folder):
        file = largest(folder)
        file.write_bytes(file.read_bytes()[:-40])

    def edit(folder):
        manifest = folder / "checkpoint.json"
        manifest.write_text(manifest.read_text().replace('"steps": 1', '"steps": 2'))

    def pickled(folder):
        folder.mkdir()
        np.savez(folder / "evil.npz", np.array([{}], dtype=object))

    refuse("missing")
    refuse("file", lambda p: p.write_text("no checkpoint"))
    refuse("foreign", pickled)
    refuse("copy", flip)
    refuse("copy", cut)
    refuse("copy", edit)
    refuse("copy", lambda p: largest(p).unlink())
    refuse("copy", lambda p: (p / "checkpoint.json").write_text("{"))
    for user in (
        make([*mlp(depth=7), keras.layers.Identity(), keras.layers.Identity()], sgd()),
        make(mlp(), keras.optimizers.Adam()),
    ):
        user.build(x)
        refuse("copy", user=user)
    after = pipe.predict(x, gather=True)
    alike = pipe._hub.gather(messages, "the test")
    loss = pipe.train_step(x, y)
    return {
        "messages": messages,
        "alike": all(row == alike[0] for row in alike),
        "unchanged": bool((np.asarray(before) == np.asarray(after)).all()),
        "goes_on": loss > 0,
    }


@case
def keras_files():
    x = tokens(steps=1)[0][0]
    layers = gpt()
    pipe, _ = train(layers, sgd(), tokens(steps=2))
    path = folder("exported")
    refused = ""
    try:
        pipe.export(f"{path}.keras")  # its head is a function
    except ValueError as error:
        refused = str(error)
    pipe.export(f"{path}.weights.h5")
    outputs = pipe.predict(x, gather=True)
    plain, _ = train(mlp(), sgd(), data(steps=1))
    plain.export(f"{path}.2.keras")
    features = data(steps=1)[0][0]
    plain_outputs = plain.predict(features, gather=True)
    sequential = keras.Sequential(mlp())
    third, _ = train(sequential, sgd(), data(steps=1))
    third.export(f"{path}.3.weights.h5")
    third_outputs = third.predict(features, gather=True)
    if hvd.rank() != 0:
        return {}
    fresh = gpt()
    for layer in fresh[:-1]:
        layer.set_weights([np.zeros_like(w) for w in layer.get_weights()])
    tokens_in = keras.Input((5,), dtype="int32")
    flow = tokens_in
    for layer in fresh:
        flow = layer(flow) if isinstance(layer, keras.Layer) else keras.layers.Lambda(layer)(flow)
    model = keras.Model(tokens_in, flow)
    model.load_weights(f"{path}.weights.h5")
    loaded = keras.models.load_model(f"{path}.2.keras")
    again = keras.Sequential(mlp())
    again.build((None, 8))
    again.load_weights(f"{path}.3.weights.h5")
    return {
        "refused": "not a layer of Keras 3" in refused,
        "weights": difference(call(fresh, x, False), outputs),
        "keras": difference(loaded(features), plain_outputs),
        "sequential": difference(again(features), third_outputs),
    }


# --- a long run -----------------------------------------------------------------------------------


@case
def soak():
    """Two thousand steps with pauses and changing shapes; lengths and sizes from one seed."""
    steps = int(os.environ.get("PIPELINE_TEST_STEPS", "2000"))
    plan = np.random.default_rng(4)
    pauses = np.random.default_rng(hvd.rank())
    layers, reference = gpt(blocks=2, rate=0.0), gpt(blocks=2, rate=0.0)
    pipe = make(layers, sgd(0.02), num_microbatches=4, schedule="bpipe")
    truth = sgd(0.02)
    worst, memory, losses = 0.0, [], []
    for step in range(steps):
        samples, length = int(plan.integers(4, 10)), int(plan.integers(3, 8))
        x = plan.integers(0, 11, (samples, length))
        y = np.roll(x, 1, axis=1)
        if pauses.random() < 0.02:
            time.sleep(pauses.random() * 0.05)
        loss = pipe.train_step(x, y)
        if hvd.rank() == 0:
            losses.append((loss, one_process(reference, truth, [(x, y)])[0][0]))
        if step >= steps // 5 and step % (steps // 20) == 0:
            memory.append(resident())
    rows = pipe._hub.gather(memory, "the test")
    if hvd.rank() != 0:
        return {}
    found, true = (np.array(column) for column in zip(*losses, strict=True))
    worst = float(np.abs(found - true).max() / true.max())
    return {
        "drift": worst,
        "learned": bool(found[-100:].mean() < found[:100].mean()),
        "growth": max(row[-1] - min(row[:2]) for row in rows) / (1 << 20),
        "traces": pipe.num_traces,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
