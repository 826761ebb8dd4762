"""The memory of a variable between steps: `Cell`.

An array at first. JAX calls a compiled function of arrays in a third of the time that
it takes for one of references (measured: 1.9 instead of 4.4 ms for 1,000 of them). So a
step is given the array, with its memory donated, and the cell keeps what it returns.

A function that the user has JAX trace (`jax.jit`, `jax.lax.scan`) runs again without
our help, and must find the numbers of that moment. Therefore the first such function
that uses the cell makes a `jax.Ref` of it, for good.
"""

from __future__ import annotations

import abc
from types import EllipsisType
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context

from jaxstrategy._src.contexts import context
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
