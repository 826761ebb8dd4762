"""The start of this process's part in a job: meeting, board, watchdog, JAX."""

from __future__ import annotations

import os
import secrets
import socket
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.board._board import AbstractBoard, LoneBoard
from jaxstrategy.cluster.board._shared_board import Board
from jaxstrategy.cluster.connections import _wire
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.liveness import _ending, _termination
from jaxstrategy.cluster.liveness._ending import Ending
from jaxstrategy.cluster.liveness._watchdog import Watchdog
from jaxstrategy.cluster.meeting import _rendezvous
from jaxstrategy.cluster.resolvers._cluster_resolver import Process

Part: TypeAlias = tuple[AbstractBoard, Watchdog]
"""The board that a process shares with the others, and its watchdog."""

_SHUTDOWN_SECONDS = 30  # of JAX's own barrier, where all come at the same time
_AGREED_BYTES = 512

IN_POD = "KUBERNETES_SERVICE_HOST"
"""The variable that Kubernetes sets in each pod."""


def alone(timeout_seconds: float) -> Part:
    """The part of a process without others, which starts nothing.

    Args:
      timeout_seconds: how long a step may go without progress.
    """
    board = LoneBoard()
    return board, Watchdog(board, timeout_seconds)


def met(
    process: Process,
    timeout_seconds: float,
    start_seconds: float,
    bind_address: str | None,
    local_device_ids: int | list[int] | None,
) -> Part:
    """The part of a process that meets the others and then starts JAX's runtime.

    Args:
      process: which one this is, of several.
      timeout_seconds: how long a step may go without progress.
      start_seconds: how long the processes wait for each other.
      bind_address: where process 0 listens if not at the coordinator's host.
      local_device_ids: the devices of this host that are this process's.

    Raises:
      ClusterError: they could not meet, or JAX could not start.
    """
    meeting = _rendezvous.meet(
        process.index,
        process.count,
        process.coordinator,
        start_seconds,
        bind_address=bind_address,
    )
    board = Board(meeting, timeout_seconds)
    watchdog = Watchdog(board, timeout_seconds)
    ending = Ending(board, watchdog)
    # Before JAX starts: its notifier takes SIGTERM in `initialize` (0.10 and 0.12).
    _termination.keep()
    try:
        _start_jax(
            process, timeout_seconds, start_seconds, bind_address, local_device_ids
        )
    # Any error counts: the others wait in JAX's start until the board tells them.
    except Exception as error:
        board.fail(_ending.described(error))
        ending.is_over = True
        raise ClusterError(
            f"Process {process.index} of {process.count} met the others, but JAX could "
            f"not start its distributed runtime: {error}"
        ) from error
    ending.install()
    watchdog.start()
    return board, watchdog


def _start_jax(
    process: Process,
    timeout_seconds: float,
    start_seconds: float,
    bind_address: str | None,
    local_device_ids: int | list[int] | None,
) -> None:
    host, port = _wire.endpoint(process.coordinator)
    jax.distributed.initialize(
        process.coordinator,
        process.count,
        process.index,
        local_device_ids=local_device_ids,
        # By default JAX listens on `[::]`, that is, to all networks of the host.
        coordinator_bind_address=_wire.address_of(bind_address or host, port),
        initialization_timeout=max(1, int(start_seconds)),
        # A backstop only: the board is faster, and our report says more. JAX's abort is
        # what remains when this process cannot run Python any more.
        heartbeat_timeout_seconds=int(min(timeout_seconds, 1e6)) + 30,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        cluster_detection_method=detection(),
    )


def detection() -> str | None:
    """How JAX looks for the devices of this process, which is all that is not known."""
    # In a pod it knows nothing of them and asks Kubernetes all the same, which fails
    # where the pod has no service account (JAX 0.10 and 0.12).
    launchers = ("OMPI_", "SLURM_")
    if IN_POD in os.environ and not any(n.startswith(launchers) for n in os.environ):
        return "deactivate"
    return None


def adopted(timeout_seconds: float, start_seconds: float) -> Part:
    """The part of a process in a `jax.distributed` that is initialised already.

    Args:
      timeout_seconds: how long a step may go without progress.
      start_seconds: how long the processes wait for each other.

    Raises:
      ClusterError: they could not meet.
    """
    index, count = jax.process_index(), jax.process_count()
    if count == 1:
        return alone(timeout_seconds)
    _termination.take_back()
    address, given, listener = _agreed(index)
    secret = Secret.of_environment() or given
    meeting = _rendezvous.meet(
        index, count, address, start_seconds, secret=secret, listener=listener
    )
    board = Board(meeting, timeout_seconds)
    watchdog = Watchdog(board, timeout_seconds)
    Ending(board, watchdog).install()
    watchdog.start()
    return board, watchdog


def _agreed(index: int) -> tuple[str, Secret, socket.socket | None]:
    """An address of process 0 and a new secret, told to all; its listener there.

    On the loopback if all are on one host. The secret is safe from who cannot listen to
    JAX's own messages. There is no board yet, so JAX's collectives tell it, by which
    all of them wait for all.
    """
    own = np.frombuffer(socket.gethostname().encode()[:64].ljust(64), np.uint8)
    hosts = np.asarray(multihost_utils.process_allgather(own))
    text, listener = b"", None
    if index == 0:
        is_one_host = bool((hosts == hosts[:1]).all())
        host = "127.0.0.1" if is_one_host else _own_address()
        # It listens before the others hear of the port: nobody else can take it.
        listener = _rendezvous.listening((host, 0))
        address = _wire.address_of(host, listener.getsockname()[1])
        text = f"{address} {secrets.token_hex(32)}".encode()
    padded = np.frombuffer(text.ljust(_AGREED_BYTES), np.uint8)
    agreed = np.asarray(multihost_utils.broadcast_one_to_all(padded))
    address, secret = agreed.astype(np.uint8).tobytes().decode().split()
    return address, Secret(secret), listener


def _own_address() -> str:
    """The address under which other hosts most likely know this one."""
    found = socket.getaddrinfo(
        socket.gethostname(), None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return str(found[0][4][0])
