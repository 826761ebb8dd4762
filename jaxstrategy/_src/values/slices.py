"""`IndexedSlices`: some rows of a larger array."""

from __future__ import annotations

import dataclasses
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from jaxstrategy._src.replicas import overflow
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.text.whole_numbers import several_whole
from jaxstrategy._src.values.types import Leaf, Value


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
        return overflow.array_of(self.values).dtype if known is None else known

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
        rows = overflow.array_of(self.indices)
        return overflow.array_of(array).at[rows].add(overflow.array_of(self.values))


def _checked_shape(given: Value) -> tuple[int, ...]:
    shape = several_whole(given)
    if shape is None or any(not 0 <= n < 2**63 for n in shape):
        raise ValueError(
            f"`dense_shape` was {shown(given)}; a shape, such as (10, 3), was wanted."
        )
    return shape


def is_slices(value: object) -> bool:
    """Whether `value` is an `IndexedSlices`, which is reduced as a whole."""
    return isinstance(value, IndexedSlices)
