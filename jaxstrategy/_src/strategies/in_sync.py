"""The comparison of the bits that replicas hold: `Strategy.assert_in_sync`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath

from jaxstrategy._src.errors import (
    OutOfSyncError,
    PlacementError,
    TracedValueError,
)
from jaxstrategy._src.reductions.fingerprint import groups
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.replicas import SAME, Replicas
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Leaf, PyTree


def assert_in_sync(
    tree: PyTree,
    name: str,
    replicas: Replicas,
    fingerprints: Callable[[PyTree], jax.Array],
) -> None:
    """Nothing if all replicas hold the same bits of `tree`, else an error.

    Args:
      tree: a pytree.
      name: how the error calls it.
      replicas: those that should agree.
      fingerprints: computes those of a tree's arrays, `[replicas, arrays, 2]`.

    Raises:
      OutOfSyncError: the replicas differ.
      PlacementError: an array lies on several devices, but neither whole on each of
        ours nor divided over them as state.
      TracedValueError: the values are not known yet.
    """
    compared = _compared(tree, replicas, name)
    if replicas.count == 1 or not jax.tree.leaves(compared):
        return
    traced = fingerprints(compared)
    if isinstance(traced, Tracer):  # the arrays are constants of a traced function
        raise _not_known(name)
    prints = np.asarray(traced)
    if (prints != prints[0]).any():
        raise OutOfSyncError(_differing(compared, prints, name))


def _compared(tree: PyTree, replicas: Replicas, name: str) -> PyTree:
    """`tree` with None for each leaf that the replicas have no copies or versions of.

    Of state that is divided over them each replica has a part that nobody else has.

    Raises:
      TracedValueError: a leaf is being traced.
      PlacementError: an array lies on several devices, but neither whole on each of
        ours nor divided over them as state.
    """

    def keep(path: KeyPath, leaf: Leaf) -> Leaf:
        content = per_replica.contents(leaf) if isinstance(leaf, PerReplica) else leaf
        if isinstance(content, Tracer):
            raise _not_known(f"{name}{jax.tree_util.keystr(path)}")
        if isinstance(leaf, PerReplica):
            return leaf
        if _is_divided_variable(leaf):
            return None
        if hasattr(type(leaf), "__jax_array__"):  # an object around an array
            leaf = jnp.asarray(leaf)
        if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
            return None
        if has_copies(leaf, replicas):
            return leaf
        where = f"`{name}{jax.tree_util.keystr(path)}`"
        if not _is_divided_state(leaf, replicas):
            raise _elsewhere(where, leaf, replicas)
        arrays.check_alive(leaf, where)
        return None

    return jax.tree.map_with_path(
        keep,
        tree,
        is_leaf=lambda node: (
            per_replica.is_per_replica(node) or _is_divided_variable(node)
        ),
    )


def has_copies(array: jax.Array, replicas: Replicas) -> bool:
    """Whether each replica has all of `array`, on its devices together."""
    if mesh.lies_as(array, replicas.sharding(SAME)):  # on whatever mesh
        return True
    return replicas.inner_placement(array, SAME) is not None


def _is_divided_variable(node: object) -> bool:
    return isinstance(node, Handle) and not node.division.is_whole


def _is_divided_state(array: jax.Array, replicas: Replicas) -> bool:
    """Whether each replica keeps its own part of `array`, which has no copies."""
    is_state_divided = replicas.state_sharding is not None
    return is_state_divided and replicas.dimension_of(array) is not None


def _elsewhere(what: str, array: jax.Array, replicas: Replicas) -> PlacementError:
    """The error for an array that lies on devices as no value of `replicas` does."""
    is_whole = replicas.state_sharding is None
    in_parts = "" if is_whole else " and not divided over them in this order"
    return PlacementError(
        f"{what} lies on several devices, as {array.sharding}, but not whole on each "
        f"of this strategy's, {replicas.device_names}{in_parts}: there are "
        "no copies to compare. Use the strategy it belongs to; if entry i belongs to "
        "replica i, pass `PerReplica(array)`."
    )


def _not_known(what: str) -> TracedValueError:
    return TracedValueError(
        f"`assert_in_sync` cannot look at `{what}` while JAX traces the function that "
        "calls it (`jax.jit`, `jax.grad`, `jax.lax.scan`): there are no copies to "
        "compare yet. Call it outside, between steps."
    )


def _differing(
    compared: PyTree, prints: np.ndarray, name: str
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The leaves whose fingerprints `[replicas, leaves, 2]` differ, with the groups."""
    paths, _ = jax.tree.flatten_with_path(compared, is_leaf=per_replica.is_per_replica)
    found = ((path, groups(prints[:, i])) for i, (path, _) in enumerate(paths))
    return {
        f"{name}{jax.tree_util.keystr(path)}": agreeing
        for path, agreeing in found
        if len(agreeing) > 1
    }
