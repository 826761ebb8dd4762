"""The processes of this job, started once: they meet, JAX is told, a watch is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import socket
import threading
from contextlib import AbstractContextManager
from typing import Any, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.agreement._agreement import (
    AbstractAgreement,
    LoneAgreement,
    ProcessAgreement,
)
from jaxstrategy.cluster.agreement._operation import Shaped
from jaxstrategy.cluster.agreement._operation_agreement import OperationAgreement
from jaxstrategy.cluster.board._board import (
    AbstractBoard,
    LoneBoard,
)
from jaxstrategy.cluster.board._shared_board import Board
from jaxstrategy.cluster.connections import _wire
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.liveness import (
    _arrivals,
    _ending,
    _termination,
)
from jaxstrategy.cluster.liveness._ending import Ending
from jaxstrategy.cluster.liveness._watchdog import Watchdog
from jaxstrategy.cluster.meeting import _rendezvous
from jaxstrategy.cluster.resolvers._cluster_resolver import Process

_SHUTDOWN_SECONDS = 30  # of JAX's own barrier, where all come at the same time
_AGREED_BYTES = 512


@final
@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of this job, as this one sees them.

    Attributes:
      index: this process's id, from 0; what `jax.process_index()` says.
      count: how many there are.
      board: what they know of each other.
      watchdog: to be told of each step.
    """

    index: int
    count: int
    board: AbstractBoard
    watchdog: Watchdog

    def agreement(self, topic: str) -> AbstractAgreement:
        """Agreement about a topic, which all processes must name alike."""
        if self.count == 1:
            return LoneAgreement()
        return ProcessAgreement(self.board, self.watchdog, topic)

    @functools.cached_property
    def operations(self) -> OperationAgreement:
        """Agreement about what all do next."""
        return OperationAgreement(self.board, self.watchdog)


_started: Processes | None = None
_starting = threading.Lock()


def current() -> Processes | None:
    """What `start` gave, None before it."""
    return _started


def start(
    process: Process | None = None,
    *,
    timeout_seconds: float = 300,
    start_seconds: float = 300,
    bind_address: str | None = None,
    local_device_ids: int | list[int] | None = None,
) -> Processes:
    """Meet the other processes and start JAX's distributed runtime.

    A second call gives the same `Processes`. If `jax.distributed` was initialised
    before, index and count are JAX's, and the main thread of each process must call
    this. A job of one process starts nothing.

    Args:
      process: which one this is, of how many, and the coordinator's address, where
        process 0 listens: first we and then JAX, and only on that host's address. Not
        needed if JAX knows already.
      timeout_seconds: how long a step may go without progress before the watchdog ends
        the process, and how long `gather` waits.
      start_seconds: how long the processes wait for each other at the start.
      bind_address: where process 0 listens if not at the coordinator's host.
      local_device_ids: the devices of this host that are this process's; by default
        all, or what JAX finds out.

    Raises:
      ClusterError: they could not start together; the message names who and why. Or
        they have started already, with another id or number. Or strangers could take
        part: other hosts reach the coordinator's address, and there is no secret.
      ValueError: the id, number or address cannot be right, or are missing.

    >>> processes = start(Process(0, 1, "localhost:8476"))
    >>> processes.board.gather("rows", 12)
    [12]
    """
    global _started
    if process is not None:
        _check_range(process)
    with _starting:
        if _started is None:
            if jax.distributed.is_initialized():
                _started = _adopted(timeout_seconds, start_seconds)
            else:
                _started = _met_by(
                    _known(process),
                    timeout_seconds,
                    start_seconds,
                    bind_address,
                    local_device_ids,
                )
        _check_same(_started, process)
        return _started


def exchanging(what: str, *arrays: Shaped) -> AbstractContextManager[None]:
    """A block in which the processes exchange `arrays`, outside of steps.

    All of them must come to it. The values may differ, shapes and dtypes may not.

    Args:
      what: they exchange, in words.
      *arrays: what this process gives.

    Raises:
      ClusterError: another process is about to do something else.
    """
    processes = current()
    if processes is None or processes.count == 1:
        return contextlib.nullcontext()
    return processes.operations.exchanging(what, *arrays)


