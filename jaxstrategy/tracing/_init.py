"""State built in mirrored form, on all devices at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._inner_specs import has_inner_axes, whole_here
from jaxstrategy.replicas._replicas import SAME, SPLIT, Replicas
from jaxstrategy.tracing import _results
from jaxstrategy.tracing._divided_init import build_divided
from jaxstrategy.tracing._inner_state import InnerState
from jaxstrategy.tracing._replica_step import name_of
from jaxstrategy.tracing._unknown_axes import needs_mesh, unknown_axis, without_axes
from jaxstrategy.values import _arrays, _building, _per_replica
from jaxstrategy.values._annotations import without_eager_sharding
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree

Build: TypeAlias = Callable[..., tuple[PyTree, list[jax.Array]]]
"""Of arrays a state, and arrays `[replica, ...]`, of which each has its version."""


def build_replicated(
    fn: Callable[..., PyTree],
    args: Sequence[PyTree],
    replicas: Replicas,
    specs: PyTree = None,
) -> PyTree:
    """`fn(*args)` compiled so that its arrays come out as `replicas` keep their state.

    That is whole on each of them, or in parts; a `PerReplica` that it makes comes out
    with a version on each. Arrays in `args` are traced; everything else `fn` sees as it
    is.

    Args:
      fn: builds the state.
      args: its arguments.
      replicas: those of the strategy.
      specs: the divisions of its arrays over the devices of each replica: a pytree of
        specs (`jax.P`), or a prefix of the result; where it is None, as Flax's
        annotations say, or as an argument lies that the array is like.

    Raises:
      TypeError: `fn` cannot be called; an argument is a `PerReplica`; a leaf of the
        result is an object that hides arrays; `specs` has something else.
      ValueError: `specs` or annotations do not fit.
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
        returned = _called(fn, jax.tree.unflatten(treedef, seen), replicas)
        returned, stacked = _without_versions(returned, replicas)
        arrays, results = _results.take_apart(returned, leaves, name_of(fn))
        return results.rebuild(arrays), stacked

    given = [leaves[index] for index in traced]
    inner = InnerState(specs, args, replicas)
    if replicas.state_sharding is not None and not _are_traced(given):
        return _with_versions(
            *build_divided(build, given, replicas, inner, name_of(fn))
        )
    arrays = _building.replicate(given, replicas)
    built, stacked = _built(build, arrays, inner, replicas)
    if not replicas.are_all_own:  # what `fn` closes over may differ
        built = jax.tree.map(lambda leaf: _of_first_process(leaf, replicas), built)
    elif replicas.state_sharding is not None:
        built = _building.replicate(built, replicas)
    return _with_versions(built, stacked)


def _called(
    fn: Callable[..., PyTree], args: Sequence[PyTree], replicas: Replicas
) -> PyTree:
    """What `fn` returns, traced where the axes inside a replica have names if need be.

    Raises:
      ValueError: it wants an array to be divided along an axis that there is not.
    """
    with without_eager_sharding():
        try:
            # Where there is a mesh, Flax refuses annotations of its attention layers,
            # which it makes as matrices first (0.12).
            return fn(*args)
        except RuntimeError as error:
            if not needs_mesh(error):
                raise
            if not has_inner_axes(replicas):
                raise without_axes(error, name_of(fn)) from error
        try:
            with jax.sharding.use_abstract_mesh(replicas.mesh.abstract_mesh):
                return fn(*args)
        except ValueError as error:
            if (told := unknown_axis(error, name_of(fn), replicas)) is None:
                raise
            raise told from error


def _built(
    build: Build, arrays: Sequence[Leaf], inner: InnerState, replicas: Replicas
) -> tuple[PyTree, list[jax.Array]]:
    """`build(*arrays)`, whole over the replicas."""
    where = replicas.sharding(SPLIT)
    if not inner.is_asked:
        whole = replicas.sharding(SAME)
        return jax.jit(build, out_shardings=(whole, where))(*arrays)
    traced, types = jax.make_jaxpr(build, return_shape=True)(*arrays)
    state, versions = types
    wanted = [*inner.shardings(state), *[where] * len(versions)]
    built = jax.jit(core.jaxpr_as_fun(traced), out_shardings=wanted)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(types), built)


def _of_first_process(leaf: jax.Array, replicas: Replicas) -> jax.Array:
    """What the first process has built, on the devices of all."""
    if leaf.is_fully_replicated:
        return _mesh.broadcast(leaf.addressable_data(0), replicas.sharding(SAME))
    assert isinstance(leaf.sharding, NamedSharding), "it lies on a mesh"
    # The devices of one replica are of one process.
    return _mesh.broadcast(whole_here(leaf), leaf.sharding)


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
