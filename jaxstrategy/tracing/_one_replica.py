"""The computation of one replica, traced in two ways: `in_shard_map`, `by_axes`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax.extend import core
from jax.ref import AbstractRef

from jaxstrategy.replicas._replicas import SAME, Meaning, Replicas
from jaxstrategy.tracing._on_own_devices import on_own_devices
from jaxstrategy.tracing._without_meshes import without_meshes
from jaxstrategy.tracing.jaxprs._visit import ClosedJaxpr, Jaxpr, jaxpr_of
from jaxstrategy.values._types import Function, Leaf, PyTree
from jaxstrategy.variables._variable import Variable

# A jaxpr of all that is given, then that of one replica; of the inputs of the latter
# their places in what is given, and the constants among them.
OneReplica: TypeAlias = tuple[ClosedJaxpr, Jaxpr, list[int | None], dict[int, Leaf]]


def in_shard_map(
    replica: Function,
    leaves: Sequence[Leaf],
    there: Sequence[Variable],
    meanings: Sequence[Meaning],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica inside a `shard_map` that is only looked into."""
    # The same for every output is not a claim.
    looked_into = on_own_devices(replica, replicas, meanings, SAME)

    def all_replicas(*given: jax.Array) -> PyTree:
        own, held = given[: len(leaves)], given[len(leaves) :]
        return looked_into(*own, *map(jax.new_ref, held))

    values = [
        jax.ShapeDtypeStruct(v.cell.shape, v.dtype, sharding=v.sharding) for v in there
    ]
    try:
        closed = jax.make_jaxpr(all_replicas)(*leaves, *values)
    except AttributeError as error:
        # shard_map has no rule for references that a function captures.
        if "'AbstractRef' object" in str(error):
            raise CapturedReference from error
        raise
    *references, eqn = closed.jaxpr.eqns
    given = closed.jaxpr.invars[: len(leaves)]
    made = [each.outvars[0] for each in references]
    place = {var: index for index, var in enumerate([*given, *made])}
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    places: list[int | None] = []
    constants: dict[int, Leaf] = {}
    for index, atom in enumerate(eqn.invars):
        is_literal = isinstance(atom, core.Literal)
        places.append(None if is_literal else place.get(atom))
        if places[index] is None:
            constants[index] = atom.val if is_literal else values[atom]
    return closed, eqn.params["jaxpr"], places, constants


def by_axes(
    replica: Function,
    leaves: Sequence[Leaf],
    there: Sequence[Variable],
    meanings: Sequence[Meaning],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica by itself, where the axes of the replicas have names.

    What is traced inside a `shard_map` carries a mesh in its types, and cannot be
    evaluated outside of one (JAX 0.10 and 0.12).
    """

    is_own = [replicas.differ(meaning) for meaning in meanings]
    row = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=1)

    def one_replica(*given: jax.Array) -> PyTree:
        # Its first row stands for what a replica has: whatever the dtype, or a tracer.
        parts = [row(x) if own else x for x, own in zip(given, is_own, strict=True)]
        own, held = parts[: len(leaves)], parts[len(leaves) :]
        return replica(*own, *map(jax.new_ref, held))

    values = [jax.ShapeDtypeStruct(v.cell.shape, v.dtype) for v in there]
    made = jax.make_jaxpr(one_replica, axis_env=replicas.axis_sizes)
    # Without the mesh that an array lies on: what is traced would carry it in types.
    types = [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )
        for leaf in jax.eval_shape(list, leaves)
    ]
    with replicas.as_one_replica():
        closed = made(*types, *values)
    if any(isinstance(jax.typeof(value), AbstractRef) for value in closed.consts):
        raise CapturedReference
    whole, rows = closed.jaxpr, sum(is_own)
    start = rows + len(there)
    results = iter(eqn.outvars[0] for eqn in whole.eqns[:rows])
    inputs = [
        next(results) if own else var
        for var, own in zip(whole.invars, is_own, strict=True)
    ]
    references = [eqn.outvars[0] for eqn in whole.eqns[rows:start]]
    invars = [*inputs[: len(leaves)], *references, *whole.constvars]
    jaxpr = without_meshes(jaxpr_of(invars, whole.eqns[start:], whole.outvars))
    known = len(meanings)
    places = [index if index < known else None for index in range(len(invars))]
    constants = dict(enumerate(closed.consts, start=known))
    return closed, jaxpr, places, constants


class CapturedReference(Exception):
    """A step uses a reference that is no variable."""
