"""A process that trains together with the others of its cluster: `TrainingTask`."""

from __future__ import annotations

import time
from typing import final

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _processes
from jaxstrategy.cluster.board._board import AbstractBoard, ProcessState
from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec
from jaxstrategy.cluster.resolvers._simple import SimpleClusterResolver

_POLL_SECONDS = 0.5


@final
class TrainingTask:
    """One of the processes that take the same steps.

    Args:
      spec: the cluster.
      job: "chief" or "worker".
      index: the number of the task.

    Raises:
      ValueError: it does not train, or there is no such task.
    """

    def __init__(self, spec: ClusterSpec, job: str, index: int) -> None:
        resolver = SimpleClusterResolver(spec, task_type=job, task_id=index)
        self._process = resolver.process()

    def start(self) -> None:
        """Meet the others; a second call does nothing.

        Raises:
          ClusterError: the processes could not start together.
        """
        _processes.start(self._process)

    def join(self) -> None:
        """Wait until all others have finished, or wait here too.

        Raises:
          ClusterError: one has died, or failed; or they could not start together.
        """
        board = _processes.start(self._process).board
        board.put(_joined(board.index), True)
        while any(not _is_done(board, state) for state in board.states()):
            time.sleep(_POLL_SECONDS)


def _joined(index: int) -> str:
    return f"Server.join of process {index}"


def _is_done(board: AbstractBoard, state: ProcessState) -> bool:
    if state.end is not None or state.member.index == board.index:
        return True
    try:
        return board.get(_joined(state.member.index), _POLL_SECONDS)
    except ClusterError:
        return False
