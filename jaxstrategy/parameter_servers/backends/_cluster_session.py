"""What is said first on each connection within a cluster: `Hello`, `joined`."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, Literal, Self, final, get_args

from jaxstrategy.parameter_servers.wire import _listener, _peer
from jaxstrategy.parameter_servers.wire._stream import Kind, Stream, WireFrame
from jaxstrategy.processes._channel import Fields, has, is_text, is_whole
from jaxstrategy.processes._secret import Secret

COORDINATOR = secrets.token_hex(16)
"""The name of this process as a coordinator; another one has another name."""

_Wish = Literal["begin", "join", "end", "devices"]
_SECONDS = 10.0  # for an answer to it


@final
@dataclasses.dataclass(frozen=True)
class Hello:
    """Who calls a worker or parameter server, and for what.

    Attributes:
      wants: "begin" something with this name; "join" it, as another connection; "end"
        it; or only to know which "devices" there are.
      coordinator: the name of its process.
      strategy: the name of one strategy of it.
      life: of a worker, the name of one life; empty for a server.
      index: of the worker.
      servers: the addresses of all parameter servers, for a worker.
    """

    wants: _Wish
    coordinator: str
    strategy: str
    life: str = ""
    index: int = 0
    servers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The name of what is begun or joined, within one coordinator."""
        return self.strategy, self.life

    def with_wish(self, wants: Literal["join", "end"]) -> Self:
        """The same with another wish."""
        return dataclasses.replace(self, wants=wants)

    def frame(self) -> WireFrame:
        """It as it is sent."""
        return WireFrame(Kind.SESSION, dataclasses.asdict(self))

    @classmethod
    def of(cls, frame: WireFrame) -> Self | None:
        """What was sent; None if it was something else."""
        if frame.kind != Kind.SESSION or not has(frame.fields, _FIELDS):
            return None
        given: dict[str, Any] = {name: frame.fields[name] for name in _FIELDS}
        given["servers"] = tuple(given["servers"])
        return cls(**given)


def _is_addresses(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


_FIELDS: Fields = {
    "wants": lambda value: is_text(value) and value in get_args(_Wish),
    "coordinator": is_text,
    "strategy": is_text,
    "life": is_text,
    "index": is_whole,
    "servers": _is_addresses,
}


def joined(
    address: str, secret: Secret, hello: Hello
) -> tuple[Stream, Mapping[str, Any]]:
    """A stream to a task of a cluster, and what it says of itself."""
    try:
        stream = _listener.dialled(address, secret)
    except ConnectionError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise ConnectionRefusedError(f"nobody listens at {address}") from error
        raise
    try:
        stream.limit_silence(_SECONDS)
        stream.send(hello.frame())
        answer = stream.receive()
        stream.limit_silence(None)
    except (EOFError, OSError) as error:
        stream.close()
        raise ConnectionError(f"{address} does not answer ({error})") from error
    if answer.kind == Kind.FAILED:
        stream.close()
        why = _peer.raised_by(answer, address, may_unpickle=False)
        raise ConnectionAbortedError(str(why))
    return stream, answer.fields
