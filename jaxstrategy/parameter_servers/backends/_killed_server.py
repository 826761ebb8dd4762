"""A parameter server of this process that was killed: `KilledServer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

import numpy as np

from jaxstrategy._errors import ParameterServerLost
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation


@final
class KilledServer(AbstractServer):
    """Is lost, whatever it is asked."""

    def __init__(self, number: int) -> None:
        self._number = number

    def create(
        self, number: int, value: np.ndarray, is_table: bool = False
    ) -> NoReturn:
        raise self._lost()

    def drop(self, numbers: Sequence[int]) -> NoReturn:
        raise self._lost()

    def read(self, reads: Sequence[Read]) -> NoReturn:
        raise self._lost()

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> NoReturn:
        raise self._lost()

    def define(self, key: str, exported: bytes) -> NoReturn:
        raise self._lost()

    def fence(self, worker: int, incarnation: int) -> NoReturn:
        raise self._lost()

    def versions(self, numbers: Sequence[int]) -> NoReturn:
        raise self._lost()

    def _lost(self) -> ParameterServerLost:
        return ParameterServerLost(f"Parameter server {self._number} was killed.")
