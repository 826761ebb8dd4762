"""The memory of a variable: on devices, on a server, one for each worker."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any, NoReturn, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractServer,
    Read,
    ServerOperation,
)
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.values.arrays import is_traced


class Holder(Protocol):
    """A holder of a variable's copies, read and written whole, with `[...]`.

    A `Cell` between steps; inside a step a `jax.Ref`, of one replica's copy.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it holds."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Of what it holds."""
        ...

    def __getitem__(self, index: EllipsisType, /) -> jax.Array: ...

    def __setitem__(self, index: EllipsisType, value: jax.Array, /) -> None: ...


class IsReference(Exception):
    """A cell has no array to lend any more."""


class AbstractCell(abc.ABC):
    """What holds all copies of a variable between steps, here or elsewhere.

    Attributes:
      array: what it holds; None if it cannot be lent.
      is_alone: whether a program may overwrite the array.
    """

    array: Any
    is_alone: bool

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of what it holds."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """Of what it holds."""

    @property
    @abc.abstractmethod
    def is_reference(self) -> bool:
        """Whether it has become a reference."""

    @property
    @abc.abstractmethod
    def ref(self) -> jax.Ref:
        """The reference that it becomes."""

    @abc.abstractmethod
    def __getitem__(self, index: EllipsisType, /) -> jax.Array: ...

    @abc.abstractmethod
    def __setitem__(self, index: EllipsisType, value: jax.Array, /) -> None: ...

    @abc.abstractmethod
    def lend(self) -> jax.Array:
        """The array, for a program that may overwrite it; it must be replaced then.

        It has the shape of the cell.
        """


@final
class Cell(AbstractCell):
    """Read and written like a reference, with `[...]`.

    Args:
      array: what it holds.
      is_alone: whether nobody else can have the array, or its memory.

    Attributes:
      array: what it holds, None once it is a reference.
      is_alone: whether a program may overwrite the array.
    """

    def __init__(self, array: jax.Array, is_alone: bool = False) -> None:
        self.array: Any = array
        self._ref: Any = None
        self.is_alone = is_alone

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it holds."""
        return (self.array if self._ref is None else self._ref).shape

    @property
    def dtype(self) -> np.dtype:
        """Of what it holds."""
        return (self.array if self._ref is None else self._ref).dtype

    @property
    def is_reference(self) -> bool:
        """Whether it has become one."""
        return self._ref is not None

    @property
    def ref(self) -> jax.Ref:
        """The reference that it becomes."""
        if self._ref is None:
            with eval_context():  # in `jax.grad`, too
                self._ref = jax.new_ref(self.array)
            self.array, self.is_alone = None, False
        return self._ref

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        if self._ref is not None or is_traced():
            if context.current().is_initial:
                return self._now()
            return self.ref[...]
        self.is_alone = False
        return self.array

    def _now(self) -> jax.Array:
        """What it holds, for a function that is traced to be called once."""
        if self._ref is None:
            self.is_alone = False
            return self.array
        with eval_context():
            return self._ref[...]

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> None:
        if self._ref is not None or is_traced():
            self.ref[...] = value
        else:
            # The user may have it, too: what is assigned is not copied.
            self.array, self.is_alone = value, False

    def lend(self) -> jax.Array:
        """The array, for a program that may overwrite it; it must be replaced then.

        It has the shape of the cell.

        Raises:
          IsReference: it has become a reference.
        """
        if self._ref is not None:
            raise IsReference
        # Who has read the cell has this very array, and donated it would be deleted.
        if not self.is_alone:
            self.array, self.is_alone = jnp.copy(self.array), True
        return self.array


class RemoteCell(AbstractCell):
    """A `Cell` that has no array or reference for a step of this process.

    Args:
      like: shape and dtype of what it stands for.
      name: the variable's, for messages.

    Attributes:
      array: None: it has nothing to lend.
      is_alone: False.
    """

    array = None
    is_alone = False

    def __init__(self, like: jax.ShapeDtypeStruct, name: str) -> None:
        self._like = like
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the variable."""
        return self._like.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the variable."""
        return np.dtype(self._like.dtype)

    @property
    def is_reference(self) -> bool:
        """False: it never becomes one."""
        return False

    @property
    def ref(self) -> NoReturn:
        """None: a function that JAX traces by itself cannot reach it.

        Raises:
          ContextError: always.
        """
        raise self._refusal()

    def lend(self) -> NoReturn:
        """As `ref`."""
        raise self._refusal()

    @abc.abstractmethod
    def _refusal(self) -> ContextError:
        """The error of code that wants an array here."""


@final
class ServerCell(RemoteCell):
    """Read and written like a `Cell`, with `[...]`, and by operations.

    Args:
      server: where it is.
      number: the variable's number there.
      like: its shape and dtype.
      name: the variable's, for messages.
      forget: called with the number when the variable is gone.

    Attributes:
      server: as given.
      number: as given.
    """

    def __init__(
        self,
        server: AbstractServer,
        number: int,
        like: jax.ShapeDtypeStruct,
        name: str,
        forget: Callable[[int], object],
    ) -> None:
        super().__init__(like, name)
        self.server = server
        self.number = number
        weakref.finalize(self, forget, number).atexit = False

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        self.check_reachable()
        (value,) = self.server.read([Read(self.number)])
        with jax.ensure_compile_time_eval():
            return jnp.asarray(value)

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> None:
        self.push("set", (value,))

    def rows(self, rows: np.ndarray) -> jax.Array:
        """Some rows; raises `IndexError` for those that there are not."""
        self.check_reachable()
        (value,) = self.server.read([Read(self.number, rows)])
        return jnp.asarray(value)

    def push(
        self,
        name: str,
        operands: Sequence[jax.Array | np.ndarray],
        program: str = "",
        others: Sequence[int] = (),
    ) -> None:
        """Make one change; see `ServerOperation`."""
        self.check_reachable()
        arrays = tuple(np.asarray(operand) for operand in operands)
        numbers = (self.number, *others)
        self.server.push([ServerOperation(name, numbers, arrays, program)])

    def check_reachable(self) -> None:
        """Raise where what is traced now would hold what the server had once."""
        if is_traced() and not context.current().is_initial:
            raise self._refusal()

    def _refusal(self) -> ContextError:
        return ContextError(
            f"Variable {self._name!r} is on a parameter server, and was used in a "
            "function that JAX traces (`jax.jit`, `jax.lax.scan`, `jax.grad`), which "
            "would hold its value of that moment for ever. Schedule the function with "
            "a `ClusterCoordinator`, or pass it `variable.value()`."
        )


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
