"""Processes of parameter servers are started again with what a checkpoint has."""

import os
import signal
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.processes import is_alive

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager
from jaxstrategy.coordinator import ClusterCoordinator, LocalProcesses

pytestmark = pytest.mark.slow


def pids_of(backend):
    """All processes of a backend, by their names."""
    living = backend._place._living
    return {task.name: task.process.pid for task in living if not task.over.is_set()}


def test_all_variables_go_back_together_when_servers_are_killed(tmp_path):
    """Both at once: functions count once."""
    backend = LocalProcesses(2, 2, patience=1.5)
    strategy = js.ParameterServerStrategy(backend=backend)
    with strategy.scope():
        state = [js.Variable(jnp.zeros(50)) for _ in range(2)]
    first, second = state
    seen = set(pids_of(backend).values())
    manager = CheckpointManager(tmp_path)
    coordinator = ClusterCoordinator(strategy, restore_from=manager, state=state)

    @coordinator.function
    def step(x):
        first.assign_add(jnp.ones(50))
        second.update(lambda old, by: old + by, jnp.ones(50))
        return x

    def check(total):
        for variable in state:
            np.testing.assert_array_equal(variable.value(), np.full(50, total))

    try:
        for _ in range(5):
            coordinator.schedule(step, (0.0,))
        coordinator.join(timeout=120)
        check(5)
        manager.save(1, state)
        manager.wait()
        values = [coordinator.schedule(step, (float(i),)) for i in range(40)]
        values[10].fetch()
        pids = pids_of(backend)
        for server in (0, 1):
            os.kill(pids[f"parameter server {server}"], signal.SIGKILL)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            coordinator.join(timeout=120)
        texts = [str(w.message) for w in told if "rolled back" in str(w.message)]
        assert len(texts) == 1 and "checkpoint 1:" in texts[0]
        lost = int(texts[0].split("what ")[1].split()[0])
        # Eleven were begun before, of which the other worker may be running one.
        assert 10 <= lost <= 40
        check(45 - lost)
        assert coordinator.fetch(values) == list(range(40))
        # No worker is to blame, and none was given up.
        assert len(pids_of(backend)) == 4
    finally:
        seen.update(pids_of(backend).values())
        strategy.close()
        manager.close()
    assert not any(map(is_alive, seen))
