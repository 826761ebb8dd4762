"""Dtypes and shapes of arrays, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import ml_dtypes  # noqa: F401  # makes names such as "bfloat16" known to NumPy
import numpy as np

# The position is the code that is sent: new names go to the end.
_NAMES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64
    complex64 complex128 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz
    float8_e4m3fnuz float8_e5m2fnuz float8_e3m4 float8_e4m3 float8_e8m0fnu
    float4_e2m1fn float6_e2m3fn float6_e3m2fn int4 uint4 int2 uint2 int1 uint1
""".split()
_HEAD = struct.Struct("<BB")
_MOST_DIMENSIONS = 64  # of NumPy 2


def _known() -> dict[int, np.dtype]:
    found = {}
    for code, name in enumerate(_NAMES):
        try:
            found[code] = np.dtype(name)
        except TypeError:
            pass  # of a newer ml_dtypes than this one
    return found


_DTYPES = _known()
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_SHAPES = [struct.Struct(f"<BB{rank}Q") for rank in range(_MOST_DIMENSIONS + 1)]


def is_plain(dtype: np.dtype) -> bool:
    """Whether arrays of that dtype travel as raw bytes, so that they need no pickle."""
    return dtype in _CODES


def written(arrays: Iterable[np.ndarray]) -> bytes:
    """Dtypes and shapes of arrays.

    Raises:
      TypeError: a dtype without a code.
    """
    return b"".join([_one(array.dtype, array.shape) for array in arrays])


def _one(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    code = _CODES.get(dtype)
    if code is None:
        raise TypeError(
            f"An array of dtype {dtype} came, which has no raw form. Numbers and truth "
            "values in the byte order of this machine have one; other objects must be "
            "pickled."
        )
    return _SHAPES[len(shape)].pack(code, len(shape), *shape)


def read(data: bytes, count: int) -> list[tuple[np.dtype, tuple[int, ...], int]]:
    """Dtypes, shapes and numbers of bytes, of as many arrays.

    Raises:
      ValueError: the bytes say something else.
    """
    found, at = [], 0
    for _ in range(count):
        if len(data) - at < _HEAD.size:
            raise ValueError("descriptions of arrays are cut off")
        code, rank = _HEAD.unpack_from(data, at)
        if code not in _DTYPES or rank > _MOST_DIMENSIONS:
            raise ValueError(f"an array of dtype {code} with {rank} dimensions")
        form = _SHAPES[rank]
        if len(data) - at < form.size:
            raise ValueError("descriptions of arrays are cut off")
        dtype, shape = _DTYPES[code], form.unpack_from(data, at)[2:]
        found.append((dtype, shape, dtype.itemsize * _elements(shape)))
        at += form.size
    if at != len(data):
        raise ValueError("descriptions of arrays are too long")
    return found


def _elements(shape: Sequence[int]) -> int:
    count, not_empty = 1, 1
    for size in shape:
        count *= size
        not_empty *= size or 1
    # NumPy refuses such shapes, also those of arrays without elements.
    if not_empty >= 1 << 60:
        raise ValueError(f"an array of shape {tuple(shape)}")
    return count
