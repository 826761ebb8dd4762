"""One message between processes: `WireFrame`, and its bytes.

    head        lengths, and what kind of frame it is
    arrays      dtype and shape of each
    fields      JSON
    blob        bytes, whatever they are
    seal        over all that, if the stream has keys
    contents    of the arrays, raw

Contents are in the byte order of the machine and have no seal: whoever changes packets
between two hosts can change numbers, and nothing that is executed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxstrategy.parameter_servers.wire import _wire_types

Fields: TypeAlias = Any
"""A value of JSON, whose reader knows its form."""

HEAD = struct.Struct("<BBHIIIIQ")
"""Mark, kind, 0, arrays; bytes of descriptions, fields, blob and contents."""
_MARK = 0xA7
_SMALL = 1 << 12  # bytes of which a copy is faster than a view
LARGEST_HEAD = 1 << 31
"""Bytes of what comes before the contents."""

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class FrameError(ValueError):
    """What came is no frame, or one that is too large."""


class WireFrame(NamedTuple):
    """A message.

    Attributes:
      kind: what it is about, 0 to 255; `_kinds` lists them.
      fields: what JSON can hold, small.
      blob: bytes; of a stream with keys they are sealed.
      arrays: of dtypes with a raw form.
    """

    kind: int
    fields: Fields = None
    blob: bytes = b""
    arrays: Sequence[np.ndarray] = ()


class Lengths(NamedTuple):
    """The lengths of what follows a head."""

    kind: int
    arrays: int
    types: int
    fields: int
    blob: int
    contents: int

    @property
    def rest(self) -> int:
        """Bytes before the seal."""
        return self.types + self.fields + self.blob


def packed(frame: WireFrame, largest: int) -> tuple[bytes, list[bytes | memoryview]]:
    """What comes before the seal, and the contents of the arrays that have any.

    Raises:
      TypeError: fields that JSON has not, or a dtype that has no raw form.
      FrameError: it is too large.
    """
    arrays = [_native(array) for array in frame.arrays]
    types = _wire_types.written(arrays)
    fields = b"" if frame.fields is None else _written(frame.fields)
    contents = [_raw(array) for array in arrays]
    size = sum(map(len, contents))
    rest = len(types) + len(fields) + len(frame.blob)
    if rest > LARGEST_HEAD or rest + size > largest:
        raise FrameError(
            f"A message of {rest + size} bytes was to be sent; the largest may have "
            f"{min(largest, LARGEST_HEAD)}, or {largest} if most are in arrays. Send "
            "it in parts."
        )
    head = HEAD.pack(
        *(_MARK, frame.kind, 0, len(arrays)),
        *(len(types), len(fields), len(frame.blob), size),
    )
    return b"".join((head, types, fields, frame.blob)), contents


def lengths(head: bytes, largest: int, largest_head: int = LARGEST_HEAD) -> Lengths:
    """The lengths that a head announces.

    Args:
      largest: bytes of the frame.
      largest_head: bytes of what comes before the contents.

    Raises:
      FrameError: it is none, or announces too much.
    """
    mark, kind, zero, arrays, types, fields, blob, size = HEAD.unpack(head)
    found = Lengths(kind, arrays, types, fields, blob, size)
    if mark != _MARK or zero:
        raise FrameError("what came is no message of this protocol")
    if found.rest > largest_head or found.rest + size > largest:
        raise FrameError(f"a message of {found.rest + size} bytes was announced")
    if 2 * arrays > types:
        raise FrameError(f"a message of {found.rest + size} bytes was announced")
    return found


def unpacked(
    found: Lengths, rest: bytes
) -> tuple[Fields, bytes, list[tuple[np.dtype, tuple[int, ...], int]]]:
    """Fields, blob, and the types of the arrays, of what comes before the seal.

    Raises:
      FrameError: it contradicts itself.
    """
    middle = found.types + found.fields
    try:
        types = _wire_types.read(rest[: found.types], found.arrays)
        text = rest[found.types : middle].decode()
        fields = json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a message contradicts itself: {error}") from error
    if sum([size for *_, size in types]) != found.contents:
        raise FrameError("the arrays of a message have another size than was announced")
    return fields, rest[middle : found.rest], types


def _written(fields: Fields) -> bytes:
    try:
        return _encode(fields).encode()
    except (ValueError, RecursionError) as error:  # such as circles
        raise TypeError(f"{error}, in fields that were to be JSON") from None


def _native(array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def _raw(array: np.ndarray) -> bytes | memoryview:
    if array.nbytes <= _SMALL:
        return array.tobytes()
    # `memoryview(array)` refuses the dtypes of ml_dtypes, so the bytes are shown.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
