"""The processes of this job, started once: they meet, JAX is told, a watch is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager
from typing import final

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxstrategy._src import text
from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
    ClusterResolver,
    Process,
    SimpleClusterResolver,
)
from jaxstrategy._src.cluster.resolvers.cluster_spec import (
    ClusterSpec,
    address_of,
)
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes import (
    ending as _ending,
    rendezvous,
    stragglers as _stragglers,
)
from jaxstrategy._src.processes.agreement import (
    Agreement,
    OperationAgreement,
)
from jaxstrategy._src.processes.ending import Ending
from jaxstrategy._src.processes.rendezvous import Group, Host
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.processes.store import ProcessState, Store
from jaxstrategy._src.processes.watchdog import Watchdog
from jaxstrategy._src.text import Shaped, with_noun

_SHUTDOWN_SECONDS = 30  # of JAX's own barrier, where all come at the same time
_AGREED_BYTES = 512

IN_POD = "KUBERNETES_SERVICE_HOST"
"""The variable that Kubernetes sets in each pod."""


def _met(process: Process, timeout_seconds: float, start_seconds: float) -> Processes:
    """The processes that have met before JAX's runtime has started."""
    group = rendezvous.meet(
        process.index, process.count, process.coordinator, start_seconds
    )
    processes, ending = _watched(group, timeout_seconds)
    # Before JAX starts: its notifier takes SIGTERM in `initialize` (0.10 and 0.12).
    _ending.keep_sigterm()
    try:
        jax.distributed.initialize(
            process.coordinator,
            process.count,
            process.index,
            # By default JAX listens on `[::]`, that is, to all networks of the host.
            coordinator_bind_address=process.coordinator,
            initialization_timeout=max(1, int(start_seconds)),
            # A backstop only: the store is faster, and our report says more. JAX's
            # abort is what remains when this process cannot run Python any more.
            heartbeat_timeout_seconds=int(min(timeout_seconds, 1e6)) + 30,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            cluster_detection_method=detection(),
        )
    # Any error counts: the others wait in JAX's start until the store tells them.
    except Exception as error:
        processes.store.fail(_ending.described(error))
        ending.is_over = True
        raise ClusterError(
            f"Process {process.index} of {process.count} met the others, but JAX could "
            f"not start its distributed runtime: {error}"
        ) from error
    ending.install()
    processes.watchdog.start()
    return processes


def _watched(group: Group, timeout_seconds: float) -> tuple[Processes, Ending]:
    store = Store(group, timeout_seconds)
    watchdog = Watchdog(store, timeout_seconds)
    return Processes(store, watchdog), Ending(store, watchdog)


def detection() -> str | None:
    """How JAX looks for the devices of this process, which is all that is not known."""
    # In a pod it knows nothing of them and asks Kubernetes all the same, which fails
    # where the pod has no service account (JAX 0.10 and 0.12).
    launchers = ("OMPI_", "SLURM_")
    if IN_POD in os.environ and not any(n.startswith(launchers) for n in os.environ):
        return "deactivate"
    return None


def _adopted(timeout_seconds: float, start_seconds: float) -> Processes:
    """The processes of a `jax.distributed` that is initialised already."""
    _ending.take_back_sigterm()
    address, secret, host = _agreed(jax.process_index())
    group = rendezvous.meet(
        jax.process_index(),
        jax.process_count(),
        address,
        start_seconds,
        secret=secret,
        host=host,
    )
    processes, ending = _watched(group, timeout_seconds)
    ending.install()
    processes.watchdog.start()
    return processes


def _agreed(index: int) -> tuple[str, Secret, Host | None]:
    """An address of process 0 and a secret, told to all; what listens there.

    On the loopback if all are on one host. The secret is safe from who cannot listen to
    JAX's own messages. There is no store yet, so JAX's collectives tell it, by which
    all of them wait for all.
    """
    own = np.frombuffer(socket.gethostname().encode()[:64].ljust(64), np.uint8)
    hosts = np.asarray(multihost_utils.process_allgather(own))
    text, host = b"", None
    if index == 0:
        is_one_host = bool((hosts == hosts[:1]).all())
        word = secrets.token_hex(32)
        name = "127.0.0.1"
        if not is_one_host:  # the address under which most likely others know it
            kind, flags = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
            known = socket.getaddrinfo(
                socket.gethostname(), None, type=kind, flags=flags
            )
            name = str(known[0][4][0])
        # It listens before the others hear of the port: nobody else can take it.
        host = Host(address_of(name, 0), Secret.of_environment() or Secret(word))
        text = f"{host.address} {word}".encode()
    padded = np.frombuffer(text.ljust(_AGREED_BYTES), np.uint8)
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    address, word = agreed.astype(np.uint8).tobytes().decode().split()
    return address, Secret.of_environment() or Secret(word), host


