"""Calls the methods of an `RpcServer`: `RpcClient`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np

from jaxstrategy._errors import ClusterError
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._stream import FrameError, Kind, WireFrame
from jaxstrategy.processes._secret import Secret
from jaxstrategy.rpc import _rpc_connections, _status_or_result, _structures
from jaxstrategy.rpc._rpc_connections import RpcPlace
from jaxstrategy.rpc._rpc_errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RpcError,
    UnauthenticatedError,
    UnavailableError,
)
from jaxstrategy.rpc._rpc_server import LARGEST, check_bytes, check_layer
from jaxstrategy.rpc._status_or_result import RpcOutcome, StatusOrResult

_BLOCKING = "_blocking"


class _Signature(NamedTuple):
    """Trees of specs of the arguments and of the result of a method."""

    inputs: Any
    outputs: Any


@final
class RpcClient:
    """Calls the methods of a `Server`: by their names, and as methods of its own.

    For each method `m` of the server there are `client.m(*args, timeout_in_ms=0)`,
    which returns a `StatusOrResult` at once, and `client.m_blocking(*args,
    timeout_in_ms=0)`, which returns the value or raises. Any number of threads may
    call; each call that runs has a connection and a thread.

    Args:
      address: that of the server.
      name: of the client, for people who look at threads.
      timeout_in_ms: for each call, and to reach the server; 0: as long as it takes.
      max_message_bytes: of the results of one call.

    Raises:
      DeadlineExceededError: the server did not answer in time.
      InternalError: what listens there is no RPC server of this version.
      UnauthenticatedError: the server has another secret, or strangers could listen.
      ValueError: the timeout is no number of milliseconds.

    >>> import jaxstrategy as js
    >>> rpc = js.experimental.rpc
    >>> with rpc.Server.create("grpc", "localhost:0") as server:
    ...     two = jax.jit(lambda x: {"sum": x["a"].sum(), "a": x["a"]})
    ...     server.register("total", two, {"a": jnp.zeros(3)})
    ...     server.start()
    ...     with rpc.Client.create("grpc", server.address) as client:
    ...         print(client.methods, client.total_blocking({"a": np.ones(3)})["sum"])
    ('total',) 3.0
    """

    def __init__(
        self,
        address: str,
        name: str = "",
        timeout_in_ms: float = 0,
        max_message_bytes: int = LARGEST,
    ) -> None:
        check_bytes(max_message_bytes)
        self.name = name
        self._seconds = _seconds(timeout_in_ms)
        self._largest = max_message_bytes
        self._place = RpcPlace(address, Secret.of_environment(), max_message_bytes)
        self._lock = threading.Lock()
        self._is_closed = False
        self._threads: set[threading.Thread] = set()
        self._methods: dict[str, _Signature] = {}
        end = None if self._seconds is None else time.monotonic() + self._seconds
        try:
            self._peer = _rpc_connections.first_peer(self._place, end)
        except ClusterError as error:
            raise UnauthenticatedError(str(error)) from error
        self._learn(end)

    @staticmethod
    def create(
        rpc_layer: str,
        address: str,
        name: str = "",
        timeout_in_ms: float = 0,
        max_message_bytes: int = LARGEST,
    ) -> RpcClient:
        """A client of the server at an address, which it waits for.

        Args:
          rpc_layer: `"grpc"`.
          address: that of the server.
          name: of the client, for people who look at threads.
          timeout_in_ms: for each call, and to reach the server; 0: as long as it takes.
          max_message_bytes: of the results of one call.

        Raises:
          DeadlineExceededError: the server did not answer in time.
          InternalError: what listens there is no RPC server of this version.
          UnauthenticatedError: the server has another secret, or strangers could
            listen.
          ValueError: there is no such layer.
        """
        check_layer(rpc_layer)
        return RpcClient(address, name, timeout_in_ms, max_message_bytes)

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the server's methods."""
        return tuple(self._methods)

    def call(
        self,
        method_name: str,
        args: Sequence[object] | None = None,
        output_specs: object = None,
        timeout_in_ms: float = 0,
    ) -> StatusOrResult:
        """Call a method by its name, without waiting for it.

        Args:
          method_name: of the method.
          args: its arguments.
          output_specs: the structure of its result, of `jax.ShapeDtypeStruct`s or
            examples; without it, only calls without results have a value.
          timeout_in_ms: for this call; 0: that of the client.

        Raises:
          OverflowError: an argument has whole numbers too large for JAX.
          TypeError: an argument has something else than numbers in it.
          ValueError: the timeout is no number of milliseconds, or `output_specs` has
            something else in it than specs and examples.
        """
        known = self._methods.get(method_name)
        wanted = jax.tree.leaves(known.inputs) if known else []
        leaves = jax.tree.leaves(args)
        specs = wanted if len(wanted) == len(leaves) else [None] * len(leaves)
        arrays = [
            _structures.as_array(leaf, spec, f"{method_name}: arg[{i}]")
            for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
        ]
        return self._begun(method_name, arrays, output_specs, timeout_in_ms)

    def close(self) -> None:
        """End all connections; calls that run fail. Once is enough."""
        with self._lock:
            self._is_closed = True
            left = set(self._threads)
        self._peer.close("the client was closed")
        for thread in left:
            if thread is not threading.current_thread():
                thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Found here, and not set as attributes: those would refer back to the client,
        # which then would not end with its last reference.
        methods = self.__dict__.get("_methods", {})
        plain = name.removesuffix(_BLOCKING)
        if name not in methods and plain not in methods:
            known = ", ".join(map(repr, methods)) or "none"
            raise AttributeError(
                f"The server at {self.__dict__.get('_place')} has no method {name!r}; "
                f"it has {known}.",
                name=name,
                obj=self,
            )
        function = self._calling(name) if name in methods else self._blocking(plain)
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"RPC Call for {plain} method to server {self._place}"
        return function

    def __dir__(self) -> list[str]:
        both = [name + end for name in self._methods for end in ("", _BLOCKING)]
        return [*super().__dir__(), *both]

    def _calling(self, method: str) -> Callable[..., StatusOrResult]:
        def call(*args: object, timeout_in_ms: float = 0) -> StatusOrResult:
            inputs, outputs = self._methods[method]
            _structures.check_structure(args, inputs, f"The arguments of `{method}`")
            return self.call(method, args, outputs, timeout_in_ms)

        return call

    def _blocking(self, method: str) -> Callable[..., Any]:
        def call(*args: object, timeout_in_ms: float = 0) -> Any:
            return self._calling(method)(*args, timeout_in_ms=timeout_in_ms).get_value()

        return call

    def _learn(self, end: float | None) -> None:
        """Ask the server for its methods."""
        left = None if end is None else max(0.001, end - time.monotonic())
        try:
            told = self._peer.ask(WireFrame(Kind.METHODS), left).fields
            self._most = int(told["largest"])
            for name, inputs, outputs in told["methods"]:
                both = _structures.read(inputs), _structures.read(outputs)
                self._methods[str(name)] = _Signature(*both)
        except RpcError:
            self._peer.close()
            raise
        except TimeoutError:
            self._peer.close()
            text = _status_or_result.late(self._seconds).message
            raise DeadlineExceededError(text) from None
        except Exception as error:  # whatever the other end makes of it
            self._peer.close()
            raise InternalError(f"{self._place} lists no methods: {error}") from error

    def _begun(
        self, method: str, arrays: list[np.ndarray], specs: object, timeout: float
    ) -> StatusOrResult:
        seconds = _seconds(timeout) or self._seconds
        future: Future[RpcOutcome] = Future()
        result = StatusOrResult(future, seconds, _packing(specs))
        if why := self._too_large(method, arrays):
            future.set_result(RpcOutcome(ResourceExhaustedError.error_code, why))
            return result
        request = WireFrame(Kind.INVOKE, method, b"", arrays)
        thread = threading.Thread(
            target=self._run,
            args=(request, seconds, future),
            name=f"jaxstrategy rpc {self.name}".rstrip(),
            daemon=True,
        )
        with self._lock:
            if self._is_closed:
                closed = UnavailableError("The client was closed.")
                future.set_result(_status_or_result.failed(closed))
                return result
            thread.start()
            self._threads.add(thread)
        return result

    def _too_large(self, method: str, arrays: list[np.ndarray]) -> str | None:
        size = sum(array.nbytes for array in arrays)
        if size > self._most:
            return (
                f"The arguments of `{method}` have {size} bytes, and the server takes "
                f"{self._most}, its `max_message_bytes`."
            )
        known = self._methods.get(method)
        size = _structures.bytes_of(known.outputs) if known else 0
        if size > self._largest:
            return (
                f"The results of `{method}` have {size} bytes, and this client takes "
                f"{self._largest}, its `max_message_bytes`."
            )
        return None

    def _run(
        self, request: WireFrame, seconds: float | None, future: Future[RpcOutcome]
    ) -> None:
        try:
            future.set_result(self._asked(request, seconds))
        except BaseException as error:  # nobody else would tell who waits
            future.set_result(RpcOutcome(RpcError.error_code, repr(error)))
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _asked(self, request: WireFrame, seconds: float | None) -> RpcOutcome:
        peer = self._peer
        try:
            return _outcome(peer.ask(request, seconds))
        except UnavailableError as error:
            self._renew(peer)
            return _status_or_result.failed(error)
        except RpcError as error:
            return _status_or_result.failed(error)
        except TimeoutError:
            return _status_or_result.late(seconds)
        except ClusterError as error:
            return RpcOutcome(UnauthenticatedError.error_code, str(error))
        except (FrameError, TypeError) as error:
            return RpcOutcome(InvalidArgumentError.error_code, str(error))

    def _renew(self, lost: Peer) -> None:
        """Let the next call connect again."""
        with self._lock:
            if self._peer is lost and not self._is_closed:
                self._peer = _rpc_connections.peer(self._place)


