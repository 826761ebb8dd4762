"""The placement of state between steps: of a leaf, and of all leaves of a tree."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy._src.replicas.inner_placement import inner_dimensions, lying_like
from jaxstrategy._src.replicas.replicas import SAME, Replicas, lies_along
from jaxstrategy._src.replicas.state_sharding import Shaped
from jaxstrategy._src.values import arrays, optimizer_state, per_replica
from jaxstrategy._src.values.types import Leaf, PyTree


def sharding_of(
    path: str, leaf: Leaf | Shaped, is_optimizer: bool, replicas: Replicas
) -> NamedSharding:
    """The placement of an array that is equal on all replicas.

    Args:
      path: of it, for the user's choice of a dimension.
      leaf: it, or its type; anything else lies whole.
      is_optimizer: whether it is known to be optimizer state. What is not, but is
        divided already, stays so where only that is divided: a step has found out.
      replicas: those of the strategy.

    Raises:
      ValueError: the user's choice cannot be.
      TypeError: it is no dimension.
    """
    chosen = replicas.state_sharding
    if chosen is None or not hasattr(leaf, "dtype"):
        return lying_like(leaf, replicas)
    if chosen.shard == "optimizer" and not is_optimizer:
        is_divided = arrays.is_placed(leaf) and replicas.dimension_of(leaf) is not None
        if not is_divided:
            return lying_like(leaf, replicas)
    division = replicas.division(path, leaf, inner_dimensions(leaf, replicas))
    return lying_like(leaf, replicas, lies_along(division.dimension))


def shardings_of(
    tree: PyTree, replicas: Replicas
) -> list[tuple[KeyPath, Leaf, NamedSharding]]:
    """The paths of all leaves of `tree`, the leaves, and their placements.

    Args:
      tree: a state, or its types; a `PerReplica` is one leaf.
      replicas: those of the strategy.
    """
    found = jax.tree.leaves_with_path(tree, is_leaf=per_replica.is_per_replica)
    if replicas.state_sharding is None and not replicas.inner_axes:
        whole = replicas.sharding(SAME)
        return [(path, leaf, whole) for path, leaf in found]
    flags = optimizer_state.optimizer_leaves(tree, per_replica.is_per_replica)
    return [
        (path, leaf, sharding_of(jax.tree_util.keystr(path), leaf, flag, replicas))
        for (path, leaf), flag in zip(found, flags, strict=True)
    ]
