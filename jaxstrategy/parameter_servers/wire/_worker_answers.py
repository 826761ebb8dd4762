"""The answers of a worker to the coordinator: `WorkerAnswers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

from jaxstrategy.parameter_servers._abstract_worker import AbstractWorker
from jaxstrategy.parameter_servers._operations import CallNumber
from jaxstrategy.parameter_servers._shipped_program import Call
from jaxstrategy.parameter_servers.wire import _pickled, _wire_types
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._responder import check_trusted, done
from jaxstrategy.parameter_servers.wire._stream import Stream

if TYPE_CHECKING:  # it would import JAX
    from jaxstrategy.parameter_servers._worker_engine import WorkerEngine


@final
class WorkerAnswers:
    """Gives the requests of `RemoteWorker` to a worker; an `answer` of a `Responder`.

    Programs and functions are unpickled, so that only the job's coordinator may ask.

    Args:
      worker: that of this process.
    """

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
        """The answer to a request.

        Raises:
          ClusterError: a stranger could have sent it.
          ValueError: no worker has such a request.
        """
        check_trusted(
            stream, "A worker runs the programs and functions that it is sent"
        )
        method = self._methods.get(request.kind)
        if method is None:
            raise ValueError(f"A worker was sent a request {request.kind}.")
        return method(request)

    def _program(self, request: WireFrame) -> WireFrame:
        self._worker.define(_pickled.loaded(request.blob, request.arrays))
        return done()

    def _build(self, request: WireFrame) -> WireFrame:
        resource, uses = request.fields
        builder = _pickled.loaded(request.blob, request.arrays)
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
        if all(_wire_types.is_plain(each.dtype) for each in results):
            return done(None, results)
        blob, arrays = _pickled.dumped_plainly(results)
        return WireFrame(Kind.DONE, None, blob, arrays)

    def _own(self, request: WireFrame) -> WireFrame:
        return done(None, [self._worker.own(request.fields)])
