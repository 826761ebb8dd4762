"""A global batch divided evenly over the replicas."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jaxstrategy import _mesh, _values
from jaxstrategy._values import PerReplica, PyTree


def split_batch(batch: PyTree, mesh: Mesh) -> PyTree:
    """`batch` with each array as a `PerReplica`: replica i gets the i-th equal part.

    Shapes: `[rows, ...]` -> local `[rows / num_replicas, ...]`, rows in order.

    Raises:
      ValueError: the rows of an array cannot be divided equally, or it is a scalar.
      TypeError: a leaf is not an array.
    """
    sharding = _mesh.split(mesh)

    def split(path: Any, leaf: Any) -> PerReplica:
        array = _checked(leaf, mesh.size, f"batch{jax.tree_util.keystr(path)}")
        rows, rest = array.shape[0], array.shape[1:]
        stacked = array.reshape(mesh.size, rows // mesh.size, *rest)
        return PerReplica(jax.device_put(stacked, sharding))

    return jax.tree.map_with_path(split, batch, is_leaf=_values.is_per_replica)


def _checked(leaf: Any, num_replicas: int, what: str) -> Any:
    if isinstance(leaf, PerReplica):
        raise TypeError(
            f"`{what}` is already a PerReplica. Give the dataset global batches, which "
            "are divided over the replicas here, or pass the value to `run` as it is."
        )
    array = _values.as_array(leaf, what)
    if array.ndim == 0:
        raise ValueError(
            f"`{what}` is a scalar, which cannot be divided over the replicas. Batches "
            "hold arrays with the examples along the first dimension; pass what is the "
            "same for all replicas to `run` as an argument of its own."
        )
    rows = array.shape[0]
    if rows % num_replicas:
        near = rows - rows % num_replicas
        raise ValueError(
            f"`{what}` has {rows} rows, which {num_replicas} replicas cannot share "
            f"equally. Use a global batch size divisible by {num_replicas}"
            + (f", such as {near}" if near else "")
            + ", and leave out or pad an incomplete last batch."
        )
    return array
