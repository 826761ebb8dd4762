"""A parameter server whose process may be another one later: `RestartedServer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation


@final
class RestartedServer(AbstractServer):
    """Asks another server, which may be replaced: who refers to this need not know."""

    def __init__(self, server: AbstractServer) -> None:
        self.server = server

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        self.server.create(number, value, is_table)

    def drop(self, numbers: Sequence[int]) -> None:
        self.server.drop(numbers)

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        return self.server.read(reads)

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        return self.server.push(operations, call)

    def define(self, key: str, exported: bytes) -> None:
        self.server.define(key, exported)

    def fence(self, worker: int, incarnation: int) -> None:
        self.server.fence(worker, incarnation)

    def versions(self, numbers: Sequence[int]) -> list[int]:
        return self.server.versions(numbers)
