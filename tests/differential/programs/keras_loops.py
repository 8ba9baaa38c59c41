"""Custom Keras training loops: the model's call, the loss, the optimizer's update, metrics."""

import keras as keras3
import tensorflow as tf

from ..table import program
from ..training import classification, images, regression, training_step


def mlp(keras, outputs=3, inputs=4):
    return keras.Sequential(
        [
            keras.Input([inputs]),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(outputs),
        ]
    )


@program(keras="both")
def keras_mlp_apply_gradients(terra):
    """Dense layers and Adam, `apply_gradients` in the usual custom loop."""
    keras = tf.keras
    model, optimizer = mlp(keras), keras.optimizers.Adam(0.01)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_step = terra.function(training_step(model, loss_function, optimizer))
    for x, y in classification(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


@program()
def keras_mlp_apply(terra):
    """`optimizer.apply` with variables built before the first step."""
    model, optimizer = mlp(keras3, 1), keras3.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    loss_function = keras3.losses.Huber()

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x))
        optimizer.apply(tape.gradient(loss, model.trainable_weights))
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


@program(keras="2")
def legacy_optimizer_minimize(terra):
    """The legacy Keras: `minimize` with a loss function and with a tape."""
    keras = tf.keras
    model, optimizer = mlp(keras, 1), keras.optimizers.Adam(0.01)

    @terra.function
    def train_step(x, y):
        optimizer.minimize(lambda: tf.reduce_mean((model(x) - y) ** 2), model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(model(x) - y))
        optimizer.minimize(loss, model.trainable_variables, tape=tape)
        return loss

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


@program(keras="2")
def legacy_keras_legacy_optimizer(terra):
    """The legacy Keras with its oldest optimizer classes, whose slots are named."""
    keras = tf.keras
    model, optimizer = mlp(keras, 1), keras.optimizers.legacy.Adam(0.01)
    train_step = terra.function(training_step(model, keras.losses.MeanSquaredError(), optimizer))
    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer
    yield [optimizer.get_slot(v, "m") for v in model.trainable_variables]


@program(keras="both")
def keras_metrics(terra):
    """Metrics updated in the step, read every third one, reset after each epoch."""
    keras = tf.keras
    model, optimizer = mlp(keras), keras.optimizers.SGD(0.1)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_function(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(loss)
        accuracy.update_state(y, logits)

    for step, (x, y) in enumerate(classification(terra.iterations)):
        yield train_step(x, y)
        if step % 3 == 2:
            print(f"step {step}: {mean_loss.result():.6f} {float(accuracy.result()):.4f}")
        if step % 6 == 5:
            yield mean_loss.result(), accuracy.result()
            mean_loss.reset_state()
            accuracy.reset_state()
    yield model, optimizer, mean_loss, accuracy


@program(keras="both")
def keras_metric_results_in_step(terra):
    """Metrics whose results, AUC among them, are returned by the step itself."""
    keras = tf.keras
    model = mlp(keras, 1)
    metrics = [keras.metrics.AUC(num_thresholds=11), keras.metrics.MeanAbsoluteError()]

    @terra.function
    def evaluate(x, y):
        outputs = tf.sigmoid(model(x))
        for metric in metrics:
            metric.update_state(tf.cast(y > 0, tf.float32), outputs)
        return {metric.name: metric.result() for metric in metrics}

    for x, y in regression(terra.iterations):
        yield evaluate(x, y)
    yield metrics


@program(keras="both")
def keras_model_class(terra):
    """A subclassed model that builds itself in the first step, with Python state of its own."""
    keras = tf.keras

    class Classifier(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = [keras.layers.Dense(8, activation="tanh") for _ in range(2)]
            self.top = keras.layers.Dense(3)
            self.calls = 0

        def call(self, x, training=False):
            self.calls += 1
            for layer in self.hidden:
                x = layer(x) + (0.01 if training else 0.0)
            return self.top(x)

    model, optimizer = Classifier(), keras.optimizers.RMSprop(0.01)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_step = terra.function(training_step(model, loss_function, optimizer))
    for x, y in classification(terra.iterations):
        yield train_step(x, y), model.calls
    yield model, optimizer


@program(keras="both")
def keras_train_step_override(terra):
    """`Model.train_step` called by hand: compile's loss, optimizer and metrics."""
    keras = tf.keras
    model = mlp(keras)
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        run_eagerly=True,
    )
    train_step = terra.function(model.train_step)
    for x, y in classification(terra.iterations):
        logs = train_step((x, y))
        yield {name: logs[name] for name in sorted(logs)}
    yield model, model.optimizer


@program(keras="both")
def keras_functional_two_inputs(terra):
    """A functional model with two inputs, a shared layer and two weighted losses."""
    keras = tf.keras
    left, right = keras.Input([4]), keras.Input([4])
    shared = keras.layers.Dense(8, activation="elu")
    joined = keras.layers.Concatenate()([shared(left), shared(right)])
    model = keras.Model(
        {"left": left, "right": right},
        {"sum": keras.layers.Dense(1)(joined), "sign": keras.layers.Dense(1)(joined)},
    )
    optimizer = keras.optimizers.Adam(0.01)
    squares = keras.losses.MeanSquaredError()
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            outputs = model({"left": x, "right": -x}, training=True)
            losses = [squares(y, outputs["sum"]), entropy(y > 0, outputs["sign"])]
            loss = losses[0] + 0.5 * losses[1]
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return losses, outputs

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


@program(keras="both")
def keras_regularization_losses(terra):
    """Weight and activity regularizers, `add_loss` in a layer; `model.losses` read in the step."""
    keras = tf.keras

    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.01 * tf.reduce_mean(x**2))
            return x

    model = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"),
            Penalty(),
            keras.layers.Dense(1, bias_regularizer=keras.regularizers.L1(0.1)),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05)

    @terra.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            penalties = model.losses
            total = loss + tf.add_n(penalties)
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, penalties

    for x, y in regression(terra.iterations):
        yield train_step(x, y)
    yield model, model.losses


