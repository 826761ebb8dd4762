"""Jitted functions that other processes call: `experimental.rpc`, as in TensorFlow.

A message is JSON and the bytes of arrays. Nothing of it is unpickled: without a secret,
other users of this host can call, too. A spec is a `jax.ShapeDtypeStruct`; trees of
them are of dicts, lists, tuples and None, so that a structure is data.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.processes import messages, secret as _secret
from jaxstrategy._src.processes.messages import Buffer, Request
from jaxstrategy._src.processes.secret import Secret

_LARGEST = 2 << 30  # bytes of the arguments, or of the results, of one call
_HEAD = 1 << 24  # bytes of a message besides its arrays: a list of methods, a text
_BLOCKING = "_blocking"
_TAKEN = ("call", "close", "create", "methods", "name")  # members of `RpcClient`
_AGAIN_SECONDS = 2.0  # to reach a server that was lost
_FOR_EVER = 1e8  # seconds, which locks take


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

    error_code: int = 2

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgumentError(RpcError, ValueError):
    """A name or an argument does not fit, or the method itself failed.

    >>> import jaxstrategy as js
    >>> js.experimental.rpc.InvalidArgumentError("what does not fit").error_code
    3
    """

    error_code = 3


class DeadlineExceededError(RpcError, TimeoutError):
    """No answer came within `timeout_in_ms`; the method may still be running.

    >>> import jaxstrategy as js
    >>> js.experimental.rpc.DeadlineExceededError("too late").error_code
    4
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
    >>> js.experimental.rpc.FailedPreconditionError("too early").error_code
    9
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
    >>> js.experimental.rpc.UnavailableError("gone").error_code
    14
    """

    error_code = 14


class UnauthenticatedError(RpcError, ClusterError):
    """One end does not know the secret of the other: `JAXSTRATEGY_CLUSTER_SECRET`.

    >>> import jaxstrategy as js
    >>> js.experimental.rpc.UnauthenticatedError("another secret").error_code
    16
    """

    error_code = 16


@final
class RpcServer:
    """Offers jitted functions to `Client`s in this and in other processes.

    Whoever calls must know the secret of the job, `JAXSTRATEGY_CLUSTER_SECRET`; without
    one, only processes of this host can call, those of its other users too. Only the
    functions that are registered run, and nothing that a client sends is unpickled.

    Args:
      address: `host:port`, the one address that it listens at; port 0 is any free one.
      max_message_bytes: of the arguments, or of the results, of one call.

    Raises:
      ClusterError: strangers could call.
      OSError: the address is not this host's, or in use.
      ValueError: the address has no port; the bound is no number of bytes.

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

    def __init__(self, address: str, max_message_bytes: int = _LARGEST) -> None:
        _check_bytes(max_message_bytes)
        secret = Secret.of_environment()
        self._calls = calls = _Calls(max_message_bytes)
        self._server = server = messages.Server(
            secret,
            calls.take,
            address=_checked_address(address, secret),
            largest=max_message_bytes + _HEAD,
        )
        self._address = server.address
        self._lock = threading.Lock()
        self._is_closed = False
        # In the loop's thread: the collector may run in one that holds a lock of these.
        end = functools.partial(lambda: (calls.finish(), server.close()))
        self._end = weakref.finalize(self, server.call, end)
        self._end.atexit = False  # its threads are daemons

    @staticmethod
    def create(
        rpc_layer: str, address: str, max_message_bytes: int = _LARGEST
    ) -> RpcServer:
        """A server at an address, which does not answer before it is started.

        It takes and raises what the class does, after `"grpc"`, the only `rpc_layer`.
        """
        _check_layer(rpc_layer)
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
          func: a jitted function.
          specs: for each argument an example, or `jax.ShapeDtypeStruct`s.

        Raises:
          FailedPreconditionError: the server was started.
          InvalidArgumentError: there is a method of that name.
          ValueError: the function is not jitted, its arguments are not known, or it
            takes or returns what cannot be sent.
        """
        plain, known = method_name.removesuffix(_BLOCKING), self._calls.methods
        with self._lock:
            if self._calls.is_started or self._is_closed:
                raise FailedPreconditionError(
                    "All methods must be registered before starting"
                )
            if {method_name, plain, method_name + _BLOCKING} & known.keys():
                raise InvalidArgumentError(f"{method_name} is already registered")
            if not method_name or plain in _TAKEN or method_name.startswith("_"):
                raise InvalidArgumentError(
                    f"A method cannot have the name {method_name!r}: clients have "
                    "something else of that name."
                )
            method = _Method(method_name, func, specs)
            size = max(_bytes_of(method.inputs), _bytes_of(method.outputs))
            if size > self._calls.largest:
                raise ValueError(
                    f"The arguments or results of `{method_name}` have {size} bytes, "
                    f"more than the {self._calls.largest} of the server's "
                    "`max_message_bytes`."
                )
            known[method_name] = method

    def start(self) -> None:
        """Answer clients from now on, in threads; once more does nothing.

        Raises:
          FailedPreconditionError: the server was closed.
        """
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError("The server was closed; create another")
            self._calls.start()

    def close(self) -> None:
        """End the server and its threads, after methods that run; once is enough."""
        with self._lock:
            self._is_closed = True
        for thread in self._calls.finish():
            if thread is not threading.current_thread():
                thread.join()
        if self._end.detach():
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class _Calls:
    """Answers requests, in as many threads as calls run at once."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.methods: dict[str, _Method] = {}
        self.is_started = False
        # Threads with nothing to do wait for more: one that ends while the interpreter
        # does, with what JAX keeps for it, would abort the process.
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = 0  # threads; below 0: requests without one
        self._lock = threading.Lock()
        _all_calls.add(self)

    def start(self) -> None:
        with self._lock:
            self.is_started = True
            self._start_threads()

    def take(self, request: Request) -> None:
        with self._lock:
            self._requests.put(request)
            self._idle -= 1
            self._start_threads()

    def finish(self) -> list[threading.Thread]:
        """Let the threads end, after the methods that run."""
        with self._lock:
            self.is_started = False
            for _ in self._threads:
                self._requests.put(None)
            return self._threads

    def _start_threads(self) -> None:
        while self.is_started and self._idle < 0:
            thread = threading.Thread(
                target=self._answer_all, name="jaxstrategy rpc", daemon=True
            )
            if not started(thread):
                return
            self._threads.append(thread)
            self._idle += 1

    def _answer_all(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                frames = self._answer(request)
            except Exception as error:  # of the user's function, whatever it raises
                code, text = _status(error)
                # The beginning: the head of an answer has a bound at the client.
                frames = _framed({"code": code, "message": text[: _HEAD // 8]})
            with self._lock:
                self._idle += 1
            request.reply(*frames)
            del request, frames

    def _answer(self, request: Request) -> list[Buffer]:
        try:
            name, arrays = _unframed(request.frames)
        except Exception as error:  # whatever the other end makes of it
            raise InternalError(f"An RPC server was sent no call: {error}") from error
        if name is None:
            listed = [
                [each.name, _written(each.inputs), _written(each.outputs)]
                for each in self.methods.values()
            ]
            return _framed({"largest": self.largest, "methods": listed})
        method = self.methods.get(name) if isinstance(name, str) else None
        if method is None:
            raise InvalidArgumentError(f"{name} is not registered.")
        return _framed({"code": 0, "message": ""}, method(arrays))


_all_calls = weakref.WeakSet[_Calls]()


@atexit.register
def _finish() -> None:
    """Let threads end that have just answered, before the interpreter does.

    Python ends a daemon thread wherever it asks for the interpreter then; in JAX's code
    that aborts the process.
    """
    end = time.monotonic() + 0.5
    for thread in [each for known in list(_all_calls) for each in known.finish()]:
        thread.join(max(0.0, end - time.monotonic()))


def _status(error: Exception) -> tuple[int, str]:
    if isinstance(error, RpcError):
        return error.error_code, error.message
    text = str(error) or type(error).__name__
    is_of_xla = isinstance(error, jax.errors.JaxRuntimeError)
    is_full = is_of_xla and text.startswith("RESOURCE_EXHAUSTED")
    kind = ResourceExhaustedError if is_full or isinstance(error, MemoryError) else None
    return (kind or InvalidArgumentError).error_code, text


_STATE = threading.Lock()
"""Held by calls that may change `jax.Ref`s, as variables are: two at once would use
memory that the other has given away ("Array has been deleted", in JAX 0.12)."""


@final
class _Method:
    """A compiled function, with the structures of its arguments and results."""

    def __init__(
        self, name: str, func: Callable[..., Any], specs: Sequence[object]
    ) -> None:
        self.name = name
        if not isinstance(func, jax.stages.Wrapped):
            raise ValueError(
                f"Only jitted functions are supported with Register method, and "
                f"`{name}` is a {type(func).__name__}: register `jax.jit(...)` of it."
            )
        if not specs and not _takes_nothing(func):
            raise ValueError(
                f"Input signature not specified for the function. `{name}` has "
                "arguments: give an example of each, or a `jax.ShapeDtypeStruct`, "
                f"as `register({name!r}, func, *specs)`."
            )
        argument, result = f"{name}: argument", f"{name}: result"
        self.inputs = _specs_of(tuple(specs), argument)
        traced = func.trace(*self.inputs)
        self._compiled = traced.lower().compile()
        has_state = any(isinstance(each, jax.Ref) for each in traced.jaxpr.consts)
        self._turn = _STATE if has_state else contextlib.nullcontext()
        self.outputs = _specs_of(traced.out_info, result)
        _written(self.inputs, argument)
        _written(self.outputs, result)
        self._specs, self._tree = jax.tree.flatten(self.inputs)

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        if why := _misfit(arrays, self._specs, "arg"):
            raise InvalidArgumentError(why)
        args = jax.tree.unflatten(self._tree, list(arrays))
        with self._turn:
            result = self._compiled(*args)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def _takes_nothing(func: Callable[..., Any]) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        inspect.signature(func).bind()
        return True
    return False


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
    """

    def __init__(
        self,
        client: RpcClient,  # which stays connected as long as this is kept
        future: Future[list[Buffer]],
        seconds: float | None,
        specs: object,
    ) -> None:
        self._client = client
        self._future = future
        self._seconds = seconds
        self._end = time.monotonic() + (seconds or _FOR_EVER)
        self._specs = specs
        self._leaves, self._tree = jax.tree.flatten(_specs_of(specs, "output_specs"))
        self._lock = threading.Lock()
        self._outcome: RpcError | list[np.ndarray] | None = None

    def is_ok(self) -> bool:
        """Whether the call went well."""
        return self.get_error()[0] == 0

    def get_error(self) -> tuple[int, str]:
        """The code of the error and its message; `(0, "")` if there is none."""
        outcome = self._settled()
        return _status(outcome) if isinstance(outcome, RpcError) else (0, "")

    def get_value(self) -> Any:
        """The arrays of NumPy that the method returned, in its structure and shapes.

        Raises:
          RpcError: the call failed; of the class of its code.
          InvalidArgumentError: `call` was not told the structure, or a wrong one.
        """
        outcome = self._settled()
        if isinstance(outcome, RpcError):
            raise outcome
        if why := _misfit(outcome, self._leaves, "result"):
            told = "" if self._specs is not None else "; give `output_specs` to `call`"
            raise InvalidArgumentError(f"{why}{told}")
        # A scalar as NumPy's own, as `ClusterCoordinator.fetch` gives it.
        return jax.tree.unflatten(self._tree, [array[()] for array in outcome])

    def _settled(self) -> RpcError | list[np.ndarray]:
        with self._lock:
            if self._outcome is None:
                self._outcome = self._awaited()
            return self._outcome

    def _awaited(self) -> RpcError | list[np.ndarray]:
        try:
            left = max(0.0, self._end - time.monotonic())
            fields, arrays = _unframed(self._future.result(left))
            code, message = int(fields["code"]), str(fields["message"])
        except RpcError as error:
            return error
        except OSError as error:
            if not self._future.done():
                told = f" within {1000 * (self._seconds or 0):g} ms"
                return DeadlineExceededError(f"No answer came{told}.")
            if self._client._is_closed:
                return UnavailableError("The client was closed.")
            where = self._client._address
            return UnavailableError(f"The RPC server at {where} is lost: {error}")
        except Exception:  # whatever the other end makes of it
            return InternalError(
                "A call was answered with something else than its outcome."
            )
        if not code:
            return arrays
        classes = {each.error_code: each for each in RpcError.__subclasses__()}
        error = classes.get(code, RpcError)(message)
        error.error_code = code
        return error


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
        max_message_bytes: int = _LARGEST,
    ) -> None:
        _check_bytes(max_message_bytes)
        self.name = name
        self._address = address
        self._seconds = _seconds(timeout_in_ms)
        self._largest = max_message_bytes
        self._methods: dict[str, tuple[Any, Any]] = {}  # specs of arguments, results
        self._lock = threading.Lock()
        self._is_closed = False
        end = time.monotonic() + (self._seconds or _FOR_EVER)
        late = "No RPC server answered in time: "
        try:
            self._connect(self._seconds or _FOR_EVER)
        except TimeoutError as error:
            raise DeadlineExceededError(f"{late}{error}") from error
        try:
            left = max(0.001, end - time.monotonic())
            frames = self._client.request(*_framed(None), timeout_seconds=left)
            told, _ = _unframed(frames)
            self._most = int(told["largest"])
            for method, inputs, outputs in told["methods"]:
                self._methods[str(method)] = _read(inputs), _read(outputs)
        except TimeoutError:
            self.close()
            raise DeadlineExceededError(f"{late}{address} is not started.") from None
        except Exception as error:  # whatever the other end makes of it
            self.close()
            raise InternalError(f"{address} lists no methods: {error}") from error

    @staticmethod
    def create(
        rpc_layer: str,
        address: str,
        name: str = "",
        timeout_in_ms: float = 0,
        max_message_bytes: int = _LARGEST,
    ) -> RpcClient:
        """A client of the server at an address, which it waits for.

        It takes and raises what the class does, after `"grpc"`, the only `rpc_layer`.
        """
        _check_layer(rpc_layer)
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
        inputs, outputs = self._methods.get(method_name, (None, None))
        wanted, leaves = jax.tree.leaves(inputs), jax.tree.leaves(args)
        specs = wanted if len(wanted) == len(leaves) else [None] * len(leaves)
        arrays = [
            _as_array(leaf, spec, f"{method_name}: arg[{i}]")
            for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
        ]
        seconds = _seconds(timeout_in_ms) or self._seconds
        future: Future[list[Buffer]] = Future()
        result = StatusOrResult(self, future, seconds, output_specs)
        for what, size, whose, most in (
            ("arguments", _bytes_of(arrays), "the server", self._most),
            ("results", _bytes_of(outputs), "this client", self._largest),
        ):
            if size > most:
                why = (
                    f"The {what} of `{method_name}` have {size} bytes, and {whose} "
                    f"takes {most}, its `max_message_bytes`."
                )
                future.set_exception(ResourceExhaustedError(why))
                return result
        frames = _framed(method_name, arrays)
        if self._client.is_connected:
            result._future = self._client.submit(*frames)
        else:
            again = functools.partial(self._call_again, frames, future)
            name = "jaxstrategy rpc"
            started(threading.Thread(target=again, name=name, daemon=True))
        return result

    def close(self) -> None:
        """End the connection; calls that run fail. Once is enough."""
        with self._lock:
            self._is_closed = True
        if self._end.detach():
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Found here, and not set as attributes: those would refer back to the client,
        # which then would not end with its last reference.
        methods = self.__dict__.get("_methods", {})
        method = name if name in methods else name.removesuffix(_BLOCKING)
        if method not in methods:
            known = ", ".join(map(repr, methods)) or "none"
            raise AttributeError(
                f"The server at {self.__dict__.get('_address')} has no method "
                f"{name!r}; it has {known}.",
                name=name,
                obj=self,
            )

        def call(*args: object, timeout_in_ms: float = 0) -> Any:
            inputs, outputs = methods[method]
            _check_structure(args, inputs, f"The arguments of `{method}`")
            result = self.call(method, args, outputs, timeout_in_ms)
            return result if name == method else result.get_value()

        call.__name__ = call.__qualname__ = name
        call.__doc__ = f"RPC Call for {method} method to server {self._address}"
        return call

    def __dir__(self) -> list[str]:
        both = [name + end for name in self._methods for end in ("", _BLOCKING)]
        return [*super().__dir__(), *both]

    def _connect(self, seconds: float) -> None:
        secret = Secret.of_environment()
        try:
            self._client = messages.Client(
                _checked_address(self._address, secret),
                secret,
                timeout_seconds=seconds,
                largest=self._largest + _HEAD,
            )
        except ClusterError as error:
            raise UnauthenticatedError(str(error)) from error
        except messages.RefusedError as error:
            own = "" if secret else ", which has none"
            raise UnauthenticatedError(
                f"What listens at {self._address} has another {_secret.VARIABLE} than "
                f"this one{own}, or is no RPC server of jaxstrategy."
            ) from error
        # In the loop's thread: the collector may run in one that holds a lock of these.
        self._end = weakref.finalize(self, self._client.call, self._client.close)
        self._end.atexit = False

    def _call_again(self, frames: list[Buffer], future: Future[list[Buffer]]) -> None:
        """Connect to a server that was lost, and call it."""
        try:
            with self._lock:  # the first that finds it lost connects for all
                if self._is_closed:
                    raise messages.LostError("the client was closed")
                if not self._client.is_connected:
                    self._end.detach()
                    self._connect(_AGAIN_SECONDS)
            future.set_result(self._client.request(*frames))
        except BaseException as error:  # nobody else would tell who waits
            future.set_exception(error)


def _seconds(timeout_in_ms: float) -> float | None:
    if not isinstance(timeout_in_ms, int | float) or not timeout_in_ms >= 0:
        raise ValueError(
            f"`timeout_in_ms` was {timeout_in_ms!r}; a number of milliseconds was "
            "wanted, or 0."
        )
    return timeout_in_ms / 1000 or None


def _check_layer(rpc_layer: str) -> None:
    if rpc_layer != "grpc":
        raise ValueError(
            f"Only GRPC backend is supported at the moment. {rpc_layer!r} was given; "
            '"grpc", TensorFlow\'s name for it, stands for the one that there is here, '
            "whose messages are jaxstrategy's own."
        )


def _check_bytes(count: int) -> None:
    if not isinstance(count, int) or count <= 0:
        raise ValueError(
            f"`max_message_bytes` was {count!r}; a whole number over 0 was wanted."
        )


def _checked_address(address: str, secret: Secret) -> str:
    """The address, which strangers cannot use."""
    if not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"`address` was {address!r}; `host:port` was wanted.")
    _secret.check_address(secret, address)
    return address


# Trees of specs, and the arrays of these.


def _specs_of(tree: object, what: str) -> Any:
    """The tree of the specs of arrays, numbers and specs."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _spec(leaf, what + jax.tree_util.keystr(path)), tree
    )


def _spec(leaf: object, where: str) -> jax.ShapeDtypeStruct:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if isinstance(leaf, bool | int | float | complex):
        shape, dtype = (), jnp.result_type(leaf)
    if shape is None or dtype is None:
        raise ValueError(
            f"{where} is {_a(leaf)}. Give arrays, numbers or `jax.ShapeDtypeStruct`s: "
            "examples of what the method will be called with."
        )
    if not isinstance(dtype, np.dtype) or not _is_plain(dtype):
        raise ValueError(
            f"{where} is of dtype {dtype}; arrays of numbers or truth values are sent, "
            "and of random keys their `jax.random.key_data`."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf  # with its sharding
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def _written(tree: object, what: str = "") -> Any:
    """A tree of specs as JSON."""
    if tree is None:
        return None
    if isinstance(tree, jax.ShapeDtypeStruct):
        return {"dtype": str(tree.dtype), "shape": tree.shape}
    if type(tree) is list or type(tree) is tuple:
        parts = [_written(part, f"{what}[{i}]") for i, part in enumerate(tree)]
        return [type(tree).__name__, parts]
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        keys = sorted(tree)  # as JAX sorts them
        parts = [[key, _written(tree[key], f"{what}[{key!r}]")] for key in keys]
        return ["dict", parts]
    raise ValueError(
        f"{what} is a {type(tree).__name__}. Other processes are sent arrays in dicts "
        "whose keys are strings or whole numbers, in lists and in tuples: make one of "
        "these of it."
    )


def _read(fields: Any) -> Any:
    """The tree of specs that JSON from elsewhere describes."""
    match fields:
        case None:
            return None
        case {"dtype": name, "shape": shape}:
            return jax.ShapeDtypeStruct(tuple(map(int, shape)), _dtype(name))
        case "dict", parts:
            return {key: _read(part) for key, part in parts}
        case "list" | "tuple" as kind, parts:
            return {"list": list, "tuple": tuple}[kind](map(_read, parts))
    raise ValueError("what came describes no arrays")


def _check_structure(given: Any, wanted: Any, where: str) -> None:
    """Nothing if a tree has the structure of a tree of specs."""
    if isinstance(wanted, jax.ShapeDtypeStruct):
        if given is None or not jax.tree_util.all_leaves([given]):
            told = f"an array {wanted.dtype}{list(wanted.shape)}"
            raise TypeError(f"{where} is {_a(given)}; {told} was wanted.")
        return
    if type(given) is not type(wanted):
        raise TypeError(f"{where} is {_a(given)}; {_a(wanted)} was wanted.")
    if given is None:
        return
    if isinstance(given, dict) and given.keys() != wanted.keys():
        raise ValueError(
            f"{where} has the keys {list(given)}; {list(wanted)} were wanted."
        )
    if len(given) != len(wanted):
        raise ValueError(
            f"{where} has {len(given)} entries; {len(wanted)} were wanted."
        )
    for key in given if isinstance(given, dict) else range(len(given)):
        _check_structure(given[key], wanted[key], f"{where}[{key!r}]")


def _as_array(
    leaf: object, spec: jax.ShapeDtypeStruct | None, where: str
) -> np.ndarray:
    """An array or number as it is sent, of the dtype that JAX gives it."""
    if isinstance(leaf, bool | int | float | complex):
        kinds = {int: jnp.integer, float: jnp.floating, complex: jnp.complexfloating}
        kind, dtype = kinds.get(type(leaf)), jnp.result_type(leaf)
        if kind and spec is not None and jnp.issubdtype(spec.dtype, kind):
            dtype = spec.dtype
        return np.asarray(leaf, dtype)
    array = np.asarray(leaf)
    if not _is_plain(array.dtype):
        raise TypeError(
            f"{where} is {_a(leaf)}; arrays of numbers or truth values, and numbers, "
            "are sent."
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    cast = array.astype(dtype, copy=False)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(cast, array):
        raise OverflowError(
            f"{where} has whole numbers that {dtype} cannot hold. Set "
            "`jax.config.update('jax_enable_x64', True)` in both processes."
        )
    return cast


def _misfit(
    arrays: Sequence[np.ndarray], specs: Sequence[jax.ShapeDtypeStruct], what: str
) -> str | None:
    """Why arrays are not the expected ones; None if they are."""
    if len(arrays) != len(specs):
        return f"Expects {len(specs)} {what}s but {len(arrays)} are provided"
    for i, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
        which = f"Expects {what}[{i}]"
        if array.dtype != spec.dtype:
            return f"{which} to be {spec.dtype} but {array.dtype} is provided"
        if array.shape != spec.shape:
            return (
                f"{which} to have the shape {spec.shape} but {array.shape} is provided"
            )
    return None


def _framed(fields: Any, arrays: Sequence[np.ndarray] = ()) -> list[Buffer]:
    kinds = [[str(array.dtype), array.shape] for array in arrays]
    frames: list[Buffer] = [json.dumps([fields, kinds]).encode()]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        frames += messages.chunks(memoryview(flat))
    return frames


def _unframed(frames: Sequence[Buffer]) -> tuple[Any, list[np.ndarray]]:
    fields, kinds = json.loads(bytes(frames[0]))
    types = [(_dtype(name), tuple(map(int, shape))) for name, shape in kinds]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in types]
    if sum(sizes) != sum(map(len, frames[1:])):
        raise ValueError("the arrays of a message have another size than it says")
    rest = iter(frames[1:])
    return fields, [
        np.frombuffer(messages.joined(size, rest), dtype).reshape(shape)
        for size, (dtype, shape) in zip(sizes, types, strict=True)
    ]


def _bytes_of(tree: object) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _dtype(name: object) -> np.dtype:
    """The dtype of a name that came from elsewhere."""
    dtype = np.dtype(str(name))
    if not _is_plain(dtype):
        raise ValueError(f"what came has arrays of dtype {dtype}")
    return dtype


def _is_plain(dtype: np.dtype) -> bool:
    """Whether arrays of it are bytes that mean the same in another process."""
    return dtype.kind == "b" or bool(jnp.issubdtype(dtype, jnp.number))


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
