"""State built in mirrored form, on all devices at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.core import Tracer
from jax.tree_util import KeyPath

from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._replicas import SAME, SPLIT, Replicas
from jaxstrategy.tracing import _results
from jaxstrategy.tracing._divided_init import build_divided
from jaxstrategy.tracing._replica_step import name_of
from jaxstrategy.values import _arrays, _building, _per_replica
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree


def build_replicated(
    fn: Callable[..., PyTree], args: Sequence[PyTree], replicas: Replicas
) -> PyTree:
    """`fn(*args)` compiled so that its arrays come out as `replicas` keep their state.

    That is whole on each of them, or in parts; a `PerReplica` that it makes comes out
    with a version on each. Arrays in `args` are traced; everything else `fn` sees as it
    is.

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
        returned, stacked = _without_versions(returned, replicas)
        arrays, results = _results.take_apart(returned, leaves, name_of(fn))
        return results.rebuild(arrays), stacked

    given = [leaves[index] for index in traced]
    if replicas.state_sharding is not None and not _are_traced(given):
        return _with_versions(*build_divided(build, given, replicas, name_of(fn)))
    arrays = _building.replicate(given, replicas)
    sharding, where = replicas.sharding(SAME), replicas.sharding(SPLIT)
    built, stacked = jax.jit(build, out_shardings=(sharding, where))(*arrays)
    if not sharding.is_fully_addressable:  # what `fn` closes over may differ
        built = jax.tree.map(
            lambda leaf: _mesh.broadcast(leaf.addressable_data(0), sharding), built
        )
    elif replicas.state_sharding is not None:
        built = _building.replicate(built, replicas)
    return _with_versions(built, stacked)


def _are_traced(arrays: Sequence[Leaf]) -> bool:
    """Whether JAX traces the code that builds, so that nothing is there to be built."""
    return _arrays.is_traced() or any(isinstance(array, Tracer) for array in arrays)


@dataclasses.dataclass(frozen=True)
class _Versions:
    """The place of a `PerReplica` of the result, number `n` of them."""

    n: int


def _without_versions(
    tree: PyTree, replicas: Replicas
) -> tuple[PyTree, list[jax.Array]]:
    """`tree` with a mark for each `PerReplica` that was built, and their arrays.

    Raises:
      ValueError: one has not a version for each replica.
    """
    stacked: list[jax.Array] = []

    def marked(path: KeyPath, leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerReplica):
            return leaf
        array = _per_replica.contents(leaf)
        if not isinstance(array, Tracer):  # captured
            return leaf
        what = f"result{jax.tree_util.keystr(path)}"
        _building.check_stacked(array, replicas.count, what)
        stacked.append(array)
        return _Versions(len(stacked) - 1)

    marks = jax.tree.map_with_path(marked, tree, is_leaf=_results.is_one_leaf)
    return marks, stacked


def _with_versions(tree: PyTree, stacked: Sequence[jax.Array]) -> PyTree:
    """`tree` with the `PerReplica`s of these arrays in place of their marks."""

    def unmarked(leaf: Leaf) -> Leaf:
        return PerReplica(stacked[leaf.n]) if isinstance(leaf, _Versions) else leaf

    plain = _results.unwrap_plain(tree)
    return jax.tree.map(unmarked, plain, is_leaf=_per_replica.is_per_replica)
