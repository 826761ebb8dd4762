"""Advice for code that uses a `PerReplica` as if it were one array."""

from __future__ import annotations

# The special methods that an array has, by what they are for.
_READING = "array index int float complex bool round"
_GOING_THROUGH = "len iter getitem contains"
_COMPUTING = (
    "jax_array array_ufunc add radd sub rsub mul rmul truediv rtruediv floordiv "
    "rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs lt le gt ge and rand or "
    "ror xor rxor invert lshift rlshift rshift rrshift"
)
OPERATORS = f"{_READING} {_GOING_THROUGH} {_COMPUTING}".split()

# The methods and attributes of arrays, as NumPy, JAX and TensorFlow have them.
_REDUCING = "sum mean min max".split()
_TO_HOST = "item numpy tolist eval cpu tobytes".split()
_OF_ARRAYS = (
    "all any argmax argmin astype at block_until_ready clip copy cumprod cumsum "
    "device devices diagonal dot flatten imag is_fully_addressable "
    "is_fully_replicated nbytes ndim nonzero prod ptp ravel real repeat reshape "
    "round set_shape sharding size sort squeeze std swapaxes take trace transpose T "
    "var view get_shape addressable_shards addressable_data"
).split()

_READ = "For one number or array of all replicas use `strategy.reduce('mean', value)`. "
_GO_THROUGH = (
    "For each replica's version use `strategy.experimental_local_results(value)`. "
)
_COMPUTE = (
    "Compute inside the step, or in one of its own, `strategy.run(lambda x: ..., "
    "(value,))`, where the function gets its own replica's version. "
)
_ALL = (
    "Outside `run` it is read with `strategy.reduce(op, value)`, "
    "`strategy.gather(value)` and `strategy.experimental_local_results(value)`; inside "
    "`run` pass it as an argument, and the function gets its own replica's version."
)


def of_one_array(value: object, use: str = "") -> str:
    """The message for an operator, or for no special use."""
    named = f" (`{use}`)" if use else ""
    advice = ""
    if use in _COMPUTING.split() or use == "==":
        advice = _COMPUTE
    elif use in _READING.split() or use.startswith("format"):
        advice = _READ
    elif use in _GOING_THROUGH.split():
        advice = _GO_THROUGH
    return (
        f"A PerReplica was used as if it were one array{named}, but {value!r} holds "
        f"one version per replica. {advice}{_ALL}"
    )


def of_attribute(value: object, name: str) -> str:
    """The message for an attribute that it does not have."""
    if name in _REDUCING:
        advice = (
            f"Use `strategy.reduce({name!r}, value)` over the replicas, and with "
            "`axis=...` over dimensions of the versions, too."
        )
    elif name in _TO_HOST:
        advice = _READ + _ALL
    elif name in _OF_ARRAYS:
        advice = _COMPUTE + _ALL
    else:
        return f"{type(value).__name__!r} object has no attribute {name!r}"
    return f"A PerReplica has no `{name}`: it holds one version per replica. {advice}"
