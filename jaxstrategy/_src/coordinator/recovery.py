"""How often workers and servers may be lost, and what brings servers back."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np

from jaxstrategy._src.checkpoint.manager import CheckpointManager
from jaxstrategy._src.checkpoint.state import leaves_of
from jaxstrategy._src.errors import ParameterServerLost
from jaxstrategy._src.parameter_servers.store import ServerPool
from jaxstrategy._src.parameter_servers.worker import AbstractWorkerBackend
from jaxstrategy._src.text import warn, with_seconds
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.variables.remote_kinds import ServerCell
from jaxstrategy._src.variables.sharded_variable import ShardedVariable

_SECONDS = 300.0  # after which a death is forgotten
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


@final
class RestartPolicy:
    """Decides whether a worker is started again, and when."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._times: list[float] = []

    def forget(self) -> None:
        """The worker has finished a function."""
        if self._times:
            self._times.clear()

    def add(self) -> None:
        """The worker was lost, or did not come up."""
        now = time.monotonic()
        self._times = [t for t in self._times if now - t < _SECONDS] + [now]

    @property
    def are_too_many(self) -> bool:
        """Whether it is better not to start it again."""
        return len(self._times) > self._limit

    @property
    def pause(self) -> float:
        """How many seconds to wait before the next start: none after one death."""
        again = len(self._times) - 1
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**again) if again > 0 else 0.0

    def __str__(self) -> str:
        return (
            f"{len(self._times)} times within {with_seconds(_SECONDS)} without "
            "finishing a function in between"
        )


_PROBE_SECONDS = 0.5


@final
class ServerRecovery:
    """Replaces lost servers, and rolls all variables back together.

    That is done in a thread, while the queue gives out nothing.
    """

    def __init__(
        self,
        backend: AbstractWorkerBackend,
        pool: ServerPool,
        manager: CheckpointManager,
        state: PyTree,
        limit: int,
    ) -> None:
        if not backend.can_restart_servers:
            raise ValueError(
                f"`restore_from` was given, and a {type(backend).__name__} cannot "
                "start a parameter server again: somebody else starts it. Leave it "
                "out, and start all again when a server is lost."
            )
        self.manager = manager
        self._backend = backend
        self._pool = pool
        self._state = state
        self._cells = {cell.number: cell for cell in _cells(state)}
        if not self._cells:
            raise ValueError(
                "`state` has no variable on a parameter server. Give the state that "
                "the manager saves, `ClusterCoordinator(strategy, "
                "restore_from=manager, state=state)`."
            )
        self._deaths = [RestartPolicy(limit) for _ in backend.servers]
        # How many had finished when the checkpoint of a step was read.
        self._at: dict[int, int] = {}
        self._last = 0
        self._told: list[str] = []
        self._lost = threading.Event()
        self._is_stopped = False
        if manager.latest_step() is None:
            manager.save(0, state, force=True)
            manager.wait()

    def start(self, scheduler: Any) -> None:
        """Begin to look after the servers of a `Scheduler`."""
        self._scheduler = scheduler
        threading.Thread(
            target=self._run, name="jaxstrategy servers", daemon=True
        ).start()

    def stop(self) -> None:
        """Let servers be lost from now on."""
        self._is_stopped = True
        self._lost.set()

    def check(self, numbers: Iterable[int]) -> None:
        """Raise unless variables can be restored, which a function uses."""
        missing = [number for number in numbers if number not in self._cells]
        if missing:
            raise ValueError(
                f"{len(missing)} of the variables that the function uses are on "
                "parameter servers, and not in the `state` that the coordinator was "
                "given with `restore_from`: they would be lost with their server. Make "
                "the coordinator with all of them."
            )

    def report(self) -> bool:
        """A server seems to be lost: nothing is given out until that is mended."""
        if self._is_stopped:
            return False
        self._scheduler.hold()
        self._lost.set()
        return True

    @contextlib.contextmanager
    def noted(self, step: int) -> Iterator[None]:
        """For a `with` block in a pause that reads the checkpoint of a step."""
        finished = self._scheduler.finished
        yield
        self._at[step] = finished

    def tell(self) -> None:
        """Warn the user, in a thread of his, of what was rolled back."""
        while self._told:
            warn(self._told.pop(0), RuntimeWarning)

    def _run(self) -> None:
        while not self._is_stopped:
            is_reported = self._lost.wait(_PROBE_SECONDS)
            if self._is_stopped:
                return
            if not (is_reported or self._lost_servers()):
                continue
            with self._scheduler.held():
                self._lost.clear()
                try:
                    self._recover()
                except BaseException as error:  # nobody may wait for ever
                    self._give_up(error)

    def _lost_servers(self) -> list[int]:
        """The numbers of the servers that do not answer."""
        lost = []
        for number, server in enumerate(self._backend.servers):
            try:
                server.versions([])
            except ParameterServerLost:
                lost.append(number)
        return lost

    def _recover(self) -> None:
        if self._scheduler.finished > self._last:  # the servers were well
            for deaths in self._deaths:
                deaths.forget()
        ever: set[int] = set()
        step = None
        while step is None:
            lost = self._lost_servers()
            if not (lost or ever):  # only a worker has lost its connection
                self._scheduler.renew()
                return
            ever.update(lost)
            step = self._rolled_back(lost)
        self._scheduler.renumber()
        finished = self._scheduler.finished
        count = finished - self._at.get(step, self._last)
        self._at, self._last = {step: finished}, finished
        names = " and ".join(map(str, sorted(ever)))
        self._told.append(
            f"Parameter server {names} was lost and started again. All variables were "
            f"rolled back to checkpoint {step}: what {count} functions did that had "
            "finished since is lost. Those that were queued or ran go on."
        )

    def _rolled_back(self, lost: Sequence[int]) -> int | None:
        """The step that all has now; None if a server was lost again meanwhile."""
        self._scheduler.renew()
        try:
            if lost:
                self._restart(lost)
            for worker in range(self._backend.num_workers):
                self._scheduler.fence(worker)
            self.manager.restore(self._state)
        except ParameterServerLost:
            if self._lost_servers():
                return None
            raise
        restored = self.manager.restored
        assert restored is not None, "it has just restored"
        return restored.step

    def _restart(self, lost: Sequence[int]) -> None:
        """Start lost servers again, with the variables and programs they had."""
        for number in lost:
            self._deaths[number].add()
            if self._deaths[number].are_too_many:
                raise RuntimeError(
                    f"parameter server {number} was lost {self._deaths[number]}; it is "
                    "not started again."
                )
        self._backend.restart_servers(lost)
        time.sleep(max(self._deaths[number].pause for number in lost))
        for number, cell in self._cells.items():
            if self._pool.home(number) in lost:
                cell.server.create(number, np.zeros(cell.shape, cell.dtype))
        for server in lost:
            self._pool.define_again(server)

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, ParameterServerLost):
            lost = ParameterServerLost(
                "A parameter server is lost, and the variables could not be rolled "
                f"back to a checkpoint: {error}"
            )
            lost.__cause__ = error
            error = lost
        if not self._is_stopped:
            self._is_stopped = True
            self._scheduler.cancel(error, for_ever=True)


def _cells(state: PyTree) -> Iterator[ServerCell]:
    for leaf in leaves_of(state).values():
        value = leaf.value
        shards = value.variables if isinstance(value, ShardedVariable) else [value]
        for shard in shards:
            cell = getattr(shard, "cell", None)
            if isinstance(cell, ServerCell):
                yield cell
