"""The shapes of the parameters, and so of the gradients, of well-known networks.

They follow from the published architectures; the numbers of parameters are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """K. He et al. Deep residual learning for image recognition. CVPR 2016, table 1."""
    shapes: list[Shape] = [(7, 7, 3, 64), *_norm(64)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shapes += [(1, 1, channels, width), *_norm(width)]
            shapes += [(3, 3, width, width), *_norm(width)]
            shapes += [(1, 1, width, 4 * width), *_norm(4 * width)]
            if block == 0:  # the shortcut has another number of channels
                shapes += [(1, 1, channels, 4 * width), *_norm(4 * width)]
            channels = 4 * width
    return [*shapes, *_dense(channels, 1000)]


def bert_base() -> list[Shape]:
    """J. Devlin et al. BERT: pre-training of deep bidirectional transformers. 2019."""
    units = 768
    shapes: list[Shape] = [(30522, units), (512, units), (2, units), *_norm(units)]
    for _ in range(12):
        for _ in ("query", "key", "value", "output"):
            shapes += _dense(units, units)
        shapes += _norm(units)
        shapes += _dense(units, 4 * units) + _dense(4 * units, units)
        shapes += _norm(units)
    return [*shapes, *_dense(units, units)]


def perceptron(layers: int = 20, units: int = 8) -> list[Shape]:
    """Layers of one size."""
    return [shape for _ in range(layers) for shape in _dense(units, units)]


def _dense(inputs: int, outputs: int) -> list[Shape]:
    return [(inputs, outputs), (outputs,)]


def _norm(units: int) -> list[Shape]:
    """Scale and shift."""
    return [(units,), (units,)]


def count(shapes: Sequence[Shape]) -> int:
    """How many numbers they hold."""
    return sum(map(math.prod, shapes))


NETWORKS: Mapping[str, list[Shape]] = {
    "ResNet-50": resnet50(),
    "BERT-base": bert_base(),
    "20 x 8 MLP": perceptron(),
}

assert count(NETWORKS["ResNet-50"]) == 25_557_032
assert count(NETWORKS["BERT-base"]) == 109_482_240
