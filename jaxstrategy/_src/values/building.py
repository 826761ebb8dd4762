"""Places values on replicas, and recognises optimizer state among them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import KeyPath

from jaxstrategy._src.errors import TracedValueError
from jaxstrategy._src.replicas import inner_axes, mesh
from jaxstrategy._src.replicas.inner_axes import inner_dimensions, sharding_like
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    Replicas,
    sharded_along,
)
from jaxstrategy._src.replicas.state_sharding import Shaped
from jaxstrategy._src.text import array_type
from jaxstrategy._src.values import arrays as _arrays, per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree, Value
from jaxstrategy._src.values.per_replica import PerReplica

IsLeaf = Callable[[object], bool]


def optimizer_leaves(tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
    """For each leaf of `tree`, in order, whether it is optimizer state.

    Recognised are the states of Optax, alone, nested or in one chain with those of
    users' own transformations, `opt_state` of Flax's `TrainState`, and the variables of
    an `nnx.Optimizer`.
    """
    return list(_flags(tree, is_leaf))


def _flags(node: PyTree, is_leaf: IsLeaf) -> Iterator[bool]:
    def stops(child: object) -> bool:
        is_end = is_leaf(child) or _is_state(child) or _is_train_state(child)
        return is_end and child is not node

    if is_leaf(node):
        yield False
        return
    if _is_state(node):
        yield from _all_of(node, is_leaf)
        return
    is_train_state = _is_train_state(node)
    for path, child in jax.tree.leaves_with_path(node, is_leaf=stops):
        if child is node:
            yield False
        elif is_train_state and getattr(path[0], "name", None) == "opt_state":
            yield from _all_of(child, is_leaf)
        else:
            yield from _flags(child, is_leaf)


def _all_of(node: PyTree, is_leaf: IsLeaf) -> list[bool]:
    return [True] * len(jax.tree.leaves(node, is_leaf=is_leaf))


def _is_state(node: object) -> bool:
    return _is_of_optax(node) or _is_chain(node) or is_optimizer_variable(node)


def _is_of_optax(node: object) -> bool:
    """Whether `node` is a state of Optax, or of `jaxstrategy.optax`."""
    if not _is_named_tuple(node):
        return False
    # The only named tuples of ours that hold arrays are states of optimizers.
    if type(node).__module__.partition(".")[0] not in ("optax", "jaxstrategy"):
        return False
    # The one type of Optax that holds parameters.
    holder = getattr(sys.modules.get("optax"), "LookaheadParams", None)
    return holder is None or not isinstance(node, holder)


def _is_chain(node: object) -> bool:
    """Whether `node` is the state of `optax.chain`, a plain tuple.

    Users write plain tuples, too: `(params, opt_state)`. So each entry must be a named
    tuple or a chain, one at least be Optax's, and none look like the parameters, which
    have the structure of the moments.
    """
    if type(node) is not tuple:
        return False
    known = [entry for entry in node if _is_of_optax(entry) or _is_chain(entry)]
    others = [entry for entry in node if not any(entry is each for each in known)]
    named = [entry for entry in others if _is_named_tuple(entry)]
    empty = [entry for entry in others if entry is None or type(entry) is tuple]
    if not known or len(named) + len(empty) < len(others) or any(empty):
        return False
    moments = {jax.tree.structure(field) for field in _fields(known)}
    return not any(jax.tree.structure(entry) in moments for entry in named)


def _fields(tree: PyTree) -> Iterator[PyTree]:
    """All fields of the named tuples in `tree`, at any depth."""
    for node in jax.tree.leaves(tree, is_leaf=_is_named_tuple):
        for field in node if _is_named_tuple(node) else ():
            yield field
            yield from _fields(field)


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_optimizer_variable(node: object) -> bool:
    """Whether `node` is a variable of Flax NNX that an optimizer keeps its state in."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.OptState)


def _is_train_state(node: object) -> bool:
    module = sys.modules.get("flax.training.train_state")
    return module is not None and isinstance(node, module.TrainState)


def sharding_of(
    path: str, leaf: Leaf | Shaped, is_optimizer: bool, replicas: Replicas
) -> NamedSharding:
    """The sharding of an array that is equal on all replicas."""
    chosen = replicas.state_sharding
    if chosen is None or not hasattr(leaf, "dtype"):
        return sharding_like(leaf, replicas)
    if chosen.shard == "optimizer" and not is_optimizer:
        is_divided = _arrays.is_placed(leaf) and replicas.dimension_of(leaf) is not None
        if not is_divided:
            return sharding_like(leaf, replicas)
    division = replicas.division(path, leaf, inner_dimensions(leaf, replicas))
    return sharding_like(leaf, replicas, sharded_along(division.dimension))


