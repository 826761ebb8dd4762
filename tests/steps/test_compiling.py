"""A new step counts as compiling until it is compiled, and waits from then on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstrategy import PerReplica
from jaxstrategy._src.inputs import origins
from jaxstrategy._src.processes.store import Store
from jaxstrategy._src.processes.watchdog import Watchdog
from jaxstrategy._src.tracing import step_agreement


@pytest.fixture
def watchdog():
    watchdog = Watchdog(Store(), 100)
    watchdog.step_started("outer.<locals>.double")
    return watchdog


def test_a_call_waits_once_its_function_is_compiled(watchdog):
    seen = []

    def double(x):
        seen.append(watchdog.pending.busy)  # while it is traced
        jnp.sin(np.ones(3))  # a program of its own, perhaps compiled
        return 2 * x

    step_agreement.begin(watchdog, "outer.<locals>.double")
    compiled = jax.jit(double)
    np.testing.assert_array_equal(compiled(np.ones(3, np.float32)), [2, 2, 2])
    assert seen == ["compiles"]
    assert watchdog.pending.busy is None and watchdog.pending.step == 1


def test_other_functions_do_not_end_it(watchdog):
    step_agreement.begin(watchdog, "outer.<locals>.double")
    jax.jit(lambda x: x * 3)(np.ones(5, np.float32))
    assert watchdog.pending.busy == "compiles"
    watchdog.step_dispatched()
    assert watchdog.pending is None and watchdog.status()["busy"] is None


def test_arrays_are_known_by_their_batch_while_they_live():
    array, other = jnp.arange(3), jnp.arange(3)
    batch = {"x": PerReplica(array)}
    origins.note(batch, "batch 3 of input 0")
    assert origins.of(array) == "batch 3 of input 0"
    assert origins.of(other) is None and origins.of(1.0) is None
    key = id(array)
    del array, batch
    assert key not in origins._known
