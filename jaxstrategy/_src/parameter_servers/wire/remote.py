"""Servers and workers in other processes, and who answers there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from jaxstrategy._src.parameter_servers.protocol import (
    AbstractServer,
    AbstractWorker,
    Builder,
    Call,
    CallNumber,
    Read,
    ServerOperation,
    ShippedProgram,
)
from jaxstrategy._src.parameter_servers.wire import peer as _peer, stream as _stream
from jaxstrategy._src.parameter_servers.wire.peer import (
    Peer,
    ReconnectingPeer,
    check_trusted,
    done,
)
from jaxstrategy._src.parameter_servers.wire.stream import Kind, Stream, WireFrame


@final
class RemoteServer(AbstractServer):
    """Asks a parameter server over streams; `ServerAnswers` is the other end."""

    def __init__(self, peer: Peer | ReconnectingPeer) -> None:
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


@final
class RemoteWorker(AbstractWorker):
    """A worker that is asked over a stream; `WorkerAnswers` is the other end."""

    def __init__(self, peer: Peer, end: Callable[[], None] | None = None) -> None:
        self._peer = peer
        self._end = end

    def define(self, program: ShippedProgram) -> None:
        blob, arrays = _peer.dumped_plainly(program)
        self._peer.ask(WireFrame(Kind.PROGRAM, None, blob, arrays))

    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        blob, arrays = _peer.dumped(builder)
        self._peer.ask(WireFrame(Kind.BUILD, [resource, list(uses)], blob, arrays))

    def release(self, resources: Sequence[int]) -> None:
        self._peer.ask(WireFrame(Kind.RELEASE, list(resources)))

    def call(self, call: Call) -> list[np.ndarray]:
        fields = [call.number, call.program, call.iterators]
        answer = self._peer.ask(WireFrame(Kind.CALL, fields, arrays=call.arguments))
        if answer.blob:
            return _peer.loaded(answer.blob, answer.arrays)
        return list(answer.arrays)

    def own(self, variable: int) -> np.ndarray:
        (value,) = self._peer.ask(WireFrame(Kind.OWN, variable)).arrays
        return value

    def kill(self) -> None:
        if self._end is not None:
            self._end()
        self._peer.close("it was ended here")

    def close(self) -> None:
        """Close the connection; a worker that serves it ends by itself."""
        self._peer.close()


@final
class ServerAnswers:
    """Answers the requests of `RemoteServer`, for a `Responder`."""

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
        """The answer to a request."""
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


if TYPE_CHECKING:  # it would import JAX
    from jaxstrategy._src.parameter_servers.worker import WorkerEngine


@final
class WorkerAnswers:
    """Answers the requests of `RemoteWorker`, for a `Responder`."""

    def __init__(self, worker: AbstractWorker | WorkerEngine) -> None:
        self._worker = worker
        self._methods: dict[int, Callable[[WireFrame], WireFrame]] = {
            Kind.PROGRAM: self._program,
            Kind.BUILD: self._build,
            Kind.RELEASE: self._release,
            Kind.CALL: self._call,
            Kind.OWN: self._own,
        }

    def __call__(self, request: WireFrame, stream: Stream) -> WireFrame:
        """The answer to a request."""
        check_trusted(
            stream, "A worker runs the programs and functions that it is sent"
        )
        method = self._methods.get(request.kind)
        if method is None:
            raise ValueError(f"A worker was sent a request {request.kind}.")
        return method(request)

    def _program(self, request: WireFrame) -> WireFrame:
        self._worker.define(_peer.loaded(request.blob, request.arrays))
        return done()

    def _build(self, request: WireFrame) -> WireFrame:
        resource, uses = request.fields
        builder = _peer.loaded(request.blob, request.arrays)
        self._worker.build(resource, builder, tuple(uses))
        return done()

    def _release(self, request: WireFrame) -> WireFrame:
        self._worker.release(request.fields)
        return done()

    def _call(self, request: WireFrame) -> WireFrame:
        number, program, iterators = request.fields
        arguments = tuple(request.arrays)
        counted = None if number is None else CallNumber(*number)
        call = Call(counted, program, arguments, tuple(iterators))
        results = self._worker.call(call)
        if all(_stream.is_plain(each.dtype) for each in results):
            return done(None, results)
        blob, arrays = _peer.dumped_plainly(results)
        return WireFrame(Kind.DONE, None, blob, arrays)

    def _own(self, request: WireFrame) -> WireFrame:
        return done(None, [self._worker.own(request.fields)])
