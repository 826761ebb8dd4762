"""Strategies, options and real rows of batches."""

import jax
import numpy as np
from helpers.cases import each_of

import jaxstrategy as js

SECONDS = 20
AT_ONCE = js.InputOptions(experimental_per_replica_buffer_size=0)
PER_REPLICA = js.InputReplicationMode.PER_REPLICA


def ways():
    """All ways to read ahead."""
    return [
        js.InputOptions(
            experimental_per_replica_buffer_size=depth, experimental_fetch_to_device=to
        )
        for depth in (0, 1, 2)
        for to in (True, False)
    ]


each_way = each_of("options", ways())


def real(value):
    """Each replica's real rows, as lists."""
    if isinstance(value, jax.Array):  # of one replica
        return [value.tolist()]
    if value.mask is None:  # all are, and it is known
        return [version.tolist() for version in value.values]
    masks = np.asarray(value.mask)
    return [np.asarray(v)[m].tolist() for v, m in zip(value.values, masks, strict=True)]


def ranged(rows, size):
    return js.batches(np.arange(rows), size)
