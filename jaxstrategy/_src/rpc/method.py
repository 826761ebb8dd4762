"""Functions that other processes call, and the structures of what these send.

A spec is a `jax.ShapeDtypeStruct`. Trees are of dicts, lists, tuples and None: both
ends know these, so that a structure is data, and no class is looked up or made for it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.processes.messages import CHUNK, Buffer
from jaxstrategy._src.rpc.errors import InvalidArgumentError

Json: TypeAlias = Any

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
