"""Operations that may be replaced by others when `run` itself is differentiated.

A function with rules of its own for derivatives, or for `vmap`, is one thing in the
step and another under `jax.grad` around `run`. The same program serves both, so what is
called equal on all replicas must be so under the rules, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing.replication._analysis import Frame, Rule
from jaxstrategy.tracing.replication._jaxprs import plain
from jaxstrategy.tracing.replication._levels import (
    HeldState,
    Known,
    Level,
    join,
    level_of,
    varying_since,
)
from jaxstrategy.tracing.replication._lowered import alone, operands_of
from jaxstrategy.values._types import Function

# Of a function and the types of its arguments another function and the types of its
# own. It takes the arguments once or several times, and so returns the results.
Types = list[jax.ShapeDtypeStruct]
Transform = Callable[[Function, Types], tuple[Function, Types]]


# A rule often calls the function that it is of, so this must end somewhere: derivatives
# of derivatives are looked at.
_ORDERS = 2


def also(rule: Rule, *transforms: Transform) -> Rule:
    """`rule`, and what becomes of the equation under `transforms`."""

    def both(frame: Frame, eqn: Equation, operands: list[Known]) -> list[Known]:
        results = rule(frame, eqn, operands)
        if all(level_of(state) == Level.VARYING for state in results):
            return results
        if frame.analysis.order == _ORDERS:
            return results
        for transform in transforms:
            others = _transformed(frame, eqn, operands, transform)
            pairs = zip(results, others, strict=True)
            results = [
                result if isinstance(result, HeldState) else _worse(result, other)
                for result, other in pairs
            ]
        return results

    return both


def _worse(result: Known, other: Known) -> Known:
    return other if level_of(other) == Level.VARYING else result


def _transformed(
    frame: Frame, eqn: Equation, operands: list[Known], transform: Transform
) -> list[Known]:
    """The knowledge of each result of `eqn` under `transform`."""
    unknown: list[Known] = [varying_since(eqn)] * len(eqn.outvars)
    if any(isinstance(state, HeldState) for state in operands):
        return unknown
    try:
        jaxpr = frame.analysis.transformed(eqn, transform, _jaxpr_of)
    except NotImplementedError:  # nor can the step be transformed
        return [None] * len(eqn.outvars)
    except Exception:  # anybody's code, in a place that it was not written for
        return unknown
    pairs = zip(eqn.invars, operands, strict=True)
    given = [state for atom, state in pairs if not isinstance(atom, core.Literal)]
    copies = len(jaxpr.invars) // len(given) if given else 1
    frame.analysis.order += 1
    # Collectives of a rule are in no program unless it is differentiated.
    outputs, _ = frame.enter(jaxpr, given * copies, eqn)
    frame.analysis.order -= 1
    kept = _is_kept(eqn)
    each = [join(outputs[i :: sum(kept)]) for i in range(sum(kept))]
    found = iter(each)
    return [next(found) if is_kept else None for is_kept in kept]


def _is_kept(eqn: Equation) -> list[bool]:
    return [not isinstance(var, core.DropVar) for var in eqn.outvars]


def _jaxpr_of(
    eqn: Equation, transform: Transform, axis_env: list[tuple[str, int]]
) -> Any:
    only = core.jaxpr_as_fun(alone(eqn))
    types = [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
        for atom in operands_of(eqn)
    ]
    made, given = transform(only, types)
    return plain(jax.make_jaxpr(made, axis_env=axis_env)(*given))


def forward(function: Function, types: Types) -> tuple[Function, Types]:
    """The results and their tangents."""

    def pushed(*given: Any) -> Any:
        primals, tangents = given[: len(types)], given[len(types) :]
        tangents = [_tangent(p, t) for p, t in zip(primals, tangents, strict=True)]
        out, moved = jax.jvp(function, primals, tuple(tangents))
        pairs = zip(out, moved, strict=True)
        return [*out, *(p if _is_discrete(p) else t for p, t in pairs)]

    return pushed, [*types, *types]


def _tangent(primal: jax.Array, tangent: jax.Array) -> jax.Array | np.ndarray:
    # `jax.jvp` refuses any other tangent of integers and bools (JAX 0.10 and 0.12).
    zero = np.zeros(primal.shape, jax.dtypes.float0)
    return zero if _is_discrete(primal) else tangent


def _is_discrete(array: jax.Array) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact)


def backward(function: Function, types: Types) -> tuple[Function, Types]:
    """The results, as they are when a gradient is to follow.

    The gradient itself needs no proof: JAX sums that of a mirrored argument over the
    replicas.
    """
    return lambda *given: jax.vjp(function, *given)[0], types


def batched(function: Function, types: Types) -> tuple[Function, Types]:
    """The results of several calls at once."""
    more = [jax.ShapeDtypeStruct((2, *each.shape), each.dtype) for each in types]
    return jax.vmap(function), more
