"""Checkpoints of variables on parameter servers, and pauses to take them in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.coordinator import ClusterCoordinator, Threads


def on_servers(count):
    return js.ParameterServerStrategy(
        workers=2, parameter_servers=count, backend="threads"
    )


def test_variables_of_workers_are_refused(tmp_path):
    with on_servers(1).scope():
        own = js.Variable(0.0, name="mine", per_worker_variable=True)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(
            ValueError, match=r"`own`, variable 'mine', has a copy on each w"
        ),
    ):
        manager.save(1, {"own": own})


# Pauses.


class Counting:
    """Two variables on two servers that each function changes together."""

    def __init__(self):
        self.backend = Threads(2, 2)
        self.strategy = js.ParameterServerStrategy(backend=self.backend)
        with self.strategy.scope():
            self.pair = [js.Variable(jnp.zeros(1000)), js.Variable(jnp.zeros(1000))]
        self.coordinator = ClusterCoordinator(self.strategy)
        first, second = self.pair

        @self.coordinator.function
        def step():
            first.assign_add(jnp.ones(1000))
            second.assign_add(jnp.ones(1000))
            return 1

        self.step = step

    def schedule(self, count):
        return [self.coordinator.schedule(self.step) for _ in range(count)]

    def totals(self):
        return [float(variable.value()[0]) for variable in self.pair]


@pytest.fixture
def counting():
    made = Counting()
    yield made
    made.strategy.close()


def test_in_a_pause_nothing_runs_and_afterwards_all_does(counting):
    values = counting.schedule(100)
    values[3].fetch()
    with counting.coordinator.paused():
        seen = counting.totals()
        assert seen[0] == seen[1] >= 4
        ended = [
            value.status is js.coordinator.RemoteValueStatus.READY for value in values
        ]
        assert seen == [sum(ended)] * 2
        late = counting.schedule(1)
        assert counting.totals() == seen
        with counting.coordinator.paused():  # in itself
            pass
        assert counting.totals() == seen
    counting.coordinator.join()
    assert late[0].fetch() == 1
    assert counting.totals() == [101, 101]


def test_waiting_in_a_pause_is_an_error_and_no_deadlock(counting):
    counting.coordinator.join()
    with counting.coordinator.paused():
        counting.coordinator.join()  # there is nothing to wait for
        assert counting.coordinator.done()
        (value,) = counting.schedule(1)
        for wait in (
            counting.coordinator.join,
            value.fetch,
            value.get,
            lambda: counting.coordinator.fetch(value),
        ):
            with pytest.raises(RuntimeError, match=r"block of `coordinator.paused\(\)"):
                wait()
    assert value.fetch() == 1


def test_what_is_saved_while_functions_run_is_of_one_moment(counting, tmp_path):
    counting.schedule(300)
    with CheckpointManager(tmp_path, keep=None) as manager:
        for step in range(1, 6):
            assert manager.save(step, counting.pair)
        counting.coordinator.join()
        saved = []
        for step in range(1, 6):
            like = [jax.ShapeDtypeStruct((1000,), np.float32)] * 2
            first, second = manager.restore(like, step)
            np.testing.assert_array_equal(first, second)
            saved.append(float(first[0]))
    assert saved == sorted(saved)
    assert counting.totals() == [300, 300]