@final
@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of this job, as this one sees them."""

    store: Store  # what they know of each other
    watchdog: Watchdog  # to be told of each step

    @property
    def index(self) -> int:
        """The id of this process, from 0; what `jax.process_index()` says."""
        return self.store.index

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self.store.members)

    def agreement(self, topic: str) -> Agreement:
        """Agreement about a topic, which all processes must name alike."""
        if self.count == 1:
            return Agreement()
        return Agreement(topic, self.store, self.watchdog)

    @functools.cached_property
    def operations(self) -> OperationAgreement:
        """Agreement about what all do next."""
        return OperationAgreement(self.store, self.watchdog)


_started: Processes | None = None
_starting = threading.Lock()


def current() -> Processes | None:
    """The processes of this job; None before `start`."""
    return _started


def start(
    process: Process | None = None,
    *,
    timeout_seconds: float = 300,
    start_seconds: float = 300,
) -> Processes:
    """Meet the other processes and start JAX's distributed runtime.

    A second call gives the same `Processes`. If `jax.distributed` was initialised
    before, index and count are JAX's, and the main thread of each process must call
    this. A job of one process starts nothing.
    """
    global _started
    if process is not None and not 0 <= process.index < process.count:
        raise ValueError(
            f"The process's id was {process.index} of {process.count}; ids go from 0 "
            "to the number of processes less one."
        )
    # Two threads may make strategies at once, and a process meets the others once.
    with _starting:
        if _started is None:
            new = None if jax.distributed.is_initialized() else process
            if new is None and not jax.distributed.is_initialized():
                raise ValueError(
                    "Which process this is of how many is not known. Give it, or start "
                    "`jax.distributed` first."
                )
            if (jax.process_count() if new is None else new.count) == 1:
                store = Store()
                _started = Processes(store, Watchdog(store, timeout_seconds))
            elif new is None:
                _started = _adopted(timeout_seconds, start_seconds)
            else:
                _started = _met(new, timeout_seconds, start_seconds)
        own = _started.index, _started.count
        if process is not None and (process.index, process.count) != own:
            raise ClusterError(
                f"This process is {own[0]} of {own[1]} already and cannot become "
                f"{process.index} of {process.count}. A process takes part in one job."
            )
        return _started


def exchanging(what: str, *arrays: Shaped) -> AbstractContextManager[None]:
    """A block in which the processes exchange `arrays`, outside of steps.

    All of them must come to it. The values may differ, shapes and dtypes may not.
    """
    processes = current()
    if processes is None or processes.count == 1:
        return contextlib.nullcontext()
    return processes.operations.exchanging(what, *arrays)


def stragglers() -> _stragglers.Stragglers:
    """A table of the processes that come late to steps, of the last 256 steps.

    Any process may ask, at any time; it waits for nobody. What the others know is up to
    a second old. Where clocks stand does not matter, but a host that starts steps far
    ahead of its devices is early although it has done no more.

    Raises:
      ClusterError: process 0 does not answer.

    >>> import jaxstrategy as js
    >>> print(js.experimental.stragglers())
    only 0 steps were seen, too few to tell who is late
    """
    started = current()
    return _stragglers.of_states(() if started is None else started.store.states())


TIMEOUT_SECONDS = 300.0
"""How long a step may go without progress, if nothing else is said."""

_ALONE = Process(0, 1, "")
_WARNING = (
    "This process trains alone: `MultiWorkerMirroredStrategy` was given no "
    "`cluster_resolver`, and no environment variable tells of other processes. If "
    "there are others, each trains a model of its own: start them with `python -m "
    "jaxstrategy.launch`, `srun` or `torchrun`, set TF_CONFIG, or give a "
    "`cluster_resolver`. If there are none, use `MirroredStrategy`."
)
_ASKED_IN_VAIN = (
    "This program runs in a pod of Kubernetes, and JAX could not ask there for the "
    "other processes: {} Say which processes there are: give a `cluster_resolver`, or "
    "set TF_CONFIG. For a process alone, use `MirroredStrategy`."
)


@final
@dataclasses.dataclass(frozen=True)
class _Launcher:
    """The variables by which a launcher tells of several processes."""

    advice: str  # what to do if they cannot be followed
    counts: tuple[str, ...] = ()  # of processes; the first that is set is right
    ranks: tuple[str, ...] = ()  # of this process, from 0
    hosts: tuple[str, ...] = ()  # separated by commas
    needed: tuple[str, ...] = ()  # in each of several; unimportant if the count is 1

    def is_alone(self) -> bool:
        """Whether it says that there is one process only."""
        count = next(filter(_value, self.counts), None)
        return count is not None and _value(count) == "1" and self.speaking() is None

    def speaking(self) -> str | None:
        """The name of a variable that tells of several processes."""
        count = next(filter(_value, self.counts), None)
        if count is not None and _value(count) != "1":
            return count
        for name in self.ranks:
            if _value(name) not in ("", "0"):
                return name
        for name in self.hosts:
            if len(_value(name).strip(",").split(",")) > 1:
                return name
        return next(filter(_value, self.needed), None) if count is None else None


_JAX = _Launcher(
    "Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each process",
    counts=("JAX_NUM_PROCESSES",),
    ranks=("JAX_PROCESS_ID",),
    needed=("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
_TORCHRUN = _Launcher(
    "Start the processes with `torchrun`, or set MASTER_ADDR, MASTER_PORT, WORLD_SIZE "
    "and RANK in each",
    counts=("WORLD_SIZE",),
    ranks=("RANK",),
    needed=("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
)
_SLURM = _Launcher(
    "Start the program in tasks of a job step, with `srun`",
    counts=(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
    ),
    ranks=("SLURM_PROCID",),
)
_LAUNCHERS = (
    _JAX,
    _TORCHRUN,
    _Launcher(
        "JAX knows Open MPI 4; for others install `mpi4py` and call "
        '`jax.distributed.initialize(cluster_detection_method="mpi4py")` first',
        counts=("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        ranks=("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    ),
    _SLURM,
    _Launcher(
        "JAX finds no TPU of theirs: install `jax[tpu]`",
        counts=("MEGASCALE_NUM_SLICES",),
        ranks=("TPU_WORKER_ID", "MEGASCALE_SLICE_ID"),
        hosts=("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        needed=("MEGASCALE_COORDINATOR_ADDRESS",),
    ),
    _Launcher(
        "Install `kubernetes`, with which JAX asks for the other pods",
        needed=("JOB_COMPLETION_INDEX",),
    ),
)
_SHELLS = ("interactive", "bash", "sh", "zsh")  # SLURM_JOB_NAME of `salloc` and shells


def found(
    resolver: ClusterResolver | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    otherwise: ClusterResolver | None = None,
    num_replicas: int | None = None,
) -> Processes:
    """The processes, which have met; those too many for `num_replicas` end."""
    if resolver is not None:
        process = _with_replicas(resolver.process(), num_replicas)
    elif (hindrance := _join()) is None:
        process = None
    else:
        process = _ALONE if otherwise is None else otherwise.process()
        if process.count == 1:
            _check_alone(hindrance)
        if otherwise is None and not any(each.is_alone() for each in _LAUNCHERS):
            text.warn(_WARNING, RuntimeWarning)
    return start(process, timeout_seconds=timeout_seconds)


def _with_replicas(process: Process, num_replicas: int | None) -> Process:
    """This process among as many as can have equally many replicas."""
    if num_replicas is None or num_replicas % process.count == 0:
        return process
    count = max(n for n in range(1, process.count) if num_replicas % n == 0)
    if process.index < count:
        return Process(process.index, count, process.coordinator)
    print(
        f"jaxstrategy: process {process.index} of {process.count} ends, and takes no "
        f"part: {num_replicas} replicas are on {with_noun(count, 'process')}, equally "
        "many on each.",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(0)


def agree_on_replicas(processes: Processes | None, replicas: str) -> None:
    """Compare the replicas of a strategy, in words, with those of the other processes.

    Processes that count other replicas would take other parts of one batch.
    """
    if processes is not None and processes.count > 1:
        processes.operations.agree(f"make a strategy of {replicas}")


def _join() -> str | None:
    """Start JAX's distributed runtime, or return what keeps it from starting."""
    if jax.distributed.is_initialized():
        return None
    if _speaking() is None and (_JAX.is_alone() or _TORCHRUN.is_alone()):
        return "There is one process."
    _ending.keep_sigterm()
    try:
        _initialize()
    except ValueError as error:
        if "coordinator_address" in str(error):
            return "JAX finds no cluster."
        return f"{str(error).removesuffix('.')}."
    except Exception as error:
        if isinstance(error, RuntimeError) and "before" in str(error):
            return (
                "JAX has started its devices already. Make the strategy before "
                "anything asks for devices or computes."
            )
        if IN_POD in os.environ:
            raise ClusterError(_ASKED_IN_VAIN.format(error)) from error
        if (speaking := _speaking()) is not None:
            raise _unjoined(*speaking, f"JAX says: {error}") from error
        raise
    return None


