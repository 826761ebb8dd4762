"""`LocalProcesses`: workers and servers as child processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar, final

import jax
from jax import export

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.errors import ParameterServerLost, WorkerLost
from jaxstrategy._src.launch.child_process import (
    Guard,
    GuardedProcess,
    OutputThread,
    described,
)
from jaxstrategy._src.launch.options import GPUS, visible_gpus
from jaxstrategy._src.parameter_servers import peer as _peer
from jaxstrategy._src.parameter_servers.backends import child as _child
from jaxstrategy._src.parameter_servers.backends.child import Task
from jaxstrategy._src.parameter_servers.peer import Peer, RemoteServer, RemoteWorker
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractWorkerBackend,
)
from jaxstrategy._src.parameter_servers.stream import Stream, dialled
from jaxstrategy._src.processes.secret import VARIABLE as SECRET
from jaxstrategy._src.text.shown import positive, with_noun

# What names one process of a job, and children are none of its processes.
_OF_ONE_PROCESS = (
    TF_CONFIG,
    SECRET,
    _environment.COORDINATOR,
    _environment.PROCESS_ID,
    _environment.NUM_PROCESSES,
    _environment.LOCAL_RANK,
    _environment.ATTEMPT,
    _environment.JOB,
)

# Options of JAX by which programs and dataset functions mean something else.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_compilation_cache_dir",
)

_COMPILED = "JAX_COMPILATION_CACHE_DIR"

# XLA refuses to be told by two who disagree, and users set this one for their script.
_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=\S*")


def of_child(
    inherited: Mapping[str, str], cpu_devices: int, threads: int
) -> dict[str, str]:
    """The environment of a child that uses CPU devices only."""
    variables = {k: v for k, v in inherited.items() if k not in _OF_ONE_PROCESS}
    variables |= options_of_jax()
    variables["XLA_FLAGS"] = _SIMULATED.sub("", variables.get("XLA_FLAGS", "")).strip()
    return variables | {
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(cpu_devices),
        # XLA takes all cores for each process otherwise: two workers on two cores
        # took 1.5 times as long for each step (3 x 256 MLP, JAX 0.12).
        "PJRT_NPROC": str(max(cpu_devices, threads)),
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
    }


def options_of_jax() -> dict[str, str]:
    """This process's options of JAX, in the form in which a new process reads them."""
    found = {name: getattr(jax.config, name, None) for name in _OPTIONS}
    return {k.upper(): str(v) for k, v in found.items() if v is not None}


