"""A parameter server in another process: `RemoteServer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._peer import Peer


@final
class RemoteServer(AbstractServer):
    """A parameter server that is asked over streams; `ServerAnswers` is the other end.

    Args:
      peer: its process, with the error `ParameterServerLost`.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        fields = [number, is_table]
        self._peer.ask(WireFrame(Kind.CREATE, fields, arrays=(np.asarray(value),)))

    def drop(self, numbers: Sequence[int]) -> None:
        self._peer.ask(WireFrame(Kind.DROP, [int(number) for number in numbers]))

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        fields, rows = [], []
        for read in reads:
            fields.append([read.variable, read.rows is not None])
            if read.rows is not None:
                rows.append(np.asarray(read.rows))
        return list(self._peer.ask(WireFrame(Kind.READ, fields, arrays=rows)).arrays)

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        arrays = [operand for each in operations for operand in each.operands]
        fields = [
            [each.name, each.variables, len(each.operands), each.program]
            for each in operations
        ]
        request = WireFrame(Kind.PUSH, [call, fields], arrays=arrays)
        return bool(self._peer.ask(request).fields)

    def define(self, key: str, exported: bytes) -> None:
        self._peer.ask(WireFrame(Kind.DEFINE, key, exported))

    def fence(self, worker: int, incarnation: int) -> None:
        self._peer.ask(WireFrame(Kind.FENCE, [worker, incarnation]))

    def versions(self, numbers: Sequence[int]) -> list[int]:
        request = WireFrame(Kind.VERSIONS, [int(number) for number in numbers])
        return list(self._peer.ask(request).fields)

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._peer.close()
