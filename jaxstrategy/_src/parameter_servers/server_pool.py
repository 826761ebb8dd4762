"""The servers of a strategy, and which variables are where."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol, final

import numpy as np

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.parameter_servers.protocol import AbstractServer

_numbers = itertools.count()


class Exported(Protocol):
    """A program in the form of `jax.export`, with a key of its own."""

    @property
    def key(self) -> str: ...

    @property
    def exported(self) -> bytes: ...


class ServerPool:
    """The servers of a strategy."""

    def __init__(self, servers: Sequence[AbstractServer]) -> None:
        self.servers = tuple(servers)
        self._turn = 0
        self._lock = threading.Lock()
        self._homes: dict[int, int] = {}
        self._gone: list[int] = []
        self._defined: dict[tuple[int, str], bytes] = {}

    def next(self) -> int:
        """The number of the server whose turn it is; then it is the next one's."""
        with self._lock:
            turn, self._turn = self._turn, (self._turn + 1) % len(self.servers)
        return turn

    def create(self, server: int, value: np.ndarray, is_table: bool = False) -> int:
        """Keep a new variable there, of the shape of `value`; returns its number."""
        self.drop_gone()
        number = next(_numbers)
        self.servers[server].create(number, value, is_table)
        self._homes[number] = server
        return number

    def know(self, number: int, server: int) -> None:
        """Take note of a variable that somebody else has made."""
        self._homes[number] = server

    def home(self, number: int) -> int:
        """The number of the server that has a variable."""
        return self._homes[number]

    def forget(self, number: int) -> None:
        """A variable is gone."""
        self._gone.append(number)

    def drop_gone(self) -> None:
        """Tell the servers which variables are gone."""
        by_server: defaultdict[int, list[int]] = defaultdict(list)
        while self._gone:
            number = self._gone.pop()
            by_server[self._homes.pop(number)].append(number)
        for server, numbers in by_server.items():
            self.servers[server].drop(numbers)

    def define(self, server: int, program: Exported) -> None:
        """Send a program for updates to a server, once."""
        if (server, program.key) not in self._defined:
            self.servers[server].define(program.key, program.exported)
            self._defined[server, program.key] = program.exported

    def define_again(self, server: int) -> None:
        """Send all programs for updates to a server that was started again."""
        for (number, key), exported in list(self._defined.items()):
            if number == server:
                self.servers[server].define(key, exported)


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
