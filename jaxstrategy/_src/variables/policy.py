"""Which kind a strategy gives a new variable: `VariablePolicy`."""

from __future__ import annotations

import abc
from typing import NoReturn, final

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy, AbstractVariablePolicy
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.parameter_servers.store import ServerPool
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.kinds import OnReadKind, VariableKind, Wanted
from jaxstrategy._src.variables.remote_kinds import (
    PerWorkerKind,
    ReadCopies,
    ServerKind,
    server_kind_of,
)
from jaxstrategy._src.variables.sharding_choice import Partitioner, PartitionFunction


class VariablePolicy(AbstractVariablePolicy):
    """Chooses how each variable is kept that is made in the scope of a strategy."""

    # How many shards each variable has; each is then a variable of its own,
    # made in their order; None: there are no shards.
    partitioner: PartitionFunction | None = None

    @abc.abstractmethod
    def kind(self, wanted: Wanted) -> VariableKind:
        """The kind of a new variable, which keeps it."""

    def adopt(self, kind: VariableKind, owner: AbstractStrategy) -> None:
        """Makes the kind of a variable that was sent to a worker one of this policy."""


class ReplicatedVariables(VariablePolicy):
    """Mirrored variables on some devices, on-read ones with a copy for each replica."""

    are_owned = True

    def __init__(self, replicas: Replicas, home: Replicas | None = None) -> None:
        self._each = replicas
        self.replicas = home or replicas

    def kind(self, wanted: Wanted) -> VariableKind:
        if wanted.per_worker:
            raise ValueError(
                f"Variable {wanted.name!r} was made with `per_worker_variable=True` "
                "outside of the scope of a ParameterServerStrategy: only that one has "
                "workers which each keep a copy. Make it in `strategy.scope()`; of "
                "other strategies, a variable with `synchronization='on_read'` has a "
                "copy for each replica."
            )
        if wanted.on_read and self.are_owned:
            return OnReadKind(wanted, self._each)
        if wanted.on_read:  # the one copy is what all of them combine to
            wanted = wanted._replace(aggregation=VariableAggregation.NONE)
        beside = context.current().colocated  # where `colocate_vars_with` wants them
        beside = beside.replicas if isinstance(beside, Handle) else beside
        return VariableKind(wanted, beside or self.replicas)


@final
class OrdinaryVariables(ReplicatedVariables):
    """Variables with one copy that belong to no strategy, which all steps may use."""

    are_owned = False

    def check_devices(self, devices: tuple[Device, ...]) -> None:
        """Raise if there are several devices: a variable has one copy."""
        if len(devices) > 1:
            raise ValueError(
                "`extended.colocate_vars_with` of the default strategy was given the "
                f"devices {_devices.names(devices)}; its variables have one copy. Give "
                "one device, or make them in the scope of a strategy."
            )


ORDINARY = OrdinaryVariables(Replicas.alone())
"""The policy of code that is part of no strategy."""


@final
class ServerVariables(VariablePolicy):
    """Each variable on the server whose turn it is."""

    are_owned = True

    def __init__(
        self,
        pool: ServerPool,
        home: Replicas,
        workers: Replicas,
        partitioner: Partitioner | None = None,
    ) -> None:
        self._pool = pool
        self.replicas = home  # of what the coordinator reads
        self._workers = workers
        self.partitioner = partitioner
        self.read_copies: ReadCopies | None = None  # as long as there is no coordinator

    def adopt(self, kind: VariableKind, owner: AbstractStrategy) -> None:
        """For functions that are traced here."""
        if isinstance(kind, ServerKind):
            kind.adopt(owner, self._pool, self._workers)

    def kind(self, wanted: Wanted) -> VariableKind:
        """On the next server; beside another variable in `colocate_vars_with`."""
        home, pool, workers = self.replicas, self._pool, self._workers
        if wanted.per_worker:
            return PerWorkerKind(wanted, home, lambda: self.read_copies)
        beside = server_kind_of(context.current().colocated)
        server = pool.next() if beside is None else beside.server
        return ServerKind(wanted, home, pool, server, workers)

    def check_devices(self, devices: tuple[Device, ...]) -> NoReturn:
        """No devices: variables are on servers."""
        raise ValueError(
            f"`extended.colocate_vars_with` was given {_devices.names(devices)}, but "
            "variables of this strategy are on parameter servers. Give a variable "
            "whose server others are to be on."
        )
