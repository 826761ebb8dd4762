"""Starting parameter servers again, with what a checkpoint has: `ServerRestarts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import final

import numpy as np

from jaxstrategy._errors import ParameterServerLost
from jaxstrategy.checkpoint._manager import CheckpointManager
from jaxstrategy.checkpoint._slots import Slots
from jaxstrategy.coordinator._deaths import Deaths
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend
from jaxstrategy.parameter_servers._server_pool import ServerPool
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables._server_cell import ServerCell
from jaxstrategy.variables._sharded_variable import ShardedVariable


@final
class ServerRestarts:
    """Replaces lost servers of one strategy, and rolls all variables back together.

    Args:
      backend: starts servers.
      pool: of the strategy.
      manager: has the checkpoints. If there is none yet, the first is saved now.
      state: what it saves and restores.
      limit: how often in 5 minutes a server is started again.

    Attributes:
      manager: as given.

    Raises:
      ValueError: the backend cannot start servers again; the state has no variable on
        a server.
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
        self._deaths = [Deaths(limit) for _ in backend.servers]
        if manager.latest_step() is None:
            manager.save(0, state, force=True)
            manager.wait()

    def check(self, numbers: Iterable[int]) -> None:
        """Raise unless variables can be restored, which a function uses.

        Raises:
          ValueError: the state has one of them not.
        """
        missing = [number for number in numbers if number not in self._cells]
        if missing:
            raise ValueError(
                f"{len(missing)} of the variables that the function uses are on "
                "parameter servers, and not in the `state` that the coordinator was "
                "given with `restore_from`: they would be lost with their server. Make "
                "the coordinator with all of them."
            )

    @property
    def lost(self) -> list[int]:
        """The numbers of the servers that do not answer."""
        return [k for k in range(len(self._backend.servers)) if not self._answers(k)]

    def restart(self, lost: Sequence[int]) -> float:
        """Start lost servers again, with nothing; returns how long to wait before.

        Raises:
          ParameterServerLost: they do not start.
          RuntimeError: they were lost too often.
        """
        for number in lost:
            self._deaths[number].add()
            if self._deaths[number].are_too_many:
                raise RuntimeError(
                    f"parameter server {number} was lost {self._deaths[number]}; it is "
                    "not started again."
                )
        self._backend.restart_servers(lost)
        return max(self._deaths[number].pause for number in lost)

    def fill(self, servers: Sequence[int]) -> None:
        """Let new servers have the variables and programs of those before."""
        for number, cell in self._cells.items():
            if self._pool.home(number) in servers:
                cell.server.create(number, np.zeros(cell.shape, cell.dtype))
        for server in servers:
            self._pool.define_again(server)

    def restore(self) -> int:
        """Roll all variables back to the last checkpoint; returns its step."""
        self.manager.restore(self._state)
        restored = self.manager.restored
        assert restored is not None, "it has just restored"
        return restored.step

    def forget(self) -> None:
        """A function has finished: the servers are well."""
        for deaths in self._deaths:
            deaths.forget()

    def _answers(self, server: int) -> bool:
        try:
            self._backend.servers[server].versions([])
        except ParameterServerLost:
            return False
        return True


def _cells(state: PyTree) -> Iterator[ServerCell]:
    for slot in Slots(state).all:
        value = slot.value
        shards = value.variables if isinstance(value, ShardedVariable) else [value]
        for shard in shards:
            cell = getattr(shard, "cell", None)
            if isinstance(cell, ServerCell):
                yield cell
