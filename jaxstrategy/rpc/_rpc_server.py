"""Offers jitted functions to other processes: `RpcServer`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

from jaxstrategy.launch._child_process import started
from jaxstrategy.parameter_servers.wire._listener import Listener
from jaxstrategy.parameter_servers.wire._peer import Responder
from jaxstrategy.parameter_servers.wire._stream import Stream
from jaxstrategy.processes._secret import Secret
from jaxstrategy.rpc._rpc_answers import REQUEST_HEAD, RpcAnswers
from jaxstrategy.rpc._rpc_errors import FailedPreconditionError, InvalidArgumentError
from jaxstrategy.rpc._rpc_method import RpcMethod

LARGEST = 2 << 30
"""Bytes of the arguments, or of the results, of one call."""

_BLOCKING = "_blocking"
_TAKEN = ("call", "close", "create", "methods", "name")  # members of `RpcClient`


def check_layer(rpc_layer: str) -> None:
    """Nothing if there is such a layer.

    Raises:
      ValueError: there is none.
    """
    if rpc_layer != "grpc":
        raise ValueError(
            f"Only GRPC backend is supported at the moment. {rpc_layer!r} was given; "
            '"grpc", TensorFlow\'s name for it, stands for the one that there is here, '
            "whose messages are jaxstrategy's own."
        )


@final
class RpcServer:
    """Offers jitted functions to `Client`s in this and in other processes.

    Whoever calls must know the secret of the job, `JAXSTRATEGY_CLUSTER_SECRET`; without
    one, only processes of this host can call, those of its other users too. Only the
    functions that are registered run, and nothing that a client sends is unpickled.

    Args:
      address: `host:port`, the one address that it listens at; port 0 is any free one.
        Or the path of a Unix socket, in a directory that only this user can open.
      max_message_bytes: of the arguments, or of the results, of one call.

    Raises:
      ClusterError: strangers could call.
      OSError: the address is not this host's, or in use.
      ValueError: the bound is no number of bytes.

    >>> import jaxstrategy as js
    >>> rpc = js.experimental.rpc
    >>> with rpc.Server.create("grpc", "localhost:0") as server:
    ...     whole = jax.ShapeDtypeStruct((), jnp.int32)
    ...     server.register("mul", jax.jit(lambda x, y: x * y), whole, whole)
    ...     server.start()
    ...     with rpc.Client.create("grpc", server.address) as client:
    ...         print(client.mul_blocking(2, 3))
    6
    """

    def __init__(self, address: str, max_message_bytes: int = LARGEST) -> None:
        check_bytes(max_message_bytes)
        self._largest = max_message_bytes
        self._answers = RpcAnswers(max_message_bytes)
        self._responder = Responder(self._answers)
        self._listener = Listener(address, Secret.of_environment())
        self._lock = threading.Lock()
        self._is_started = self._is_closed = False
        finalizer = weakref.finalize(self, _end_later, self._listener, self._responder)
        finalizer.atexit = False  # its threads are daemons

    @staticmethod
    def create(
        rpc_layer: str, address: str, max_message_bytes: int = LARGEST
    ) -> RpcServer:
        """A server at an address, which does not answer before it is started.

        Args:
          rpc_layer: `"grpc"`.
          address: `host:port`; port 0 is any free one.
          max_message_bytes: of the arguments, or of the results, of one call.

        Raises:
          ClusterError: strangers could call.
          OSError: the address is not this host's, or in use.
          ValueError: there is no such layer.
        """
        check_layer(rpc_layer)
        return RpcServer(address, max_message_bytes)

    @property
    def address(self) -> str:
        """The address where clients connect, with the port that was free."""
        return self._listener.address

    def register(
        self, method_name: str, func: Callable[..., Any], *specs: object
    ) -> None:
        """Let clients call a function by a name.

        It is compiled now, for arguments of fixed shapes and dtypes. Those and its
        results are trees of arrays in dicts, lists and tuples.

        Args:
          method_name: the name, which clients have as a method.
          func: a jitted function, or one that was compiled ahead of time, which needs
            no specs.
          specs: for each argument an example, or `jax.ShapeDtypeStruct`s.

        Raises:
          FailedPreconditionError: the server was started.
          InvalidArgumentError: there is a method of that name.
          ValueError: the function is not jitted, its arguments are not known, or it
            takes or returns what cannot be sent.
        """
        with self._lock:
            if self._is_started or self._is_closed:
                raise FailedPreconditionError(
                    "All methods must be registered before starting"
                )
            self._check_name(method_name)
            method = RpcMethod(method_name, func, specs)
            if method.largest > self._largest:
                raise ValueError(
                    f"The arguments or results of `{method_name}` have "
                    f"{method.largest} bytes, more than the {self._largest} of the "
                    "server's `max_message_bytes`."
                )
            self._answers.add(method_name, method)

    def start(self) -> None:
        """Answer clients from now on, in threads; once more does nothing.

        Raises:
          FailedPreconditionError: the server was closed.
        """
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("The server was closed; create another")
            if self._is_started:
                return
            self._is_started = True
        self._listener.start(_taker(self._responder, self._largest))

    def close(self) -> None:
        """End the server and its threads, after methods that run; once is enough."""
        with self._lock:
            self._is_closed = True
        _end(self._listener, self._responder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_name(self, name: str) -> None:
        """Nothing if clients can have a method of that name, and a blocking one.

        Raises:
          InvalidArgumentError: they cannot.
        """
        other = name.removesuffix(_BLOCKING)
        clashes = name.endswith(_BLOCKING) and other in self._answers
        if name in self._answers or clashes or name + _BLOCKING in self._answers:
            raise InvalidArgumentError(f"{name} is already registered")
        if not name or name in _TAKEN or other in _TAKEN or name.startswith("_"):
            raise InvalidArgumentError(
                f"A method cannot have the name {name!r}: clients have something else "
                "of that name."
            )


def check_bytes(count: int) -> None:
    """Nothing if it is a number of bytes.

    Raises:
      ValueError: it is none.
    """
    if not isinstance(count, int) or count <= 0:
        raise ValueError(
            f"`max_message_bytes` was {count!r}; a whole number over 0 was wanted."
        )


def _taker(responder: Responder, largest: int) -> Callable[[Stream], None]:
    # Without the server, which these threads would keep from being collected.
    def take(stream: Stream) -> None:
        stream.is_trusted = False  # so that no exception is pickled for it
        stream.limit_received(REQUEST_HEAD, largest + REQUEST_HEAD)
        responder.add(stream)

    return take


def _end(listener: Listener, responder: Responder) -> None:
    listener.close()
    responder.close()


def _end_later(listener: Listener, responder: Responder) -> None:
    # The collector may run in any thread, also in one that holds a lock of these.
    started(
        threading.Thread(
            target=_end,
            args=(listener, responder),
            name="jaxstrategy rpc end",
            daemon=True,
        )
    )
