"""Coordinators whose workers are threads, and functions that wait, fail or end them."""

import contextlib
import functools
import itertools
import threading
import time

from helpers.threads import until

import jaxstrategy as js

SECONDS = 30
index = js.coordinator.experimental_get_current_worker_index
Activity = js.coordinator.WorkerActivity
Status = js.coordinator.RemoteValueStatus


class Cluster:
    """Workers and servers that are threads, a coordinator, and a sum on a server."""

    def __init__(self, workers=2, servers=1, devices=1, partitioner=None, **options):
        js.simulate(8)
        self.backend = js.coordinator.Threads(workers, servers, devices)
        self.strategy = js.ParameterServerStrategy(
            None, partitioner, backend=self.backend
        )
        self.total = self.variable(0.0, name="total")
        self.away, self.refusals, self._killed = {}, {}, {}
        self._hooks, self._numbers, self.gates = {}, itertools.count(), []
        self._start, self.backend.start = self.backend.start, self._started
        self.coordinator = js.coordinator.ClusterCoordinator(self.strategy, **options)

    def variable(self, value=1.0, **options):
        with self.strategy.scope():
            return js.Variable(value, **options)

    def function(self, fn, before=None, after=None):
        """A function of which something is called in the worker's thread, too."""
        number = next(self._numbers)

        @functools.wraps(fn)
        def hooked(*args, **kwargs):
            assert number >= 0  # two functions with the same code are told apart
            return fn(*args, **kwargs)

        hooked.__name__ = f"{fn.__name__}_{number}"
        self._hooks[hooked.__name__] = before, after
        return self.coordinator.function(hooked)

    def schedule(self, fn, *args, **kwargs):
        if not hasattr(fn, "function"):
            fn = self.coordinator.function(fn)
        return self.coordinator.schedule(fn, args, kwargs)

    def __call__(self, fn, *args, **kwargs):
        return self.schedule(fn, *args, **kwargs).fetch()

    def add(self, x=1.0):
        """A function that adds to the sum."""
        self.total.assign_add(x)
        return x

    def raising(self, error):
        """A function whose worker raises this."""

        def fail(worker):
            raise error

        return self.function(lambda: 1.0, fail)

    def kill(self, worker):
        self.backend.kill(worker)

    def lost(self, worker):
        """The event that is set when the present life of a worker is ended."""
        return self._killed[worker]

    def activities(self):
        return [state.activity for state in self.coordinator.workers]

    def starts(self):
        return [state.starts for state in self.coordinator.workers]

    def until_idle(self):
        until(lambda: set(self.activities()) == {Activity.IDLE})

    def open_all(self):
        """After a test, whatever became of it."""
        for gate in self.gates:
            gate.open.set()
        self.gates.clear()

    def sum(self):
        return float(self.total.value())

    def close(self):
        self.strategy.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _started(self, worker, incarnation):
        if worker in self.away:
            assert self.away[worker].wait(SECONDS)
        if self.refusals.get(worker, 0):
            self.refusals[worker] -= 1
            raise js.WorkerLost(f"worker {worker} did not come up")
        is_lost = self._killed[worker] = threading.Event()
        life, names = self._start(worker, incarnation), {}
        define, call, kill = life.define, life.call, life.kill

        def defined(program):
            names[program.key] = program.name
            define(program)

        def called(given):
            before, after = self._hooks.get(names[given.program], (None, None))
            arguments = [each.item() for each in given.arguments if not each.ndim]
            if before is not None:
                before(worker, *arguments)
            results = call(given)
            if after is not None:
                after(worker, *arguments)
            return results

        def killed():
            is_lost.set()
            kill()

        life.define, life.call, life.kill = defined, called, killed
        return life


class Gate:
    """A function that waits in its worker until it may go on, or that is killed."""

    def __init__(self, cluster, fn=lambda x=0.0: x):
        cluster.gates.append(self)
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.cluster = cluster
        self.fn = self.before(fn)

    def before(self, fn):
        """`fn`, which waits first."""
        return self.cluster.function(fn, self.wait)

    def wait(self, worker, *args):
        self.entered.release()
        lost = self.cluster.lost(worker)
        while not (self.open.wait(0.002) or lost.is_set()):
            pass

    def until_entered(self, times=1):
        for _ in range(times):
            assert self.entered.acquire(timeout=SECONDS), "it does not run"


@contextlib.contextmanager
def coordinated(workers, devices=1, servers=1):
    """A coordinator of workers that are threads, closed afterwards."""
    with Cluster(workers, servers, devices) as cluster:
        yield cluster.coordinator


def until_each_has(coordinator, fn, args=(), workers=None):
    """What `fn` returned, worker by worker, once each of them has run it."""
    found = {index: [] for index in range(workers or len(coordinator.workers))}
    end = time.monotonic() + SECONDS
    while not all(found.values()):
        assert time.monotonic() < end, f"some workers have run nothing: {found}"
        values = [coordinator.schedule(fn, args) for _ in found]
        for index, value in coordinator.fetch(values):
            found[int(index)].append(value)
    coordinator.join()
    return found
