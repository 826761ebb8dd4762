"""The launchers of a job on several machines: who takes part in an attempt."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from jaxstrategy._src.text import with_noun

_FIRST_SECONDS = 300.0  # until machines that are started together are there
_LEADER_SECONDS = 30.0  # more, until one that was lost is there again
_ANSWER_SECONDS = 1.0
_LOOK_SECONDS = 0.2  # between questions; more between those of many nodes
_ALIVE_SECONDS = 5.0  # after its last question a launcher counts as lost


@final
class Nodes:
    """Waits for the launchers of the other nodes before each attempt.

    All ask those with an address in `--coordinator`, one of which leads: it numbers
    those that ask it. It is the first of those that answer and took part in the last
    attempt; in the beginning, node 0. It listens one port above its address, where
    process 0 does.
    """

    def __init__(self, options: Options, is_stopped: Callable[[], bool]) -> None:
        assert options.coordinator is not None, "it was checked"
        self._coordinators = options.coordinator.split(",")
        pairs = map(host_and_port, self._coordinators)
        self._addresses = [address_of(host, port + 1) for host, port in pairs]
        self._rank, self._most = options.node_rank or 0, options.nodes
        self._look_seconds = _LOOK_SECONDS * (1 + self._most / 32)
        self._alive_seconds = _ALIVE_SECONDS + 2 * self._look_seconds
        self._least = options.min_nodes or options.nodes
        # The others' processes have the grace to end, and then they come.
        self._patience = max(options.wait_for_replacement, options.grace + 2.0)
        self._is_stopped = is_stopped
        self._name = secrets.token_hex(8)  # another one when it is started again
        self._number, self._order = -1, [*range(self._most)]  # of the last attempt
        self._lock = threading.Lock()
        self._names: dict[int, list[str]] = {}  # of each node, the one that counts last
        self._asked_at: dict[int, float] = {}  # when each last asked to take part
        self._members: set[str] = set()  # who was asked to take part
        self._untold: set[str] = set()  # and has not asked again yet
        self._server: Server | None = None
        if self._rank < len(self._addresses):
            address = self._addresses[self._rank]
            try:
                secret = Secret.of_environment()
                self._server = Server(secret, self._asked, address=address)
            except (OSError, OverflowError) as error:
                raise ClusterError(
                    f"The launcher cannot listen at {address}, one port above "
                    f"the coordinator's: {error}. Give another --coordinator."
                ) from error

    def waiting(self) -> list[int]:
        """The nodes that ask to take part."""
        now, asked = time.monotonic(), self._asked_at.copy()
        return sorted(k for k, at in asked.items() if now - at < self._alive_seconds)

    def meet(self) -> tuple[int, int, str, int]:
        """The number of nodes, which this is, where process 0 is, and the attempt."""
        last, leader, since = self._number, None, time.monotonic()
        self._members = set()
        patience = _FIRST_SECONDS if last < 0 else self._patience
        while self._number == last:
            if self._is_stopped():
                raise ClusterError("The launcher was asked to stop.")
            before, leader = leader, self._ask(leader)
            if leader != before or leader not in (None, self._rank):
                since = time.monotonic()
            waited = time.monotonic() - since
            if leader == self._rank:
                self._lead(waited > patience, patience)
            elif waited > patience + (0 if last < 0 else _LEADER_SECONDS):
                raise ClusterError(
                    f"The launcher of node 0 does not answer at "
                    f"{' or '.join(self._addresses)}. If it is lost, another one "
                    "takes its place where --coordinator has an address for each "
                    "of several nodes, separated by commas."
                )
            time.sleep(self._look_seconds)
        order, until = self._order, time.monotonic() + self._alive_seconds
        while self._untold and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS / 10)
        where = self._coordinators[order[0]]
        return len(order), order.index(self._rank), where, self._number

    def close(self) -> None:
        """Answer no longer."""
        if self._server is not None:
            self._server.close()

    def _ask(self, leader: int | None) -> int | None:
        """Ask all to take part in what the leader begins; the leader, as they say."""
        told = json.dumps([self._rank, self._name, self._number, leader]).encode()
        numbers = {} if self._server is None else {self._rank: self._number}
        begun = self._number, self._order
        refused: list[str] = []

        def ask(rank: int) -> None:
            nonlocal begun
            secret, seconds = Secret.of_environment(), _ANSWER_SECONDS
            try:
                with contextlib.closing(
                    Client(self._addresses[rank], secret, timeout_seconds=seconds)
                ) as client:
                    (said,) = client.request(told, timeout_seconds=seconds)
            except RefusedError as error:
                refused.append(
                    f"The launcher of node {rank} refuses this one: {error} Set the "
                    "same JAXSTRATEGY_CLUSTER_SECRET for both."
                )
            except RemoteError as error:
                refused.append(f"The launcher of node {rank} says: {error}.")
            except OSError:
                pass  # it is not there
            else:
                numbers[rank], order = json.loads(bytes(said))
                if order is not None:
                    begun = numbers[rank], order

        others = [k for k in range(len(self._addresses)) if k != self._rank]
        with ThreadPoolExecutor(len(others) or 1) as pool:
            list(pool.map(ask, others))
        self._number, self._order = begun
        may = [(-n, rank) for rank, n in numbers.items() if n >= 0 or not rank]
        if not may and refused:
            raise ClusterError(refused[0])
        return min(may)[1] if may else None

    # What the leader does.

    def _asked(self, request: Request) -> None:
        """Tell the number of the last attempt, and who takes part its nodes."""
        rank, name, number, leader = json.loads(bytes(request.frames[0]))
        with self._lock:
            names = self._names.setdefault(rank, [])
            if name not in names:
                names.append(name)
            if name != names[-1]:
                request.fail(f"another launcher came with --node-rank {rank}")
                return
            # Told again if it did not hear the answer.
            is_new = name in self._members and number < self._number
            order = self._order if is_new else None
            self._untold.discard(name)
            self._asked_at.pop(rank, None)
            if order is None and leader == self._rank:
                self._asked_at[rank] = time.monotonic()
            request.reply(json.dumps([self._number, order]).encode())

    def _lead(self, is_late: bool, patience: float) -> None:
        """Begin an attempt of those that have come, if it is time."""
        with self._lock:
            order = [self._rank, *self.waiting()]
            if len(order) < self._most and not is_late:
                return
            came = f"came within {patience:g} s"
            if len(order) < self._least:
                raise ClusterError(
                    f"{len(order)} of at least {self._least} machines {came}. Start "
                    "the launcher on the others, or ask for fewer by --nodes M:N."
                )
            # Machines that do not reach each other must not go on as two jobs.
            last, there = self._order, set(self._order) & set(order)
            half = len(there) * 2 - len(last)
            if len(self._addresses) > 1 and (
                half < 0 or (half == 0 and min(last) not in there)
            ):
                loss = " after a loss" if self._number >= 0 else ""
                raise ClusterError(
                    f"{len(there)} of {with_noun(len(last), 'machine')} {came}{loss}. "
                    "The others may go on without this one: more than half must come, "
                    f"or half with node {min(last)}."
                )
            self._number, self._order = self._number + 1, order
            self._members = {self._names[rank][-1] for rank in order[1:]}
            self._untold = self._members.copy()
            self._asked_at.clear()
