"""Calls the methods of an `RpcServer`: `RpcClient`, `StatusOrResult`."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.processes.messages import Buffer, Client, LostError, RefusedError
from jaxstrategy._src.processes.secret import VARIABLE, Secret
from jaxstrategy._src.rpc.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RpcError,
    UnauthenticatedError,
    UnavailableError,
    error_of,
)
from jaxstrategy._src.rpc.server import (
    HEAD,
    LARGEST,
    as_array,
    bytes_of,
    check_bytes,
    check_layer,
    check_structure,
    endpoint,
    framed,
    misfit,
    read,
    specs_of,
    unframed,
)

_BLOCKING = "_blocking"
_AGAIN_SECONDS = 2.0  # to reach a server that was lost
_FOR_EVER = 1e8  # seconds, which locks take

Frames = Future[list[Buffer]]


class _Signature(NamedTuple):
    """Trees of specs of the arguments and of the result of a method."""

    inputs: Any
    outputs: Any


class _Outcome(NamedTuple):
    """The end of a remote call: a code, 0 if it went well, and the results, flat."""

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
        future: Future[_Outcome],
        seconds: float | None,
        packed: Callable[[tuple[np.ndarray, ...]], Any],
    ) -> None:
        self._future = future
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds
        self._packed = packed
        self._lock = threading.Lock()
        self._outcome: _Outcome | None = None

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

    def _settled(self) -> _Outcome:
        with self._lock:
            if self._outcome is None:
                self._outcome = self._awaited()
            return self._outcome

    def _awaited(self) -> _Outcome:
        left = None if self._end is None else max(0.0, self._end - time.monotonic())
        try:
            return self._future.result(left)
        except TimeoutError:
            return _failed(_late(self._seconds))


@final
class RpcClient:
    """Calls the methods of a `Server`: by their names, and as methods of its own.

    For each method `m` of the server there are `client.m(*args, timeout_in_ms=0)`,
    which returns a `StatusOrResult` at once, and `client.m_blocking(*args,
    timeout_in_ms=0)`, which returns the value or raises. Any number of threads may
    call.

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
        self._address = address
        self._lock = threading.Lock()
        self._methods: dict[str, _Signature] = {}
        end = None if self._seconds is None else time.monotonic() + self._seconds
        try:
            self._line = _Line(address, max_message_bytes, self._seconds)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"No RPC server answered in time: {error}"
            ) from error
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
            as_array(leaf, spec, f"{method_name}: arg[{i}]")
            for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
        ]
        return self._begun(method_name, arrays, output_specs, timeout_in_ms)

    def close(self) -> None:
        """End the connection; calls that run fail. Once is enough."""
        self._line.close()

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
                f"The server at {self.__dict__.get('_address')} has no method "
                f"{name!r}; it has {known}.",
                name=name,
                obj=self,
            )
        function = self._calling(name) if name in methods else self._blocking(plain)
        function.__name__ = function.__qualname__ = name
        function.__doc__ = f"RPC Call for {plain} method to server {self._address}"
        return function

    def __dir__(self) -> list[str]:
        both = [name + end for name in self._methods for end in ("", _BLOCKING)]
        return [*super().__dir__(), *both]

    def _calling(self, method: str) -> Callable[..., StatusOrResult]:
        def call(*args: object, timeout_in_ms: float = 0) -> StatusOrResult:
            inputs, outputs = self._methods[method]
            check_structure(args, inputs, f"The arguments of `{method}`")
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
            told, _ = unframed(self._line.submit(framed(None)).result(left))
            self._most = int(told["largest"])
            for name, inputs, outputs in told["methods"]:
                self._methods[str(name)] = _Signature(read(inputs), read(outputs))
        except TimeoutError:
            self.close()
            text = f"No RPC server answered in time: {self._address} is not started."
            raise DeadlineExceededError(text) from None
        except Exception as error:  # whatever the other end makes of it
            self.close()
            raise InternalError(f"{self._address} lists no methods: {error}") from error

    def _begun(
        self, method: str, arrays: list[np.ndarray], specs: object, timeout: float
    ) -> StatusOrResult:
        seconds = _seconds(timeout) or self._seconds
        future: Future[_Outcome] = Future()
        result = StatusOrResult(future, seconds, _packing(specs))
        if why := self._too_large(method, arrays):
            future.set_result(_failed(ResourceExhaustedError(why)))
        else:
            line = self._line  # which the call keeps until it has its answer
            answer = line.submit(framed(method, arrays))
            answer.add_done_callback(lambda done: future.set_result(line.outcome(done)))
        return result

    def _too_large(self, method: str, arrays: list[np.ndarray]) -> str | None:
        size = sum(array.nbytes for array in arrays)
        if size > self._most:
            return (
                f"The arguments of `{method}` have {size} bytes, and the server takes "
                f"{self._most}, its `max_message_bytes`."
            )
        known = self._methods.get(method)
        size = bytes_of(known.outputs) if known else 0
        if size > self._largest:
            return (
                f"The results of `{method}` have {size} bytes, and this client takes "
                f"{self._largest}, its `max_message_bytes`."
            )
        return None


