"""What a server computes with JAX: changes of rows, and updates by programs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.parameter_servers.protocol import OF_WHOLE, Type, shown, types_of
from jaxstrategy._src.values.arrays import is_traced
from jaxstrategy._src.values.memory import aligned, aligned_empty

_OF_64_BITS = {np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")}
_CHOICES = (
    *("jax_debug_nans", "jax_debug_infs", "jax_disable_jit"),
    *("jax_transfer_guard", "jax_transfer_guard_host_to_device"),
)
Held: TypeAlias = tuple[np.ndarray | jax.Array, bool]
"""What a variable holds, and whether somebody has it, so that it must stay."""


@contextlib.contextmanager
def _without_choices(is_wide: bool) -> Iterator[None]:
    """JAX as programs must find it, whatever the calling thread has chosen."""
    # JAX looks for NaN when the state is donated already, and with an error it is lost.
    checks = jax.debug_nans(False), jax.debug_infs(False)
    width = jax.enable_x64(True) if is_wide else contextlib.nullcontext()
    with checks[0], checks[1], jax.disable_jit(False), jax.transfer_guard("allow"):
        # And not as part of what the thread is tracing.
        with width, jax.ensure_compile_time_eval():
            yield


_Jitted: TypeAlias = Callable[[int], Callable[..., Sequence[jax.Array]]]
"""The compiled function to which so many of its arguments are donated."""


def _jitted(fn: Callable[..., Sequence[jax.Array]]) -> _Jitted:
    return functools.cache(
        lambda donated: jax.jit(
            fn, donate_argnums=tuple(range(donated)), keep_unused=True
        )
    )


def _run(
    jitted: _Jitted,
    held: Sequence[Held],
    operands: Sequence[np.ndarray],
) -> Sequence[jax.Array]:
    """What a function makes of values; it writes into them unless somebody has one."""
    dtypes = {each.dtype for each in (*(value for value, _ in held), *operands)}
    is_wide = not dtypes.isdisjoint(_OF_64_BITS)
    # The contexts take as long as half a program, and are hardly ever needed.
    is_usual = not (
        is_wide or is_traced() or any(getattr(jax.config, x) for x in _CHOICES)
    )
    with contextlib.nullcontext() if is_usual else _without_choices(is_wide):
        state = [_on_device(value) for value, _ in held]
        kept = any(is_ and x is y for x, (y, is_) in zip(state, held, strict=True))
        new = jitted(0 if kept else len(held))(*state, *map(aligned, operands))
    # The program may be reading the operands' own memory until it has ended.
    return jax.block_until_ready(new)


def _on_device(value: np.ndarray | jax.Array) -> jax.Array:
    """On the CPU that has all arrays, also where there are other devices."""
    if isinstance(value, jax.Array):
        return value
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise RuntimeError(
            "Parameter servers keep tables, and what updates change, in arrays on a "
            f"CPU, which JAX_PLATFORMS={jax.config.jax_platforms} leaves out. Add it: "
            f"JAX_PLATFORMS={jax.config.jax_platforms},cpu"
        ) from error
    # JAX 0.12 shares aligned memory also with `may_alias=False`, and then a program
    # that is donated the array writes into it.
    return jnp.copy(jax.device_put(value, device))


def changed(name: str, held: Held, operands: Sequence[np.ndarray]) -> jax.Array:
    """What one of `OF_WHOLE` or `OF_ROWS` makes of a value."""
    if name not in OF_WHOLE:
        rows, values = operands
        operands = _scatter_operands(name, rows, values, len(held[0]))
    (new,) = _run(_CHANGES[name], [held], operands)
    return new


def _divided(
    table: jax.Array, rows: jax.Array, positions: jax.Array, values: jax.Array
) -> jax.Array:
    """A table with rows divided: row `rows[positions[i]]` by `values[i]`."""
    divisors = jnp.ones_like(values).at[positions].multiply(values, mode="drop")
    # A quotient of integers keeps what is whole.
    quotients = jax.lax.div(table.at[rows].get(mode="clip"), divisors)
    return table.at[rows].set(quotients, mode="drop")


def _of_rows(method: str) -> Callable[..., jax.Array]:
    # Rows beyond the table fill up, and change nothing.
    return lambda old, rows, values: getattr(old.at[rows], method)(values, mode="drop")


def _of_nonempty(change: Callable[..., jax.Array]) -> _Jitted:
    return _jitted(lambda old, *given: [change(old, *given) if old.size else old])


_CHANGES = {
    name: _of_nonempty(change)
    for name, change in {
        "set": lambda old, new: jnp.copy(new),
        "add": lambda old, given: old + given,
        "subtract": lambda old, given: old - given,
        "scatter_div": _divided,
        "scatter_add": _of_rows("add"),
        "scatter_sub": _of_rows("subtract"),
        "scatter_mul": _of_rows("multiply"),
        "scatter_min": _of_rows("min"),
        "scatter_max": _of_rows("max"),
        "scatter_update": _of_rows("set"),
    }.items()
}


def _scatter_operands(
    name: str, rows: np.ndarray, values: np.ndarray, end: int
) -> tuple[np.ndarray, ...]:
    """Operands that have a power of two of rows, so that few programs are compiled."""
    if name == "scatter_update":
        # Each row once, with the last of its values: XLA promises no order.
        unique, from_end = np.unique(rows[::-1], return_index=True)
        if len(unique) < len(rows):
            last = len(rows) - 1 - from_end
            rows, values = rows[last], values[last]
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
class UpdateProgram:
    """An exported program, of what variables hold and of operands."""

    def __init__(self, key: str, exported: bytes) -> None:
        self._key = key
        try:
            self._exported = export.deserialize(bytearray(exported))
        except ImportError as missing:
            raise MissingExtraError(
                "Updates of variables on parameter servers need flatbuffers, which is "
                "not installed. Install the extra: pip install "
                "'jaxstrategy[coordinator]'"
            ) from missing
        except Exception as error:
            raise ValueError(
                f"Update {key!r} is no program in the form of `jax.export`: {error}"
            ) from error
        call = self._exported.call
        self._call = _jitted(lambda *arrays: jax.tree.leaves(call(*arrays)))

    def check(self, state: Sequence[Type], operands: Sequence[Type]) -> None:
        """See that it takes these, and gives back the types of the state."""
        given = (*state, *operands)
        wanted: Any = self._exported.in_avals
        if given != (wanted := types_of(wanted)):
            raise ValueError(
                f"Update {self._key!r} takes ({shown(*wanted)}), not variables "
                f"({shown(*state)}) and operands ({shown(*operands)})."
            )
        made: Any = self._exported.out_avals
        if tuple(state) != (made := types_of(made)):
            raise ValueError(
                f"Update {self._key!r} returns ({shown(*made)}), which cannot "
                f"become what the variables hold: ({shown(*state)})."
            )

    def run(
        self, held: Sequence[Held], operands: Sequence[np.ndarray]
    ) -> Sequence[jax.Array]:
        """What it makes of what variables hold."""
        return _run(self._call, held, operands)
