"""The interface of a parameter server: `AbstractServer`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation


class AbstractServer(abc.ABC):
    """Keeps variables by their numbers; any number of threads may call it at once.

    All methods of one that runs elsewhere raise `ParameterServerLost` when it is gone.
    """

    @abc.abstractmethod
    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        """Keep a new variable."""

    @abc.abstractmethod
    def drop(self, numbers: Sequence[int]) -> None:
        """Forget variables; those that are not there are none."""

    @abc.abstractmethod
    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """What these hold now; each of them is whole, together they are no snapshot."""

    @abc.abstractmethod
    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        """Apply operations in their order; whether they count."""

    @abc.abstractmethod
    def define(self, key: str, exported: bytes) -> None:
        """Keep a program for updates, in the form of `jax.export`."""

    @abc.abstractmethod
    def fence(self, worker: int, incarnation: int) -> None:
        """From now on nothing counts that earlier incarnations of a worker push."""

    @abc.abstractmethod
    def versions(self, numbers: Sequence[int]) -> list[int]:
        """How many operations each variable has seen."""