@final
class _Line:
    """The connection to a server, made anew by the next call once it was lost."""

    def __init__(self, address: str, largest: int, seconds: float | None) -> None:
        self._address = address
        self._largest = largest
        self._lock = threading.Lock()
        self._is_closed = False
        self._now: list[Client] = []  # one, or none once it was lost
        self._connect(_FOR_EVER if seconds is None else seconds)
        finalizer = weakref.finalize(self, _end_later, self._now)
        finalizer.atexit = False

    def submit(self, frames: list[Buffer]) -> Frames:
        """The future of an answer; it may fail with a `ConnectionError`."""
        for client in self._now:
            return client.submit(*frames)
        future: Frames = Future()
        started(
            threading.Thread(
                target=self._submit_again,
                args=(frames, future),
                name="jaxstrategy rpc",
                daemon=True,
            )
        )
        return future

    def outcome(self, answer: Frames) -> _Outcome:
        """What came of a call."""
        try:
            fields, arrays = unframed(answer.result())
            return _Outcome(int(fields["code"]), str(fields["message"]), tuple(arrays))
        except RpcError as error:
            return _failed(error)
        except OSError as error:
            text = f"The RPC server at {self._address} is lost: {error}"
            if self._is_closed:
                text = "The client was closed."
            return _failed(UnavailableError(text))
        except Exception:  # whatever the other end makes of it
            text = "A call was answered with something else than its outcome."
            return _failed(InternalError(text))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        _end(self._now)

    def _connect(self, seconds: float) -> None:
        secret = Secret.of_environment()
        try:
            client = Client(
                endpoint(self._address, secret),
                secret,
                lost=self._now.clear,
                timeout_seconds=seconds,
                largest=self._largest + HEAD,
            )
        except RpcError:
            raise
        except ClusterError as error:
            raise UnauthenticatedError(str(error)) from error
        except RefusedError as error:
            own = "" if secret else ", which has none"
            raise UnauthenticatedError(
                f"What listens at {self._address} has another {VARIABLE} than this "
                f"one{own}, or is no RPC server of jaxstrategy."
            ) from error
        self._now.append(client)

    def _submit_again(self, frames: list[Buffer], future: Frames) -> None:
        try:
            with self._lock:  # the first that finds it lost connects for all
                if self._is_closed:
                    raise LostError("the client was closed")
                if not self._now:
                    self._connect(_AGAIN_SECONDS)
                client = self._now[0]
            answer = client.submit(*frames)
        except BaseException as error:  # nobody else would tell who waits
            future.set_exception(error)
            return
        answer.add_done_callback(lambda done: _hand_on(done, future))


def _end(now: list[Client]) -> None:
    while now:
        now.pop().close()


def _end_later(now: list[Client]) -> None:
    # The collector may run in any thread, also in one that holds a lock of these.
    started(
        threading.Thread(
            target=_end, args=(now,), name="jaxstrategy rpc end", daemon=True
        )
    )


def _hand_on(answer: Frames, future: Frames) -> None:
    try:
        future.set_result(answer.result())
    except Exception as error:
        future.set_exception(error)


def _late(seconds: float | None) -> RpcError:
    told = "" if seconds is None else f" within {1000 * seconds:g} ms"
    return DeadlineExceededError(f"No answer came{told}.")


def _failed(error: RpcError) -> _Outcome:
    return _Outcome(error.error_code, error.message)


def _packing(specs: object) -> Callable[[tuple[np.ndarray, ...]], Any]:
    """The function that makes the value of flat results."""
    wanted = specs_of(specs, "output_specs")
    leaves, structure = jax.tree.flatten(wanted)

    def packed(arrays: tuple[np.ndarray, ...]) -> Any:
        if why := misfit(arrays, leaves, "result"):
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
