"""A worker in another process: `RemoteWorker`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from jaxstrategy.parameter_servers._abstract_worker import AbstractWorker, Builder
from jaxstrategy.parameter_servers._shipped_program import Call, ShippedProgram
from jaxstrategy.parameter_servers.wire import _pickled
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._peer import Peer


@final
class RemoteWorker(AbstractWorker):
    """A worker that is asked over a stream; `WorkerAnswers` is the other end.

    Args:
      peer: its process, with the error `WorkerLost`.
      end: ends that process at once; None: only the connection is closed.
    """

    def __init__(self, peer: Peer, end: Callable[[], None] | None = None) -> None:
        self._peer = peer
        self._end = end

    def define(self, program: ShippedProgram) -> None:
        blob, arrays = _pickled.dumped_plainly(program)
        self._peer.ask(WireFrame(Kind.PROGRAM, None, blob, arrays))

    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        blob, arrays = _pickled.dumped(builder)
        self._peer.ask(WireFrame(Kind.BUILD, [resource, list(uses)], blob, arrays))

    def release(self, resources: Sequence[int]) -> None:
        self._peer.ask(WireFrame(Kind.RELEASE, list(resources)))

    def call(self, call: Call) -> list[np.ndarray]:
        fields = [call.number, call.program, call.iterators]
        answer = self._peer.ask(WireFrame(Kind.CALL, fields, arrays=call.arguments))
        if answer.blob:
            return _pickled.loaded(answer.blob, answer.arrays)
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
