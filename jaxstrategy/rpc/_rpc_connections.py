"""How clients connect to a server of methods: `first_peer`, `peer`."""

from __future__ import annotations

import dataclasses
import time

from jaxstrategy.parameter_servers.wire._listener import SECONDS, dialled
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._stream import Stream
from jaxstrategy.processes._secret import Secret
from jaxstrategy.rpc._rpc_errors import DeadlineExceededError, UnavailableError

_PAUSE = 0.05  # between attempts
_ANSWER_HEAD = 1 << 24  # bytes before the results: a list of methods, a message


@dataclasses.dataclass(frozen=True)
class RpcPlace:
    """The address of a server, and what is needed to connect there; prints as that.

    Attributes:
      largest: bytes of the results of one call.
    """

    address: str
    secret: Secret
    largest: int

    def __str__(self) -> str:
        return self.address

    def connected(self, wait: float = 0.0, seconds: float = SECONDS) -> Stream:
        """A new stream to the server.

        Raises:
          ClusterError: who listens there has another secret, or strangers could.
          ConnectionError: nobody listens there, or does not answer.
        """
        stream = dialled(self.address, self.secret, wait, seconds=seconds)
        stream.is_trusted = False  # so that nothing from it is unpickled
        stream.limit_received(_ANSWER_HEAD, self.largest + _ANSWER_HEAD)
        return stream


def peer(place: RpcPlace, first: Stream | None = None) -> Peer:
    """The server as somebody to ask, over a first stream and others like it."""
    streams = [] if first is None else [first]

    def dial() -> Stream:
        return streams.pop() if streams else place.connected()

    return Peer(f"The RPC server at {place}", dial, lost=UnavailableError)


def first_peer(place: RpcPlace, end: float | None) -> Peer:
    """The same once the server answers, which is waited for until a time, if any.

    Raises:
      ClusterError: who listens there has another secret, or strangers could.
      DeadlineExceededError: it does not answer by then.
    """
    while True:
        left = SECONDS if end is None else min(SECONDS, end - time.monotonic())
        try:
            return peer(place, place.connected(max(0.0, left), max(0.01, left)))
        except ConnectionError as error:
            if end is not None and time.monotonic() >= end:
                raise DeadlineExceededError(
                    f"No RPC server answered in time: {error}"
                ) from error
            time.sleep(_PAUSE)
