"""What a server computes with JAX: tables, and updates by programs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import SingleDeviceSharding

from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.parameter_servers.protocol import OF_WHOLE, aligned, aligned_empty
from jaxstrategy._src.parameter_servers.store.snapshot import (
    Snapshot,
    Type,
    shown,
    types_of,
)
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text.shown import Shaped

Program = Callable[[Sequence[jax.Array], Sequence[np.ndarray]], list[jax.Array]]
"""The new state, of the state and the operands."""
_Changing = Callable[..., Sequence[jax.Array]]


class _Jitted(Protocol):
    """What `jax.jit` returns."""

    def __call__(self, *arrays: jax.Array | np.ndarray) -> Sequence[jax.Array]: ...

    def lower(self, *arrays: jax.ShapeDtypeStruct) -> jax.stages.Lowered: ...


def _configured(types: Iterable[Type]) -> contextlib.AbstractContextManager[object]:
    """JAX as programs of these must find it, whatever the calling thread has chosen."""
    # The contexts take as long as half a program, and are hardly ever needed.
    is_wide = any(dtype in _OF_64_BITS for _, dtype in types)
    if is_wide or any(getattr(jax.config, name) for name in _CHOICES):
        return _without_choices(is_wide)
    return contextlib.nullcontext()


_OF_64_BITS = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}
_CHOICES = (
    *("jax_debug_nans", "jax_debug_infs", "jax_disable_jit"),
    *("jax_transfer_guard", "jax_transfer_guard_host_to_device"),
)


@contextlib.contextmanager
def _without_choices(is_wide: bool) -> Iterator[None]:
    # JAX looks for NaN when the state is donated already, and with an error it is lost.
    checks = jax.debug_nans(False), jax.debug_infs(False)
    width = jax.enable_x64(True) if is_wide else contextlib.nullcontext()
    with checks[0], checks[1], jax.disable_jit(False), jax.transfer_guard("allow"):
        with width:
            yield


def _device() -> Device:
    """The CPU that has all arrays, also where there are other devices."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "Parameter servers keep tables, and what updates change, in arrays on a "
            f"CPU, which JAX_PLATFORMS={jax.config.jax_platforms} leaves out. Add it: "
            f"JAX_PLATFORMS={jax.config.jax_platforms},cpu"
        ) from error


def on_device(value: np.ndarray) -> jax.Array:
    """A copy of `value`."""
    # Not in what the thread may be tracing.
    with jax.ensure_compile_time_eval(), _configured(types_of([value])):
        # JAX 0.12 shares aligned memory also with `may_alias=False`, and then a program
        # that is donated the array writes into it.
        return jnp.copy(jax.device_put(value, _device()))


def compiled(
    change: _Changing,
    state: Sequence[Type],
    operands: Sequence[Type],
    donates: bool,
) -> Program:
    """A program for arrays of these types."""
    types = (*state, *operands)
    donated = tuple(range(len(state))) if donates else ()
    jitted = jax.jit(change, donate_argnums=donated, keep_unused=True)
    call = _outside_traces(jitted) if _has_packed(types) else _ahead(jitted, types)

    def run(state: Sequence[jax.Array], given: Sequence[np.ndarray]) -> list[jax.Array]:
        with _configured(types):
            new = list(call(*state, *map(aligned, given)))
        # The program may be reading the operands' own memory until it has ended.
        for array in new:
            array.block_until_ready()
        return new

    return run


def _ahead(jitted: _Jitted, types: Iterable[Type]) -> _Changing:
    """What `jitted` compiles to for arrays of these types."""
    cpu = SingleDeviceSharding(_device())
    structs = [jax.ShapeDtypeStruct(*kind, sharding=cpu) for kind in types]
    with _configured(types):
        return jitted.lower(*structs).compile()


def _outside_traces(jitted: _Jitted) -> _Changing:
    """`jitted`, not staged into what the calling thread may be tracing."""

    # What JAX 0.10 compiles ahead of time refuses arrays of int4 for their layout.
    def call(*arrays: jax.Array | np.ndarray) -> Sequence[jax.Array]:
        with jax.ensure_compile_time_eval():
            return jitted(*arrays)

    return call


