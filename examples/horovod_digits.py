"""Trains one model on several processes with Horovod, in an ordinary eager loop.

    horovodrun -np 2 terra run examples/horovod_digits.py     # co-executed by Terra
    horovodrun -np 2 python examples/horovod_digits.py        # plain eager, the same numbers

There is no line of Terra's in this file. Each rank trains on its own part of every batch, Horovod
averages the gradients, and the ranks stay alike. Collectives run where the program calls them, in
its order, on every rank, whether its iteration is co-executed, traced or fallen back.
"""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from sklearn.datasets import load_digits

EPOCHS = 4
BATCH = 64  # of all ranks together

hvd.init()
keras.utils.set_random_seed(1 + hvd.rank())  # other dropout masks on each rank

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
train, test = slice(0, 1408), slice(1408, None)
batches = (
    tf.data.Dataset.from_tensor_slices((images[train], labels[train]))
    .shuffle(1408, seed=2)
    .batch(BATCH, drop_remainder=True)
    # Each batch falls into as many parts as there are ranks; one of them is ours.
    .map(lambda x, y: (x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]))
)

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(3e-3)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Horovod wants TensorFlow's variables, not the Keras 3 objects around them. Dropout's random state
# stays each rank's own.
weights = [variable.value for variable in model.trainable_variables]
hvd.broadcast_variables(weights + [v.value for v in optimizer.variables], root_rank=0)


def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    # Not hvd.DistributedOptimizer, which does nothing to the gradients of a Keras 3 optimizer.
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(1, EPOCHS + 1):
    for x, y in batches:
        loss = train_step(x, y)
    mean_loss = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}  loss of the last batch {float(mean_loss):.6f}")

predictions = tf.argmax(model(images[test], training=False), axis=1)
accuracy = float(tf.reduce_mean(tf.cast(predictions == labels[test], tf.float32)))
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f}")
