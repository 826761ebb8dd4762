"""`Visualization`: what of a tree lies on which device, as text and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import final

from jaxstrategy.charts._bars import BarPart, ChartBar, bars
from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text import _html_report
from jaxstrategy.text._columns import in_columns
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._lists import and_more
from jaxstrategy.text._shown import shown
from jaxstrategy.text._units import with_bytes, with_noun
from jaxstrategy.visualization._placed_array import PlacedArray
from jaxstrategy.visualization._placement_picture import picture

_MOST_LINES = 40
_MOST_PICTURES = 16
_HEADER = ("array", "type", "on a device", "where")
_MEANINGS = {
    Colour.WHOLE: "whole arrays",
    Colour.PART: "parts of arrays",
    Colour.OWN: "versions of replicas",
}


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Visualization:
    """The arrays of a tree and where each lies: a table, in a notebook a picture.

    Made by `Strategy.visualize`.

    Attributes:
      title: above it.
      arrays: all that were found, in the order of the tree; `path`, `type` and `parts`
        say what and where.
      devices: those of the strategy, and others that hold an array.

    Raises:
      TypeError: it is not made by a strategy.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> w = strategy.mirror(np.ones((256, 4), np.float32))
    >>> strategy.visualize({"w": w, "x": strategy.per_replica([1.0, 2.0, 3.0, 4.0])})
    What lies where: 2 arrays, 4 KiB on a device
      array  type            on a device  where
      w      float32[256,4]  4 KiB        whole on each of cpu:0..3
      x      float32[]       4 B          versions of 4 replicas on cpu:0..3
    """

    title: str
    arrays: tuple[PlacedArray, ...]
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        is_placed = isinstance(self.arrays, tuple) and isinstance(self.devices, tuple)
        if not is_placed or not all(isinstance(a, PlacedArray) for a in self.arrays):
            raise TypeError(
                f"A `Visualization` was made of {shown(self.arrays)} on "
                f"{shown(self.devices)}. Let a strategy make it: "
                "`strategy.visualize(tree)`."
            )

    @property
    def device_bytes(self) -> dict[Device, int]:
        """The bytes of all arrays on each device.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> seen = strategy.visualize(strategy.mirror(np.ones(3, np.float32)))
        >>> list(seen.device_bytes.values())
        [12, 12]
        """
        return {device: sum(self._bytes_by_colour(device)) for device in self.devices}

    def _bytes_by_colour(self, device: Device) -> tuple[int, ...]:
        held = dict.fromkeys(_MEANINGS, 0)
        for array in self.arrays:
            if device in (own := array.device_bytes):
                held[array.colour] += own[device]
        return tuple(held.values())

    def __str__(self) -> str:
        lines = list(in_columns([_HEADER, *map(_row, self.arrays[:_MOST_LINES])]))
        if not self.arrays:
            return self._heading()
        if more := and_more(len(self.arrays), _MOST_LINES, before=""):
            lines.append(f"  {more}")
        return "\n".join([self._heading(), *lines, *self._unequal()])

    __repr__ = __str__

    def _heading(self) -> str:
        amount = with_noun(len(self.arrays), "array")
        return f"{self.title}: {amount}, {self._amount()}"

    def _amount(self) -> str:
        sizes = set(self.device_bytes.values())
        upto = "" if len(sizes) == 1 else "up to "
        return f"{upto}{with_bytes(max(sizes, default=0))} on a device"

    def _unequal(self) -> Iterator[str]:
        """The bytes of each device, if they differ."""
        groups = self._alike()
        if len(groups) > 1:
            yield "on a device"
            yield from in_columns(
                [(name, with_bytes(sum(held))) for name, held in groups.items()]
            )

    def _alike(self) -> dict[str, tuple[int, ...]]:
        """The bytes by colour of devices that have the same, by their names."""
        groups: dict[tuple[int, ...], list[Device]] = {}
        for device in self.devices:
            groups.setdefault(self._bytes_by_colour(device), []).append(device)
        return {_devices.names(alike): held for held, alike in groups.items()}

    def _repr_html_(self) -> str:
        drawn = self._largest()
        shown = [array for array in self.arrays if id(array) in drawn]
        parts = [self._chart(), *map(_with_picture, shown)]
        if rest := [array for array in self.arrays if id(array) not in drawn]:
            rows = list(map(_row, rest))
            parts.append(
                _html_report.section(
                    f"{with_noun(len(rest), 'array')} without a picture",
                    _html_report.table(_HEADER, rows, most_rows=_MOST_LINES),
                )
            )
        return _html_report.page(self._heading(), parts)

    def _largest(self) -> set[int]:
        """The largest arrays on devices, by identity."""
        placed = [array for array in self.arrays if array.parts]
        by_size = sorted(placed, key=lambda a: -max(a.device_bytes.values()))
        return set(map(id, by_size[:_MOST_PICTURES]))

    def _chart(self) -> str:
        rows = []
        for name, held in self._alike().items():
            parts = (
                BarPart(nbytes, meaning, colour, with_bytes(nbytes))
                for nbytes, (colour, meaning) in zip(
                    held, _MEANINGS.items(), strict=True
                )
                if nbytes
            )
            each = f"each of {name}" if ".." in name or "," in name else name
            rows.append(ChartBar(each, tuple(parts), with_bytes(sum(held))))
        return bars("Bytes on a device", rows)


def _row(array: PlacedArray) -> tuple[str, str, str, str]:
    held = set(array.device_bytes.values())
    return array.path, array.type, with_bytes(max(held)) if held else "", str(array)


def _with_picture(array: PlacedArray) -> str:
    path, kind, size, where = _row(array)
    name = f"`{path}` " if path else ""
    text = f"{name}{kind}, {size} on a device: {where}"
    drawing = picture(array)
    return f'<div style="margin:.7em 0">{_html_report.paragraph(text)}{drawing}</div>'
