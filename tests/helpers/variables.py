"""Variables of any kind, and their copies."""

import numpy as np

import jaxstrategy as js


def copies(strategy, variable):
    found = strategy.experimental_local_results(variable)
    return [np.asarray(copy).tolist() for copy in found]


def variable(strategy, value=10.0, kind="auto", aggregation="none", **more):
    with strategy.scope():
        return js.Variable(value, synchronization=kind, aggregation=aggregation, **more)
