"""Rows of all replicas, joined."""

from __future__ import annotations

from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._gather import all_gather
from jaxstrategy.reductions._reduce_operations import (
    OPERATIONS,
    checked,
)
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._slices import IndexedSlices


def reduce_slices(
    op: ReduceOp, slices: IndexedSlices, replicas: Replicas
) -> IndexedSlices:
    """The rows of all replicas: their sum, or for MEAN that divided by the replicas.

    Shapes: values `[rows, ...]` -> `[num_replicas * rows, ...]`.

    Raises:
      ValueError: `op` is no sum: a result that rows that are not there would change.
      TypeError: the rows are no numbers.
    """
    check_sum(op)
    row = OPERATIONS[op]
    rows = row.prepared(checked(op, slices.values))
    if row.divides:
        rows /= replicas.count
    return IndexedSlices(
        all_gather(rows, 0, replicas),
        all_gather(slices.indices, 0, replicas),
        slices.dense_shape,
    )


def check_sum(op: ReduceOp) -> None:
    """Raise unless `op` is a sum: rows that are not there would change another result.

    Raises:
      ValueError: it is none.
    """
    if not OPERATIONS[op].is_sum:
        raise ValueError(
            f"{op.name} of IndexedSlices is not defined, because rows that are not "
            "there count as zeros. Reduce `slices.to_dense()` instead."
        )
