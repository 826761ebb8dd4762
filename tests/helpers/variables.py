"""Variables of any kind, and their copies."""

import numpy as np

import jaxstrategy as js


def ids(strategy, start=0.0):
    """`start + i` for replica i."""
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([np.float32(start + i) for i in range(n)])


def copies(strategy, variable):
    return [v.tolist() for v in strategy.experimental_local_results(variable)]


def variable(strategy, value=10.0, kind="auto", aggregation="none", **more):
    with strategy.scope():
        return js.Variable(value, synchronization=kind, aggregation=aggregation, **more)