def shardings_of(
    tree: PyTree, replicas: Replicas
) -> list[tuple[KeyPath, Leaf, NamedSharding]]:
    """The path, leaf and sharding of each leaf of `tree`."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=per_replica.is_per_replica)
    if replicas.state_sharding is None and not replicas.inner_axes:
        whole = replicas.sharding(REPLICATED)
        return [(path, leaf, whole) for path, leaf in leaves]
    flags = optimizer_leaves(tree, per_replica.is_per_replica)
    return [
        (path, leaf, sharding_of(jax.tree_util.keystr(path), leaf, flag, replicas))
        for (path, leaf), flag in zip(leaves, flags, strict=True)
    ]


def stack(
    versions: Sequence[PyTree],
    replicas: Replicas,
    what: str = "value",
    is_local: bool = False,
) -> PyTree:
    """Per-replica trees as one tree of `PerReplica` leaves, each on its device.

    Nested lists of numbers are arrays. If `is_local`, the versions are only of this
    process's replicas, and one replica's version becomes an array of shape `[...]`.
    """
    count = len(replicas.local_ids) if is_local else replicas.count
    if len(versions) != count:
        raise ValueError(
            f"`{what}` has {len(versions)} versions for {count} replicas; one "
            "per replica is wanted."
        )
    paths, structure = jax.tree.flatten_with_path(versions[0], is_leaf=_is_list)
    columns = [[leaf] for _, leaf in paths]
    for replica_id, version in enumerate(versions[1:], start=1):
        leaves, other = jax.tree.flatten(version, is_leaf=_is_list)
        if other != structure:
            raise ValueError(
                f"`{what}` has another structure on replica {replica_id} than on "
                f"replica 0: {other} instead of {structure}."
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.append(leaf)
    labels = [f"{what}{jax.tree_util.keystr(path)}" for path, _ in paths]
    labeled = zip(columns, labels, strict=True)
    if is_local and replicas.count == 1:
        placed = [
            replicate_leaf(array, sharding_like(array, replicas))
            for column, label in labeled
            for array in [_arrays.as_array(column[0], label)]
        ]
    else:
        placed = [
            _stack_leaf(column, replicas, is_local, label) for column, label in labeled
        ]
    return jax.tree.unflatten(structure, placed)


def _is_list(node: object) -> bool:
    return isinstance(node, list)  # of numbers: the data of an array


def _stack_leaf(
    column: list[Value], replicas: Replicas, is_local: bool, what: str
) -> PerReplica:
    arrays = [_arrays.as_array(value, what) for value in column]
    kinds = {(array.shape, array.dtype) for array in arrays}
    if len(kinds) > 1:
        seen = ", ".join(array_type(array.dtype, array.shape) for array in arrays)
        raise ValueError(
            f"`{what}` differs in shape or dtype between replicas: {seen}. One "
            "program runs on all replicas, so all versions need one shape and dtype."
        )
    if any(isinstance(array, Tracer) for array in arrays) or _arrays.is_staged():
        if len(arrays) < replicas.count:  # each process would trace another program
            raise TracedValueError(
                f"`{what}` has versions of this process's replicas only, and JAX "
                "traces the function that makes them (`jax.jit`, `jax.grad`, "
                "`jax.lax.scan`), which must be one for all processes. Make them "
                "outside, and pass them as an argument, or use `strategy.per_replica` "
                "with the versions of all replicas."
            )
        stacked = jnp.stack(arrays)
        return PerReplica(mesh.place(stacked, replicas.sharding(STACKED)))
    if not is_local:
        arrays = [arrays[i] for i in replicas.local_ids]
    return PerReplica(replicas.stacked(arrays))


def place_stacked(value: Value, replicas: Replicas, what: str = "value") -> PerReplica:
    """An array of shape `[replica, ...]` as a `PerReplica` on their devices."""
    array = _arrays.as_array(value, what)
    check_stacked(array, replicas.count, what)
    return PerReplica(mesh.place(array, sharding_like(array, replicas, STACKED)))


def equal_versions(array: jax.Array, replicas: Replicas) -> PerReplica:
    """An array that all replicas have, as a `PerReplica`, without communication."""

    def stacked(array: jax.Array) -> jax.Array:
        return jnp.broadcast_to(array[None], (replicas.count, *array.shape))

    inner = inner_axes.of_stacked(inner_axes.inner_spec(array, replicas))
    where = inner_axes.with_inner(inner, replicas, STACKED)
    return PerReplica(jax.jit(stacked, out_shardings=where)(array))


def check_stacked(array: Value, num_replicas: int, what: str) -> None:
    """Raise unless the first dimension of `array` counts the replicas."""
    shape = np.shape(array)
    if not shape or shape[0] != num_replicas:
        raise ValueError(
            f"`{what}` has shape {shape}; its first dimension should be the number of "
            f"replicas, {num_replicas}. To give one version per replica write a list, "
            "`strategy.per_replica([v0, v1, ...])`."
        )


def replicate(tree: PyTree, replicas: Replicas) -> PyTree:
    """`tree` with every array and number replicated, or sharded as state is.

    Other leaves (strings, bools, functions) stay as they are.
    """
    placed = []
    for path, leaf, sharding in shardings_of(tree, replicas):
        what = f"`tree{jax.tree_util.keystr(path)}`"
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"{what} is a PerReplica: its versions may differ, so it cannot be "
                "mirrored as it is. Use `strategy.reduce('mean', value)` to make one "
                "value of it first."
            )
        is_placed = is_value(leaf)
        placed.append(replicate_leaf(leaf, sharding, what) if is_placed else leaf)
    structure = jax.tree.structure(tree, is_leaf=per_replica.is_per_replica)
    return jax.tree.unflatten(structure, placed)


def is_value(leaf: object) -> bool:
    """Whether a leaf is an array or a number, not a bool."""
    if isinstance(leaf, bool):
        return False
    return _arrays.is_array(leaf) or isinstance(leaf, (int, float, complex))


def replicate_leaf(leaf: Leaf, sharding: Sharding, what: str = "A value") -> jax.Array:
    """An array or a number of the first process, placed on all."""
    _arrays.check_alive(leaf, what)
    if _arrays.is_placed(leaf) and _may_share(leaf, sharding):
        # A copy, because a device that has the array would share its memory, and
        # donating one would delete the other.
        leaf = jnp.copy(leaf)
    return mesh.broadcast(leaf, sharding)


def _may_share(array: jax.Array, sharding: Sharding) -> bool:
    """Whether `array`, moved to `sharding`, may share memory with what it is now."""
    if mesh.has_sharding(array, sharding):
        return False  # it is not moved
    # Shards of another shape are always new, so a large array is not copied whole.
    return array.sharding.shard_shape(array.shape) == sharding.shard_shape(array.shape)
