"""Changes of some rows of a variable: `scatter_add` and its kin."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.replicas import overflow
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.values.types import Index, Value
from jaxstrategy._src.variables.changes import (
    ASSIGN,
    ASSIGN_ADD,
    ASSIGN_SUB,
    SCATTERS,
    Change,
)
from jaxstrategy._src.variables.part import VariablePart


def _index(indices: Value) -> tuple[jax.Array, ...]:
    """TensorFlow's indices `[..., k]` as those of an array, one for each dimension."""
    return tuple(jnp.moveaxis(overflow.array_of(indices), -1, 0))


# Without a type of what it returns, checkers know the arguments of each method.
def _scatter(change: Change, does: str, undefined: str = "is on-read"):
    """The method of `Scatters` that makes `change`.

    Args:
      change: with the name of the method.
      does: what it does, for its docstring.
      undefined: which variables have no such change.
    """

    def scatter(
        self: Scatters,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Value:
        return self._change_rows(sparse_delta, change)

    scatter.__name__ = change.method
    scatter.__qualname__ = f"Scatters.{change.method}"
    scatter.__doc__ = f"""{does}

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable {undefined}.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
    return scatter


# What has no sum of rows that several replicas give.
_NOT_SUMMED = "is on-read, or has aggregation SUM or MEAN"


class Scatters(abc.ABC):
    """Methods that change some rows of a mirrored or ordinary variable.

    In `run`, the rows of all replicas count if the variable has an aggregation: for
    MEAN their values are divided by the number of replicas first, for
    ONLY_FIRST_REPLICA they are the first replica's. With NONE the rows must be equal on
    all replicas. Outside `run`, and in `merge_call`, they count once.
    """

    @abc.abstractmethod
    def _change_rows(self, rows: IndexedSlices, change: Change) -> Value:
        """Changes these rows; returns the new value."""

    @abc.abstractmethod
    def _write(self, value: Value, change: Change) -> jax.Array | PerReplica:
        """Makes a change; returns the new value of the whole variable."""

    @abc.abstractmethod
    def __getitem__(self, index: Index) -> VariablePart:
        """A part, which can be assigned."""

    def sparse_read(self, indices: Value, name: str | None = None) -> jax.Array:
        """The rows at `indices`, whole numbers of any shape `[...]`: `[..., row]`.

        Raises:
          ValueError: an index is a number that no integer dtype of JAX holds.
        """
        return self[overflow.array_of(indices)].value()

    def gather_nd(self, indices: Value, name: str | None = None) -> jax.Array:
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
        self, indices: Value, updates: Value, name: str | None = None
    ) -> Value:
        """Adds `updates` `[...]` to the entries at `indices`, as `gather_nd` has them.

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
        return self._write(updates, ASSIGN_ADD.of_part(_index(indices)))

    def scatter_nd_sub(
        self, indices: Value, updates: Value, name: str | None = None
    ) -> Value:
        """Subtracts `updates` `[...]`; otherwise as `scatter_nd_add`.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
        """
        return self._write(updates, ASSIGN_SUB.of_part(_index(indices)))

    def scatter_nd_update(
        self, indices: Value, updates: Value, name: str | None = None
    ) -> Value:
        """Makes them `updates` `[...]`; otherwise as `scatter_nd_add`.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
        """
        return self._write(updates, ASSIGN.of_part(_index(indices)))

    def batch_scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Value:
        """Puts rows in the place of the variable's, in each batch by its own indices.

        Args:
          sparse_delta: with indices `[..., k]` and values `[..., k, *rest]`: row
            `indices[..., j]` of the variable's `[..., n, *rest]` becomes
            `values[..., j]`.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.

        >>> import jaxstrategy as js
        >>> v = js.Variable([[1.0, 2.0], [3.0, 4.0]])
        >>> v.batch_scatter_update(js.IndexedSlices([[20.0], [30.0]], [[1], [0]]))
        Array([[ 1., 20.],
               [30.,  4.]], dtype=float32)
        """
        if not is_slices(sparse_delta):
            raise TypeError(
                f"`batch_scatter_update` was given {sparse_delta!r}, a "
                f"{type(sparse_delta).__name__}; `IndexedSlices(values, indices)` were "
                "wanted."
            )
        rows = overflow.array_of(sparse_delta.indices)
        indices = jnp.stack([*np.indices(rows.shape)[:-1], rows], axis=-1)
        return self.scatter_nd_update(indices, sparse_delta.values)

    scatter_add = _scatter(SCATTERS["add"], "Adds rows to those of the variable.")
    scatter_sub = _scatter(
        SCATTERS["sub"], "Subtracts rows from those of the variable."
    )
    scatter_mul = _scatter(SCATTERS["mul"], "Multiplies rows of the variable.")
    scatter_div = _scatter(
        SCATTERS["div"], "Divides rows of the variable; integers keep what is whole."
    )
    scatter_min = _scatter(
        SCATTERS["min"], "Makes rows of the variable the smaller of both.", _NOT_SUMMED
    )
    scatter_max = _scatter(
        SCATTERS["max"], "Makes rows of the variable the larger of both.", _NOT_SUMMED
    )
    scatter_update = _scatter(
        SCATTERS["update"], "Puts rows in the place of the variable's.", _NOT_SUMMED
    )