def _has_packed(types: Iterable[Type]) -> bool:
    """Whether an array has several elements in one byte, as of int4."""
    return any(_bits(dtype) < 8 for _, dtype in types if dtype.kind == "V")


def _bits(dtype: np.dtype) -> int:
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    return (jnp.iinfo if is_whole else jnp.finfo)(dtype).bits


@functools.cache
def of_whole(name: str, kind: Type, donates: bool) -> Program:
    """The program of one of `OF_WHOLE`, for arrays of a type."""
    return compiled(functools.partial(_whole, name), [kind], [kind], donates)


def _whole(name: str, old: jax.Array, operand: jax.Array) -> list[jax.Array]:
    match name:
        case "add":
            return [old + operand]
        case "subtract":
            return [old - operand]
        case _:
            return [jnp.copy(operand)]


@functools.cache
def of_rows(name: str, kind: Type, count: int, donates: bool) -> Program:
    """The program of one of `OF_ROWS` for tables of a type; see `_rows`."""
    (_, *row), dtype = kind
    numbers: Type = ((count,), np.dtype(np.int32))
    operands: list[Type] = [numbers] * (2 if name == "scatter_div" else 1)
    operands.append(((count, *row), dtype))
    change = _quotients if name == "scatter_div" else functools.partial(_rows, name)
    return compiled(change, [kind], operands, donates)


def _rows(
    name: str, table: jax.Array, rows: jax.Array, values: jax.Array
) -> list[jax.Array]:
    """A table with some rows changed; those beyond it fill up and change nothing."""
    if name == "scatter_sub":
        name, values = "scatter_add", -values
    part = table.at[rows]
    change = {
        "scatter_add": part.add,
        "scatter_mul": part.multiply,
        "scatter_min": part.min,
        "scatter_max": part.max,
        "scatter_update": part.set,
    }[name]
    return [change(values, mode="drop")]


def _quotients(
    table: jax.Array, rows: jax.Array, positions: jax.Array, values: jax.Array
) -> list[jax.Array]:
    """A table with rows divided: row `rows[positions[i]]` by `values[i]`."""
    divisors = jnp.ones_like(values).at[positions].multiply(values, mode="drop")
    # A quotient of integers keeps what is whole.
    quotients = jax.lax.div(table.at[rows].get(mode="clip"), divisors)
    return [table.at[rows].set(quotients, mode="drop")]


def scatter_operands(
    name: str, rows: np.ndarray, values: np.ndarray, end: int
) -> tuple[np.ndarray, ...]:
    """Operands that have a power of two of rows, so that few programs are compiled."""
    if name == "scatter_update":
        rows, values = _last(rows, values)
    count = 1 << max(len(rows) - 1, 0).bit_length()
    if name != "scatter_div":
        return _filled(rows, count, end), _filled(values, count)
    unique, positions = np.unique(rows, return_inverse=True)
    # A position of `count` is none.
    return (
        _filled(unique, count, end),
        _filled(positions, count, count),
        _filled(values, count),
    )


