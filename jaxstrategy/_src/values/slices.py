"""`IndexedSlices`, rows of a larger array, and `Versions` that have no common shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import final, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.text import several_whole, shown
from jaxstrategy._src.values.arrays import Leaf, Value


@final
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class IndexedSlices:
    """Rows of an array that is zero elsewhere, such as an embedding's gradient.

    Reducing it over the replicas joins their rows instead of making them dense, so what
    is sent is as large as the rows. A row that is there more than once counts as often.

    Attributes:
      values: the rows, `[rows, ...]`.
      indices: which rows they are, whole numbers `[rows]`.
      dense_shape: the shape of the whole array, or None if it is not known.

    Raises:
      ValueError: `values`, `indices` and `dense_shape` do not fit.

    >>> import jaxstrategy as js
    >>> rows = js.IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 0]), dense_shape=(2, 3))
    >>> rows.to_dense()
    Array([[2., 2., 2.],
           [0., 0., 0.]], dtype=float32)
    """

    values: Leaf
    indices: Leaf
    dense_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dense_shape is not None:
            shape = _checked_shape(self.dense_shape)
            object.__setattr__(self, "dense_shape", shape)
        values = getattr(self.values, "shape", None)
        indices = getattr(self.indices, "shape", None)
        if not isinstance(values, tuple) or not isinstance(indices, tuple):
            return
        fits = len(indices) == 1 and values[:1] == indices
        if fits and self.dense_shape is not None:
            fits = values[1:] == self.dense_shape[1:]
        if not fits:
            raise ValueError(
                f"`IndexedSlices` was given values of shape {values}, indices of shape "
                f"{indices} and dense_shape {self.dense_shape}; values [rows, ...], "
                "indices [rows] and dense_shape (n, ...) were wanted."
            )

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[object, Leaf], ...], tuple[int, ...] | None]:
        """The two arrays, and the shape, which is static."""
        key = GetAttrKey
        arrays = (key("values"), self.values), (key("indices"), self.indices)
        return arrays, self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, arrays: tuple[Leaf, Leaf]
    ) -> IndexedSlices:
        """The slices that JAX makes, unchecked: arrays of any shape, or none at all."""
        made = object.__new__(cls)
        values, indices = arrays
        object.__setattr__(made, "values", values)
        object.__setattr__(made, "indices", indices)
        object.__setattr__(made, "dense_shape", dense_shape)
        return made

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the rows.

        Raises:
          ValueError: they are a Python number that no dtype of JAX holds.
        """
        known = getattr(self.values, "dtype", None)
        return mesh.array_of(self.values).dtype if known is None else known

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the whole array."""
        return self.dense_shape

    def to_dense(self) -> jax.Array:
        """The whole array, of shape `dense_shape`.

        Raises:
          ValueError: `dense_shape` is not known.
        """
        if self.dense_shape is None:
            raise ValueError(
                "These IndexedSlices have no `dense_shape`, so it is not known how "
                "large the array is. Give it when they are made."
            )
        return self.added_to(jnp.zeros(self.dense_shape, self.dtype))

    def added_to(self, array: jax.Array) -> jax.Array:
        """`array`, which has the whole shape, with the rows added to it.

        Raises:
          ValueError: a Python number among the arguments that no dtype of JAX holds.
        """
        rows = mesh.array_of(self.indices)
        return mesh.array_of(array).at[rows].add(mesh.array_of(self.values))


def _checked_shape(value: Value) -> tuple[int, ...]:
    shape = several_whole(value)
    if shape is None or any(not 0 <= n < 2**63 for n in shape):
        raise ValueError(
            f"`dense_shape` was {shown(value)}; a shape, such as (10, 3), was wanted."
        )
    return shape


def is_slices(value: object) -> bool:
    """Whether `value` is an `IndexedSlices`, which is reduced as a whole."""
    return isinstance(value, IndexedSlices)


@final
class Versions(Sequence[Leaf]):
    """One value for each replica of this process, of any shapes and kinds.

    A step returns it in `eager_replicas()` for what differs in shape between the
    replicas, or is no array; compiled there is no such result. It is a sequence in
    replica order, and to pytrees one leaf.

    Args:
      values: one for each replica of this process, in replica order.
      replicas: their numbers.

    Raises:
      TypeError: something else than sequences.
      ValueError: they are of different lengths.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with js.experimental.eager_replicas():
    ...     kept = strategy.run(lambda x: x[x > 0], (js.PerReplica(
    ...         np.array([[1.0, -1.0], [2.0, 3.0]])),))
    >>> kept
    Versions(Array([1.], dtype=float32), Array([2., 3.], dtype=float32))
    """

    def __init__(self, values: Sequence[Leaf], replicas: Sequence[int]) -> None:
        if not isinstance(values, Sequence) or not isinstance(replicas, Sequence):
            raise TypeError(
                f"`Versions` was given {shown(values)} and {shown(replicas)}; a "
                "sequence of values and one of the replicas' numbers were wanted."
            )
        if len(values) != len(replicas):
            raise ValueError(
                f"`Versions` was given {len(values)} values for {len(replicas)} "
                "replicas; one for each was wanted."
            )
        self._values = tuple(values)
        self._replicas = tuple(replicas)

    @property
    def values(self) -> tuple[Leaf, ...]:
        """They, in replica order."""
        return self._values

    def local(self, replica_id: int) -> Leaf:
        """The value of a replica.

        Raises:
          IndexError: there is no such replica in this process.
        """
        if replica_id not in self._replicas:
            raise IndexError(
                f"Replica {replica_id} was asked of a value of which this process has "
                f"replicas {self._replicas[0]} to {self._replicas[-1]}."
            )
        return self._values[self._replicas.index(replica_id)]

    @overload
    def __getitem__(self, index: int) -> Leaf: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Leaf, ...]: ...

    def __getitem__(self, index: int | slice) -> Leaf:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"Versions({', '.join(map(repr, self._values))})"
