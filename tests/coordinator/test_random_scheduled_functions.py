"""Random functions of server variables do on workers what they do in NumPy."""

import warnings

import numpy as np
import pytest
from helpers.random_functions import START, OnWorkers, Plain, random_function, run

import jaxstrategy as js
from jaxstrategy.coordinator import Threads

SEEDS = (954, 963, 966)
"""Those that change in branches and loops only what they may change there."""


def in_three_shards(shape, dtype):
    if not shape:
        return []
    return [3 if shape[0] == 9 else 1, *(1 for _ in shape[1:])]


@pytest.fixture(scope="module", params=[1, 2])
def workers(request):
    strategy = js.ParameterServerStrategy(
        backend=Threads(1, 2, request.param), variable_partitioner=in_three_shards
    )
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        yield OnWorkers(strategy), coordinator


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_functions(workers, seed):
    on, coordinator = workers
    statements, plain = random_function(seed), Plain()
    on.begin()
    function = coordinator.function(lambda x, r: run(on, statements, x, r))
    for x in np.float32([1, -2]):
        wanted = run(plain, statements, x, np.float32(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", js.errors.WholeTableWarning)
            found = coordinator.schedule(function, (x, np.float32(0))).fetch()
        assert float(found) == float(wanted)
        for name in START:
            np.testing.assert_array_equal(on.state[name].value(), plain.state[name])
