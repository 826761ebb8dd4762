"""The policy of strategies whose variables are on parameter servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NoReturn, final

from jaxstrategy._options import VariableAggregation
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.parameter_servers._server_pool import ServerPool
from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.variables._partitioners import Partitioner
from jaxstrategy.variables._policy import VariablePolicy
from jaxstrategy.variables.kinds._kind import VariableKind
from jaxstrategy.variables.kinds._per_worker_kind import PerWorkerKind, ReadCopies
from jaxstrategy.variables.kinds._server_kind import ServerKind, server_kind_of

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
        beside = server_kind_of(_context.current().colocated)
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
