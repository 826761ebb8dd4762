"""The memory of a variable of which each worker has a copy: `OwnCell`."""

from __future__ import annotations

from types import EllipsisType
from typing import NoReturn, final

import jax

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.variables.remote_cell import RemoteCell


@final
class OwnCell(RemoteCell):
    """A `Cell` that nobody reads or writes but the functions of a worker.

    Args:
      resource: the copies.
      like: shape and dtype of each.
      name: the variable's, for messages.

    Attributes:
      resource: as given.
    """

    def __init__(
        self, resource: WorkerResource, like: jax.ShapeDtypeStruct, name: str
    ) -> None:
        super().__init__(like, name)
        self.resource = resource

    def __getitem__(self, index: EllipsisType) -> NoReturn:
        raise self._refusal()

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> ContextError:
        return ContextError(
            f"Variable {self._name!r} was made with `per_worker_variable=True`, and "
            "was read or changed outside of a scheduled function, where it has no "
            "value: each worker has a copy. `read_all()` reads all of them; functions "
            "that a `ClusterCoordinator` schedules read and change that of their "
            "worker."
        )
