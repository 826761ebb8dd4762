"""An array that is changed as a whole, in NumPy: `HostArray`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np

from jaxstrategy.parameter_servers._aligned_memory import aligned_empty
from jaxstrategy.parameter_servers.store._snapshot import Snapshot


def _set(old: np.ndarray, operand: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, operand)


_CHANGES: dict[str, Callable[..., object]] = {
    "set": _set,
    "add": np.add,
    "subtract": np.subtract,
}


@final
class HostArray:
    """What a variable holds; its lock is held around each call."""

    def __init__(self, value: np.ndarray) -> None:
        """Args: value: which is copied."""
        self._value = aligned_empty(value.shape, value.dtype)
        np.copyto(self._value, value)
        self._snapshot = Snapshot()

    @property
    def value(self) -> np.ndarray:
        """What it holds, until the next change."""
        return self._value

    def whole(self) -> np.ndarray:
        """What it holds now, for ever."""
        return self._snapshot.of(self._value)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows, which it has."""
        return self._value.take(rows, axis=0)

    def change(self, name: str, operand: np.ndarray) -> None:
        """Do one of `OF_WHOLE`; in place, unless a reader still has the old value."""
        # A new 10 MB costs 0.3 ms more than the 0.3 ms of an addition in place; a copy
        # for each reader would cost as much each time.
        old = new = self._value
        if self._snapshot.is_held:
            new, self._snapshot = aligned_empty(old.shape, old.dtype), Snapshot()
        with np.errstate(all="ignore"):  # as on a device
            _CHANGES[name](old, operand, out=new)
        self._value = new
