"""What follows when parameter servers are lost: `Recovery`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import final

from jaxstrategy._errors import ParameterServerLost
from jaxstrategy.coordinator._closure_queue import ClosureQueue
from jaxstrategy.coordinator._incarnations import Incarnations
from jaxstrategy.coordinator._scheduled_closure import WorkerClosure
from jaxstrategy.coordinator._server_restarts import ServerRestarts
from jaxstrategy.text._user_code import warn

_PROBE_SECONDS = 0.5


@final
class Recovery:
    """Has lost servers started again in a thread, while the queue gives out nothing.

    Args:
      restarts: starts and fills servers.
      queue: of the coordinator.
      incarnations: of the workers.
      finished: how many functions have finished.
      renew: lets the workers end without blame, which know lost servers only.
    """

    def __init__(
        self,
        restarts: ServerRestarts,
        queue: ClosureQueue[WorkerClosure],
        incarnations: Incarnations,
        finished: Callable[[], int],
        renew: Callable[[], None],
    ) -> None:
        self.check = restarts.check
        self._restarts = restarts
        self._queue = queue
        self._incarnations = incarnations
        self._finished = finished
        self._renew = renew
        # How many had finished when the checkpoint of a step was read.
        self._at: dict[int, int] = {}
        self._last = 0
        self._told: list[str] = []
        self._lost = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(
            target=self._run, name="jaxstrategy servers", daemon=True
        )

    def start(self) -> None:
        """Begin to look after the servers."""
        self._thread.start()

    def stop(self) -> None:
        """Let servers be lost from now on."""
        self._is_stopped = True
        self._lost.set()

    def report(self) -> bool:
        """A server seems to be lost: nothing is given out until that is mended.

        Returns:
          Whether it will be.
        """
        if self._is_stopped:
            return False
        self._queue.hold()
        self._lost.set()
        return True

    @contextlib.contextmanager
    def noted(self, step: int) -> Iterator[None]:
        """For a `with` block in a pause that reads the checkpoint of a step."""
        finished = self._finished()
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
            if is_reported or self._restarts.lost:
                self._recover_or_give_up()

    def _recover_or_give_up(self) -> None:
        self._queue.hold()
        try:
            self._queue.wait_alone()
            self._lost.clear()
            self._recover()
        except BaseException as error:  # nobody may wait for ever
            self._give_up(error)
        finally:
            self._queue.resume()

    def _recover(self) -> None:
        if self._finished() > self._last:
            self._restarts.forget()
        ever: set[int] = set()
        step = None
        while step is None:
            lost = self._restarts.lost
            if not (lost or ever):  # only a worker has lost its connection
                self._renew()
                return
            ever.update(lost)
            step = self._rolled_back(lost)
        self._queue.each_queued(lambda closure: closure.renumber())
        self._note(step, sorted(ever))

    def _rolled_back(self, lost: list[int]) -> int | None:
        """The step that all has now; None if a server was lost again meanwhile."""
        self._renew()
        try:
            time.sleep(self._restarts.restart(lost) if lost else 0.0)
            self._restarts.fill(lost)
            self._incarnations.fence_all()
            return self._restarts.restore()
        except ParameterServerLost:
            if self._restarts.lost:
                return None
            raise

    def _note(self, step: int, lost: list[int]) -> None:
        finished = self._finished()
        count = finished - self._at.get(step, self._last)
        self._at = {step: finished}
        self._last = finished
        names = " and ".join(map(str, lost))
        self._told.append(
            f"Parameter server {names} was lost and started again. All variables were "
            f"rolled back to checkpoint {step}: what {count} functions did that had "
            "finished since is lost. Those that were queued or ran go on."
        )

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, ParameterServerLost):
            lost = ParameterServerLost(
                "A parameter server is lost, and the variables could not be rolled "
                f"back to a checkpoint: {error}"
            )
            lost.__cause__ = error
            error = lost
        if self._is_stopped:
            return
        self._is_stopped = True
        self._queue.cancel(error, for_ever=True)
