"""Rings through the chips of a mesh, in which neighbours are neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

Chip = tuple[int, ...]
"""The coordinates `(x, y, z)` of a chip."""


def ring(shape: tuple[int, int, int]) -> list[Chip]:
    """All chips of a mesh of this shape, as a ring.

    Each chip has the next one beside it, and the last one the first, if the sizes along
    the axes on which there is more than one chip are even. On one such axis, and with
    odd sizes, the chips come one after the other, along x first.
    """
    long = [axis for axis in range(3) if shape[axis] > 1]
    if len(long) < 2 or any(shape[axis] % 2 for axis in long):
        return [chip[::-1] for chip in _grid(shape[::-1])]
    if len(long) == 3:
        return list(_through_layers(*shape))
    first, second = long
    places = [(0, 0), *_around(shape[first], shape[second])]
    return [_at({first: a, second: b}) for a, b in places]


def _through_layers(x: int, y: int, z: int) -> Iterator[Chip]:
    """Layer by layer around, up along z, and back down the edge that was left out."""
    yield 0, 0, 0
    for layer in range(z):
        around = list(_around(x, y))
        for a, b in around[::-1] if layer % 2 else around:
            yield a, b, layer
    yield from ((0, 0, layer) for layer in range(z - 1, 0, -1))


def _around(width: int, height: int) -> Iterator[tuple[int, int]]:
    """A way around a plane from beside its corner `(0, 0)` to the other side of that.

    To and fro through the rows, and back through the column that these leave out.
    """
    for b in range(height):
        row = range(1, width) if b % 2 == 0 else range(width - 1, 0, -1)
        yield from ((a, b) for a in row)
    yield from ((0, b) for b in range(height - 1, 0, -1))


def _at(along: dict[int, int]) -> Chip:
    return tuple(along.get(axis, 0) for axis in range(3))


def _grid(shape: tuple[int, ...]) -> Iterator[Chip]:
    return itertools.product(*map(range, shape))
