"""The answers of a parameter server to other processes: `ServerAnswers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._responder import done
from jaxstrategy.parameter_servers.wire._stream import Stream


@final
class ServerAnswers:
    """Gives the requests of `RemoteServer` to a server; an `answer` of a `Responder`.

    Nothing is unpickled. Programs for updates come in the form of `jax.export`.

    Args:
      server: that of this process.
    """

    def __init__(self, server: AbstractServer) -> None:
        self._server = server
        self._methods: dict[int, Callable[[WireFrame], WireFrame]] = {
            Kind.CREATE: self._create,
            Kind.DROP: self._drop,
            Kind.READ: self._read,
            Kind.PUSH: self._push,
            Kind.DEFINE: self._define,
            Kind.FENCE: self._fence,
            Kind.VERSIONS: self._versions,
        }

    def __call__(self, request: WireFrame, stream: Stream) -> WireFrame:
        """The answer to a request.

        Raises:
          ValueError: no server has such a request.
        """
        method = self._methods.get(request.kind)
        if method is None:
            raise ValueError(f"A parameter server was sent a request {request.kind}.")
        return method(request)

    def _create(self, request: WireFrame) -> WireFrame:
        number, is_table = request.fields
        (value,) = request.arrays
        self._server.create(number, value, is_table)
        return done()

    def _drop(self, request: WireFrame) -> WireFrame:
        self._server.drop(request.fields)
        return done()

    def _read(self, request: WireFrame) -> WireFrame:
        rows = iter(request.arrays)
        reads = [Read(k, next(rows) if has else None) for k, has in request.fields]
        return done()._replace(arrays=self._server.read(reads))

    def _push(self, request: WireFrame) -> WireFrame:
        call, fields = request.fields
        operations, at = [], 0
        for name, variables, count, program in fields:
            operands = tuple(request.arrays[at : at + count])
            operations.append(
                ServerOperation(name, tuple(variables), operands, program)
            )
            at += count
        number = None if call is None else CallNumber(*call)
        return done(bool(self._server.push(operations, number)))

    def _define(self, request: WireFrame) -> WireFrame:
        self._server.define(request.fields, request.blob)
        return done()

    def _fence(self, request: WireFrame) -> WireFrame:
        worker, incarnation = request.fields
        self._server.fence(worker, incarnation)
        return done()

    def _versions(self, request: WireFrame) -> WireFrame:
        return done([int(each) for each in self._server.versions(request.fields)])
