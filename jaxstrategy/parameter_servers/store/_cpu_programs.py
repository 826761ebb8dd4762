"""Arrays and programs on the CPU of this process, whoever calls.

Programs are compiled ahead of time: a jitted function would be staged into the program
that the calling thread may be tracing, and compiled anew for each configuration of JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxstrategy.parameter_servers._aligned_memory import aligned
from jaxstrategy.parameter_servers.store._stored_types import Type, types_of
from jaxstrategy.replicas._devices import Device

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
    """A program for arrays of these types.

    Args:
      change: the new state, of the state and the operands.
      state: the types of the arrays that it changes.
      operands: the types of those that it is given besides.
      donates: whether the memory of the old state becomes that of the new one.
    """
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
