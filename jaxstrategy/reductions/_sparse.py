"""Rows of all replicas, joined."""

from __future__ import annotations

from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._all_reduce import checked, floating
from jaxstrategy.reductions._gather import all_gather
from jaxstrategy.reductions._sums import Axes
from jaxstrategy.values._slices import IndexedSlices


def reduce_slices(
    op: ReduceOp, slices: IndexedSlices, axes: Axes, replicas: int
) -> IndexedSlices:
    """The rows of all replicas: their sum, or for MEAN that divided by the replicas.

    Shapes: values `[rows, ...]` -> `[num_replicas * rows, ...]`.

    Raises:
      ValueError: `op` is MIN or MAX, which rows that are not there would change.
      TypeError: the rows are no numbers.
    """
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"{op.name} of IndexedSlices is not defined, because rows that are not "
            "there count as zeros. Reduce `slices.to_dense()` instead."
        )
    rows = checked(op, slices.values)
    if op is ReduceOp.MEAN:
        rows = floating(rows) / replicas
    return IndexedSlices(
        all_gather(rows, 0, axes),
        all_gather(slices.indices, 0, axes),
        slices.dense_shape,
    )
