"""Changes of some rows of a variable: `scatter_add` and its kin."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp

from jaxstrategy.replicas import _mesh
from jaxstrategy.values._slices import IndexedSlices
from jaxstrategy.variables._changes import SCATTERS, Change
from jaxstrategy.variables._part import VariablePart


def _index(indices: Any) -> tuple[jax.Array, ...]:
    """TensorFlow's indices `[..., k]` as those of an array, one for each dimension."""
    return tuple(jnp.moveaxis(_mesh.array_of(indices), -1, 0))


class Scatters(abc.ABC):
    """Methods that change some rows of a mirrored or ordinary variable.

    In `run`, the rows of all replicas count if the variable has an aggregation: for
    MEAN their values are divided by the number of replicas first, for
    ONLY_FIRST_REPLICA they are the first replica's. With NONE the rows must be equal on
    all replicas. Outside `run`, and in `merge_call`, they count once.
    """

    @abc.abstractmethod
    def _scatter(self, rows: IndexedSlices, change: Change) -> Any:
        """Change these rows; returns the new value."""

    @abc.abstractmethod
    def __getitem__(self, index: Any) -> VariablePart:
        """A part, which can be assigned."""

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """The rows at `indices`, whole numbers of any shape `[...]`: `[..., row]`.

        Raises:
          ValueError: an index is a number that no integer dtype of JAX holds.
        """
        return self[_mesh.array_of(indices)].value()

    def gather_nd(self, indices: Any, name: str | None = None) -> jax.Array:
        """The entries at `indices`, `[..., k]`: the first k dimensions' indices each.

        Returns:
          Of a variable with as many dimensions as k an array `[...]`; each dimension
          that it has more stands behind them.

        Raises:
          ValueError: an index is a number that no integer dtype of JAX holds.

        >>> import jaxstrategy as js
        >>> js.Variable([[1.0, 2.0], [3.0, 4.0]]).gather_nd([[0, 1], [1, 0]])
        Array([2., 3.], dtype=float32)
        """
        return self[_index(indices)].value()

    def scatter_nd_add(
        self, indices: Any, updates: Any, name: str | None = None
    ) -> jax.Array | None:
        """Add `updates`, `[...]`, to the entries at `indices`, as `gather_nd` has them.

        All copies change in the same way, as by `variable[index].assign_add`.

        Returns:
          The new value of the whole variable.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.

        >>> import jaxstrategy as js
        >>> js.Variable([1.0, 2.0, 3.0]).scatter_nd_add([[0], [2]], [10.0, 20.0])
        Array([11.,  2., 23.], dtype=float32)
        """
        return self[_index(indices)].assign_add(updates)

    def scatter_nd_sub(
        self, indices: Any, updates: Any, name: str | None = None
    ) -> jax.Array | None:
        """Subtract `updates` `[...]`; otherwise as `scatter_nd_add`.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
        """
        return self[_index(indices)].assign_sub(updates)

    def scatter_nd_update(
        self, indices: Any, updates: Any, name: str | None = None
    ) -> jax.Array | None:
        """Make them `updates` `[...]`; otherwise as `scatter_nd_add`.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
        """
        return self[_index(indices)].assign(updates)

    def scatter_add(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Add rows to those of the variable.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["add"])

    def scatter_sub(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Subtract rows from those of the variable.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["sub"])

    def scatter_mul(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Multiply rows of the variable by others.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["mul"])

    def scatter_div(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Divide rows of the variable by others; integers keep what is whole.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["div"])

    def scatter_min(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Make rows of the variable the smaller of both.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read, or has aggregation SUM or MEAN.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["min"])

    def scatter_max(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Make rows of the variable the larger of both.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read, or has aggregation SUM or MEAN.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["max"])

    def scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        """Put rows in the place of those of the variable.

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable is on-read, or has aggregation SUM or MEAN.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
        return self._scatter(sparse_delta, SCATTERS["update"])
