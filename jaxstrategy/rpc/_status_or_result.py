"""What comes of a remote call: `StatusOrResult`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, final

import numpy as np

from jaxstrategy.rpc._rpc_errors import DeadlineExceededError, RpcError, error_of


class RpcOutcome(NamedTuple):
    """The end of a remote call.

    Attributes:
      code: 0 if it went well.
      message: why it did not.
      arrays: the results, flat.
    """

    code: int
    message: str = ""
    arrays: tuple[np.ndarray, ...] = ()


@final
class StatusOrResult:
    """The result of a remote call, which may still be running; methods wait for it.

    `Client.call` and the methods of clients return it.

    >>> import jaxstrategy as js
    >>> rpc = js.experimental.rpc
    >>> with rpc.Server.create("grpc", "localhost:0") as server:
    ...     server.register("double", jax.jit(lambda x: 2 * x), 1.0)
    ...     server.start()
    ...     with rpc.Client.create("grpc", server.address) as client:
    ...         good, bad = client.double(4.0), client.double(4)
    ...         print(good.is_ok(), good.get_value(), bad.is_ok(), bad.get_error())
    True 8.0 False (3, 'Expects arg[0] to be float32 but int32 is provided')

    Args:
      future: of the call; it gets no exception.
      seconds: how long to wait for it, from now on; None: as long as it takes.
      packed: makes the value of the flat results, of the shapes of the method.
    """

    def __init__(
        self,
        future: Future[RpcOutcome],
        seconds: float | None,
        packed: Callable[[tuple[np.ndarray, ...]], Any],
    ) -> None:
        self._future = future
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._packed = packed
        self._lock = threading.Lock()
        self._outcome: RpcOutcome | None = None

    def is_ok(self) -> bool:
        """Whether the call went well."""
        return self._settled().code == 0

    def get_error(self) -> tuple[int, str]:
        """The code of the error and its message; `(0, "")` if there is none."""
        outcome = self._settled()
        return outcome.code, outcome.message

    def get_value(self) -> Any:
        """The arrays of NumPy that the method returned, in its structure and shapes.

        Raises:
          RpcError: the call failed; of the class of its code.
          InvalidArgumentError: `call` was not told the structure, or a wrong one.
        """
        outcome = self._settled()
        if outcome.code:
            raise error_of(outcome.code, outcome.message)
        return self._packed(outcome.arrays)

    def _settled(self) -> RpcOutcome:
        with self._lock:
            if self._outcome is None:
                self._outcome = self._awaited()
            return self._outcome

    def _awaited(self) -> RpcOutcome:
        left = None if self._end is None else max(0.0, self._end - time.monotonic())
        try:
            return self._future.result(left)
        except TimeoutError:
            return late(self._seconds)


def late(seconds: float | None) -> RpcOutcome:
    """That of a call to which no answer came in time."""
    told = "" if seconds is None else f" within {1000 * seconds:g} ms"
    return RpcOutcome(DeadlineExceededError.error_code, f"No answer came{told}.")


def failed(error: RpcError) -> RpcOutcome:
    """That of a call that ended with an error."""
    return RpcOutcome(error.error_code, error.message)
