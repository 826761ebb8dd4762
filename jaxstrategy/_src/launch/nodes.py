"""The launchers of a job on several machines: who takes part in an attempt."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import final

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of, host_and_port
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.options import Options
from jaxstrategy._src.processes.messages import (
    Client,
    LostError,
    RefusedError,
    RemoteError,
    Request,
    Server,
)
from jaxstrategy._src.processes.secret import Secret

_FIRST_SECONDS = 300.0  # until machines that are started together are there
_LOOK_SECONDS = 0.2  # between looks whether the launcher is asked to stop


@final
class Nodes:
    """The launcher of node 0 waits for the others, and numbers those that come.

    It listens one port above the coordinator's, where process 0 does.
    """

    def __init__(self, options: Options, is_stopped: Callable[[], bool]) -> None:
        assert options.coordinator is not None, "it was checked"
        host, port = host_and_port(options.coordinator)
        self._address = address_of(host, port + 1)
        self._rank, self._most = options.node_rank or 0, options.nodes
        self._least = options.min_nodes or options.nodes
        # The others' processes have the grace to end, and then they come.
        self._patience = max(options.wait_for_replacement, options.grace + 2.0)
        self._is_stopped = is_stopped
        self._lock = threading.Condition()
        self._waiting: dict[int, Request] = {}
        self._server: Server | None = None
        if not self._rank:
            try:
                self._server = Server(
                    Secret.of_environment(),
                    self._joins,
                    address=self._address,
                    lost=self._leaves,
                )
            except (OSError, OverflowError) as error:
                raise ClusterError(
                    f"The launcher cannot listen at {self._address}, one port above "
                    f"the coordinator's: {error}. Give another --coordinator."
                ) from error

    @property
    def someone_waits(self) -> bool:
        """Whether a machine has come that takes no part yet."""
        return bool(self._waiting)

    def meet(self, number: int) -> tuple[int, int, int]:
        """The number of nodes, which of them this is, and of the attempt."""
        if self._server is None:
            return self._join(number)
        patience = self._patience if number else _FIRST_SECONDS
        end = time.monotonic() + patience
        with self._lock:
            while len(self._waiting) < self._most - 1 and time.monotonic() < end:
                if self._is_stopped():
                    raise ClusterError("The launcher was asked to stop.")
                self._lock.wait(_LOOK_SECONDS)
            requests = [request for _, request in sorted(self._waiting.items())]
            count = 1 + len(requests)
            if count < self._least:
                raise ClusterError(
                    f"{count} of at least {self._least} machines came within "
                    f"{patience:g} s. Start the launcher on the others, or ask for "
                    "fewer by --nodes M:N."
                )
            self._waiting.clear()
        for rank, request in enumerate(requests, start=1):
            request.reply(json.dumps([count, rank, number]).encode())
        return count, 0, number

    def close(self) -> None:
        """Hang up on who still waits."""
        if self._server is not None:
            self._server.close()

    def _joins(self, request: Request) -> None:
        rank = int(bytes(request.frames[0]))
        with self._lock:
            if (other := self._waiting.pop(rank, None)) is not None:
                other.fail(f"another launcher came with --node-rank {rank}")
            self._waiting[rank] = request
            self._lock.notify_all()

    def _leaves(self, peer: bytes) -> None:
        with self._lock:
            for rank, request in list(self._waiting.items()):
                if request.peer == peer:
                    del self._waiting[rank]

    def _join(self, number: int) -> tuple[int, int, int]:
        end = time.monotonic() + (self._patience + 30.0 if number else _FIRST_SECONDS)
        why: Exception | None = None
        while time.monotonic() < end:
            if self._is_stopped():
                raise ClusterError("The launcher was asked to stop.")
            try:
                client = Client(
                    self._address, Secret.of_environment(), timeout_seconds=1.0
                )
            except RefusedError as error:
                raise ClusterError(
                    f"The launcher of node 0 refuses this one: {error} Set the same "
                    "JAXSTRATEGY_CLUSTER_SECRET for both."
                ) from error
            except (TimeoutError, ConnectionError) as error:
                why = error
                continue
            try:
                reply = client.submit(str(self._rank).encode())
                while not reply.done():
                    if self._is_stopped():
                        raise ClusterError("The launcher was asked to stop.")
                    time.sleep(_LOOK_SECONDS)
                count, rank, attempt = json.loads(bytes(reply.result()[0]))
                return count, rank, attempt
            except RemoteError as error:
                raise ClusterError(f"The launcher of node 0 says: {error}.") from error
            except LostError as error:
                why = error
                time.sleep(_LOOK_SECONDS)
            finally:
                client.close()
        raise ClusterError(
            f"The launcher of node 0 does not answer at {self._address}: {why}"
        )
