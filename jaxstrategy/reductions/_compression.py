"""What is sent of gradients instead of all their bits: `Compression`."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy.values._types import Leaf


@dataclasses.dataclass(frozen=True)
class Sent:
    """One array after its compressed reduction.

    Attributes:
      value: the sum or mean, `[...]`, equal on all replicas; NaN where an array was not
        finite.
      missed: what of this replica's array is not in it, `[...]`. The sum of it over the
        replicas is what the sum misses.
      basis: what the next reduction begins with, if it begins with something.
    """

    value: jax.Array
    missed: jax.Array
    basis: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Sums:
    """The sums over the replicas, or means, that a compression is made of.

    Attributes:
      exact: of this replica's arrays, with all bits.
      in_eight_bits: of arrays of floating-point numbers of 32 bits or more; with what
        of this replica's array is not in the result.
    """

    exact: Callable[[Sequence[Leaf]], list[Leaf]]
    in_eight_bits: Callable[[Sequence[jax.Array]], list[tuple[jax.Array, jax.Array]]]


class Compression(abc.ABC):
    """A reduction that sends less than all bits, and says what it did not send."""

    @abc.abstractmethod
    def takes(self, shape: Sequence[int]) -> bool:
        """Whether it is worth while for floating-point numbers of this shape."""

    @abc.abstractmethod
    def basis(self, leaf: jax.ShapeDtypeStruct, number: int) -> jax.Array | None:
        """What the first reduction of the array begins with.

        Args:
          leaf: the type of the array.
          number: of the array, so that not all begin alike.
        """

    @abc.abstractmethod
    def reduced(
        self,
        exact: Sequence[Leaf],
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array | None],
        sums: Sums,
    ) -> tuple[list[Leaf], list[Sent]]:
        """The sums of `exact` with all bits, and of `arrays` compressed.

        Args:
          exact: this replica's arrays that are not compressed.
          arrays: those that are, of 32 bits or more.
          bases: what `basis` or the last reduction made, for each of them.
          sums: over two replicas or more.
        """


def memory_of(
    compression: Compression, leaf: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct | None:
    """The type of what is kept of an array that was not sent; None: all is sent."""
    is_real = jnp.issubdtype(leaf.dtype, jnp.floating)
    if not is_real or not compression.takes(leaf.shape):
        return None
    # In 16 bits what is added up over many steps would be lost itself.
    dtype = np.promote_types(jnp.promote_types(leaf.dtype, jnp.float32), np.float32)
    return jax.ShapeDtypeStruct(leaf.shape, dtype)
