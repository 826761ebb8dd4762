"""Arrays of the host whose memory devices of the host take over without a copy."""

from __future__ import annotations

import numpy as np

# Where memory of the host begins that a device takes over instead of copying it. It is
# so with XLA; half of it would be found, too.
_ALIGNMENT = 64


def may_be_shared(array: np.ndarray) -> bool:
    """Whether devices of the host would share memory with `array`, when it is split.

    They may although `device_put` was told otherwise.
    """
    if not array.flags.c_contiguous:
        return True
    start, step = array.ctypes.data, array.strides[0]
    return any((start + i * step) % (_ALIGNMENT // 2) == 0 for i in range(len(array)))


def own(array: np.ndarray) -> np.ndarray:
    """A copy that lies where it can be taken over, so that no second one is made."""
    made = _empty(array.shape, array.dtype)
    np.copyto(made, array)
    return made


def rows(array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """`array[numbers]`, where it can be taken over.

    Args:
      array: `[n, ...]`.
      numbers: of rows, each from 0 to n - 1.
    """
    if array.dtype.hasobject or not array.dtype.itemsize:
        return array[numbers]  # has no bytes of its own
    made = _empty((len(numbers), *array.shape[1:]), array.dtype)
    # With "raise", NumPy makes another array first and copies that.
    return np.take(array, numbers, axis=0, out=made, mode="clip")


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
