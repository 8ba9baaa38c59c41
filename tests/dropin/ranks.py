"""A Horovod program whose ranks take different branches; `test_horovod` runs it on two of them.

What it prints must not depend on how its iterations run. Options:

    plain        the loop of this file, for `terra run`
    function     the body as a `terra_tf.function`
    optimizer    asks for what Horovod does silently wrong

The last line that a rank prints tells how its iterations ran.
"""

import random
import sys
import tempfile

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

TURNS = 40

hvd.init()
rank = hvd.rank()
keras.utils.set_random_seed(5)
dice = random.Random(100 + rank)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)])
weights = [variable.value for variable in model.trainable_variables]
weights[0].assign_add(tf.ones_like(weights[0]) * float(rank))
hvd.broadcast_variables(weights, root_rank=0)
noise = tf.Variable(0.0)
data = np.random.RandomState(rank).rand(TURNS, 8, 6).astype("float32")


def step(x, turn):
    with tf.GradientTape() as tape:
        hidden = model(x)
        if dice.random() < 0.3:  # other turns on each rank
            hidden = tf.nn.softmax(hidden * 2.0) + tf.reduce_mean(x)
        loss = tf.reduce_mean((hidden - 0.5) ** 2)
        if turn == 25 and rank == 1:  # something quite new on one rank only
            for k in range(3):
                loss += tf.reduce_sum(tf.sin(hidden * float(k)))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
    for variable, gradient in zip(weights, gradients, strict=True):
        variable.assign_sub(0.05 * gradient)
    total = hvd.allreduce(loss, op=hvd.Sum, name="total")
    if rank == 0 and turn % 7 == 3:
        noise.assign_add(float(total))  # one rank reads what the other one does not
    first, second = hvd.grouped_allreduce([loss * 2.0, total + 1.0], op=hvd.Average)
    everything = hvd.allgather(tf.reshape(tf.stack([first, second]), [1, 2]))
    if rank == 1 and turn % 5 == 4:
        try:
            tf.gather(everything, 99).numpy()
        except tf.errors.InvalidArgumentError:
            everything = everything + 0.0
    return total, hvd.broadcast(everything[rank] if turn % 2 else everything[0], root_rank=turn % 2)


def show(turn, total, shared):
    if turn % 4 == 0 or turn > 20:
        print(f"rank {rank} turn {turn} {float(total)!r} {shared.numpy().tolist()}", flush=True)


kind = sys.argv[1]
if kind == "optimizer":
    import horovod.keras
    import horovod.tensorflow.keras as hvd_keras

    model.compile(keras.optimizers.SGD(0.1), "mse")
    saved = f"{tempfile.mkdtemp()}/model.keras"
    model.save(saved)
    for make, argument in (
        (hvd.DistributedOptimizer, model.optimizer),
        (hvd_keras.DistributedOptimizer, model.optimizer),
        (horovod.keras.PartialDistributedOptimizer, model.optimizer),
        (hvd_keras.load_model, saved),
    ):
        try:
            make(argument)
            print(f"rank {rank} got an optimizer", flush=True)
        except TypeError as error:
            print(f"rank {rank} {type(error).__name__} {str(error)[:70]}", flush=True)
elif kind == "function":
    import terra_tf as terra

    own_step = terra.function(step)
    for turn in range(TURNS):
        show(turn, *own_step(tf.constant(data[turn]), turn))
else:
    for turn in range(TURNS):
        show(turn, *step(tf.constant(data[turn]), turn))
for number, variable in enumerate(weights):
    print(f"rank {rank} weight {number} {variable.numpy().astype(float).sum()!r}", flush=True)

import terra_tf  # noqa: E402  (after the program, which does not need it)

terra_tf.sync()
stats = terra_tf.stats()
hvd.allreduce(tf.constant(0.0), name="end")  # no rank ends before the others
print(f"ran {rank} {stats.coexecuted} {stats.fallen_back}", flush=True)