def stragglers() -> _arrivals.Stragglers:
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
    return _arrivals.of_states(() if started is None else started.board.states())


def _check_range(process: Process) -> None:
    if not 0 <= process.index < process.count:
        raise ValueError(
            f"The process's id was {process.index} of {process.count}; ids go from 0 "
            "to the number of processes less one."
        )


def _known(process: Process | None) -> Process:
    if process is None:
        raise ValueError(
            "Which process this is of how many is not known. Give it, or start "
            "`jax.distributed` first."
        )
    return process


def _check_same(started: Processes, process: Process | None) -> None:
    own = started.index, started.count
    if process is not None and (process.index, process.count) != own:
        raise ClusterError(
            f"This process is {own[0]} of {own[1]} already and cannot become "
            f"{process.index} of {process.count}. A process takes part in one job."
        )


def _alone(timeout_seconds: float) -> Processes:
    board = LoneBoard()
    return Processes(0, 1, board, Watchdog(board, timeout_seconds))


def _met_by(
    process: Process,
    timeout_seconds: float,
    start_seconds: float,
    bind_address: str | None,
    local_device_ids: Any,
) -> Processes:
    index, count, coordinator = process.index, process.count, process.coordinator
    if count == 1:
        return _alone(timeout_seconds)
    meeting = _rendezvous.meet(
        index, count, coordinator, start_seconds, bind_address=bind_address
    )
    board = Board(meeting, timeout_seconds)
    processes = Processes(index, count, board, Watchdog(board, timeout_seconds))
    ending = Ending(board, processes.watchdog)
    _termination.keep()
    try:
        jax.distributed.initialize(
            coordinator,
            count,
            index,
            local_device_ids=local_device_ids,
            coordinator_bind_address=_bound(coordinator, bind_address),
            initialization_timeout=max(1, int(start_seconds)),
            # A backstop only: the board is faster, and our report says more.
            heartbeat_timeout_seconds=int(min(timeout_seconds, 1e6)) + 30,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
    except Exception as error:
        board.fail(_ending.described(error))
        ending.is_over = True
        raise ClusterError(
            f"Process {index} of {count} met the others, but JAX could not start its "
            f"distributed runtime: {error}"
        ) from error
    ending.install()
    processes.watchdog.start()
    return processes


def _bound(coordinator: str, bind_address: str | None) -> str:
    host, port = _wire.endpoint(coordinator)
    return _wire.address_of(bind_address or host, port)


def _adopted(timeout_seconds: float, start_seconds: float) -> Processes:
    """The processes of a `jax.distributed` that is initialised already."""
    index, count = jax.process_index(), jax.process_count()
    if count == 1:
        return _alone(timeout_seconds)
    _termination.take_back()
    address, given = _agreed(index)
    secret = Secret.of_environment() or given
    meeting = _rendezvous.meet(index, count, address, start_seconds, secret=secret)
    board = Board(meeting, timeout_seconds)
    processes = Processes(index, count, board, Watchdog(board, timeout_seconds))
    Ending(board, processes.watchdog).install()
    processes.watchdog.start()
    return processes


def _agreed(index: int) -> tuple[str, Secret]:
    """A free port of process 0 and a new secret, told to all.

    On the loopback if all are on one host. The secret is safe from who cannot listen to
    JAX's own messages.
    """
    own = np.frombuffer(socket.gethostname().encode()[:64].ljust(64), np.uint8)
    hosts = np.asarray(multihost_utils.process_allgather(own))
    text = b""
    if index == 0:
        is_one_host = bool((hosts == hosts[:1]).all())
        address = _free_address("127.0.0.1" if is_one_host else _own_address())
        text = f"{address} {secrets.token_hex(32)}".encode()
    padded = np.frombuffer(text.ljust(_AGREED_BYTES), np.uint8)
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    address, secret = agreed.astype(np.uint8).tobytes().decode().split()
    return address, Secret(secret)


def _free_address(host: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as reserved:
        reserved.bind((host, 0))
        return _wire.address_of(host, reserved.getsockname()[1])


def _own_address() -> str:
    """The address under which other hosts most likely know this one."""
    found = socket.getaddrinfo(
        socket.gethostname(), None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return str(found[0][4][0])
