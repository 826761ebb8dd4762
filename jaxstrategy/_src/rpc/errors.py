"""Errors of remote calls, each with the number that TensorFlow has for its kind."""

from __future__ import annotations

from typing import ClassVar

from jaxstrategy._src.errors import ClusterError


class RpcError(Exception):
    """A remote call, or its preparation, failed.

    Attributes:
      error_code: the number of the kind of error, as in TensorFlow and gRPC; 2 for one
        that has no class of its own.
      message: the text.

    >>> import jaxstrategy as js
    >>> js.experimental.rpc.RpcError("what happened").error_code
    2
    """

    error_code: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidArgumentError(RpcError, ValueError):
    """A name or an argument does not fit, or the method itself failed.

    >>> import jaxstrategy as js
    >>> issubclass(js.experimental.rpc.InvalidArgumentError, ValueError)
    True
    """

    error_code = 3


class DeadlineExceededError(RpcError, TimeoutError):
    """No answer came within `timeout_in_ms`; the method may still be running.

    >>> import jaxstrategy as js
    >>> rpc = js.experimental.rpc
    >>> try:
    ...     rpc.Client.create("grpc", "localhost:1", timeout_in_ms=50)
    ... except TimeoutError as error:
    ...     print(type(error).__name__, error.error_code)
    DeadlineExceededError 4
    """

    error_code = 4


class ResourceExhaustedError(RpcError):
    """A message is larger than allowed, or the memory of the server is exhausted.

    >>> import jaxstrategy as js
    >>> js.experimental.rpc.ResourceExhaustedError("too large").error_code
    8
    """

    error_code = 8


class FailedPreconditionError(RpcError, RuntimeError):
    """A server was asked for something too early, or too late.

    >>> import jaxstrategy as js
    >>> rpc = js.experimental.rpc
    >>> with rpc.Server.create("grpc", "localhost:0") as server:
    ...     server.start()
    ...     try:
    ...         server.register("two", jax.jit(lambda: 2))
    ...     except rpc.FailedPreconditionError as error:
    ...         print(error)
    All methods must be registered before starting
    """

    error_code = 9


class InternalError(RpcError, RuntimeError):
    """The other end answered something that no server of this version answers.

    >>> import jaxstrategy as js
    >>> js.experimental.rpc.InternalError("what came").error_code
    13
    """

    error_code = 13


class UnavailableError(RpcError, ConnectionError):
    """The server is gone, or the client was closed; the method may have run.

    The next call connects anew.

    >>> import jaxstrategy as js
    >>> issubclass(js.experimental.rpc.UnavailableError, ConnectionError)
    True
    """

    error_code = 14


class UnauthenticatedError(RpcError, ClusterError):
    """One end does not know the secret of the other: `JAXSTRATEGY_CLUSTER_SECRET`.

    >>> import jaxstrategy as js
    >>> issubclass(js.experimental.rpc.UnauthenticatedError, js.ClusterError)
    True
    """

    error_code = 16


_CLASSES: tuple[type[RpcError], ...] = (
    *(InvalidArgumentError, DeadlineExceededError, ResourceExhaustedError),
    *(FailedPreconditionError, InternalError, UnavailableError, UnauthenticatedError),
)
_BY_CODE = {each.error_code: each for each in _CLASSES}


def error_of(code: int, message: str) -> RpcError:
    """The exception of a code."""
    return _BY_CODE.get(code, RpcError)(message)
