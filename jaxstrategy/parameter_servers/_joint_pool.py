"""The servers of several processes that make the same variables: `JointPool`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import final

import numpy as np

from jaxstrategy._errors import ClusterError
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._server_pool import ServerPool

_PAUSE = 0.05  # between two looks whether a variable is there


@final
class JointPool(ServerPool):
    """The servers of a strategy of which each worker process has one."""

    def __init__(
        self, servers: Sequence[AbstractServer], is_chief: bool, seconds: float = 300.0
    ) -> None:
        super().__init__(servers)
        self._is_chief = is_chief
        self._seconds = seconds
        self._in_order = itertools.count()

    def create(self, server: int, value: np.ndarray, is_table: bool = False) -> int:
        """The number of the next variable, once it is there."""
        number = next(self._in_order)
        if not self._is_chief:
            self._wait_for(server, number)
        elif not self._is_there(server, number):
            self.servers[server].create(number, value, is_table)
        self.know(number, server)
        return number

    def forget(self, number: int) -> None:
        """Nothing: other processes have the variable."""

    def _is_there(self, server: int, number: int) -> bool:
        try:
            self.servers[server].versions([number])
        except LookupError:
            return False
        return True

    def _wait_for(self, server: int, number: int) -> None:
        end = time.monotonic() + self._seconds
        while not self._is_there(server, number):
            if time.monotonic() > end:
                raise ClusterError(
                    f"The chief has not made variable number {number} within "
                    f"{self._seconds:.0f} s. All workers run the same program, which "
                    "makes the same variables in the same order; is the chief (or "
                    "worker 0) running?"
                )
            time.sleep(_PAUSE)
