"""The message in which TensorFlow writes down a TPU's topology: `TopologyMessage`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from jaxstrategy.text._shown import shown

# The numbers of the fields, and how values are written: protocol buffers.
_MESH_SHAPE, _TASKS, _DEVICES, _COORDINATES, _HARDWARE = 1, 2, 3, 4, 5
_EMBEDDING = 1  # a field of the message of the hardware
_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_SKIPPED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


@final
@dataclasses.dataclass(frozen=True)
class TopologyMessage:
    """A TPU's topology as numbers.

    Attributes:
      mesh_shape: how many devices there are along each axis.
      tasks: the number of tasks, which are processes.
      devices: that of devices of each task.
      coordinates: of the devices, one after the other, those of task 0 first.
      embedding: the number of the hardware's embedding feature; None if nothing is
        said of hardware.
    """

    mesh_shape: Sequence[int]
    tasks: int
    devices: int
    coordinates: Sequence[int]
    embedding: int | None = None

    @staticmethod
    def parsed(serialized: bytes) -> TopologyMessage:
        """The message in `serialized`.

        Raises:
          ValueError: it is no such message.
        """
        try:
            return _of_fields(list(_fields(bytes(memoryview(serialized)))))
        except (IndexError, TypeError):  # it ends too early; it has no bytes
            raise ValueError(
                "A serialized topology was wanted, as `Topology.serialized()` makes "
                f"it; got {shown(serialized)}."
            ) from None

    def serialized(self) -> bytes:
        """The message as bytes, which TensorFlow reads."""
        parts = [
            _packed(_MESH_SHAPE, self.mesh_shape),
            _numbered(_TASKS, self.tasks),
            _numbered(_DEVICES, self.devices),
            _packed(_COORDINATES, self.coordinates),
        ]
        if self.embedding is not None:
            hardware = _numbered(_EMBEDDING, self.embedding)
            parts.append(_delimited(_HARDWARE, hardware))
        return b"".join(parts)


def _of_fields(fields: Sequence[tuple[int, int | bytes]]) -> TopologyMessage:
    mesh_shape: list[int] = []
    coordinates: list[int] = []
    single = {_TASKS: 0, _DEVICES: 0}
    embedding: int | None = None
    for number, value in fields:
        if number == _MESH_SHAPE:
            mesh_shape += _numbers(value)
        elif number == _COORDINATES:
            coordinates += _numbers(value)
        elif number in single:
            (single[number],) = _numbers(value)
        elif number == _HARDWARE and isinstance(value, bytes):
            found = [v for n, v in _fields(value) if n == _EMBEDDING]
            embedding = _numbers(found[-1])[0] if found else 0
    return TopologyMessage(
        mesh_shape, single[_TASKS], single[_DEVICES], coordinates, embedding
    )


def _numbers(value: int | bytes) -> list[int]:
    """The numbers of a field, which stand alone or packed."""
    if isinstance(value, int):
        return [value]
    found: list[int] = []
    place = 0
    while place < len(value):
        number, place = _number_at(value, place)
        found.append(number)
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, each by its number."""
    place = 0
    while place < len(message):
        key, place = _number_at(message, place)
        number, kind = key >> 3, key & 7
        if kind == _NUMBER:
            value, place = _number_at(message, place)
        else:
            size, place = _size_at(message, place, kind)
            value, place = message[place : place + size], place + size
        if place > len(message):
            raise IndexError("it ends too early")
        yield number, value


def _size_at(message: bytes, place: int, kind: int) -> tuple[int, int]:
    """The size of a value that is no number, and where it begins."""
    if kind == _BYTES:
        return _number_at(message, place)
    if kind not in _SKIPPED:
        raise IndexError("there is no such kind of field")
    return _SKIPPED[kind], place


def _number_at(message: bytes, place: int) -> tuple[int, int]:
    """The number at `place`, in groups of 7 bits, and where the next begins."""
    number = shift = 0
    while True:
        byte = message[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return number, place


def _written(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _delimited(field: int, value: bytes) -> bytes:
    return _written(field << 3 | _BYTES) + _written(len(value)) + value


def _packed(field: int, numbers: Iterable[int]) -> bytes:
    value = b"".join(map(_written, numbers))
    return _delimited(field, value) if value else b""


def _numbered(field: int, number: int) -> bytes:
    # A field that is 0 is left out, as TensorFlow does.
    return _written(field << 3 | _NUMBER) + _written(number) if number else b""
