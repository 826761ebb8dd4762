"""What follows when closures end, and when workers do: `Failures`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import final

from jaxstrategy._errors import ParameterServerLost, WorkerLost
from jaxstrategy.coordinator._closure_queue import ClosureQueue
from jaxstrategy.coordinator._incarnations import Incarnations
from jaxstrategy.coordinator._recovery import Recovery
from jaxstrategy.coordinator._scheduled_closure import WorkerClosure

# So many workers a function may end before it is taken for the reason.
_MOST_DEATHS = 3


@final
class Failures:
    """Tells the queue how closures have ended. Any number of threads call it.

    Args:
      queue: has the closures.
      incarnations: of all workers.

    Attributes:
      incarnations: as given.
      recovery: starts lost servers again; None: that they are lost is an error.
    """

    def __init__(
        self,
        queue: ClosureQueue[WorkerClosure],
        incarnations: Incarnations,
        num_workers: int,
    ) -> None:
        self.incarnations = incarnations
        self._queue = queue
        self._left = set(range(num_workers))
        self.recovery: Recovery | None = None

    def succeeded(self, closure: WorkerClosure, results: object) -> None:
        """It has run."""
        if closure.is_of_one_worker:
            closure.succeed(results)
        else:
            self._queue.mark_finished(closure, results)

    def failed(self, worker: int, closure: WorkerClosure, error: BaseException) -> None:
        """It has raised this on a worker."""
        if isinstance(error, ParameterServerLost) and self._is_mended():
            self._queue.put_back(closure, _tag(closure, worker))
            return
        if isinstance(error, ParameterServerLost):
            self._queue.cancel(error, for_ever=True)
        if closure.is_of_one_worker:
            closure.fail(error)
            return
        if not self._queue.has_failed:
            self._queue.cancel(error)
            self._refuse_pushes(closure)
        self._queue.mark_failed(closure, error)

    def lost(
        self,
        worker: int,
        closure: WorkerClosure | None,
        lost: WorkerLost,
        is_excused: bool = False,
    ) -> bool:
        """A worker was lost, with what it was running; whether that is to blame.

        Args:
          is_excused: neither is to blame: it was ended here.
        """
        # Before it is run again: what the lost worker has sent may arrive at any time.
        self._fence(worker)
        if closure is None:
            return False
        closure.deaths += not is_excused
        is_to_blame = closure.deaths >= _MOST_DEATHS
        if is_to_blame:
            error = RuntimeError(
                f"{closure.described()} was run {closure.deaths} times, and each time "
                "its worker was lost; it is not run again. Does it need more memory "
                f"than a worker has? The last time: {lost}"
            )
            error.__cause__ = lost
            self.failed(worker, closure, error)
        else:
            self._queue.put_back(closure, _tag(closure, worker))
        return is_to_blame

    def gave_up(self, worker: int, error: BaseException) -> None:
        """A worker is not started again; without any, nothing runs any more."""
        self._left.discard(worker)
        lasting = not self._left or isinstance(error, ParameterServerLost)
        self._queue.cancel(error, for_ever=lasting)
        self._queue.refuse(worker, error)

    def _refuse_pushes(self, failed: WorkerClosure) -> None:
        """What others run now is cancelled, so that it must not change variables."""
        for closure, worker in self._queue.running:
            if closure is not failed:
                self._fence(worker)

    def _is_mended(self) -> bool:
        """Whether servers that are lost are started again."""
        return self.recovery is not None and self.recovery.report()

    def _fence(self, worker: Hashable) -> None:
        try:
            assert isinstance(worker, int), "who runs closures asks by its index"
            self.incarnations.fence(worker)
        except ParameterServerLost as error:
            if self._is_mended():
                return  # it gives all workers new numbers
            self._queue.cancel(error, for_ever=True)


def _tag(closure: WorkerClosure, worker: int) -> int | None:
    return worker if closure.is_of_one_worker else None
