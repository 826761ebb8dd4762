"""State built in mirrored form, on all devices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._replicas import SAME, Replicas
from jaxstrategy.tracing import _results
from jaxstrategy.tracing._divided_init import build_divided
from jaxstrategy.tracing._replica_step import name_of
from jaxstrategy.values import _arrays, _building, _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import PyTree


def build_replicated(
    fn: Callable[..., PyTree], args: Sequence[PyTree], replicas: Replicas
) -> PyTree:
    """`fn(*args)` compiled so that its arrays come out as `replicas` keep their state.

    That is whole on each of them, or in parts. Arrays in `args` are traced; everything
    else `fn` sees as it is.

    Raises:
      TypeError: `fn` cannot be called; an argument is a `PerReplica`; a leaf of the
        result is an object that hides arrays.
    """
    if not callable(fn):
        raise TypeError(
            f"`init` was given {fn!r}, which cannot be called. Give the function that "
            "builds the state and then its arguments: `strategy.init(model.init, key)`."
        )
    leaves, treedef = jax.tree.flatten(tuple(args), is_leaf=_per_replica.is_per_replica)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise TypeError(
            "`init` was given a PerReplica, but it builds one state that is the same "
            "on all replicas. Give it plain arrays."
        )
    traced = [index for index, leaf in enumerate(leaves) if _arrays.is_array(leaf)]

    def build(*given_arrays: jax.Array) -> PyTree:
        given = dict(zip(traced, given_arrays, strict=True))
        seen = [given.get(index, leaf) for index, leaf in enumerate(leaves)]
        returned = fn(*jax.tree.unflatten(treedef, seen))
        arrays, results = _results.take_apart(returned, leaves, name_of(fn))
        return results.rebuild(arrays)

    given = [leaves[index] for index in traced]
    if replicas.state_sharding is not None:
        divided = build_divided(build, given, replicas, name_of(fn))
        return _results.unwrap_plain(divided)
    arrays = _building.replicate(given, replicas)
    sharding = replicas.sharding(SAME)
    built = jax.jit(build, out_shardings=sharding)(*arrays)
    if not sharding.is_fully_addressable:  # what `fn` closes over may differ
        built = jax.tree.map(
            lambda leaf: _mesh.broadcast(leaf.addressable_data(0), sharding), built
        )
    return _results.unwrap_plain(built)
