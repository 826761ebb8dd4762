"""What a function sent to workers does to a server's variable: `PendingChange`."""

from __future__ import annotations

import itertools
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxstrategy._src.replicas.replicas import SAME, Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.values.handle import Handle

_numbers = itertools.count(1 << 40)


@final
class PendingChange(Handle):
    """A value that a traced function counts up beside a variable; 0 when it begins.

    In branches and loops a trace does not tell which changes a variable will have seen.
    What was added so far, or whether it was assigned, is a value like any other there.

    Args:
      name: for messages.
      like: its shape and dtype.
      replicas: of the function.
    """

    def __init__(
        self, name: str, like: jax.ShapeDtypeStruct, replicas: Replicas
    ) -> None:
        self.number = next(_numbers)
        self._name = name
        self.dtype = np.dtype(like.dtype)
        self._replicas = replicas
        self.cell = _Type(like)

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def is_distributed(self) -> bool:
        """True."""
        return True

    @property
    def copies_must_agree(self) -> bool:
        """True."""
        return True

    @property
    def replicas(self) -> Replicas:
        """Those of the function."""
        return self._replicas

    @property
    def sharding(self) -> NamedSharding:
        """Whole on each replica."""
        return self._replicas.sharding(SAME)

    @property
    def division(self) -> LeafSharding:
        """None."""
        return LeafSharding(None, "a function counts it up")

    def lives_on(self, replicas: Replicas) -> bool:
        """Always: it has no other place."""
        return True

    def value(self) -> jax.Array:
        """What it is when the function begins."""
        return jnp.zeros(self.cell.shape, self.dtype)

    def distributed(self) -> jax.Array:
        """The same."""
        return self.value()


@final
class _Type:
    """The shape and dtype of what a trace needs no array of."""

    def __init__(self, like: jax.ShapeDtypeStruct) -> None:
        self.shape, self.dtype = like.shape, np.dtype(like.dtype)
