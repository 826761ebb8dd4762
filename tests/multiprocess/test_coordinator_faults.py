"""Workers and servers that are killed or stopped while functions run on them."""

import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest
from harness import until
from helpers.processes import stop

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy.coordinator import ClusterCoordinator, LocalProcesses

# A busy computer may take long to start all workers again, of which `join` tells.
pytestmark = pytest.mark.filterwarnings("ignore:All . workers are lost:RuntimeWarning")

Activity = js.coordinator.WorkerActivity
PATIENCE = 1.5


class Cluster:
    """A strategy on processes, its coordinator and a variable that counts."""

    def __init__(self, workers, servers=1):
        self.backend = LocalProcesses(workers, servers, patience=PATIENCE)
        self.strategy = js.ParameterServerStrategy(backend=self.backend)
        with self.strategy.scope():
            self.total = js.Variable(jnp.zeros(100), name="total")
        self.coordinator = ClusterCoordinator(self.strategy)
        self.own = WorkerResource(lambda index: np.int64(os.getpid()))
        total = self.total

        @self.coordinator.function
        def add(x):
            """Takes some milliseconds, so that there is time to be killed in."""
            matrix = jnp.full((200, 200), 1e-3) + x
            for _ in range(8):
                matrix = jnp.tanh(matrix @ matrix)
            total.assign_add(jnp.ones(100) + 0 * matrix[0, :100])
            return x

        self.add = add

    def pids(self):
        """The processes of the workers now."""
        return [
            int(self.coordinator._scheduler.on_worker(i, "pid", self.pid).fetch())
            for i in range(self.backend.num_workers)
        ]

    def pid(self, life):
        return life.own(self.own)

    def activities(self):
        return [state.activity for state in self.coordinator.workers]

    def starts(self):
        return [state.starts for state in self.coordinator.workers]

    def schedule(self, count):
        return [self.coordinator.schedule(self.add, (float(i),)) for i in range(count)]

    def check(self, values, total):
        """All have their results, and each counts once."""
        self.coordinator.join(timeout=120)
        assert self.coordinator.fetch(values) == list(range(len(values)))
        np.testing.assert_array_equal(self.total.value(), np.full(100, total))

    def close(self):
        self.strategy.close()


@pytest.fixture(scope="module")
def shared():
    """Three workers, which each test here leaves as alive as they were."""
    cluster = Cluster(3, 2)
    cluster.check(cluster.schedule(3), 3)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(shared):
    shared.total.assign(np.zeros(100, np.float32))
    yield shared
    shared.coordinator.join(timeout=120)
    until(lambda: shared.activities() == [Activity.IDLE] * 3, 60)


def test_a_worker_killed_in_the_middle_costs_nothing(cluster):
    """CCO-39, CCO-40, FLT-2: exactly once, and the others go on."""
    pids, before = cluster.pids(), cluster.starts()
    values = cluster.schedule(60)
    values[10].fetch()
    os.kill(pids[0], signal.SIGKILL)
    cluster.check(values, 60)
    until(lambda: cluster.activities() == [Activity.IDLE] * 3, 60)
    assert cluster.starts() == [before[0] + 1, *before[1:]]
    again = cluster.pids()
    assert again[0] != pids[0] and again[1:] == pids[1:]
    assert "SIGKILL" in cluster.coordinator.workers[0].error


@pytest.mark.slow
def test_a_stopped_worker_is_given_up_and_what_it_sends_later_does_not_count(cluster):
    pids = cluster.pids()
    values = cluster.schedule(30)
    values[3].fetch()
    stop(pids[0])
    cluster.check(values, 30)
    until(lambda: cluster.activities() == [Activity.IDLE] * 3, 60)
    assert cluster.pids()[0] != pids[0]
