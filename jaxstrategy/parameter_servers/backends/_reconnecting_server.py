"""A parameter server over a network that breaks: `ReconnectingServer`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, final

import numpy as np

from jaxstrategy._errors import ParameterServerLost
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._remote import RemoteServer
from jaxstrategy.parameter_servers.wire._stream import Kind, Stream, WireFrame

SECONDS = 20.0
"""How long a server may be out of reach before it is lost."""

_PAUSE = 0.2
_MOST = 3  # times that one request is repeated; it may be what breaks the connection
_T = TypeVar("_T")


@final
class ReconnectingServer(AbstractServer):
    """Connects again when the network broke, as long as the server still has all."""

    def __init__(
        self,
        name: str,
        dial: Callable[[], Stream],
        patience: float,
        seconds: float = SECONDS,
        last_output: Callable[[], str | None] | None = None,
    ) -> None:
        self._name = name
        self._dial = dial
        self._patience = patience
        self._seconds = seconds
        self._last_output = last_output
        self._lock = threading.Lock()
        self._is_closed = False
        self._now = self._connected([])

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        is_first = True

        def create(server: RemoteServer) -> None:
            nonlocal is_first
            if not is_first:
                server.drop([number])  # it may be there already
            is_first = False
            server.create(number, value, is_table)

        self._asked(create)

    def drop(self, numbers: Sequence[int]) -> None:
        self._asked(lambda server: server.drop(numbers))

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        return self._asked(lambda server: server.read(reads))

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        repeats = call is not None or all(each.name == "set" for each in operations)
        return self._asked(lambda server: server.push(operations, call), repeats)

    def define(self, key: str, exported: bytes) -> None:
        self._asked(lambda server: server.define(key, exported))

    def fence(self, worker: int, incarnation: int) -> None:
        self._asked(lambda server: server.fence(worker, incarnation))

    def versions(self, numbers: Sequence[int]) -> list[int]:
        return self._asked(lambda server: server.versions(numbers))

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._is_closed = True
        self._now.close()

    def _asked(self, ask: Callable[[RemoteServer], _T], repeats: bool = True) -> _T:
        for _ in range(_MOST):
            server = self._now
            try:
                return ask(server)
            except ParameterServerLost as lost:
                self._connect_again(server, lost)
                if not repeats:
                    raise ParameterServerLost(
                        f"{lost} It was reached again, but whether the change that "
                        "was being made counts is not known."
                    ) from lost
        return ask(self._now)

    def _connect_again(self, broken: RemoteServer, lost: ParameterServerLost) -> None:
        """Reach the server over new connections."""
        with self._lock:  # the first that finds it broken connects for all
            end = time.monotonic() + self._seconds
            while self._now is broken:
                if self._is_closed or time.monotonic() >= end:
                    raise lost
                try:
                    stream = self._dial()
                except (ConnectionAbortedError, ConnectionRefusedError) as error:
                    said = self._last_output() if self._last_output else None
                    more = f"\nThe last that it wrote:\n{said}" if said else ""
                    raise ParameterServerLost(
                        f"{self._name} is lost: {error}.{more}"
                    ) from lost
                except ConnectionError:
                    time.sleep(_PAUSE)
                else:
                    self._now = self._connected([stream])

    def _connected(self, made: list[Stream]) -> RemoteServer:
        def dial() -> Stream:
            try:
                return made.pop()
            except IndexError:
                return self._dial()

        peer = Peer(
            self._name, dial, ParameterServerLost, self._patience, self._last_output
        )
        if made:
            peer.ask(WireFrame(Kind.PING))  # so that the stream is its to close
        return RemoteServer(peer)