def _initialize() -> None:
    if all(map(_value, _TORCHRUN.needed)) and not _TORCHRUN.is_alone():
        host, port = _value("MASTER_ADDR"), _number("MASTER_PORT")
        assert port is not None
        # There the agent of torchrun itself listens.
        port += _value("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, per_host = address_of(host, port), _number("LOCAL_WORLD_SIZE") or 1
        local = host in ("localhost", "127.0.0.1", "::1")
        jax.distributed.initialize(
            address,
            _number("WORLD_SIZE"),
            _number("RANK"),
            local_device_ids=_number("LOCAL_RANK") if per_host > 1 else None,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address if local else None,
        )
        return
    count, rank = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
    method = detection() if all(map(_value, _JAX.needed)) else None
    # In a shell that is an interactive step, SLURM_NTASKS is that of the whole job.
    if _value("SLURM_STEP_NUM_TASKS") == "1" != _value("SLURM_NTASKS"):
        method = "deactivate"
    jax.distributed.initialize(
        num_processes=None if count == 1 else count,
        process_id=None if count == 1 else rank,
        cluster_detection_method=method,
    )


def _check_alone(hindrance: str) -> None:
    """Raises if there are other processes after all."""
    if (speaking := _speaking()) is not None:
        raise _unjoined(*speaking, hindrance)
    # A TPU of several hosts is one without JAX's distributed runtime, too.
    if not jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ClusterError(
            f"JAX has {jax.process_count()} processes, which cannot meet. {hindrance}"
        )


def _unjoined(launcher: _Launcher, name: str, hindrance: str) -> ClusterError:
    missing = [needed for needed in launcher.needed if not _value(needed)]
    if missing:
        hindrance = f"{' and '.join(missing)} must be set, too."
    return ClusterError(
        f"{name} is {os.environ[name]!r} in the environment, so this is one process of "
        f"several, and it cannot join the others. {hindrance} {launcher.advice}; or "
        "set TF_CONFIG, or give a `cluster_resolver`. For a process alone, use "
        f"`MirroredStrategy`, or unset {name}."
    )


def _speaking() -> tuple[_Launcher, str] | None:
    """The first launcher that tells of several processes, and by which variable."""
    shell = _value("SLURM_JOB_NAME") in _SHELLS
    steps = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    for launcher in _LAUNCHERS:
        if launcher is _SLURM and shell and not any(map(_value, steps)):
            continue
        name = launcher.speaking()
        if name is not None:
            return launcher, name
    return None


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def _number(name: str) -> int | None:
    text = _value(name)
    if text and not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it is a whole number from 0 on.")
    return int(text) if text else None


_POLL_SECONDS = 0.5
_JOINED = "Server.join of process {}"


@final
class TrainingTask:
    """One of the processes that take the same steps."""

    def __init__(self, spec: ClusterSpec, job: str, index: int) -> None:
        resolver = SimpleClusterResolver(spec, task_type=job, task_id=index)
        self._process = resolver.process()

    def start(self) -> None:
        """Meet the others; a second call does nothing."""
        start(self._process)

    def join(self) -> None:
        """Wait until all others have finished, or wait here too."""
        store = start(self._process).store
        store.put(_JOINED.format(store.index), True)
        while not all(self._is_done(store, state) for state in store.states()):
            time.sleep(_POLL_SECONDS)

    def _is_done(self, store: Store, state: ProcessState) -> bool:
        index = state.member.index
        if state.end is not None or index == store.index:
            return True
        try:
            return store.get(_JOINED.format(index), _POLL_SECONDS)
        except ClusterError:
            return False
