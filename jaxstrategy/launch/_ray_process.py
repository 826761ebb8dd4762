"""A process that an actor of Ray has started."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, final

from jaxstrategy.launch._ray_actors import RayActors
from jaxstrategy.launch._started_process import AbstractStartedProcess, Stream

_CLOSE_SECONDS = 10.0
_UNAVAILABLE_SECONDS = 60.0  # as long as Ray itself waits for its head


@final
class RayStartedProcess(AbstractStartedProcess):
    """A process elsewhere. If its actor is lost, it counts as killed.

    Args:
      actors: among them the next one.
      actor: a `ProcessActor` that has started it.
      name: for the names of threads.
      ended: called with its exit code, in a thread: minus the number of a signal.
    """

    def __init__(
        self, actors: RayActors, actor: Any, name: str, ended: Callable[[int], None]
    ) -> None:
        self.killed = False
        self._actors = actors
        self._errors = actors.ray.exceptions
        self._actor = actor
        self._is_over = False
        self._has_told = False
        self._waiter = threading.Thread(
            target=self._wait, args=(ended,), name=f"end of {name}", daemon=True
        )
        self._waiter.start()

    def read(self, stream: Stream) -> bytes:
        try:
            return self._asked(lambda: self._actor.read.remote(stream))
        except self._errors.RayError as error:
            return self._last_words(error) if stream == 1 else b""

    def send(self, number: int) -> None:
        self._actors.tell(lambda: self._actor.send.remote(number))

    def kill(self) -> None:
        self.killed |= not self._is_over
        self._actors.tell(lambda: self._actor.kill.remote())

    def close(self) -> None:
        if threading.current_thread() is not self._waiter:
            self._waiter.join()
        try:
            self._actors.ask(lambda: self._actor.close.remote(), _CLOSE_SECONDS)
        except self._errors.RayError:
            return  # it is gone, and the guard of its machine has ended the rest

    def _wait(self, ended: Callable[[int], None]) -> None:
        try:
            code = self._asked(lambda: self._actor.wait.remote())
        except self._errors.RayError:
            code = -signal.SIGKILL
        self._is_over = True
        ended(code)

    def _asked(self, call: Callable[[], Any]) -> Any:
        """What a method of the actor returns; asks again while it cannot be reached."""
        end = time.monotonic() + _UNAVAILABLE_SECONDS
        while True:
            try:
                return self._actors.ask(call)
            except self._errors.ActorUnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def _last_words(self, error: Exception) -> bytes:
        """The last line of its output, which says why it was lost; none after that."""
        if self._has_told:
            return b""
        self._has_told = True
        *_, why = str(error).strip().splitlines()
        return f"jaxstrategy.launch: this process was lost: {why.strip()}\n".encode()