def _outcome(answer: WireFrame) -> RpcOutcome:
    match answer.fields:
        case {"code": int(code), "message": str(message)}:
            return RpcOutcome(code, message, tuple(answer.arrays))
    raise InternalError("A call was answered with something else than its outcome.")


def _packing(specs: object) -> Callable[[tuple[np.ndarray, ...]], Any]:
    """The function that makes the value of flat results."""
    wanted = _structures.specs_of(specs, "output_specs")
    leaves, structure = jax.tree.flatten(wanted)

    def packed(arrays: tuple[np.ndarray, ...]) -> Any:
        if why := _structures.misfit(arrays, leaves, "result"):
            told = "" if specs is not None else "; give `output_specs` to `call`"
            raise InvalidArgumentError(f"{why}{told}")
        # A scalar as NumPy's own, as `ClusterCoordinator.fetch` gives it.
        return jax.tree.unflatten(structure, [array[()] for array in arrays])

    return packed


def _seconds(timeout_in_ms: float) -> float | None:
    if not isinstance(timeout_in_ms, int | float) or not timeout_in_ms >= 0:
        raise ValueError(
            f"`timeout_in_ms` was {timeout_in_ms!r}; a number of milliseconds was "
            "wanted, or 0."
        )
    return timeout_in_ms / 1000 or None
