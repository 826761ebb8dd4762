"""Agreement about the call after which all processes stop: `StopAgreement`.

JAX's `multihost_utils.reached_preemption_sync_point` agrees on a step, too, but knows
no other notice than SIGTERM to its own service, which takes the signal from handlers
that were installed before it (measured with 0.10 and 0.12), and needs a
`jax.distributed` even where there is one process.
"""

from __future__ import annotations

import threading
from typing import final

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.agreement._agreement import AS_LONG_AS_IT_TAKES
from jaxstrategy.cluster.board._board import AbstractBoard

_TICK_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


def announce(board: AbstractBoard, name: str, reason: str) -> None:
    """Let all processes stop soon.

    Args:
      board: where the processes meet.
      name: of the agreement; not every process need have made it yet.
      reason: why, in words.
    """
    board.put(name, reason)


@final
class StopAgreement:
    """Lets all processes stop after the same number of calls.

    When one has announced that it wants to, a thread of each says how many calls its
    process has begun. From then on the process begins no other until all have said so;
    then those that are behind go on to where the first of them is, and stop there too.

    A thread says it, because the process itself may be inside a step, which does not
    end before all others have begun it.

    Args:
      board: where the processes meet.
      name: of this agreement; each is made once.
      count: how many calls were begun before.
    """

    def __init__(self, board: AbstractBoard, name: str, count: int = 0) -> None:
        self._board = board
        self._name = name
        self._count = count
        self._limit: int | None = None
        self._stop: int | None = None
        self._error: ClusterError | None = None
        self._changed = threading.Condition()
        self._over = threading.Event()
        threading.Thread(
            target=self._look_on, name=f"jaxstrategy {name}", daemon=True
        ).start()

    def begin(self) -> bool:
        """Before each call: whether it is to be left out, because it is time to stop.

        Raises:
          ClusterError: another process has ended instead of taking part.
        """
        with self._changed:
            while self._must_wait():
                self._changed.wait(_TICK_SECONDS)
            if self._error is not None:
                raise self._error
            if self._stop is not None and self._count >= self._stop:
                return True
            self._count += 1
            return False

    def catch_up(self, count: int) -> None:
        """So many calls have been begun at least, some of them unseen."""
        with self._changed:
            self._count = max(self._count, count)

    @property
    def is_time(self) -> bool:
        """Whether the last call that was begun is the last one of all."""
        with self._changed:
            return self._stop is not None and self._count >= self._stop

    def close(self) -> None:
        """Take no part any more."""
        self._over.set()

    def _must_wait(self) -> bool:
        is_asked = self._limit is not None and self._count >= self._limit
        return is_asked and self._stop is None and self._error is None

    def _look_on(self) -> None:
        while not self._over.is_set():
            try:
                # Again and again for a short time, so that `close` is heard.
                self._board.get(self._name, _TICK_SECONDS)
            except ClusterError:
                self._over.wait(_PAUSE_SECONDS)  # it may be that it cannot answer
                continue
            break
        else:
            return
        with self._changed:
            self._limit = self._count
        try:
            counts = self._board.gather(
                f"{self._name}: calls", self._limit, AS_LONG_AS_IT_TAKES
            )
        except ClusterError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        with self._changed:
            self._stop = max(counts)
            self._changed.notify_all()
