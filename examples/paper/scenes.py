"""Scenes to detect things in: handwritten digits on photographs, all from scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits, load_sample_images


def make_scenes(count, size, most, seed):
    """Makes scenes with 1 to `most` digits that do not overlap much.

    Returns:
      Images [count, size, size, 3] with values from 0 to 1, and for each a list of
      (top, left, bottom, right, digit), in pixels.
    """
    numbers = np.random.default_rng(seed)
    digits, labels = load_digits(return_X_y=True)
    photographs = load_sample_images().images
    images, objects = [], []
    for _ in range(count):
        photograph = photographs[numbers.integers(len(photographs))]
        top, left = (numbers.integers(side - size) for side in photograph.shape[:2])
        image = 0.5 * photograph[top : top + size, left : left + size] / 255.0
        found = []
        for _ in range(numbers.integers(1, most + 1)):
            chosen = numbers.integers(len(digits))
            scale = numbers.integers(2, 4)
            side = 8 * scale
            top, left = numbers.integers(0, size - side, 2)
            if any(abs(top - t) < side and abs(left - x) < side for t, x, *_ in found):
                continue
            ink = (digits[chosen] / 16.0).reshape(8, 8).repeat(scale, 0).repeat(scale, 1)
            place = image[top : top + side, left : left + side]
            place[:] = np.maximum(place, ink[:, :, np.newaxis])
            found.append((top, left, top + side, left + side, int(labels[chosen])))
        images.append(image.astype(np.float32))
        objects.append(found)
    return np.stack(images), objects
