"""The handwritten digits that ship inside scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

TRAIN_IMAGES = 1440  # of 1,797; the others are for testing


class Examples(NamedTuple):
    """Images `[rows, 8, 8, 1]` from 0 to 1, and the digits they show."""

    images: np.ndarray
    labels: np.ndarray

    def rows(self, which: np.ndarray | slice) -> Examples:
        """Some of the examples."""
        return Examples(self.images[which], self.labels[which])


def load() -> tuple[Examples, Examples]:
    """The examples to train on and those to test on, the same ones every time."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    # The file goes from writer to writer: in this order both parts have some of each.
    order = np.random.default_rng(0).permutation(len(labels))
    digits = Examples(images, np.asarray(labels)).rows(order)
    return digits.rows(slice(TRAIN_IMAGES)), digits.rows(slice(TRAIN_IMAGES, None))


def batches(
    examples: Examples, batch_size: int, rng: np.random.Generator
) -> Iterator[Examples]:
    """One epoch of whole batches in random order; a rest is left out."""
    order = rng.permutation(len(examples.labels))
    for end in range(batch_size, len(order) + 1, batch_size):
        yield examples.rows(order[end - batch_size : end])


def padded(examples: Examples, multiple: int) -> Examples:
    """The examples and blank ones, labelled -1, up to a multiple of `multiple` rows.

    No prediction is -1, so a blank one never counts as recognised.
    """
    blank = -len(examples.labels) % multiple
    images = np.pad(examples.images, [(0, blank), (0, 0), (0, 0), (0, 0)])
    return Examples(images, np.pad(examples.labels, (0, blank), constant_values=-1))
