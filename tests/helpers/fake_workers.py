"""Workers and servers that only do what a test tells them, in this process."""

import threading
import types

import jax
import numpy as np

from jaxstrategy._errors import ParameterServerLost, WorkerLost
from jaxstrategy.coordinator._cluster_coordinator import ClusterCoordinator
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._abstract_worker import (
    AbstractWorker,
    AbstractWorkerBackend,
)

SECONDS = 20


class Strategy:
    """Something that a coordinator is of."""


class Server(AbstractServer):
    """Counts what is pushed, and by whom; drops repeats and what is fenced off."""

    def __init__(self):
        self.lock = threading.Lock()
        self.fences, self.pushed, self.is_lost = {}, [], False

    def fence(self, worker, incarnation):
        self.check()
        with self.lock:
            self.fences[worker] = incarnation

    def push(self, operations, call=None):
        self.check()
        with self.lock:
            if call.incarnation < self.fences.get(call.worker, 0):
                return False
            if any(call.function == earlier.function for earlier, _ in self.pushed):
                return False
            self.pushed.append((call, operations))
            return True

    def check(self):
        if self.is_lost:
            raise ParameterServerLost("the server is gone")

    @property
    def total(self):
        return sum(number for _, number in self.pushed)

    def create(self, number, value, is_table=False):
        raise NotImplementedError

    drop = read = define = versions = create


class Worker(AbstractWorker):
    """Calls the user's function in the thread that asks."""

    def __init__(self, backend, index, incarnation):
        self.backend, self.index, self.incarnation = backend, index, incarnation
        self.dead = threading.Event()
        self.programs, self.resources = set(), {}

    def alive(self):
        if self.dead.is_set():
            raise WorkerLost(f"worker {self.index} is gone, exit code -9")

    def define(self, program):
        self.alive()
        assert program.key not in self.programs, "it knows it"
        self.programs.add(program.key)
        self.backend.defined.append((self.index, program.key))

    def build(self, resource, builder, uses=()):
        self.alive()
        assert resource not in self.resources, "it has it"
        made = builder(self.index, *(self.resources[use] for use in uses))
        self.alive()
        self.resources[resource] = made

    def release(self, resources):
        self.alive()
        for number in resources:
            self.resources.pop(number, None)

    def call(self, call):
        self.alive()
        assert call.program in self.programs, "it does not know it"
        iterators = [self.resources[number] for number in call.iterators]
        function = self.backend.functions[call.program]
        here.worker, here.call, here.iterators = self, call, iterators
        result = function.fn(*call.arguments, **function.kwargs)
        self.alive()
        leaves, function.structure = jax.tree.flatten(result)
        function.static = [leaf if isinstance(leaf, str) else None for leaf in leaves]
        return [np.asarray(leaf) for leaf in leaves if not isinstance(leaf, str)]

    def own(self, variable):
        self.alive()
        return self.resources[variable]

    def kill(self):
        self.dead.set()
        self.backend.event.set()


here = threading.local()
"""Of the function that runs in this thread: its worker, call and iterators."""


def push(number, server=0):
    """As a function's last deed: add a number on a server."""
    server = here.worker.backend.servers[server]
    return server.push(number, here.call.number)


class Backend(AbstractWorkerBackend):
    """Starts such workers.

    Attributes:
      lives: all workers that there ever were, in the order of their starts.
      refusals: of each index how many starts fail; or an event to wait for before.
      event: is set whenever a worker is killed, so that blocked functions look.
    """

    platforms = ("cpu",)

    def __init__(self, workers=2, servers=1):
        self._servers = [Server() for _ in range(servers)]
        self._workers = workers
        self.lives, self.defined, self.functions = [], [], {}
        self.refusals, self.gates = {}, {}
        self.event = threading.Event()
        self.lock = threading.Lock()

    num_workers = property(lambda self: self._workers)
    replicas_per_worker = 1
    servers = property(lambda self: self._servers)

    def start(self, worker, incarnation):
        gate = self.gates.get(worker)
        if gate is not None:
            assert gate.wait(SECONDS)
        with self.lock:
            if self.refusals.get(worker, 0):
                self.refusals[worker] -= 1
                raise WorkerLost(f"worker {worker} did not come up")
            life = Worker(self, worker, incarnation)
            self.lives.append(life)
            return life

    def life(self, index):
        """The latest life of a worker."""
        return [life for life in self.lives if life.index == index][-1]

    def kill(self, index):
        self.life(index).kill()

    def close(self):
        """Nothing runs by itself."""


class Prepared:
    """A function with its arguments, which is traced by nobody."""

    def __init__(self, tracer, key, args, resources, trace_seconds):
        self.program = types.SimpleNamespace(key=key, name=key)
        self.arguments = args
        self.resources = resources
        self.iterators = tuple(resource.number for resource in resources)
        self.trace_seconds = trace_seconds
        self.tracer = tracer

    def arguments_of(self, worker):
        return self.arguments

    def taken(self, worker, arrays):
        return arrays

    def rebuild(self, arrays):
        function = self.tracer.backend.functions[self.program.key]
        left = iter(arrays)
        leaves = [next(left) if s is None else s for s in function.static]
        return jax.tree.unflatten(function.structure, leaves)

    def traced_again(self, changed):
        self.tracer.changes.append(changed)
        return self.tracer.again(self, changed)


class Tracer:
    """Prepares functions: the attribute `uses` of one has its resources."""

    def __init__(self, backend):
        self.backend = backend
        self.changes = []
        self.calls = 0
        self.again = lambda prepared, changed: prepared

    def prepare(self, fn, args, kwargs):
        plain = getattr(fn, "function", fn)
        self.calls += 1
        # With kwargs it is another program each time, which is all that fakes need.
        key = f"{plain.__name__} {id(plain)} {self.calls if kwargs else ''}"
        is_new = key not in self.backend.functions
        self.backend.functions.setdefault(
            key, types.SimpleNamespace(fn=plain, kwargs=kwargs)
        )
        resources = getattr(plain, "uses", ())
        seconds = 0.25 if is_new else None
        return Prepared(self, key, args, resources, seconds)


def coordinator(workers=2, servers=1, **options):
    """A coordinator of such workers; its `backend` and `tracer` are attributes."""
    backend = Backend(workers, servers)
    tracer = Tracer(backend)
    made = ClusterCoordinator._of(Strategy(), backend, tracer, **options)
    made.backend, made.tracer = backend, tracer
    return made


class Gate:
    """A function that waits in its worker until it may go on, or its worker dies."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, x=0):
        self.entered.release()
        worker = here.worker
        while not self.open.wait(0.002):
            worker.alive()
        return np.asarray(x)

    __name__ = "gate"

    def wait_until_entered(self, times=1):
        for _ in range(times):
            assert self.entered.acquire(timeout=SECONDS), "it does not run"
