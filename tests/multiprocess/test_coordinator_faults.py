"""Workers and servers that are killed or stopped while functions run on them."""

import os
import signal

import jax
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
def test_all_workers_killed_at_once_come_back(cluster):
    """CCO-42, FLT-3"""
    pids = cluster.pids()
    values = cluster.schedule(30)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster.check(values, 30)
    assert not set(pids) & set(cluster.pids())


@pytest.mark.slow
def test_a_worker_killed_while_idle_is_back_before_it_is_needed(cluster):
    pids, before = cluster.pids(), cluster.starts()
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: cluster.starts()[1] == before[1] + 1, 60)
    cluster.check(cluster.schedule(6), 6)


@pytest.mark.slow
def test_a_users_error_while_workers_are_killed(cluster):
    """FLT-5: the user's error wins, and what was cancelled has changed nothing."""
    with cluster.strategy.scope():
        table = js.Variable(jnp.zeros((4, 2)))

    @cluster.coordinator.function
    def bad(row):
        table.scatter_add(js.IndexedSlices(jnp.ones((1, 2)), row[None]))

    pids = cluster.pids()
    failed = cluster.coordinator.schedule(bad, (7,))
    with pytest.raises(IndexError, match="7"):
        failed.fetch()
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(IndexError, match="7") as raised:
        cluster.coordinator.join(timeout=60)
    notes = "\n".join(raised.value.__notes__)
    assert "Traceback" in notes  # the worker's
    cluster.check(cluster.schedule(6), 6)


@pytest.mark.slow
def test_a_stopped_worker_is_given_up_and_what_it_sends_later_does_not_count(cluster):
    pids = cluster.pids()
    values = cluster.schedule(30)
    values[3].fetch()
    stop(pids[0])
    cluster.check(values, 30)
    until(lambda: cluster.activities() == [Activity.IDLE] * 3, 60)
    assert cluster.pids()[0] != pids[0]


@pytest.mark.slow
def test_a_function_that_ends_its_workers_is_named(cluster):
    here = os.getpid()

    def broken():
        yield np.float32(1)
        if os.getpid() != here:
            os._exit(7)

    @cluster.coordinator.function
    def deadly(iterator):
        return next(iterator) + next(iterator)

    data = iter(cluster.coordinator.create_per_worker_dataset(broken))
    cluster.coordinator.schedule(deadly, (data,))
    with pytest.raises(RuntimeError, match="exit code 7") as raised:
        cluster.coordinator.join(timeout=120)
    text = str(raised.value)
    assert text.startswith(f"`deadly` ({__file__}:") and "was run 3 times" in text
    assert isinstance(raised.value.__cause__, js.WorkerLost)
    cluster.check(cluster.schedule(6), 6)


@pytest.mark.slow
def test_results_are_here_when_their_worker_is_gone(cluster):
    """CCO-43, FLT-10"""
    value = cluster.coordinator.schedule(jax.jit(lambda: (jnp.ones(3), -1)))
    cluster.coordinator.join()
    got = value.get()
    for pid in cluster.pids():
        os.kill(pid, signal.SIGKILL)
    np.testing.assert_array_equal(got[0], np.ones(3))
    assert value.fetch()[1] == -1


@pytest.mark.slow
def test_a_killed_server_is_an_error_for_ever():
    """CCO-49, FLT-6"""
    cluster = Cluster(2, 2)
    try:
        cluster.check(cluster.schedule(4), 4)
        with cluster.strategy.scope():
            elsewhere = js.Variable(5.0, name="elsewhere")
        (server,) = [
            task.process.pid
            for task in cluster.backend._tasks.servers
            if task.name == "parameter server 0"
        ]
        os.kill(server, signal.SIGKILL)
        cluster.coordinator.schedule(cluster.add, (0.0,))
        for call in (
            lambda: cluster.coordinator.join(timeout=60),
            lambda: cluster.coordinator.schedule(cluster.add, (0.0,)),
            cluster.coordinator.done,
            lambda: cluster.coordinator.join(timeout=60),
        ):
            with pytest.raises(
                js.errors.ParameterServerLost, match="arameter server 0"
            ):
                call()
        with pytest.raises(js.errors.ParameterServerLost):
            cluster.total.value()
        assert elsewhere.value() == 5.0  # of the living server
    finally:
        cluster.close()
