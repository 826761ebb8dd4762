"""Offers jitted functions to other processes: `RpcServer`.

A spec is a `jax.ShapeDtypeStruct`. Trees are of dicts, lists, tuples and None: both
ends know these, so that a structure is data, and no class is looked up or made for it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.messages import CHUNK, Buffer, Request, Server
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.rpc.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RpcError,
)

Json: TypeAlias = Any

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


_NUMBERS = (bool, int, float, complex)
_SEQUENCES: dict[str, type[list[Any]] | type[tuple[Any, ...]]] = {
    "list": list,
    "tuple": tuple,
}


def specs_of(tree: object, what: str) -> Any:
    """The tree of the specs of arrays, numbers and specs."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _spec(leaf, what + jax.tree_util.keystr(path)), tree
    )


def written(tree: object, what: str) -> Json:
    """A tree of specs as JSON."""
    if tree is None:
        return None
    if isinstance(tree, jax.ShapeDtypeStruct):
        return {"dtype": str(tree.dtype), "shape": list(tree.shape)}
    if type(tree) in _SEQUENCES.values() and isinstance(tree, Sequence):
        parts = [written(part, f"{what}[{i}]") for i, part in enumerate(tree)]
        return [type(tree).__name__, parts]
    if type(tree) is dict and all(type(key) in (str, int) for key in tree):
        keys = sorted(tree)  # as JAX sorts them
        return ["dict", [[key, written(tree[key], f"{what}[{key!r}]")] for key in keys]]
    raise ValueError(
        f"{what} is a {type(tree).__name__}. Other processes are sent arrays in dicts "
        "whose keys are strings or whole numbers, in lists and in tuples: make one of "
        "these of it."
    )


def read(fields: Json) -> Any:
    """The tree of specs that JSON from elsewhere describes."""
    try:
        return _read(fields)
    except (TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"what came describes no arrays: {error}") from None


def check_structure(given: object, wanted: object, where: str) -> None:
    """Nothing if a tree has the structure of a tree of specs."""
    if isinstance(wanted, jax.ShapeDtypeStruct):
        if given is None or not jax.tree_util.all_leaves([given]):
            raise TypeError(f"{where} is {_a(given)}; {_told(wanted)} was wanted.")
        return
    if type(given) is not type(wanted):
        raise TypeError(f"{where} is {_a(given)}; {_a(wanted)} was wanted.")
    if isinstance(given, dict) and isinstance(wanted, dict):
        if given.keys() != wanted.keys():
            raise ValueError(
                f"{where} has the keys {list(given)}; {list(wanted)} were wanted."
            )
        for key, part in given.items():
            check_structure(part, wanted[key], f"{where}[{key!r}]")
    elif isinstance(given, list | tuple) and isinstance(wanted, list | tuple):
        if len(given) != len(wanted):
            raise ValueError(
                f"{where} has {len(given)} entries; {len(wanted)} were wanted."
            )
        for i, (part, spec) in enumerate(zip(given, wanted, strict=True)):
            check_structure(part, spec, f"{where}[{i}]")


