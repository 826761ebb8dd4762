"""A collective as an operation of JAX: `met`.

JAX differentiates and maps operations by rules. With these, code of a replica that runs
eagerly may be differentiated as that of a compiled step: what JAX computes backwards
makes the replicas meet again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxstrategy._errors import ContextError
from jaxstrategy.contexts import _context
from jaxstrategy.executors.replica_threads._replica_thread import ReplicaThread
from jaxstrategy.reductions._met_collectives import (
    Derivative,
    Mapped,
    MetCollective,
    Transposed,
)
from jaxstrategy.values._types import PyTree

_met = Primitive("jaxstrategy_met")
_met.multiple_results = True


def met(collective: MetCollective, arrays: Sequence[jax.Array]) -> PyTree:
    """This replica's results of a collective for which all replicas meet."""
    thread = _this_replica(collective)
    types = thread.result_types(collective, arrays)
    found = _met.bind(*arrays, collective=collective)
    return jax.tree.structure(types).unflatten(found)


def _this_replica(collective: MetCollective) -> ReplicaThread:
    thread = _context.current().eager
    if isinstance(thread, ReplicaThread):
        return thread
    raise ContextError(
        f"{collective.name} was called in `eager_replicas()` by a thread that is no "
        "replica's. Call it in the step itself, not in a thread or callback of it."
    )


@_met.def_impl
def _now(*arrays: jax.Array, collective: MetCollective) -> list[jax.Array]:
    return _this_replica(collective).meet(collective, arrays)


@_met.def_abstract_eval
def _types(*types: ShapedArray, collective: MetCollective) -> list[ShapedArray]:
    structs = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)
        for each in types
    ]
    found = _this_replica(collective).result_types(collective, structs)
    return [
        ShapedArray(each.shape, each.dtype, weak_type=each.weak_type)
        for each in jax.tree.leaves(found)
    ]


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, collective: MetCollective
) -> tuple[list[Any], list[Any]]:
    results = _met.bind(*primals, collective=collective)
    differs = tuple(not isinstance(each, ad.Zero) for each in tangents)
    given = [each for each in tangents if not isinstance(each, ad.Zero)]
    found = iter(
        _met.bind(*primals, *given, collective=Derivative(collective, differs))
    )
    return results, [
        next(found)
        if jnp.issubdtype(result.dtype, jnp.inexact)
        else ad.Zero(jax.typeof(result).to_tangent_aval())
        for result in results
    ]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, collective: MetCollective
) -> list[Any]:
    linear = tuple(
        jax.ShapeDtypeStruct(
            each.aval.shape, each.aval.dtype, weak_type=each.aval.weak_type
        )
        if ad.is_undefined_primal(each)
        else None
        for each in operands
    )
    known = [each for each in operands if not ad.is_undefined_primal(each)]
    given = [ad.instantiate_zeros(each) for each in cotangents]
    transposed = Transposed(collective, linear)
    found = iter(_met.bind(*known, *given, collective=transposed))
    return [None if like is None else next(found) for like in linear]


def _mapped(
    operands: Sequence[Any], dimensions: Sequence[Any], *, collective: MetCollective
) -> tuple[list[Any], list[int]]:
    found = _met.bind(*operands, collective=Mapped(collective, tuple(dimensions)))
    return found, [0] * len(found)


def _compiled(*_: Any, collective: MetCollective, **__: Any) -> Any:
    raise ContextError(
        f"{collective.name} was called in a function that JAX compiles for one replica "
        "by itself, where in `eager_replicas()` it cannot meet the others. Leave out "
        "what compiles there: `jax.jit` in `jax.disable_jit(False)`, `.lower()`."
    )


ad.primitive_jvps[_met] = _derivative
ad.primitive_transposes[_met] = _transpose
batching.primitive_batchers[_met] = _mapped
mlir.register_lowering(_met, _compiled)
