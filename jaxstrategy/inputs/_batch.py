"""A batch as a source gives it, checked."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy.replicas import _overflow
from jaxstrategy.replicas._random_keys import as_numbers
from jaxstrategy.text._array_types import array_type
from jaxstrategy.values import _arrays, _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree

Array: TypeAlias = np.ndarray | jax.Array
"""An array of a batch: on the host, or on a device already."""


@dataclasses.dataclass(frozen=True)
class SourceBatch:
    """The arrays of a batch, `[rows, ...]` each.

    A batch for one replica may have scalars, too, which are its own.

    Attributes:
      arrays: its leaves.
      paths: how messages call them.
      treedef: its structure.
      number: which batch it is, from 0.
    """

    arrays: tuple[Array, ...]
    paths: tuple[str, ...]
    treedef: PyTree
    number: int

    @property
    def rows(self) -> int:
        """The number of examples; one, if there are only scalars."""
        return next((array.shape[0] for array in self.arrays if array.ndim), 1)

    def cut(self, rows: slice) -> SourceBatch:
        """Some of its rows."""
        return self.map(lambda array: array[rows])

    def map(self, function: Callable[[Array], Array]) -> SourceBatch:
        """The batch of what `function` makes of each array."""
        return dataclasses.replace(self, arrays=tuple(map(function, self.arrays)))

    @property
    def fingerprint(self) -> int:
        """A number that another batch would hardly have, from a part of it."""
        crc = 0
        for array in self.arrays:
            array = as_numbers(array)
            rows = array[:_HEAD_ROWS] if array.ndim else array
            head = np.asarray(rows).reshape(-1)[:_HEAD]
            crc = zlib.crc32(f"{array.shape}{array.dtype}".encode(), crc)
            crc = zlib.crc32(head.tobytes(), crc)
        return crc


_HEAD_ROWS, _HEAD = 8, 1024  # rows, numbers


def checked(tree: PyTree, number: int, is_of_replica: bool = False) -> SourceBatch:
    """`tree` as a batch.

    Args:
      tree: what a source gave.
      number: which batch it is.
      is_of_replica: whether it is for one replica, and may have scalars.

    Raises:
      TypeError: a leaf is not an array of numbers.
      ValueError: it has no leaves; one has integers that JAX does not hold, is a
        scalar and may not be, or has other rows than the first.
    """
    found, treedef = jax.tree.flatten_with_path(
        tree, is_leaf=_per_replica.is_per_replica
    )
    if not found:
        raise ValueError(
            f"Batch {number} is {tree!r}, which has no arrays. A batch is a pytree of "
            "arrays, each with the examples along its first dimension."
        )
    paths = tuple(f"batch{jax.tree_util.keystr(path)}" for path, _ in found)
    arrays = tuple(
        _array(leaf, path, number) for (_, leaf), path in zip(found, paths, strict=True)
    )
    batch = SourceBatch(arrays, paths, treedef, number)
    if not is_of_replica:
        _check_no_scalars(batch)
    _check_rows(batch)
    return batch


def _array(leaf: Leaf, path: str, number: int) -> Array:
    if isinstance(leaf, PerReplica):
        raise TypeError(
            f"`{path}` of batch {number} is already a PerReplica. Give the dataset "
            "global batches, which are divided over the replicas here, or pass the "
            "value to `run` as it is."
        )
    try:
        array = _arrays.as_array(leaf, path)
    except _overflow.NotHeldError as error:
        raise ValueError(f"`{path}` of batch {number}: {error}") from None
    except (TypeError, ValueError) as error:
        shown = repr(leaf)
        raise TypeError(
            f"`{path}` of batch {number} is "
            f"{shown if len(shown) < 80 else shown[:77] + '...'}, which is not an "
            "array of numbers and cannot be placed on a device. Leave it out, or "
            "encode it as numbers, before the batch is made."
        ) from error
    return array


def _check_no_scalars(batch: SourceBatch) -> None:
    for path, array in zip(batch.paths, batch.arrays, strict=True):
        if array.ndim == 0:
            raise ValueError(
                f"`{path}` of batch {batch.number} is a scalar, which cannot be "
                "divided over the replicas. Batches hold arrays with the examples "
                "along the first dimension; pass what is the same for all replicas to "
                "`run` as an argument of its own, and give each replica its own "
                "scalars with `strategy.distribute_datasets_from_function`."
            )


def _check_rows(batch: SourceBatch) -> None:
    rows = [
        (path, array.shape[0])
        for path, array in zip(batch.paths, batch.arrays, strict=True)
        if array.ndim
    ]
    for path, count in rows:
        if count != rows[0][1]:
            raise ValueError(
                f"In batch {batch.number}, `{path}` has {count} rows, but "
                f"`{rows[0][0]}` has {rows[0][1]}. All arrays of a batch have the "
                "examples along the first dimension, so as many rows."
            )


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The structure, row shapes and dtypes that all batches of a dataset share.

    Attributes:
      treedef: their structure.
      paths: how messages call their leaves.
      types: of each leaf the shape of a row, None of a scalar, and the dtype.
    """

    treedef: PyTree
    paths: tuple[str, ...]
    types: tuple[tuple[tuple[int, ...] | None, np.dtype], ...]

    @classmethod
    def of(cls, batch: SourceBatch) -> BatchSpec:
        """That of a batch."""
        types = tuple(
            (array.shape[1:] if array.ndim else None, array.dtype)
            for array in batch.arrays
        )
        return cls(batch.treedef, batch.paths, types)

    def check(self, batch: SourceBatch) -> None:
        """Raise if a batch is of another kind.

        Raises:
          ValueError: another structure, or a leaf with another shape or dtype.
        """
        found = BatchSpec.of(batch)
        if found.treedef != self.treedef:
            raise ValueError(
                f"Batch {batch.number} has another structure than the first: "
                f"{found.treedef} instead of {self.treedef}. All batches of a dataset "
                "go through one compiled step."
            )
        pairs = zip(found.types, self.types, batch.paths, strict=True)
        for (shape, dtype), (first_shape, first_dtype), path in pairs:
            if shape != first_shape or dtype != first_dtype:
                raise ValueError(
                    f"`{path}` of batch {batch.number} is {_type(dtype, shape)}, but "
                    f"in the first batch it was {_type(first_dtype, first_shape)}. All "
                    "batches of a dataset go through one compiled step: convert or pad "
                    "them alike."
                )


def _type(dtype: DTypeLike, shape: Sequence[int] | None) -> str:
    """The name in messages of arrays of rows of this shape; None of scalars."""
    if shape is None:
        return array_type(dtype, ())
    return array_type(dtype, ("rows", *shape), ", ")
