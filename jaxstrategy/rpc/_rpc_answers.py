"""The answers of an `RpcServer` to its clients: `RpcAnswers`."""

from __future__ import annotations

from typing import final

import jax

from jaxstrategy.parameter_servers.wire._peer import done
from jaxstrategy.parameter_servers.wire._stream import Kind, Stream, WireFrame
from jaxstrategy.rpc._rpc_errors import (
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RpcError,
)
from jaxstrategy.rpc._rpc_method import RpcMethod

REQUEST_HEAD = 1 << 20
"""Bytes of a request before its arrays: a name, and the types of the arguments."""


@final
class RpcAnswers:
    """Calls methods by their names; an `answer` of a `Responder`.

    It raises nothing: clients get a code and a message, never an exception itself.

    Args:
      largest: bytes of the arguments of a call.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._methods: dict[str, RpcMethod] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._methods

    def add(self, name: str, method: RpcMethod) -> None:
        """Know a method, before anybody asks."""
        self._methods[name] = method

    def __call__(self, request: WireFrame, stream: Stream) -> WireFrame:
        """The answer to a request."""
        try:
            return self._answered(request)
        except RpcError as error:
            return _failed(error)
        except Exception as error:  # of the user's function, whatever it raises
            return _failed(_as_status(error))

    def _answered(self, request: WireFrame) -> WireFrame:
        if request.kind == Kind.METHODS:
            methods = [each.described for each in self._methods.values()]
            return done({"largest": self._largest, "methods": methods})
        if request.kind != Kind.INVOKE:
            raise InternalError(f"An RPC server was sent a request {request.kind}.")
        name = request.fields
        method = self._methods.get(name) if isinstance(name, str) else None
        if method is None:
            raise InvalidArgumentError(f"{name} is not registered.")
        return done({"code": 0, "message": ""}, method(request.arrays))


def _failed(error: RpcError) -> WireFrame:
    # Of a message, the beginning: the head of an answer has a bound at the client.
    return done({"code": error.error_code, "message": error.message[:REQUEST_HEAD]})


def _as_status(error: Exception) -> RpcError:
    text = str(error) or type(error).__name__
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
    is_full = is_of_xla and text.startswith("RESOURCE_EXHAUSTED")
    if is_full or isinstance(error, MemoryError):
        return ResourceExhaustedError(text)
    return InvalidArgumentError(text)
