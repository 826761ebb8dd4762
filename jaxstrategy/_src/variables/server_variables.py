"""The policy of strategies whose variables are on parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn, final

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.parameter_servers.protocol import ServerPool
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.variables.kinds.kind import VariableKind
from jaxstrategy._src.variables.kinds.per_worker_kind import PerWorkerKind, ReadCopies
from jaxstrategy._src.variables.kinds.server_kind import ServerKind, server_kind_of
from jaxstrategy._src.variables.partitioners import Partitioner
from jaxstrategy._src.variables.policy import VariablePolicy

Pause = Callable[[int], contextlib.AbstractContextManager[None]]
"""A `with` block in which no function runs, for the checkpoint of a step."""


@final
class ServerVariables(VariablePolicy):
    """Each variable on the server whose turn it is.

    Args:
      pool: the servers.
      home: where the coordinator has what it reads.
      workers: the replicas of one worker.
      partitioner: divides variables into shards, each of them a variable.

    Attributes:
      partitioner: as given.
      read_copies: asks each worker what it has; None while there is no coordinator.
      pause: lets no function change variables, for a checkpoint of some step; likewise.
    """

    are_owned = True

    def __init__(
        self,
        pool: ServerPool,
        home: Replicas,
        workers: Replicas,
        partitioner: Partitioner | None = None,
    ) -> None:
        self._pool = pool
        self._home = home
        self._workers = workers
        self.partitioner = partitioner
        self.read_copies: ReadCopies | None = None
        self.pause: Pause | None = None

    @property
    def replicas(self) -> Replicas:
        """The place of what the coordinator reads."""
        return self._home

    def snapshot(self, step: int) -> contextlib.AbstractContextManager[None]:
        """No function of the coordinator changes variables in the block."""
        return contextlib.nullcontext() if self.pause is None else self.pause(step)

    def adopted(self, kind: VariableKind, owner: AbstractStrategy) -> VariableKind:
        """The kind of a variable that was sent, for functions that are traced here."""
        own = isinstance(kind, ServerKind)
        return kind.of(owner, self._pool, self._workers) if own else kind

    def kind(
        self,
        name: str,
        on_read: bool,
        aggregation: VariableAggregation,
        owner: AbstractStrategy | None,
    ) -> VariableKind:
        """On the next server; beside another variable in `colocate_vars_with`."""
        assert owner is not None, "only code in its scope asks the strategy's policy"
        beside = server_kind_of(context.current().colocated)
        server = self._pool.next() if beside is None else beside.server
        return ServerKind(
            name, aggregation, self._home, owner, self._pool, server, self._workers
        )

    def check_devices(self, devices: tuple[Device, ...]) -> NoReturn:
        """No devices: variables are on servers.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            f"`extended.colocate_vars_with` was given {_devices.names(devices)}, but "
            "variables of this strategy are on parameter servers. Give a variable "
            "whose server others are to be on."
        )

    def kind_for_each_worker(
        self, name: str, aggregation: VariableAggregation, owner: AbstractStrategy
    ) -> VariableKind:
        """In the memory of each worker, on no server."""
        return PerWorkerKind(
            name, aggregation, self._home, owner, lambda: self.read_copies
        )
