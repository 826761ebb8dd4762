"""The answers of a parameter server to other processes: `ServerAnswers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._responder import check_trusted, done
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
            Kind.FENCE: self._fence,
            Kind.VERSIONS: self._versions,
        }

    def __call__(self, request: WireFrame, stream: Stream) -> WireFrame:
        """The answer to a request.

        Raises:
          ClusterError: a stranger could have sent a program.
          ValueError: no server has such a request.
        """
        if request.kind == Kind.DEFINE:
            return self._define(request, stream)
        method = self._methods.get(request.kind)
        if method is None:
            raise ValueError(f"A parameter server was sent a request {request.kind}.")
        return method(request)

    def _create(self, request: WireFrame) -> WireFrame:
        number, is_table = request.fields
        (value,) = request.arrays
        self._server.create(_whole(number), value, bool(is_table))
        return done()

    def _drop(self, request: WireFrame) -> WireFrame:
        self._server.drop([_whole(each) for each in request.fields])
        return done()

    def _read(self, request: WireFrame) -> WireFrame:
        rows = iter(request.arrays)
        reads = [
            Read(_whole(variable), next(rows) if has else None)
            for variable, has in request.fields
        ]
        return done(None, self._server.read(reads))

    def _push(self, request: WireFrame) -> WireFrame:
        call, fields = request.fields
        operations, at = [], 0
        for name, variables, count, program in fields:
            operands = tuple(request.arrays[at : at + _whole(count)])
            changed = tuple([_whole(each) for each in variables])
            operations.append(ServerOperation(name, changed, operands, program))
            at += count
        number = None if call is None else CallNumber(*map(_whole, call))
        return done(bool(self._server.push(operations, number)))

    def _define(self, request: WireFrame, stream: Stream) -> WireFrame:
        # A program can call any function of the process by its address.
        check_trusted(stream, "A parameter server runs the programs that it is sent")
        self._server.define(request.fields, request.blob)
        return done()

    def _fence(self, request: WireFrame) -> WireFrame:
        worker, incarnation = map(_whole, request.fields)
        self._server.fence(worker, incarnation)
        return done()

    def _versions(self, request: WireFrame) -> WireFrame:
        numbers = [_whole(each) for each in request.fields]
        return done([int(each) for each in self._server.versions(numbers)])


def _whole(value: object) -> int:
    """A number of a message, which came from elsewhere."""
    if type(value) is not int:
        raise TypeError(f"A request has {value!r} where a whole number was wanted.")
    return value
