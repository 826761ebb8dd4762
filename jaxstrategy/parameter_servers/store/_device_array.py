"""An array of which rows are changed, or all by a program: `DeviceArray`."""

from __future__ import annotations

from typing import final

import jax
import numpy as np

from jaxstrategy.parameter_servers._operations import OF_WHOLE
from jaxstrategy.parameter_servers.store import (
    _cpu_programs,
    _pushed_rows,
    _state_programs,
)
from jaxstrategy.parameter_servers.store._snapshot import Snapshot


@final
class DeviceArray:
    """What a variable holds; its lock is held around each call.

    A program that may write to the memory of a table changes 512 rows of 100,000 in
    54 us; `np.add.at` needs 1,843 us.
    """

    def __init__(self, value: np.ndarray) -> None:
        """Args: value: which is copied."""
        self._value = _cpu_programs.on_device(value)
        self._snapshot = Snapshot()

    @property
    def value(self) -> jax.Array:
        """What it holds, until the next change."""
        return self._value

    @property
    def is_held(self) -> bool:
        """Whether a reader still has what it holds, so that it must not be donated."""
        return self._snapshot.is_held

    def whole(self) -> np.ndarray:
        """What it holds now, for ever."""
        return self._snapshot.of(np.asarray(self._value))

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows, which it has."""
        return np.asarray(self._value).take(rows, axis=0)

    def replace(self, value: jax.Array) -> None:
        """Hold what a program has made of it."""
        self._value, self._snapshot = value, Snapshot()

    def change(self, name: str, *operands: np.ndarray) -> None:
        """Do one of `OF_WHOLE` or `OF_ROWS`."""
        kind, donates = (self._value.shape, self._value.dtype), not self.is_held
        if name in OF_WHOLE:
            program = _state_programs.of_whole(name, kind, donates)
        else:
            rows, values = operands
            if not len(rows):
                return
            operands = _pushed_rows.scatter_operands(name, rows, values, kind[0][0])
            program = _state_programs.of_rows(name, kind, len(operands[0]), donates)
        self.replace(*program([self._value], operands))