@program(coexecuted=2, fallbacks=(0, 3), keras="both")
def keras_layer_frozen_midway(terra):
    """Fine-tuning: a layer is made trainable half way, and a new optimizer takes over."""
    keras = tf.keras
    model = mlp(keras, 1)
    model.layers[0].trainable = False
    optimizer = keras.optimizers.Adam(0.01)
    loss_function = keras.losses.MeanSquaredError()

    @terra.function
    def train_step(x, y):
        return training_step(model, loss_function, optimizer)(x, y)

    for step, (x, y) in enumerate(regression(terra.iterations)):
        if step == terra.iterations // 2:
            model.layers[0].trainable = True
            yield optimizer
            optimizer = keras.optimizers.Adam(0.001)
        yield train_step(x, y), len(model.trainable_variables)
    yield model, optimizer


@program(keras="both")
def keras_two_optimizers(terra):
    """A GAN: two models, two tapes, two optimizers, noise drawn in the step."""
    keras = tf.keras
    generator, critic = mlp(keras, outputs=4, inputs=2), mlp(keras, outputs=1)
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02, beta_1=0.5)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @terra.function
    def train_step(real):
        noise = tf.random.normal([8, 2])
        with tf.GradientTape() as generator_tape, tf.GradientTape() as critic_tape:
            fake = generator(noise, training=True)
            real_logits, fake_logits = critic(real, training=True), critic(fake, training=True)
            generator_loss = entropy(tf.ones_like(fake_logits), fake_logits)
            critic_loss = entropy(tf.ones_like(real_logits), real_logits)
            critic_loss += entropy(tf.zeros_like(fake_logits), fake_logits)
        for tape, loss, model, optimizer in zip(
            (generator_tape, critic_tape),
            (generator_loss, critic_loss),
            (generator, critic),
            optimizers,
            strict=True,
        ):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return generator_loss, critic_loss

    for x, _ in regression(terra.iterations):
        yield train_step(x)
    yield generator, critic, optimizers


@program(keras="both")
def keras_target_network(terra):
    """Deep Q-learning: a target network that follows slowly, and is copied every fifth step."""
    keras = tf.keras
    online, target = mlp(keras, 2), mlp(keras, 2)
    target.set_weights(online.get_weights())
    optimizer = keras.optimizers.Adam(0.01)

    @terra.function
    def train_step(states, rewards):
        best = tf.reduce_max(target(states + 0.1), axis=1)
        with tf.GradientTape() as tape:
            values = tf.reduce_sum(online(states) * tf.one_hot([0, 1] * 4, 2), axis=1)
            loss = tf.reduce_mean((rewards[:, 0] + 0.9 * best - values) ** 2)
        gradients = tape.gradient(loss, online.trainable_variables)
        optimizer.apply_gradients(zip(gradients, online.trainable_variables, strict=True))
        for slow, fast in zip(target.variables, online.variables, strict=True):
            slow.assign(0.95 * slow + 0.05 * fast)
        return loss

    for step, (x, y) in enumerate(regression(terra.iterations)):
        yield train_step(x, y)
        if step % 5 == 4:
            target.set_weights(online.get_weights())
    yield online, target, optimizer


@program(tolerance=1e-4, keras="both")
def keras_cnn(terra):
    """Conv2D, MaxPooling2D, Flatten, Dense; a classifier of small images."""
    keras = tf.keras
    model = keras.Sequential(
        [
            keras.Input([8, 8, 1]),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    train_step = terra.function(training_step(model, loss_function, optimizer))
    for x, y in images(terra.iterations):
        yield train_step(x, y)
    yield model, optimizer


@program(coexecuted=0, fallbacks=(0, None), keras="both")
def keras_predict_in_step(terra):
    """`Model.predict` and `train_on_batch`, which run functions of their own, in the step."""
    keras = tf.keras
    model = mlp(keras, 1)
    model.compile("sgd", "mse")

    @terra.function
    def step(x, y):
        before = model.predict(x, verbose=0)
        loss = model.train_on_batch(x, y)
        return loss, before, tf.reduce_mean(model(x) - before)

    for x, y in regression(terra.iterations):
        yield step(x, y)
    yield model