def as_array(leaf: object, spec: jax.ShapeDtypeStruct | None, where: str) -> np.ndarray:
    """An array or number as it is sent, of the dtype that JAX gives it."""
    if isinstance(leaf, _NUMBERS):
        dtype = jnp.result_type(leaf)
        if spec is not None and _are_alike(leaf, spec.dtype):
            dtype = spec.dtype
        return np.asarray(leaf, dtype)
    array = np.asarray(leaf)
    if not _is_plain(array.dtype):
        raise TypeError(
            f"{where} is {_a(leaf)}; arrays of numbers or truth values, and numbers, "
            "are sent."
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    cast = array.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(cast, array):
        raise OverflowError(
            f"{where} has whole numbers that {dtype} cannot hold. Set "
            "`jax.config.update('jax_enable_x64', True)` in both processes."
        )
    return cast


def bytes_of(tree: object) -> int:
    """The bytes of the arrays of a tree of specs."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def misfit(
    arrays: Sequence[np.ndarray], specs: Sequence[jax.ShapeDtypeStruct], what: str
) -> str | None:
    """What is wrong with arrays, of which others were expected; None if nothing."""
    if len(arrays) != len(specs):
        return f"Expects {len(specs)} {what}s but {len(arrays)} are provided"
    for i, (array, spec) in enumerate(zip(arrays, specs, strict=True)):
        if array.dtype != spec.dtype:
            return (
                f"Expects {what}[{i}] to be {spec.dtype} but {array.dtype} is provided"
            )
        if array.shape != spec.shape:
            return (
                f"Expects {what}[{i}] to have the shape {spec.shape} but "
                f"{array.shape} is provided"
            )
    return None


def framed(fields: Json, arrays: Sequence[np.ndarray] = ()) -> list[Buffer]:
    """A message as frames: JSON, and the bytes of arrays. Nothing is pickled."""
    kinds = [[str(array.dtype), list(array.shape)] for array in arrays]
    frames: list[Buffer] = [json.dumps([fields, kinds]).encode()]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        starts = range(0, max(flat.nbytes, 1), CHUNK)
        frames += [memoryview(flat[start : start + CHUNK]) for start in starts]
    return frames


def unframed(frames: Sequence[Buffer]) -> tuple[Json, list[np.ndarray]]:
    """The message of some frames."""
    try:
        fields, kinds = json.loads(bytes(frames[0]))
        arrays, rest = [], [np.frombuffer(frame, np.uint8) for frame in frames[1:]]
        for name, shape in kinds:
            dtype = np.dtype(name)
            if not _is_plain(dtype):
                raise ValueError(f"what came has arrays of dtype {dtype}")
            size = math.prod(map(int, shape)) * dtype.itemsize
            count = max(1, -(-size // CHUNK))
            parts, rest = rest[:count], rest[count:]
            flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
            arrays.append(flat.view(dtype).reshape(shape))
    except (TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise ValueError(f"what came is no message: {error}") from None
    return fields, arrays


def _spec(leaf: object, where: str) -> jax.ShapeDtypeStruct:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if isinstance(leaf, _NUMBERS):
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


def _read(fields: Json) -> Any:
    if fields is None:
        return None
    if isinstance(fields, dict):
        dtype = np.dtype(fields["dtype"])
        if not _is_plain(dtype):
            raise ValueError(f"what came has arrays of dtype {dtype}")
        return jax.ShapeDtypeStruct(tuple(map(int, fields["shape"])), dtype)
    kind, parts = fields
    if kind == "dict":
        return {key: _read(part) for key, part in parts}
    return _SEQUENCES[kind](_read(part) for part in parts)


def _is_plain(dtype: np.dtype) -> bool:
    """Whether arrays of it are bytes that mean the same in another process."""
    return dtype.kind == "b" or bool(jnp.issubdtype(dtype, jnp.number))


def _are_alike(number: object, dtype: np.dtype) -> bool:
    match number:
        case bool():
            return False
        case int():
            return jnp.issubdtype(dtype, jnp.integer)
        case float():
            return jnp.issubdtype(dtype, jnp.floating)
        case _:
            return jnp.issubdtype(dtype, jnp.complexfloating)


def _a(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _told(spec: jax.ShapeDtypeStruct) -> str:
    return f"an array {spec.dtype}{list(spec.shape)}"


_STATE = threading.Lock()
"""Held by calls that may change `jax.Ref`s, as variables are: two at once would use
memory that the other has given away ("Array has been deleted", in JAX 0.12)."""


class _RpcProgram(NamedTuple):
    """A compiled function, what it returns, and whether it may have state."""

    compiled: jax.stages.Compiled
    outputs: object
    may_have_state: bool


@final
class RpcMethod:
    """A compiled function, with the structures of its arguments and results."""

    def __init__(
        self, name: str, func: Callable[..., Any], specs: Sequence[object]
    ) -> None:
        program = _program(name, func, specs)
        args, kwargs = program.compiled.args_info
        if kwargs:
            raise ValueError(
                f"`{name}` was compiled with arguments by keyword; remote calls have "
                "arguments by position."
            )
        self._compiled = program.compiled
        self._turn = _STATE if program.may_have_state else contextlib.nullcontext()
        self._inputs = specs_of(tuple(args), f"{name}: argument")
        self._outputs = specs_of(program.outputs, f"{name}: result")
        self._tree = jax.tree.structure(self._inputs)
        self._specs = jax.tree.leaves(self._inputs)
        self.described: Json = [
            name,
            written(self._inputs, f"{name}: argument"),
            written(self._outputs, f"{name}: result"),
        ]

    @property
    def largest(self) -> int:
        """Bytes of all arguments, or of all results if those are more."""
        both = (self._inputs, self._outputs)
        return max(map(bytes_of, both))

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results, for arguments that came from elsewhere."""
        if why := misfit(arrays, self._specs, "arg"):
            raise InvalidArgumentError(why)
        args = jax.tree.unflatten(self._tree, list(arrays))
        with self._turn:
            result = self._compiled(*args)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def _program(
    name: str, func: Callable[..., Any], specs: Sequence[object]
) -> _RpcProgram:
    if isinstance(func, jax.stages.Compiled):
        if specs:
            raise ValueError(
                f"`{name}` is compiled, for arguments that are known; do not give them "
                "again."
            )
        return _RpcProgram(func, _results(name, func), may_have_state=True)
    if not isinstance(func, jax.stages.Wrapped):
        raise ValueError(
            f"Only jitted functions are supported with Register method, and `{name}` "
            f"is a {type(func).__name__}: register `jax.jit(...)` of it."
        )
    if not specs and _needs_arguments(func):
        raise ValueError(
            f"Input signature not specified for the function. `{name}` has arguments: "
            "give an example of each, or a `jax.ShapeDtypeStruct`, as "
            f"`register({name!r}, func, *specs)`."
        )
    traced = func.trace(*specs_of(tuple(specs), f"{name}: argument"))
    has_state = any(isinstance(const, jax.Ref) for const in traced.jaxpr.consts)
    return _RpcProgram(traced.lower().compile(), traced.out_info, has_state)


def _results(name: str, compiled: jax.stages.Compiled) -> object:
    try:
        return compiled.out_info
    except ValueError:  # JAX 0.12 counts the `jax.Ref`s that it changes as results
        raise ValueError(
            f"`{name}` is compiled, and changes variables, so that JAX does not say "
            "what it returns: register the jitted function, with examples of its "
            "arguments."
        ) from None


def _needs_arguments(func: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return False  # it has none to look at; JAX says what is missing
    has_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return any(
        each.kind in has_place and each.default is each.empty for each in parameters
    )
