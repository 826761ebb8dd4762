"""The copies that workers have of a variable: `WorkerCopies`."""

from __future__ import annotations

import abc

import jax

from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.variables.kinds.kind import VariableKind
from jaxstrategy._src.variables.kinds.per_worker_kind import PerWorkerKind


class WorkerCopies(Handle, abc.ABC):
    """The method of variables made with `per_worker_variable=True`."""

    _kind: VariableKind

    def read_all(self) -> list[jax.Array]:
        """The present value of the copy of each worker, in the order of the workers.

        Only of a variable made with `per_worker_variable=True`. Each worker is asked
        between two functions; of one that was lost it waits until it is back, with the
        value that the variable began with.

        Returns:
          An array of the variable's shape for each worker.

        Raises:
          TypeError: it is another variable, which has one value.
          ContextError: in a scheduled function, or without a `ClusterCoordinator`.
        """
        if not isinstance(self._kind, PerWorkerKind):
            raise TypeError(
                f"`read_all` was called of variable {self.name!r}, of which workers "
                "have no copies of their own: `value()` is its value. With "
                "`per_worker_variable=True`, in the scope of a "
                "ParameterServerStrategy, they have."
            )
        return self._kind.read_all()
