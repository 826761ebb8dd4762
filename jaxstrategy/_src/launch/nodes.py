"""The launchers of a job on several machines: who takes part in an attempt."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import final

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of, host_and_port
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.options import Options
from jaxstrategy._src.processes.messages import (
    Client,
    RefusedError,
    RemoteError,
    Request,
    Server,
)
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.text.shown import with_noun

_FIRST_SECONDS = 300.0  # until machines that are started together are there
_JOIN_SECONDS = 30.0  # that others wait longer than the one that numbers them
_LOOK_SECONDS = 0.2  # between looks whether the launcher is asked to stop
_ANSWER_SECONDS = 1.0
_ALIVE_SECONDS = 5.0  # between questions to whom is waited for, and for an answer


@final
class Nodes:
    """The launcher of one node waits for the others, and numbers those that come.

    It is the first of those that have an address in `--coordinator` and answer. Of a
    job that has begun, only those can be it that took part in its last attempt; at
    first, node 0. It listens one port above its address, where process 0 does.
    """

    def __init__(self, options: Options, is_stopped: Callable[[], bool]) -> None:
        assert options.coordinator is not None, "it was checked"
        self._coordinators = options.coordinator.split(",")
        pairs = map(host_and_port, self._coordinators)
        self._addresses = [address_of(host, port + 1) for host, port in pairs]
        self._rank, self._most = options.node_rank or 0, options.nodes
        self._least = options.min_nodes or options.nodes
        # The others' processes have the grace to end, and then they come.
        self._patience = max(options.wait_for_replacement, options.grace + 2.0)
        self._is_stopped = is_stopped
        self._number = -1  # of the last attempt
        self._took_part: set[int] = set()  # in it
        self._lock = threading.Condition()
        self._is_first = not self._rank
        self._waiting: dict[int, Request] = {}
        self._server: Server | None = None
        if self._rank < len(self._addresses):
            address = self._addresses[self._rank]
            try:
                self._server = Server(
                    Secret.of_environment(),
                    self._asked,
                    address=address,
                    lost=self._leaves,
                )
            except (OSError, OverflowError) as error:
                raise ClusterError(
                    f"The launcher cannot listen at {address}, one port above "
                    f"the coordinator's: {error}. Give another --coordinator."
                ) from error

    @property
    def someone_waits(self) -> bool:
        """Whether a machine has come that takes no part yet."""
        return bool(self._waiting)

    def meet(self) -> tuple[int, int, str, int]:
        """The number of nodes, which this is, where process 0 is, and the attempt."""
        patience = _FIRST_SECONDS if self._number < 0 else self._patience
        begun = time.monotonic()
        while not self._is_stopped():
            first = self._first()
            with self._lock:
                if first == self._rank and not self._is_first:
                    begun = time.monotonic()  # the others may still ask the last one
                self._is_first = first == self._rank
                if not self._is_first:
                    for request in self._waiting.values():
                        request.reply(b"null")
                    self._waiting.clear()
            is_late = time.monotonic() - begun > patience
            if self._is_first:
                order = self._order(is_late, patience)
            else:
                tried = time.monotonic()
                order = None if first is None else self._join(first)
                if time.monotonic() - tried > _JOIN_SECONDS:
                    begun = time.monotonic()  # that one was there until now
                most = patience + (0 if self._number < 0 else _JOIN_SECONDS)
                if order is None and time.monotonic() - begun > most:
                    raise ClusterError(
                        f"The launcher of node 0 does not answer at "
                        f"{' or '.join(self._addresses)}. If it is lost, another one "
                        "takes its place where --coordinator has an address for each "
                        "of several nodes, separated by commas."
                    )
            if order is not None:
                self._took_part = set(order)
                where = self._coordinators[order[0]]
                return len(order), order.index(self._rank), where, self._number
            time.sleep(_LOOK_SECONDS / 4)
        raise ClusterError("The launcher was asked to stop.")

    def close(self) -> None:
        """Hang up on who still waits."""
        if self._server is not None:
            self._server.close()

    def _first(self) -> int | None:
        """Who numbers the others, of those that answer."""
        if len(self._addresses) == 1:
            return 0
        numbers = {} if self._server is None else {self._rank: self._number}
        others = [k for k in range(len(self._addresses)) if k != self._rank]

        refused: list[ClusterError] = []

        def ask(rank: int) -> None:
            try:
                with contextlib.suppress(OSError), self._client(rank) as client:
                    (said,) = client.request(b"null", timeout_seconds=_ANSWER_SECONDS)
                    numbers[rank] = json.loads(bytes(said))
            except ClusterError as error:
                refused.append(error)

        with concurrent.futures.ThreadPoolExecutor(len(others)) as pool:
            list(pool.map(ask, others))
        may = [(-n, rank) for rank, n in numbers.items() if n >= 0 or not rank]
        if not may and refused:
            raise refused[0]
        return min(may)[1] if may else None

    # What the first one does.

    def _order(self, is_late: bool, patience: float) -> list[int] | None:
        """The nodes of an attempt, this one first; None if others are waited for."""
        with self._lock:
            count = 1 + len(self._waiting)
            if count < self._most and not is_late:
                self._lock.wait(_LOOK_SECONDS)
                return None
            order = [self._rank, *sorted(self._waiting)]
            if count < self._least:
                raise ClusterError(
                    f"{count} of at least {self._least} machines came within "
                    f"{patience:g} s. Start the launcher on the others, or ask for "
                    "fewer by --nodes M:N."
                )
            # Machines that do not reach each other must not go on as two jobs.
            last, there = self._took_part, self._took_part & set(order)
            half = len(there) * 2 - len(last)
            if len(self._addresses) > 1 and last:
                if half < 0 or (half == 0 and min(last) not in there):
                    raise ClusterError(
                        f"{len(there)} of {with_noun(len(last), 'machine')} came "
                        f"within {patience:g} s after a loss. The others may go on "
                        "without this one: more than half must come, or half with "
                        f"node {min(last)}."
                    )
            requests, self._waiting = self._waiting, {}
        self._number += 1
        for request in requests.values():
            request.reply(json.dumps([self._number, order]).encode())
        return order

    def _asked(self, request: Request) -> None:
        """Of null tell the last attempt; a number is a node that wants to take part."""
        rank = json.loads(bytes(request.frames[0]))
        if rank is None:
            request.reply(json.dumps(self._number).encode())
            return
        with self._lock:
            if not self._is_first:
                request.reply(b"null")
                return
            if (other := self._waiting.pop(int(rank), None)) is not None:
                other.fail(f"another launcher came with --node-rank {rank}")
            self._waiting[int(rank)] = request
            self._lock.notify_all()

    def _leaves(self, peer: bytes) -> None:
        with self._lock:
            for rank, request in list(self._waiting.items()):
                if request.peer == peer:
                    del self._waiting[rank]

    # What the others do.

    @contextlib.contextmanager
    def _client(self, rank: int) -> Iterator[Client]:
        try:
            client = Client(
                self._addresses[rank],
                Secret.of_environment(),
                timeout_seconds=_ANSWER_SECONDS,
            )
        except RefusedError as error:
            raise ClusterError(
                f"The launcher of node {rank} refuses this one: {error} Set the same "
                "JAXSTRATEGY_CLUSTER_SECRET for both."
            ) from error
        with contextlib.closing(client):
            yield client

    def _join(self, first: int) -> list[int] | None:
        """The nodes of an attempt; None if that one is not, or no more, the first."""
        with contextlib.suppress(OSError), self._client(first) as client:
            reply = client.submit(json.dumps(self._rank).encode())
            ask_at = time.monotonic() + _ALIVE_SECONDS
            while not reply.done():
                if self._is_stopped():
                    return None
                time.sleep(_LOOK_SECONDS)
                if time.monotonic() > ask_at and not reply.done():
                    # It may wait for long, but not without a sign of life.
                    client.request(b"null", timeout_seconds=_ALIVE_SECONDS)
                    ask_at = time.monotonic() + _ALIVE_SECONDS
            try:
                told = json.loads(bytes(reply.result()[0]))
            except RemoteError as error:
                raise ClusterError(
                    f"The launcher of node {first} says: {error}."
                ) from error
            if told is not None:
                self._number, order = told
                return order
        return None
