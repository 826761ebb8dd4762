"""Variables of which each worker of a coordinator has a copy: `PerWorkerKind`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import Shaped
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.cell import AbstractCell, OwnCell
from jaxstrategy._src.variables.initial_value import Start
from jaxstrategy._src.variables.kinds.kind import SentKind, VariableKind
from jaxstrategy._src.variables.kinds.mirrored_kind import MirroredKind
from jaxstrategy._src.variables.sharding_choice import ShardingChoice

ReadCopies = Callable[[WorkerResource], list[np.ndarray]]
"""What each worker has of a resource, in the order of the workers."""


@final
class PerWorkerKind(MirroredKind):
    """A copy in the memory of each worker, which its functions read and change.

    Args:
      name: the variable's.
      aggregation: of the variable, between the replicas of a worker.
      home: the replica of functions that are traced.
      owner: the variable's strategy.
      reader: returns what reads the copies; None while there is no coordinator.
    """

    describe = "with a copy on each worker"
    is_readable = False
    _cell: OwnCell

    def __init__(
        self,
        name: str,
        aggregation: VariableAggregation,
        home: Replicas,
        owner: AbstractStrategy | None,
        reader: Callable[[], ReadCopies | None],
    ) -> None:
        super().__init__(name, aggregation, home, owner)
        self._reader = reader

    @property
    def device(self) -> str:
        """The name that TensorFlow has for the memory of the workers."""
        return "/job:worker/device:CPU:0"

    @property
    def resource(self) -> WorkerResource:
        """The copies."""
        return self._cell.resource

    def divided(self, leaf: Shaped, choice: ShardingChoice) -> Self:
        """This kind."""
        if choice.divides:
            raise ValueError(
                f"Variable {self.name!r} was made with `sharding` and with "
                "`per_worker_variable=True`. Leave one of both out: each worker has "
                "all of its copy."
            )
        if is_key(leaf.dtype):
            raise TypeError(
                f"Variable {self.name!r} holds random keys, which workers do not "
                "keep. Keep `jax.random.key_data(key)`, and make the key of it."
            )
        return self

    def cell(self, start: Start) -> OwnCell:
        """The copies, each of which a worker makes when it needs it."""
        value = np.array(start.array)
        like = jax.ShapeDtypeStruct(value.shape, value.dtype)
        self._cell = OwnCell(WorkerResource(_FirstValue(value)), like, self.name)
        return self._cell

    def sent(self) -> SentKind:
        """The number by which workers know their copies."""
        like = jax.ShapeDtypeStruct(self._cell.shape, self._cell.dtype)
        return _SentPerWorkerKind(self.resource.number, like)

    @classmethod
    def on_worker(
        cls, name: str, aggregation: VariableAggregation, sent: _SentPerWorkerKind
    ) -> PerWorkerKind:
        """The kind of a variable for functions that a worker traces."""
        kind = cls(name, aggregation, Replicas.alone(), None, lambda: None)
        # The worker has built it for the coordinator, who says when it is gone.
        resource = WorkerResource(_refused, number=sent.number)
        kind._cell = OwnCell(resource, sent.like, name)
        return kind

    def read_all(self) -> list[jax.Array]:
        """What each worker has."""
        read = self._reader()
        if context.current().function is not None:
            raise ContextError(
                f"`read_all` of variable {self.name!r} was called in a scheduled "
                "function, which sees the copy of its own worker only: `value()`."
            )
        if read is None:
            raise ContextError(
                f"`read_all` of variable {self.name!r} was called before there are "
                "workers that have copies of it. Make the "
                "`coordinator.ClusterCoordinator(strategy)` first."
            )
        return [jnp.asarray(copy) for copy in read(self.resource)]


@final
@dataclasses.dataclass(frozen=True)
class _SentPerWorkerKind(SentKind):
    number: int
    like: jax.ShapeDtypeStruct

    def on_worker(
        self, name: str, aggregation: VariableAggregation
    ) -> tuple[VariableKind, AbstractCell]:
        kind = PerWorkerKind.on_worker(name, aggregation, self)
        return kind, kind._cell


def _refused(index: int) -> NoReturn:
    raise RuntimeError("The coordinator has this variable built, and no function.")


class _FirstValue:
    """Makes the copy of a worker; in processes, it is sent there."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = value

    def __call__(self, index: int) -> np.ndarray:
        return self._value


def per_worker_kind_of(variable: Handle | None) -> PerWorkerKind | None:
    """How a variable is kept that each worker has a copy of; None of others."""
    kind = getattr(variable, "_kind", None)
    return kind if isinstance(kind, PerWorkerKind) else None
