"""Which functions have pushed already, and whose pushes count: `PushedFunctions`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import final

from jaxstrategy.parameter_servers._operations import CallNumber
from jaxstrategy.parameter_servers.store._number_ranges import NumberRanges


@final
class Turn:
    """One push of a function.

    Attributes:
      counts: whether it is to be applied.
      has_begun: whether something of it is applied; then it is not made again.
    """

    def __init__(self, counts: bool) -> None:
        self.counts, self.has_begun = counts, False


@final
class PushedFunctions:
    """Lets each function push once, although it may be run several times.

    It remembers those functions only that may still come again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pushing: dict[int, CallNumber] = {}
        self._pushed = NumberRanges()
        self._finished = 0
        self._incarnations: dict[int, int] = {}

    def fence(self, worker: int, incarnation: int) -> None:
        """Let nothing count that earlier incarnations push; waits for what they do."""
        with self._changed:
            known = self._incarnations.get(worker, 0)
            self._incarnations[worker] = max(known, incarnation)
            self._changed.wait_for(
                lambda: not any(map(self._is_fenced, self._pushing.values()))
            )

    @contextlib.contextmanager
    def turn(self, call: CallNumber | None) -> Iterator[Turn]:
        """The turn of a push; another push of the same function waits for its end.

        Args:
          call: None: of no function; it counts.
        """
        if call is None:
            yield Turn(True)
            return
        turn = Turn(self._begins(call))
        try:
            yield turn
        finally:
            if turn.counts:
                self._end(call, turn.has_begun)

    def _begins(self, call: CallNumber) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: call.function not in self._pushing)
            self._finished = max(self._finished, call.finished)
            self._pushed.drop_below(self._finished)
            has_ended = call.function < self._finished or call.function in self._pushed
            if has_ended or self._is_fenced(call):
                return False
            self._pushing[call.function] = call
            return True

    def _end(self, call: CallNumber, has_pushed: bool) -> None:
        with self._changed:
            del self._pushing[call.function]
            if has_pushed:
                self._pushed.add(call.function)
            self._changed.notify_all()

    def _is_fenced(self, call: CallNumber) -> bool:
        return call.incarnation < self._incarnations.get(call.worker, 0)
