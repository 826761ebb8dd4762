"""Which incarnation of each worker counts: `Incarnations`."""

from __future__ import annotations

import threading
import weakref
from typing import final

from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend


@final
class Incarnations:
    """The number that each worker pushes with; servers refuse pushes with earlier ones.

    A worker that is lost gets a new one, and so does one that runs a function that was
    cancelled: what that pushes from now on does not count.

    Args:
      backend: has the servers.
    """

    def __init__(self, backend: AbstractWorkerBackend) -> None:
        self._servers = tuple(backend.servers)
        self._numbers = _of_backends.setdefault(backend, [0] * backend.num_workers)
        self._lock = threading.Lock()

    def __getitem__(self, worker: int) -> int:
        return self._numbers[worker]

    def fence(self, worker: int) -> None:
        """What a worker pushes with its present number does not count any more.

        Raises:
          ParameterServerLost: a server is gone.
        """
        with self._lock:
            self._numbers[worker] += 1
            for server in self._servers:
                server.fence(worker, self._numbers[worker])

    def fence_all(self) -> None:
        """As `fence`, of all workers."""
        for worker in range(len(self._numbers)):
            self.fence(worker)


# A second coordinator of the same servers goes on from the numbers of the first.
_of_backends: weakref.WeakKeyDictionary[AbstractWorkerBackend, list[int]] = (
    weakref.WeakKeyDictionary()
)