def threads_of_one(workers: int) -> int:
    """How many threads a worker has for itself, of several on this host."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // workers)


_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_WHOLE = 0.75  # of a GPU's memory: JAX's own default


@final
@dataclasses.dataclass(frozen=True)
class ChildDevices:
    """Which devices each worker has."""

    platform: str
    count: int
    gpus: tuple[tuple[str, ...], ...] = ()
    sharing: int = 1

    @classmethod
    def found(cls, workers: int, count: int | None) -> Self:
        """Those that JAX has here: GPUs, or else CPU devices that are simulated."""
        backend = jax.default_backend()
        if backend == "cpu":
            return cls("cpu", count or 1)
        if backend != "gpu":
            raise ValueError(
                f"The devices here are of the platform {backend!r}, which processes "
                "cannot divide. Set JAX_PLATFORMS=cpu, or choose backend='threads'."
            )
        names = visible_gpus(os.environ) or list(
            map(str, range(jax.local_device_count()))
        )
        return cls(export.default_export_platform(), *divided(names, workers, count))

    def environment(
        self, inherited: Mapping[str, str], worker: int, workers: int
    ) -> dict[str, str]:
        """The environment variables of one worker, of several."""
        cpu_devices = 1 if self.gpus else self.count
        own = of_child(inherited, cpu_devices, threads_of_one(workers))
        if directory := own.get(_COMPILED):
            # JAX reads entries while another process writes them: "Error reading
            # persistent compilation cache entry", and compiles anyway (0.10 to 0.12).
            own[_COMPILED] = f"{directory}/worker-{worker}"
        if not self.gpus:
            return own
        del own["JAX_PLATFORMS"]
        own |= {k: inherited[k] for k in ("JAX_PLATFORMS",) if k in inherited}
        own[GPUS] = ",".join(self.gpus[worker])
        if self.sharing > 1:
            own.setdefault(_MEMORY, f"{_WHOLE / self.sharing:.3f}")
        return own


def divided(
    gpus: Sequence[str], workers: int, count: int | None
) -> tuple[int, tuple[tuple[str, ...], ...], int]:
    """How many GPUs each worker has, which, and how many workers share one.

    >>> divided("0123", 2, None)
    (2, (('0', '1'), ('2', '3')), 1)
    >>> divided("0", 2, 1)
    (1, (('0',), ('0',)), 2)
    """
    each = count or max(1, len(gpus) // workers)
    if each * workers <= len(gpus):
        parts = (gpus[each * k : each * (k + 1)] for k in range(workers))
        return each, tuple(map(tuple, parts)), 1
    if each == 1:
        shared = tuple((gpus[k % len(gpus)],) for k in range(workers))
        return 1, shared, -(-workers // len(gpus))
    raise ValueError(
        f"{with_noun(workers, 'worker')} with {each} devices each need "
        f"{each * workers} GPUs, and there are {len(gpus)}. Ask for fewer workers or "
        "devices_per_worker, or set JAX_PLATFORMS=cpu to simulate devices."
    )


START_SECONDS = 60.0
"""An import of JAX takes one, on a busy host many."""

_DRAIN_SECONDS = 1.0


@final
class ChildProcess:
    """A process that ends with this one, and answers at a socket.

    Attributes:
      address: the path of the socket.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        environment: Mapping[str, str],
        guard: Guard,
        ended: Callable[[ChildProcess], None],
        address: str,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.name = name
        self.address = address
        self._start_seconds = start_seconds
        self._code: int | None = None
        self._told: list[Callable[[str], None]] = []
        self._ready = threading.Event()  # or ended
        self._over = threading.Event()
        self._building = threading.Lock()
        self._line, line = socket.socketpair()
        with self._building, line:
            self._process = GuardedProcess(
                # -P: the folder of the program is none to import from.
                [
                    sys.executable,
                    "-P",
                    _child.__file__,
                    str(line.fileno()),
                    name,
                ],
                environment,
                name,
                guard,
                lambda code: self._end(code, ended),
                joined=True,
                descriptors=[line.fileno()],
            )
            read = functools.partial(self._process.read, 0)
            self._output = OutputThread(name, read, functools.partial(show, name))
        path = [os.path.abspath(entry) for entry in sys.path]
        self._tell({"path": path, "address": address, **task})
        threading.Thread(
            target=self._listen, name=f"control of {name}", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def is_ready(self, seconds: float | None = None) -> bool:
        """Whether it answers calls, within that time, or the time to start."""
        seconds = self._start_seconds if seconds is None else seconds
        self._ready.wait(seconds)
        return self._ready.is_set() and self.end is None

    def dial(self) -> Stream:
        """A new connection to it, once it answers."""
        if not self.is_ready():
            raise ConnectionError(
                self.end or f"it did not start within {self._start_seconds:g} s"
            )
        return dialled(self.address)

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""
        if self._code is None:
            return None
        return f"it ended with {described(self._code)}"

    def when_ended(self, tell: Callable[[str], None]) -> None:
        """Tell how it has ended, once it has."""
        with self._building:
            if self.end is None:
                self._told.append(tell)
                return
        tell(self.end)

    def last_output(self) -> str:
        """The last lines that it wrote, and how it has ended if it has."""
        # Its sockets break before it is over, and its output comes after that.
        if self._over.wait(_DRAIN_SECONDS):
            self._output.finish(_DRAIN_SECONDS)
        lines = [line.decode(errors="replace") for line in self._output.tail]
        lines += [f"({self.end})"] if self.end else []
        return "\n".join(lines)

    def ask_to_end(self) -> None:
        """Let it end by itself."""
        self._tell(None)

    def wait(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        return self._process.wait(seconds)

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._process.send(number)

    def kill(self) -> None:
        """End it now, and what it has started."""
        self._process.kill()

    def abandon(self) -> None:
        """Let go of it, in a fork of this process."""
        if self._line.fileno() >= 0:
            os.close(self._line.detach())  # `close` would wait for the reader's file

    def close(self) -> None:
        """Wait for its end, and for what it has written."""
        self._process.close()
        self._output.finish(_DRAIN_SECONDS)

    def _tell(self, task: Task | None) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self._line.sendall(json.dumps(task).encode() + b"\n")

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._line.makefile("rb") as lines:
            while lines.readline():
                self._ready.set()

    def _end(self, code: int, ended: Callable[[ChildProcess], None]) -> None:
        with self._building:  # some end at once
            self._code = code
        self._over.set()
        self._ready.set()
        self._process.close()
        self._hang_up()
        ended(self)
        for tell in self._told:
            tell(f"it ended with {described(code)}")

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # wakes up who reads it
        self._line.close()


def show(name: str, line: bytes) -> None:
    """Show a line that a process wrote, behind its name."""
    stream = sys.stderr
    # Notebooks have streams of their own, and some programs have none.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        stream.write(f"[{name}] {line.decode(errors='replace')}\n")
        stream.flush()


_POLITE_SECONDS = 2.0
_TERMINATE_SECONDS = 1.0


@final
class Children:
    """Processes that are started and ended together, at the latest with this one."""

    def __init__(self) -> None:
        # Only this user enters it. A path of a socket has at most 107 characters.
        where = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="jaxstrategy-", dir=where if len(where) < 70 else "/tmp"
        )
        self._guard = Guard(self._folder)  # which removes it
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._living: list[ChildProcess] = []
        self._pid = os.getpid()
        self._is_closed = False
        _all.add(self)

    def start(self, make: Callable[[Guard], ChildProcess]) -> ChildProcess | None:
        """A new child; None once all were ended, or the main thread has."""
        with self._lock:
            if self._is_closed or not threading.main_thread().is_alive():
                return None
            self._living = [each for each in self._living if each.end is None]
            try:
                child = make(self._guard)
            except RuntimeError:
                # Since Python 3.12 an ending interpreter starts no thread; the guard
                # ends what the child has begun.
                if threading.main_thread().is_alive():
                    raise
                return None
            self._living.append(child)
        return child

    def address(self) -> str:
        """The path of a new socket."""
        return f"{self._folder}/{next(self._numbers)}"

    def close(self) -> None:
        """End all: asked to first, then made to. May be called twice."""
        if os.getpid() != self._pid:
            return  # a fork of the parent has no children
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for child in self._living:
            # One that is starting has nothing to end, and would not listen.
            child.ask_to_end() if child.is_ready(0) else child.kill()
        left = _still_there(self._living, _POLITE_SECONDS)
        for child in left:
            child.send(signal.SIGTERM)
        for child in _still_there(left, _TERMINATE_SECONDS):
            child.kill()
        for child in self._living:
            child.close()
        self._guard.close()

    def abandon(self) -> None:
        """Give up what a fork of this process has of them."""
        for child in self._living:
            child.abandon()
        self._guard.abandon()


def _still_there(
    children: Iterable[ChildProcess], seconds: float
) -> list[ChildProcess]:
    end = time.monotonic() + seconds
    return [c for c in children if not c.wait(max(0.0, end - time.monotonic()))]


_all: weakref.WeakSet[Children] = weakref.WeakSet()


def _abandon_all() -> None:
    for children in _all:
        children.abandon()


# Children would wait for the forks of their parent too, which have copies of sockets.
os.register_at_fork(after_in_child=_abandon_all)


class PlacedProcess(Protocol):
    """A process that can be replaced by another one."""

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""

    def kill(self) -> None:
        """End it now."""

    def close(self) -> None:
        """Wait for its end."""


ProcessT = TypeVar("ProcessT", bound=PlacedProcess)
Ended = Callable[[Any], None]


@final
class WorkerPlace(Generic[ProcessT]):
    """A worker's process, and the next one as soon as that has ended."""

    def __init__(self, start: Callable[[Ended], ProcessT | None]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._is_used = False
        with self._lock:  # it may end before it is known here
            self._child = start(self._ended)

    @property
    def current(self) -> ProcessT | None:
        """The process that there is now."""
        return self._child

    def fresh(self) -> ProcessT | None:
        """A process that was never given out; the one before it is ended."""
        with self._lock:
            old = self._child
            if self._is_used or old is None or old.end is not None:
                if old is not None:
                    old.kill()  # it may have what the next one needs
                self._child = self._start(self._ended)
            self._is_used = True
            child = self._child
        if old is not None and old is not child:
            old.close()
        return child

    def renew(self) -> None:
        """End the process, and start one that knows the servers that there are now."""
        with self._lock:
            old = self._child
            if old is not None:
                old.kill()
            self._child, self._is_used = self._start(self._ended), False
        if old is not None:
            old.close()

    def kill(self) -> None:
        """End the process that there is now."""
        child = self._child
        if child is not None:
            child.kill()

    def _ended(self, child: ProcessT) -> None:
        with self._lock:
            if child is self._child and self._is_used:
                self._child, self._is_used = self._start(self._ended), False


@final
class LocalProcesses(AbstractWorkerBackend):
    """Starts workers and parameter servers as processes, which end with this one.

    They are connected by sockets in a folder that only this user can enter. What they
    print appears behind their names in this process's standard error. A worker that
    ends is started again at once.

    Args:
      workers: how many.
      parameter_servers: how many.
      devices_per_worker: by default an equal share of the GPUs that JAX finds; where
        there are none, one CPU device. More of those are simulated.
      start_seconds: the time that a process has to start.
      patience: seconds without a sign of life after which one that was asked something
        is lost.

    Attributes:
      num_workers: how many workers there are.
      replicas_per_worker: how many devices each worker has.
      platforms: the platform of these devices.
      servers: the parameter servers.

    Raises:
      ValueError: there is no such number of devices.
    """

    can_restart_servers = True

    def __init__(
        self,
        workers: int,
        parameter_servers: int,
        devices_per_worker: int | None = None,
        *,
        start_seconds: float = START_SECONDS,
        patience: float = _peer.PATIENCE,
    ) -> None:
        self.num_workers = positive("workers", workers)
        parameter_servers = positive("parameter_servers", parameter_servers)
        if devices_per_worker is not None:
            positive("devices_per_worker", devices_per_worker)
        found = ChildDevices.found(workers, devices_per_worker)
        self.replicas_per_worker, self.platforms = found.count, (found.platform,)
        self._patience = patience
        children = Children()
        weakref.finalize(self, children.close)
        self._close = children.close
        starter = _Starter(children, workers, found, start_seconds)
        self._server_children = [starter.server(k) for k in range(parameter_servers)]
        self.servers = self._servers = [
            RemoteServer(self._peer(child)) for child in self._server_children
        ]
        self._start_server = starter.server
        self._places = [WorkerPlace(starter.worker(k)) for k in range(workers)]

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new process of a worker; the one before is ended, if it has not.

        Raises:
          WorkerLost: it did not start; the message has the last lines that it wrote.
        """
        child = self._places[worker].fresh()
        if child is None:
            raise WorkerLost(f"Worker {worker} is lost: all processes were ended.")
        for server in self._server_children:
            # Or the worker, which waits for answers only, would take it for lost.
            server.is_ready()
        if not child.is_ready():
            child.kill()
            raise WorkerLost(
                f"Worker {worker} did not start. The last that it wrote:\n"
                f"{child.last_output()}"
            )
        return RemoteWorker(self._peer(child, WorkerLost), child.kill)

    def _peer(
        self, child: ChildProcess, lost: type[Exception] = ParameterServerLost
    ) -> Peer:
        name = child.name.capitalize()
        peer = Peer(name, child.dial, lost, self._patience, child.last_output)
        child.when_ended(peer.close)
        return peer

    def kill(self, worker: int) -> None:
        """End a worker's process, as a crash would; another one is started.

        Callable from any thread.
        """
        self._places[worker].kill()

    def restart_servers(self, servers: Sequence[int]) -> None:
        """New processes of parameter servers, and of all workers, which know them.

        Raises:
          ParameterServerLost: one did not start.
        """
        for number in servers:
            old, child = self._server_children[number], self._start_server(number)
            old.kill()
            old.close()
            self._server_children[number] = child
            if not child.is_ready():
                raise ParameterServerLost(
                    f"Parameter server {number} did not start again. The last that it "
                    f"wrote:\n{child.last_output()}"
                )
            self._servers[number].peer = self._peer(child)
        for place in self._places:
            place.renew()

    def close(self) -> None:
        """End all processes: asked to first, then made to."""
        self._close()


@final
class _Starter:
    """Starts the children; holds nothing that would keep the backend alive."""

    def __init__(
        self, children: Children, workers: int, devices: ChildDevices, seconds: float
    ) -> None:
        self._children = children
        self._workers = workers
        self._devices = devices
        self._seconds = seconds
        self._servers: list[ChildProcess] = []
        # The children see the environment as it is now, whatever becomes of it.
        self._environment = dict(os.environ)

    def server(self, number: int) -> ChildProcess:
        child = self._started(
            f"parameter server {number}",
            {"role": _child.SERVER},
            of_child(self._environment, 1, 1),
            lambda child: None,
        )
        if child is None:
            raise ParameterServerLost(
                f"Parameter server {number} is lost: all processes were ended."
            )
        self._servers[number:] = [child, *self._servers[number + 1 :]]
        return child

    def worker(self, index: int) -> Callable[[Ended], ChildProcess | None]:
        task = {"role": _child.WORKER, "index": index}
        environment = self._devices.environment(self._environment, index, self._workers)

        def start(ended: Ended) -> ChildProcess | None:
            return self._started(f"worker {index}", task, environment, ended)

        return start

    def _started(
        self, name: str, task: Task, environment: Mapping[str, str], ended: Ended
    ) -> ChildProcess | None:
        own = {**task, "servers": [child.address for child in self._servers]}
        address = self._children.address()

        def make(guard: Guard) -> ChildProcess:
            return ChildProcess(
                name, own, environment, guard, ended, address, self._seconds
            )

        return self._children.start(make)
