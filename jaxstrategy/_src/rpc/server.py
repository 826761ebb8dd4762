"""Offers jitted functions to other processes: `RpcServer`."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, final

import jax
import numpy as np

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.messages import Request, Server
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.rpc.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RpcError,
)
from jaxstrategy._src.rpc.method import Json, RpcMethod, framed, unframed

LARGEST = 2 << 30
"""Bytes of the arguments, or of the results, of one call."""

HEAD = 1 << 24
"""Bytes of a message besides its arrays: a list of methods, a name, a text."""

_BLOCKING = "_blocking"
_TAKEN = ("call", "close", "create", "methods", "name")  # members of `RpcClient`
_ALL_ADDRESSES = ("", "0.0.0.0", "::", "*")


def check_layer(rpc_layer: str) -> None:
    """Nothing if there is such a layer."""
    if rpc_layer != "grpc":
        raise ValueError(
            f"Only GRPC backend is supported at the moment. {rpc_layer!r} was given; "
            '"grpc", TensorFlow\'s name for it, stands for the one that there is here, '
            "whose messages are jaxstrategy's own."
        )


def check_bytes(count: int) -> None:
    """Nothing if it is a bound of messages."""
    if not isinstance(count, int) or count <= 0:
        raise ValueError(
            f"`max_message_bytes` was {count!r}; a whole number over 0 was wanted."
        )


def endpoint(address: str, secret: Secret) -> str:
    """The address as messages have it, which strangers cannot use."""
    if "/" in address:  # the path of a Unix socket
        return f"ipc://{address}"
    host = address.rpartition(":")[0].strip("[]")
    if host in _ALL_ADDRESSES:
        raise ClusterError(
            f"{address!r} is every address of this host. Give the one at which the "
            "other processes of the job reach it."
        )
    _secret.check(secret, host)
    return address


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
        self._answers = answers = _Answers(max_message_bytes)
        secret = Secret.of_environment()
        server = Server(
            secret,
            answers.take,
            address=endpoint(address, secret),
            largest=max_message_bytes + HEAD,
        )
        self._address = server.address.removeprefix("ipc://")
        self._lock = threading.Lock()
        self._is_closed = False
        self._close = weakref.finalize(self, _end_later, server, answers)
        self._close.atexit = False  # its threads are daemons
        self._server = server

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
        return self._address

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
            if self._answers.is_started or self._is_closed:
                raise FailedPreconditionError(
                    "All methods must be registered before starting"
                )
            self._check_name(method_name)
            method = RpcMethod(method_name, func, specs)
            largest = self._answers.largest
            if method.largest > largest:
                raise ValueError(
                    f"The arguments or results of `{method_name}` have "
                    f"{method.largest} bytes, more than the {largest} of the server's "
                    "`max_message_bytes`."
                )
            self._answers.methods[method_name] = method

    def start(self) -> None:
        """Answer clients from now on, in threads; once more does nothing.

        Raises:
          FailedPreconditionError: the server was closed.
        """
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("The server was closed; create another")
            self._answers.start()

    def close(self) -> None:
        """End the server and its threads, after methods that run; once is enough."""
        with self._lock:
            self._is_closed = True
        self._answers.finish()
        if self._close.detach():
            self._server.close()

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
        """Nothing if clients can have a method of that name, and a blocking one."""
        other = name.removesuffix(_BLOCKING)
        clashes = name.endswith(_BLOCKING) and other in self._answers.methods
        if (
            name in self._answers.methods
            or clashes
            or name + _BLOCKING in self._answers.methods
        ):
            raise InvalidArgumentError(f"{name} is already registered")
        if not name or name in _TAKEN or other in _TAKEN or name.startswith("_"):
            raise InvalidArgumentError(
                f"A method cannot have the name {name!r}: clients have something else "
                "of that name."
            )


@final
class _Answers:
    """Calls methods by their names, in as many threads as calls run at once."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.methods: dict[str, RpcMethod] = {}
        self.is_started = False
        self._waiting: list[Request] = []
        # Threads with nothing to do wait for more: one that ends while the interpreter
        # does, with what JAX keeps for it, would abort the process.
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            self.is_started = True
            waiting, self._waiting = self._waiting, []
        for request in waiting:
            self.take(request)

    def take(self, request: Request) -> None:
        """Begin to answer a request, once the server is started."""
        with self._lock:
            if not self.is_started:
                self._waiting.append(request)
                return
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(
                    target=self._answer_all, name="jaxstrategy rpc", daemon=True
                )
                if not started(thread):
                    return
                self._threads.append(thread)
        self._requests.put(request)

    def finish(self) -> None:
        """End the threads, after the methods that run."""
        with self._lock:
            threads, self._threads, self._idle = self._threads, [], 0
        for _ in threads:
            self._requests.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _answer_all(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                fields, arrays = self._answered(request)
            except RpcError as error:
                fields, arrays = _failed(error), []
            except Exception as error:  # of the user's function, whatever it raises
                fields, arrays = _failed(_as_status(error)), []
            with self._lock:
                self._idle += 1
            request.reply(*framed(fields, arrays))
            del request, arrays

    def _answered(self, request: Request) -> tuple[Json, list[np.ndarray]]:
        try:
            name, arrays = unframed(request.frames)
        except ValueError as error:
            raise InternalError(f"An RPC server was sent no call: {error}") from error
        if name is None:
            methods = [each.described for each in self.methods.values()]
            return {"largest": self.largest, "methods": methods}, []
        method = self.methods.get(name) if isinstance(name, str) else None
        if method is None:
            raise InvalidArgumentError(f"{name} is not registered.")
        return {"code": 0, "message": ""}, method(arrays)


def _failed(error: RpcError) -> Json:
    # Of a message, the beginning: the head of an answer has a bound at the client.
    return {"code": error.error_code, "message": error.message[: HEAD // 8]}


def _as_status(error: Exception) -> RpcError:
    text = str(error) or type(error).__name__
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
    is_full = is_of_xla and text.startswith("RESOURCE_EXHAUSTED")
    if is_full or isinstance(error, MemoryError):
        return ResourceExhaustedError(text)
    return InvalidArgumentError(text)


def _end(server: Server, answers: _Answers) -> None:
    server.close()
    answers.finish()


def _end_later(server: Server, answers: _Answers) -> None:
    # The collector may run in any thread, also in one that holds a lock of these.
    started(
        threading.Thread(
            target=_end,
            args=(server, answers),
            name="jaxstrategy rpc end",
            daemon=True,
        )
    )
