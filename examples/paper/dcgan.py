"""DCGAN: a generator and a discriminator, trained against each other on handwritten digits.

Two models, two gradient tapes over the same ops and two optimizers in one step (Radford, Metz and
Chintala, 2015), with noise drawn in the step.

    python examples/paper/dcgan.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import terra_tf as terra

BATCH = 32
NOISE = 32


def make_generator():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(4 * 4 * 48, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((4, 4, 48)),
            layers.Conv2DTranspose(24, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ]
    )


def make_discriminator():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(24, 4, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Conv2D(48, 4, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def load_batches():
    images, _ = load_digits(return_X_y=True)
    images = (images / 8.0 - 1.0).reshape(-1, 8, 8, 1).astype("float32")
    images = images.repeat(2, axis=1).repeat(2, axis=2)
    dataset = tf.data.Dataset.from_tensor_slices(images).batch(BATCH, drop_remainder=True)
    return [(batch,) for batch in dataset]


def build():
    generator, discriminator = make_generator(), make_discriminator()
    generator_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
    discriminator_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
    generator_optimizer.build(generator.trainable_variables)
    discriminator_optimizer.build(discriminator.trainable_variables)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    seeds = keras.random.SeedGenerator()

    def train_step(images):
        noise = keras.random.normal((BATCH, NOISE), seed=seeds)
        with tf.GradientTape() as generator_tape, tf.GradientTape() as discriminator_tape:
            generated = generator(noise, training=True)
            real = discriminator(images, training=True)
            fake = discriminator(generated, training=True)
            generator_loss = cross_entropy(tf.ones_like(fake), fake)
            discriminator_loss = cross_entropy(tf.ones_like(real), real) + cross_entropy(
                tf.zeros_like(fake), fake
            )
        gradients = generator_tape.gradient(generator_loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(
            zip(gradients, generator.trainable_variables, strict=True)
        )
        gradients = discriminator_tape.gradient(
            discriminator_loss, discriminator.trainable_variables
        )
        discriminator_optimizer.apply_gradients(
            zip(gradients, discriminator.trainable_variables, strict=True)
        )
        return generator_loss + discriminator_loss

    def variables():
        models = generator.variables + discriminator.variables
        return models + generator_optimizer.variables + discriminator_optimizer.variables

    return train_step, load_batches(), variables


def main():
    keras.utils.set_random_seed(1)
    train_step, batches, _ = build()
    train_step = terra.function(train_step)
    for step in range(300):
        loss = train_step(*batches[step % len(batches)])
        if step % 20 == 0:
            print(f"step {step:3d}  both losses {float(loss):.4f}")


if __name__ == "__main__":
    main()
