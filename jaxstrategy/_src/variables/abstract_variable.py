"""What variables and tables in shards have alike, and which variables there are."""

from __future__ import annotations

import abc
import threading
import weakref
from collections.abc import Callable
from typing import Generic, NoReturn, Self, TypeVar, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.options import VariableAggregation, VariableSynchronization
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.variables.access import Access, Cell
from jaxstrategy._src.variables.changes import Assignments, Operators, Scatters
from jaxstrategy._src.variables.kinds import VariableKind

T = TypeVar("T")


@final
class Reference(Generic[T]):
    """Stands for one object; equal to other references to that object.

    Args:
      referent: the object, which the reference keeps alive.
    """

    def __init__(self, referent: T) -> None:
        self._referent = referent

    def deref(self) -> T:
        """The object."""
        return self._referent

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._referent is self._referent

    def __hash__(self) -> int:
        return id(self._referent)

    def __repr__(self) -> str:
        return f"<Reference to {self._referent!r}>"


# Weak: no variable, with its memory, and no strategy outlives who holds it.
# Those of no strategy, and those of each.
_ordinary: weakref.WeakSet[Handle] = weakref.WeakSet()
_of_strategy: weakref.WeakKeyDictionary[AbstractStrategy, weakref.WeakSet[Handle]] = (
    weakref.WeakKeyDictionary()
)
# To go through a WeakSet to which another thread adds raises RuntimeError.
_lock = threading.Lock()


def add(variable: Handle, owner: AbstractStrategy | None) -> None:
    """Count `variable` as alive for as long as somebody holds it."""
    with _lock:
        if owner is None:
            _ordinary.add(variable)
        else:
            _of_strategy.setdefault(owner, weakref.WeakSet()).add(variable)


def usable_by(strategy: AbstractStrategy) -> list[Handle]:
    """The variables that steps of `strategy` may use, oldest first."""
    with _lock:
        found = [*_ordinary, *_of_strategy.get(strategy, ())]
    # A set has the order of addresses, which differs between the processes of a job.
    return sorted(found, key=lambda variable: variable.number)


class VariableLike(Operators, Assignments, Scatters):
    """What a variable and a table in shards have alike."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in messages."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""

    @property
    def ndim(self) -> int:
        """The number of dimensions of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self.shape))

    @property
    @abc.abstractmethod
    def strategy(self) -> AbstractStrategy | None:
        """The strategy it belongs to, None for an ordinary variable."""

    @property
    def distribute_strategy(self) -> AbstractStrategy | None:
        """The same as `strategy`, under TensorFlow's name."""
        return self.strategy

    @property
    def is_distributed(self) -> bool:
        """Whether it belongs to a strategy."""
        return self.strategy is not None

    def read_value(self) -> jax.Array:
        """The same as `value`, of the variable's shape.

        Raises:
          ValueError: outside `run`, an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
        """
        return self.value()

    @abc.abstractmethod
    def numpy(self) -> np.ndarray:
        """The value as a NumPy array; not inside `run`."""

    def __array__(
        self, dtype: np.dtype | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def ref(self) -> Reference[Self]:
        """A reference that equals those to the same variable, as a key of dicts.

        Variables themselves are hashable, too: `{v: 1}` finds `v` by identity.

        >>> import jaxstrategy as js
        >>> v = js.Variable(1.0)
        >>> v.ref() == v.ref(), v.ref().deref() is v
        (True, True)
        """
        return Reference(self)

    def __copy__(self) -> Self:
        return self

    def _cannot_be_pickled(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: it stands for memory of this "
            "process's devices. Save `variable.numpy()`, and assign it to a variable "
            "of the other process."
        )


class AbstractVariable(VariableLike, Handle):
    """One variable: `Variable`, for files that it is made of."""

    _name: str
    _shape: tuple[int, ...]
    _dtype: np.dtype
    _trainable: bool
    _synchronization: VariableSynchronization
    _aggregation: VariableAggregation
    _strategy: AbstractStrategy | None
    _kind: VariableKind
    _cell: Cell

    # What no assignment changes.

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """The moment at which its copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The operation that makes one value of its copies, or of those assigned."""
        return self._aggregation

    @property
    def strategy(self) -> AbstractStrategy | None:
        """The strategy it belongs to, None for an ordinary variable."""
        return self._strategy

    # Where it is.

    @property
    def replicas(self) -> Replicas:
        """The replicas that have a copy each; one for an ordinary variable."""
        return self._kind.replicas

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold its copies, in replica order."""
        return self._kind.replicas.devices

    @property
    def device(self) -> Device | str:
        """The device that holds the first of its copies; the name of one elsewhere."""
        return self._kind.device

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that hold its copies."""
        return self._kind.replicas.mesh

    @property
    def sharding(self) -> NamedSharding:
        """The placement of the copies."""
        return self._kind.sharding

    @property
    def sharding_of_value(self) -> NamedSharding:
        """The placement of a value that all copies take."""
        return self._kind.sharding_of_value

    @property
    def kept(self) -> str:
        """The way in which it is kept: `"mirrored"`, `"on read"`, and so on."""
        return self._kind.describe

    @property
    def division(self) -> LeafSharding:
        """The dimension along which it is divided over the replicas, or why none is."""
        return self._kind.division

    @property
    def copies_must_agree(self) -> bool:
        """Whether it has no copies that may differ."""
        return self._kind.copies_must_agree

    def lives_on(self, replicas: Replicas) -> bool:
        """Whether steps of these replicas can work on it where it is."""
        return self._strategy is not None and self._kind.replicas == replicas

    @property
    def cell(self) -> Cell:
        """The holder of all copies, outside of steps."""
        return self._cell

    @abc.abstractmethod
    def _access(self) -> Access:
        """How the code that asks may use it; raises if it is another strategy's."""

    @abc.abstractmethod
    def _change_by(
        self, make: Callable[..., jax.Array | PerReplica], *given: Value
    ) -> jax.Array | PerReplica:
        """Changes it by `make(access, *given)`; returns the new value."""

    @abc.abstractmethod
    def _remote_rows(self, numbers: np.ndarray) -> jax.Array:
        """Some rows, each of which it has, of one that is on a server."""
