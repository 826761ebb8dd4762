"""Programs that change the array of one variable, compiled for this process's CPU.

They are compiled ahead of time: a jitted function would be staged into the program that
the calling thread may be tracing, and compiled anew for each configuration of JAX.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxstrategy.parameter_servers._aligned_memory import aligned
from jaxstrategy.replicas._devices import Device

Type = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""
Program = Callable[[Sequence[jax.Array], Sequence[np.ndarray]], list[jax.Array]]
"""The new state, of the state and the operands."""

_OF_64_BITS = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}


def array_types(arrays: Iterable[np.ndarray]) -> tuple[Type, ...]:
    """Shape and dtype of each."""
    return tuple((array.shape, array.dtype) for array in arrays)


def _configured(is_wide: bool) -> contextlib.AbstractContextManager[object]:
    """JAX as programs must find it here, whatever the calling thread has chosen.

    Args:
      is_wide: whether an array has 64 bits.
    """
    # The contexts take as long as half a program, and are hardly ever needed.
    if is_wide or any(getattr(jax.config, name) for name in _CHOICES):
        return _without_choices(is_wide)
    return contextlib.nullcontext()


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


def _is_wide(types: Iterable[Type]) -> bool:
    return any(dtype in _OF_64_BITS for _, dtype in types)


def _device() -> Device:
    """The CPU that has all arrays, also where there are other devices."""
    return jax.local_devices(backend="cpu")[0]


def on_device(value: np.ndarray) -> jax.Array:
    """A copy of `value`."""
    # Not in what the thread may be tracing.
    with jax.ensure_compile_time_eval(), _configured(_is_wide(array_types([value]))):
        return jax.device_put(value, _device(), may_alias=False)


def compiled(
    change: Callable[..., Sequence[jax.Array]],
    state: Sequence[Type],
    operands: Sequence[Type],
    donates: bool,
) -> Program:
    """A program for arrays of these types.

    Args:
      change: the new state, of the state and the operands.
      state: the types of the arrays that it changes.
      operands: the types of those that it is given besides.
      donates: whether the memory of the old state becomes that of the new one.
    """
    sharding = SingleDeviceSharding(_device())
    types = (*state, *operands)
    is_wide = _is_wide(types)
    with _configured(is_wide):
        structs = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for shape, dtype in types
        ]
        donated = tuple(range(len(state))) if donates else ()
        jitted = jax.jit(change, donate_argnums=donated, keep_unused=True)
        program = jitted.lower(*structs).compile()

    def run(state: Sequence[jax.Array], given: Sequence[np.ndarray]) -> list[jax.Array]:
        with _configured(is_wide):
            new = list(program(*state, *map(aligned, given)))
        # The program may be reading the operands' own memory until it has ended.
        for array in new:
            array.block_until_ready()
        return new

    return run


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
    """A table with rows divided: row `rows[positions[i]]` by `values[i]`.

    As variables elsewhere, by the product of what is given for a row.
    """
    divisors = jnp.ones_like(values).at[positions].multiply(values, mode="drop")
    # A quotient of integers keeps what is whole.
    quotients = jax.lax.div(table.at[rows].get(mode="clip"), divisors)
    return [table.at[rows].set(quotients, mode="drop")]
