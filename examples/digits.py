"""Trains a small Keras model to read handwritten digits, in an ordinary eager loop.

    python examples/digits.py                 # co-executed by Terra
    TERRA_DISABLE=1 python examples/digits.py # plain eager TensorFlow, same numbers
    terra bench examples/digits.py            # both, compared

The only line that Terra needs is `@terra.function`.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import terra_tf as terra

EPOCHS = 30
BATCH = 64
PATIENCE = 5  # stop after this many epochs without a better validation loss

# One seed for Python, NumPy and TensorFlow: every run prints the same numbers.
keras.utils.set_random_seed(1)

# 1,797 images of 8 x 8 pixels, split into training, validation and test images.
images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=360, random_state=0)
x_train, x_val, y_train, y_val = train_test_split(x_train, y_train, test_size=285, random_state=0)

# Each pass over the batches shuffles anew; every batch has the same size.
batches = tf.data.Dataset.from_tensor_slices((x_train, y_train))
batches = batches.shuffle(len(x_train), seed=2).batch(BATCH, drop_remainder=True)

model = keras.Sequential([keras.Input((64,))])
for _ in range(3):
    model.add(keras.layers.Dense(64, activation="relu"))
    model.add(keras.layers.Dropout(0.2))
model.add(keras.layers.Dense(10))

optimizer = keras.optimizers.Adam(3e-3)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@terra.function
def train_step(x, y):
    """One step of training. Runs as it would without the decorator, only faster."""
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


step = 0
best_loss = float("inf")
bad_epochs = 0  # early stopping is plain Python: a counter and an `if`

for epoch in range(1, EPOCHS + 1):
    for x, y in batches:
        loss = train_step(x, y)
        step += 1
        if step % 20 == 0:
            print(f"step {step:4d}  loss {float(loss):.6f}")

    val_loss = float(loss_fn(y_val, model(x_val, training=False)))
    print(f"epoch {epoch:3d}  validation loss {val_loss:.6f}")
    if val_loss < best_loss:
        best_loss = val_loss
        bad_epochs = 0
    else:
        bad_epochs += 1
        if bad_epochs == PATIENCE:
            print(f"no better validation loss for {PATIENCE} epochs: stopping early")
            break

predictions = tf.argmax(model(x_test, training=False), axis=1)
accuracy = float(tf.reduce_mean(tf.cast(predictions == y_test, tf.float32)))
print(f"final loss {float(loss):.6f}  test accuracy {accuracy:.4f}")
