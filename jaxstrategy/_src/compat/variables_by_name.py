"""Variables by name, as model functions of TensorFlow 1 make them: `get_variable`."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import math
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.options import VariableAggregation, VariableSynchronization
from jaxstrategy._src.strategies import current
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import several_whole, shown, whole
from jaxstrategy._src.variables.variable import Variable

Initializer: TypeAlias = Callable[..., ArrayLike] | ArrayLike | None


def _initial_value(
    name: str,
    shape: Sequence[int] | int | None,
    dtype: DTypeLike | None,
    initializer: Initializer,
) -> tuple[Any, np.dtype | None]:
    """What `Variable` is made of: a value or a function of nothing, and a dtype."""
    kind = None if dtype is None else _dtype_of(dtype)
    if initializer is not None and not callable(initializer):
        if shape is not None:
            raise ValueError(
                "If `initializer` is a value, do not specify `shape`: that of "
                f"{name!r} was {shown(shape)}. Give a function of the shape, or only "
                "the value."
            )
        return initializer, kind
    kind = kind or np.dtype(np.float32)
    if shape is None and initializer is None:
        raise ValueError(
            f"Shape of a new variable ({name}) must be fully defined, but no `shape` "
            "was given. Give it, or a value as `initializer`."
        )
    if shape is None:
        return initializer, kind
    make = _default(name, kind) if initializer is None else initializer
    return functools.partial(_called, make, name, _shape_of(shape), kind), kind


def _shape_of(given: object) -> tuple[int, ...]:
    number = whole(given)
    found = several_whole(given) if number is None else (number,)
    if found is None:
        raise TypeError(f"`shape` was {shown(given)}; whole numbers were wanted.")
    if min(found, default=0) < 0:
        raise ValueError(
            f"`shape` was {shown(given)}; a new variable needs the size of each "
            "dimension, at least 0."
        )
    return found


def _dtype_of(given: DTypeLike) -> np.dtype:
    given = getattr(given, "as_numpy_dtype", given)  # of TensorFlow's own
    return np.dtype(jax.dtypes.canonicalize_dtype(given))


def _called(
    make: Callable[..., Any], name: str, shape: tuple[int, ...], dtype: np.dtype
) -> ArrayLike:
    """The value of a function that wants a key, or a dtype, or neither."""
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # some builtins have none
        return make(shape, dtype)
    if next(iter(parameters), None) in ("key", "rng"):
        # Of the name alone: all processes of a job make the same, in any order.
        key = jax.random.key(
            zlib.crc32(name.encode(errors="surrogatepass")) & 0x7FFFFFFF
        )
        return make(key, shape, dtype)
    kinds = {parameter.kind for parameter in parameters.values()}
    if "dtype" in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return make(shape, dtype=dtype)
    return make(shape)


def _default(name: str, dtype: np.dtype) -> Callable[..., ArrayLike]:
    if jnp.issubdtype(dtype, jnp.floating):
        return _glorot_uniform
    if jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_:
        return np.zeros
    raise ValueError(
        f"An initializer for variable {name!r} of {dtype} is required: there is a "
        "default for real floating-point numbers, integers and bools only."
    )


def _glorot_uniform(
    key: jax.Array, shape: tuple[int, ...], dtype: np.dtype
) -> jax.Array:
    """Uniform up to sqrt(6 / (fan_in + fan_out)), also of scalars and vectors."""
    fans = shape[-2:] if len(shape) > 1 else (*shape, 1)[:1] * 2
    receptive = math.prod(shape[:-2])
    limit = math.sqrt(6 / max(1, receptive * sum(fans)))
    # In one dimension: of four, XLA compiles for 6 s on CPUs (JAX 0.10 and 0.12).
    flat = jax.random.uniform(key, (math.prod(shape),), dtype, -limit, limit)
    return flat.reshape(shape)


class Reuse(enum.Enum):
    """Whether names may be asked for again; `AUTO_REUSE` is one."""

    AUTO_REUSE = "auto"


AUTO_REUSE: Final = Reuse.AUTO_REUSE
"""Variables of a scope are made at first, and the same ones afterwards."""

Reusing: TypeAlias = bool | Reuse | None


@final
class VariableScope:
    """The names that `get_variable` gives; `variable_scope` makes it.

    Attributes:
      name: what stands before each name, without the last slash.
      reuse: whether names may be asked for again.
    """

    def __init__(self, name: str, reuse: Reusing) -> None:
        self.name = name
        self.reuse = reuse

    def reuse_variables(self) -> None:
        """From now on, only variables are given that were made before."""
        self.reuse = True

    def full_name(self, name: str) -> str:
        """`name` behind those of the scopes."""
        return f"{self.name}/{name}" if self.name else name

    def __repr__(self) -> str:
        reuse = self.reuse.name if isinstance(self.reuse, Reuse) else self.reuse
        return f"VariableScope({self.name!r}, reuse={reuse})"


def get_variable_scope() -> VariableScope:
    """The current scope; outside of all, one without a name.

    So that variables are found again without another name:

    >>> with v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE) as scope:
    ...     scope
    VariableScope('', reuse=AUTO_REUSE)
    """
    scope = context.current().variable_scope
    return scope if isinstance(scope, VariableScope) else VariableScope("", None)


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope, *, reuse: Reusing = None
) -> Iterator[VariableScope]:
    """A `with` block whose name stands before those of `get_variable`.

    >>> with v1.variable_scope("outer"), v1.variable_scope("inner"):
    ...     v1.get_variable("w", initializer=1.0).name
    'outer/inner/w'
    """
    if not (reuse is None or isinstance(reuse, (bool, Reuse))):
        raise ValueError(
            f"`reuse` was {reuse!r}; True, False, None or AUTO_REUSE was wanted."
        )
    outer = get_variable_scope()
    if isinstance(name_or_scope, VariableScope):
        name, inherited = name_or_scope.name, name_or_scope.reuse
    else:
        name = outer.full_name(_checked_name("variable_scope", name_or_scope))
        inherited = outer.reuse
    scope = VariableScope(name, reuse or inherited)
    with context.entered(variable_scope=scope):
        yield scope


def get_variable(
    name: str,
    shape: Sequence[int] | int | None = None,
    dtype: DTypeLike | None = None,
    initializer: Callable[..., ArrayLike] | ArrayLike | None = None,
    *,
    trainable: bool | None = None,
    partitioner: object = None,
    use_resource: bool | None = None,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
) -> Variable | Any:
    """The variable of this name that the current strategy has, made at first.

    Model functions of TensorFlow 1 make their variables wherever they are called, which
    was once, for a graph. Here a step is traced more than once, and run often: each
    name is one variable of a strategy (and one outside of all), which lives as long
    as the strategy does.

    `initializer` is a value; a function of the shape and `dtype=`, as of TensorFlow;
    one of a key, the shape and the dtype, as of `jax.nn.initializers`; or without a
    shape one of nothing. By default Glorot's uniform numbers, and 0 of integers and
    bools. Keys are made of the name: the same name begins with the same. The other
    arguments are those of `jaxstrategy.Variable`; `partitioner` is dropped with a
    warning, `use_resource` changes nothing.

    Raises:
      ValueError: the name was asked for before in the same step, outside of a
        `variable_scope(..., reuse=AUTO_REUSE)`; it is new with `reuse=True`; it has
        another shape or dtype; there is no shape, or one besides a value.

    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> def model(x):
    ...     w = v1.get_variable("w", shape=[3], initializer=np.ones)
    ...     return (w * x).sum()
    >>> print(strategy.run(model, (2.0,)), strategy.run(model, (3.0,)))
    6.0 9.0
    """
    full = get_variable_scope().full_name(_checked_name("get_variable", name))
    if partitioner is not None:
        text.warn(
            f"`get_variable` was given a partitioner for {full!r}, which is dropped: "
            "strategies divide variables by `jaxstrategy.Variable(sharding=...)`.",
            UserWarning,
        )

    def make() -> Variable:
        value, shaped = _initial_value(full, shape, dtype, initializer)
        return Variable(value, trainable, shaped, full, synchronization, aggregation)

    found = _variable_of(current.get_strategy(), full, make)
    wanted = None if shape is None else _shape_of(shape)
    kind = None if dtype is None else _dtype_of(dtype)
    for what, asked, has in (
        ("shape", wanted, found.shape),
        ("dtype", kind, found.dtype),
    ):
        if asked is not None and asked != has:
            raise ValueError(
                f"Trying to share variable {full!r}, but specified {what} {asked} and "
                f"found {what} {has}."
            )
    return found


# An initial value may ask for other variables.
_lock = threading.RLock()


def _variable_of(
    strategy: Strategy, name: str, make: Callable[[], Variable]
) -> Variable:
    reuse, trace = get_variable_scope().reuse, context.current().trace
    with _lock:
        # A variable holds its strategy: a table that is not the strategy's own would
        # keep both for ever. Beside each variable the trace that last asked for it.
        known: dict[str, tuple[Variable, int | None]]
        known = vars(strategy).setdefault("_named_variables", {})
        if name in known:
            variable, asked = known[name]
            if trace is not None and asked == trace and not reuse:
                raise ValueError(
                    f"Variable {name!r} already exists, disallowed: this step has "
                    "asked for it before, or JAX has traced its code twice. Did you "
                    "mean another name, or one variable for both, in `with "
                    "variable_scope(get_variable_scope(), reuse=AUTO_REUSE):`?"
                )
        elif reuse is True:
            raise ValueError(
                f"Variable {name!r} does not exist, or was not created with "
                "`get_variable`, and the scope has `reuse=True`. Did you mean to set "
                "`reuse=AUTO_REUSE`?"
            )
        else:
            variable, asked = make(), None
        known[name] = variable, asked if trace is None else trace
        return variable


def _checked_name(function: str, name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"`{function}` was given {shown(name)}; a name was wanted.")
    if not name:
        raise ValueError(f"`{function}` was given an empty name.")
    return name
