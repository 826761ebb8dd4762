"""The processes of this job, started once: they meet, JAX is told, a watch is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from contextlib import AbstractContextManager
from typing import final

import jax

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _startup
from jaxstrategy.cluster.agreement._agreement import (
    AbstractAgreement,
    LoneAgreement,
    ProcessAgreement,
)
from jaxstrategy.cluster.agreement._operation_agreement import OperationAgreement
from jaxstrategy.cluster.board._board import AbstractBoard
from jaxstrategy.cluster.liveness import _arrivals
from jaxstrategy.cluster.liveness._watchdog import Watchdog
from jaxstrategy.cluster.resolvers._cluster_resolver import Process
from jaxstrategy.text._array_types import Shaped


@final
@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of this job, as this one sees them.

    Attributes:
      board: what they know of each other.
      watchdog: to be told of each step.
    """

    board: AbstractBoard
    watchdog: Watchdog

    @property
    def index(self) -> int:
        """The id of this process, from 0; what `jax.process_index()` says."""
        return self.board.index

    @property
    def count(self) -> int:
        """The number of processes."""
        return len(self.board.members)

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
    """The processes of this job; None before `start`."""
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
    # Two threads may make strategies at once, and a process meets the others once.
    with _starting:
        if _started is None:
            if jax.distributed.is_initialized():
                part = _startup.adopted(timeout_seconds, start_seconds)
            elif (known := _known(process)).count == 1:
                part = _startup.alone(timeout_seconds)
            else:
                part = _startup.met(
                    known,
                    timeout_seconds,
                    start_seconds,
                    bind_address,
                    local_device_ids,
                )
            _started = Processes(*part)
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