def _last(rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row once, with the last of its values: XLA promises no order."""
    _, from_end = np.unique(rows[::-1], return_index=True)
    if len(from_end) == len(rows):
        return rows, values
    last = len(rows) - 1 - from_end
    return rows[last], values[last]


def _filled(array: np.ndarray, count: int, number: int | None = None) -> np.ndarray:
    """`count` rows, the last ones of this number; as int32 if there is one."""
    dtype = array.dtype if number is None else np.dtype(np.int32)
    if len(array) == count and array.dtype == dtype:
        return array
    filled = aligned_empty((count, *array.shape[1:]), dtype)
    filled[: len(array)] = array
    filled[len(array) :] = number or 0
    return filled


@final
class DeviceArray:
    """What a variable holds; its lock is held around each call."""

    def __init__(self, value: np.ndarray) -> None:
        """Args: value: which is copied."""
        self._value = on_device(value)
        self._snapshot = Snapshot()

    @property
    def value(self) -> jax.Array:
        """What it holds, until the next change."""
        return self._value

    @property
    def is_held(self) -> bool:
        """Whether a reader still has what it holds, so that it must not be donated."""
        return self._snapshot.is_held

    def whole(self) -> np.ndarray:
        """What it holds now, for ever."""
        return self._snapshot.of(np.asarray(self._value))

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows, which it has."""
        return np.asarray(self._value).take(rows, axis=0)

    def replace(self, value: jax.Array) -> None:
        """Hold what a program has made of it."""
        self._value, self._snapshot = value, Snapshot()

    def change(self, name: str, *operands: np.ndarray) -> None:
        """Do one of `OF_WHOLE` or `OF_ROWS`."""
        kind, donates = (self._value.shape, self._value.dtype), not self.is_held
        if name in OF_WHOLE:
            program = of_whole(name, kind, donates)
        else:
            rows, values = operands
            if not len(rows):
                return
            operands = scatter_operands(name, rows, values, kind[0][0])
            program = of_rows(name, kind, len(operands[0]), donates)
        self.replace(*program([self._value], operands))


@final
class UpdateProgram:
    """An exported program, of what variables hold and of operands."""

    def __init__(self, key: str, exported: bytes) -> None:
        """Deserialize it."""
        self._key = key
        self._exported = _deserialized(key, exported)
        self._programs: dict[tuple[tuple[Type, ...], int, bool], Program] = {}

    def check(self, state: Sequence[Type], operands: Sequence[Type]) -> None:
        """See that it takes these, and gives back the types of the state."""
        given = tuple(state) + tuple(operands)
        if (given, len(state), True) not in self._programs:
            self._compile(given, len(state), True)

    def run(
        self, state: Sequence[jax.Array], operands: Sequence[np.ndarray], donates: bool
    ) -> list[jax.Array]:
        """The new state."""
        given = tuple((a.shape, a.dtype) for a in state) + types_of(operands)
        key = given, len(state), donates
        if key not in self._programs:
            self._compile(*key)
        return self._programs[key](state, operands)

    def _compile(self, given: tuple[Type, ...], count: int, donates: bool) -> None:
        self._check_types(given, count)
        program = compiled(
            lambda *arrays: jax.tree.leaves(self._exported.call(*arrays)),
            given[:count],
            given[count:],
            donates,
        )
        self._programs[given, count, donates] = program

    def _check_types(self, given: tuple[Type, ...], count: int) -> None:
        wanted = _types(self._exported.in_avals)
        if given != wanted:
            raise ValueError(
                f"Update {self._key!r} takes ({shown(*wanted)}), not variables "
                f"({shown(*given[:count])}) and operands ({shown(*given[count:])})."
            )
        results = _types(self._exported.out_avals)
        if given[:count] != results:
            raise ValueError(
                f"Update {self._key!r} returns ({shown(*results)}), which cannot "
                f"become what the variables hold: ({shown(*given[:count])})."
            )


def _deserialized(key: str, exported: bytes) -> export.Exported:
    try:
        program = export.deserialize(bytearray(exported))
    except ImportError as missing:
        raise MissingExtraError(
            "Updates of variables on parameter servers need flatbuffers, which is not "
            "installed. Install the extra: pip install 'jaxstrategy[coordinator]'"
        ) from missing
    except Exception as error:
        raise ValueError(
            f"Update {key!r} is no program in the form of `jax.export`: {error}"
        ) from error
    if "cpu" not in program.platforms:
        raise ValueError(
            f"Update {key!r} was exported for {', '.join(program.platforms)}. "
            "Parameter servers run on CPUs: export it with `platforms=['cpu']`."
        )
    if program.nr_devices != 1:
        raise ValueError(
            f"Update {key!r} was exported for {program.nr_devices} devices; a "
            "parameter server computes it on one."
        )
    return program


def _types(abstract: Sequence[Shaped]) -> tuple[Type, ...]:
    return tuple((array.shape, array.dtype) for array in abstract)
