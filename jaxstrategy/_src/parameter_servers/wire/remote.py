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
    Answer,
    Peer,
    ReconnectingPeer,
    check_trusted,
    done,
)
from jaxstrategy._src.parameter_servers.wire.stream import Kind, Stream, WireFrame


@final
class RemoteServer(AbstractServer):
    """Asks a parameter server over streams; `answers_of_server` is the other end.

    Attributes:
      peer: the server's process, to be replaced when another one is started for it.
    """

    def __init__(self, peer: Peer | ReconnectingPeer) -> None:
        self.peer = peer

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        fields = [number, is_table]
        self.peer.ask(WireFrame(Kind.CREATE, fields, arrays=(np.asarray(value),)))

    def drop(self, numbers: Sequence[int]) -> None:
        self.peer.ask(WireFrame(Kind.DROP, [int(number) for number in numbers]))

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        fields, rows = [], []
        for read in reads:
            fields.append([read.variable, read.rows is not None])
            if read.rows is not None:
                rows.append(np.asarray(read.rows))
        return list(self.peer.ask(WireFrame(Kind.READ, fields, arrays=rows)).arrays)

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        arrays = [operand for each in operations for operand in each.operands]
        fields = [
            [each.name, each.variables, len(each.operands), each.program]
            for each in operations
        ]
        request = WireFrame(Kind.PUSH, [call, fields], arrays=arrays)
        return bool(self.peer.ask(request).fields)

    def define(self, key: str, exported: bytes) -> None:
        self.peer.ask(WireFrame(Kind.DEFINE, key, exported))

    def fence(self, worker: int, incarnation: int) -> None:
        self.peer.ask(WireFrame(Kind.FENCE, [worker, incarnation]))

    def versions(self, numbers: Sequence[int]) -> list[int]:
        request = WireFrame(Kind.VERSIONS, [int(number) for number in numbers])
        return list(self.peer.ask(request).fields)

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self.peer.close()


@final
class RemoteWorker(AbstractWorker):
    """A worker that is asked over a stream; `answers_of_worker` is the other end."""

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


def answers_of_server(server: AbstractServer) -> Answer:
    """Answers the requests of a `RemoteServer`."""

    def answer(request: WireFrame, stream: Stream) -> WireFrame:
        fields, arrays = request.fields, request.arrays
        match request.kind:
            case Kind.READ:
                rows = iter(arrays)
                reads = [
                    Read(_whole(variable), next(rows) if has else None)
                    for variable, has in fields
                ]
                return done(None, server.read(reads))
            case Kind.PUSH:
                call, operations = fields
                pushed, at = [], 0
                for name, variables, count, program in operations:
                    operands = tuple(arrays[at : at + _whole(count)])
                    changed = tuple([_whole(each) for each in variables])
                    pushed.append(ServerOperation(name, changed, operands, program))
                    at += count
                number = None if call is None else CallNumber(*map(_whole, call))
                return done(bool(server.push(pushed, number)))
            case Kind.CREATE:
                number, is_table = fields
                (value,) = arrays
                server.create(_whole(number), value, bool(is_table))
            case Kind.DROP:
                server.drop([_whole(each) for each in fields])
            case Kind.DEFINE:
                # A program can call any function of the process by its address.
                check_trusted(
                    stream, "A parameter server runs the programs that it is sent"
                )
                server.define(fields, request.blob)
            case Kind.FENCE:
                worker, incarnation = map(_whole, fields)
                server.fence(worker, incarnation)
            case Kind.VERSIONS:
                numbers = [_whole(each) for each in fields]
                return done([int(each) for each in server.versions(numbers)])
            case kind:
                raise ValueError(f"A parameter server was sent a request {kind}.")
        return done()

    return answer


def _whole(value: object) -> int:
    """A number of a message, which came from elsewhere."""
    if type(value) is not int:
        raise TypeError(f"A request has {value!r} where a whole number was wanted.")
    return value


if TYPE_CHECKING:  # it would import JAX
    from jaxstrategy._src.parameter_servers.worker import WorkerEngine


def answers_of_worker(worker: AbstractWorker | WorkerEngine) -> Answer:
    """Answers the requests of a `RemoteWorker`."""

    def answer(request: WireFrame, stream: Stream) -> WireFrame:
        check_trusted(
            stream, "A worker runs the programs and functions that it is sent"
        )
        fields, arrays = request.fields, request.arrays
        match request.kind:
            case Kind.CALL:
                number, program, iterators = fields
                counted = None if number is None else CallNumber(*number)
                results = worker.call(
                    Call(counted, program, tuple(arrays), tuple(iterators))
                )
                if all(_stream.is_plain(each.dtype) for each in results):
                    return done(None, results)
                blob, arrays = _peer.dumped_plainly(results)
                return WireFrame(Kind.DONE, None, blob, arrays)
            case Kind.PROGRAM:
                worker.define(_peer.loaded(request.blob, arrays))
            case Kind.BUILD:
                resource, uses = fields
                builder = _peer.loaded(request.blob, arrays)
                worker.build(resource, builder, tuple(uses))
            case Kind.RELEASE:
                worker.release(fields)
            case Kind.OWN:
                return done(None, [worker.own(fields)])
            case kind:
                raise ValueError(f"A worker was sent a request {kind}.")
        return done()

    return answer
