"""The memory of a variable that is on a parameter server: `ServerCell`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractServer,
    Read,
    ServerOperation,
)
from jaxstrategy._src.values.arrays import is_traced
from jaxstrategy._src.variables.remote_cell import RemoteCell


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
        """Raise where what is traced now would hold what the server had once.

        Raises:
          ContextError: a function is traced that is not one of a coordinator.
        """
        if is_traced() and not context.current().is_initial:
            raise self._refusal()

    def _refusal(self) -> ContextError:
        return ContextError(
            f"Variable {self._name!r} is on a parameter server, and was used in a "
            "function that JAX traces (`jax.jit`, `jax.lax.scan`, `jax.grad`), which "
            "would hold its value of that moment for ever. Schedule the function with "
            "a `ClusterCoordinator`, or pass it `variable.value()`."
        )
