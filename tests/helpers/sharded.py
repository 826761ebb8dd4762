"""Tables in shards, made by hand."""

import contextlib

import numpy as np

import jaxstrategy as js
from jaxstrategy.experimental import ShardedVariable


def sharded(value, cuts, strategy=None, name="table", **choices):
    """`value`, cut before these rows, in variables of a strategy or of none."""
    blocks = np.split(np.asarray(value), cuts)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        shards = [
            js.Variable(block, name=f"{name}/part_{number}", **choices)
            for number, block in enumerate(blocks)
        ]
    return ShardedVariable(shards, name)


def slices(indices, values, shape=None):
    return js.IndexedSlices(
        np.asarray(values, np.float32), np.asarray(indices, np.int32), shape
    )
