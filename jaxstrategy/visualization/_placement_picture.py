"""A picture of one array: its parts side by side, each with its devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxstrategy.charts import _svg
from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.visualization._placed_array import Interval, PlacedArray

_CELL = 24
_FLAT_CELL = 8
_MOST_ROWS = 8
_MOST_HEIGHT = 240
# Letters must fit on the narrowest screen, too.
_LEAST_WIDTH = 340
_LETTER_WIDTH = 7


def picture(array: PlacedArray) -> str:
    """A drawing of the parts, as they follow each other in the array.

    From left to right that is the last divided dimension, or the replicas; from above
    all others.
    """
    across, down = _dimensions(array)
    divided = array.divided
    columns = divided.get(across, [(0, 1)])
    rows = list(itertools.product(*(divided[i] for i in down)))
    height = _CELL if len(rows) <= _MOST_ROWS else _FLAT_CELL
    height = min(height, _MOST_HEIGHT / len(rows))
    parts = []
    for (at, row), column in itertools.product(enumerate(rows), columns):
        chosen = dict(zip((*down, across), (*row, column), strict=True))
        devices = _held_by(array, chosen)
        place = _share(column, columns)
        parts.append(
            _svg.cell(
                *place,
                at * height,
                height,
                array.colour,
                _devices.names(devices),
                _label(devices, place, height),
            )
        )
    title = f"{array.path} {array.type}: {array}"
    return _svg.drawing(title, height * len(rows), parts)


def _dimensions(array: PlacedArray) -> tuple[int, tuple[int, ...]]:
    """The divided dimension that goes from left to right, and the others."""
    divided = tuple(array.divided)
    if not divided:
        return -1, ()
    across = 0 if array.has_versions and 0 in divided else divided[-1]
    return across, tuple(i for i in divided if i != across)


def _held_by(array: PlacedArray, chosen: dict[int, Interval]) -> tuple[Device, ...]:
    """The devices of the part that has these intervals along divided dimensions."""
    for part, devices in array.parts.items():
        if all(part[i] == interval for i, interval in chosen.items() if i >= 0):
            return devices
    raise AssertionError("shardings divide dimensions independently of each other")


def _share(column: Interval, columns: Sequence[Interval]) -> tuple[float, float]:
    full = columns[-1][1]
    return column[0] / full, column[1] / full


def _label(devices: Sequence[Device], place: tuple[float, float], height: float) -> str:
    """The names, or the numbers alone, if there is room for them."""
    if height < _CELL:
        return ""
    names = _devices.names(devices)
    room = (place[1] - place[0]) * _LEAST_WIDTH / _LETTER_WIDTH
    numbers = names.replace(f"{devices[0].platform}:", "")
    return next((text for text in (names, numbers) if len(text) <= room), "")
