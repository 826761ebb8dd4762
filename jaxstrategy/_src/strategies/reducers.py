"""Reductions over versions that a host holds, gathers, and `assert_in_sync`."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy._src import masks
from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.errors import (
    DonatedValueError,
    OutOfSyncError,
    PlacementError,
    TracedValueError,
)
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.fingerprint import fingerprints, groups
from jaxstrategy._src.reductions.operations import (
    OPERATIONS,
    checked_axis,
    reduced_over,
    sums,
)
from jaxstrategy._src.reductions.reduction import (
    EagerReduction,
    LocalReduction,
    Reduction,
)
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import inner_spec, of_versions, with_inner
from jaxstrategy._src.replicas.replica_placements import (
    SAME,
)
from jaxstrategy._src.replicas.replicas import (
    Replicas,
)
from jaxstrategy._src.text.shown import several_whole, whole
from jaxstrategy._src.tracing.stages import stages
from jaxstrategy._src.values import arrays as _arrays, per_replica, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices

Groups: TypeAlias = list[list[int]]
"""The places of the leaves of each type, in order."""


def equal_parts(types: Sequence[Hashable], most: int) -> list[list[int]]:
    """The places of leaves in parts, of which most have the same types in one order.

    So one program does for all of these, however many there are. Each leaf is in one
    part. The parts follow from the types alone, so that all processes of a job find
    the same.

    >>> equal_parts(["weight", "bias"] * 4, most=4)
    [[0, 2, 1, 3], [4, 6, 5, 7]]
    >>> equal_parts(["weight", "bias"] * 4 + ["scale"], most=4)
    [[0, 1], [2, 3], [4, 5], [6, 7, 8]]
    """
    found: dict[Hashable, list[int]] = {}
    for place, kind in enumerate(types):
        found.setdefault(kind, []).append(place)
    groups, parts = list(found.values()), []
    while groups:
        alike = _alike(groups, most)
        parts += alike or _in_order(groups, most)
        groups = _left(groups, len(alike)) if alike else []
    return parts


def _alike(groups: Groups, most: int) -> list[list[int]]:
    """Parts with equally many leaves of each type, as few as there can be."""
    count = -(-sum(map(len, groups)) // most)
    shares = [(group, len(group) // count) for group in groups]
    parts = [
        [
            place
            for group, each in shares
            for place in group[at * each : (at + 1) * each]
        ]
        for at in range(count)
    ]
    return parts if parts[0] else []


def _left(groups: Groups, count: int) -> Groups:
    """What so many parts that are alike leave of each type."""
    left = [group[len(group) // count * count :] for group in groups]
    return [group for group in left if group]


def _in_order(groups: Groups, most: int) -> Iterator[list[int]]:
    """Parts of about one size, of types of which there are too few for all."""
    places = [place for group in groups for place in group]
    count = -(-len(places) // most)
    size = -(-len(places) // count)
    return (places[at : at + size] for at in range(0, len(places), size))


# XLA takes longer than in proportion to compile many arrays at once: a sum of 125, 500
# and 2,000 written by hand takes 0.3, 1.6 and 13 s of processor time, of 10,000 over 10
# minutes.
_AT_ONCE = 128
# XLA compiles a kernel for each type of array that it cuts out of joined ones, in 20 ms
# of processor time. On eight CPU devices a collective less saves 0.15 ms of a call.
_FEW = 4


def in_parts(
    function: Callable[[PyTree], PyTree],
    tree: PyTree,
    of_few: Callable[[PyTree], PyTree] | None = None,
) -> PyTree:
    """`function`, which gives each leaf by itself something, of `tree`."""
    # A variable is not to be read here, and an object not to be looked into.
    trees.object_kinds()
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_leaf)
    if len(leaves) <= _AT_ONCE or any(map(trees.is_object, leaves)):
        return function(tree)
    types = [_type_of(leaf) for leaf in leaves]
    results: list[Leaf] = [None] * len(leaves)
    try:
        for works, places in _by_number(function, types, of_few):
            for part in equal_parts([types[place] for place in places], _AT_ONCE):
                chosen = [places[each] for each in part]
                done = works([leaves[place] for place in chosen])
                for place, result in zip(chosen, done, strict=True):
                    results[place] = result
    except (TypeError, ValueError, DonatedValueError):
        return function(tree)  # its errors name leaves by their place in it
    return jax.tree.unflatten(treedef, results)


def _is_leaf(node: object) -> bool:
    return trees.is_whole(node) or is_slices(node) or trees.is_object(node)


def _type_of(leaf: Leaf) -> Hashable:
    """Equal for leaves that programs take for each other."""
    if isinstance(leaf, IndexedSlices):
        return _type_of(leaf.values), _type_of(leaf.indices), leaf.dense_shape
    array = per_replica.contents(leaf) if isinstance(leaf, PerReplica) else leaf
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    return type(leaf), shape if isinstance(shape, tuple) else None, str(dtype)


Works = Callable[[PyTree], PyTree]


def _by_number(
    function: Works, types: Sequence[Hashable], of_few: Works | None
) -> list[tuple[Works, Sequence[int]]]:
    """The function for each leaf, with the places of its leaves."""
    if of_few is None:
        return [(function, range(len(types)))]
    count = collections.Counter(types)
    common = [place for place, kind in enumerate(types) if count[kind] >= _FEW]
    rare = [place for place, kind in enumerate(types) if count[kind] < _FEW]
    return [(function, common), (of_few, rare)]


# A larger version stays on its device: each is copied to all devices of the process.
_SMALL_BYTES = 65536


def local_versions(
    values: Sequence[PerReplica], replicas: Replicas
) -> list[tuple[jax.Array, ...]]:
    """Of each value the versions of this process's replicas, only their real rows."""
    own = _own(replicas)
    small = [i for i, value in enumerate(values) if _is_brought(value, own)]
    brought = in_parts(
        functools.partial(_everywhere, own=own), [values[i] for i in small]
    )
    everywhere = dict(zip(small, brought, strict=True))
    if any(isinstance(value.mask, Tracer) for value in values):
        masks.warn_of_traced("experimental_local_results")
        return [value.values for value in values]
    return [
        masks.real_versions(value, everywhere[i] if i in everywhere else value.values)
        for i, value in enumerate(values)
    ]


@functools.lru_cache(maxsize=64)
def _own(replicas: Replicas) -> Replicas:
    """The replicas of this process, by themselves."""
    if replicas.are_all_own:
        return replicas
    first, last = replicas.own[0], replicas.own[-1]
    devices = [
        device for i in range(first, last + 1) for device in replicas.devices_of(i)
    ]
    return Replicas.on(
        list(dict.fromkeys(devices)),
        logical_axes=replicas.inner_sizes,
        per_device=replicas.per_device,
    )


def _is_brought(value: PerReplica, own: Replicas) -> bool:
    """Whether the versions are small, and each lies on a device of `own`."""
    array = per_replica.contents(value)
    _arrays.check_alive(array, "A PerReplica")
    if own.count == 1 or not _arrays.is_placed(array) or not array.shape:
        return False
    bytes_each = int(np.prod(array.shape[1:])) * array.dtype.itemsize
    devices = array.sharding.addressable_devices
    return (
        bytes_each <= _SMALL_BYTES
        and Replicas.dividing(array) is not None
        and devices == own.all_devices
    )


def _everywhere(
    values: Sequence[PerReplica], own: Replicas
) -> tuple[tuple[jax.Array, ...], ...]:
    """The versions of each value, whole on each replica of `own`."""
    if not values:
        return ()
    stacked = [_own_part(value.stacked, own) for value in values]
    specs = [of_versions(inner_spec(array, own)) for array in stacked]
    versions = _unstacked(tuple(with_inner(spec, own) for spec in specs))(stacked)
    if stages.needed(own.devices):
        stages.dispatched(versions[0][0])
    return versions


def _own_part(array: jax.Array, own: Replicas) -> jax.Array:
    """The part of a stacked array that this process has, as one of its own."""
    if array.is_fully_addressable:
        return array
    replicas = Replicas.dividing(array)
    assert replicas is not None, "`_is_brought` has asked"
    return own.stacked(replicas.versions(array))


@functools.lru_cache(maxsize=64)
def _unstacked(shardings: tuple[NamedSharding, ...]) -> Function:
    def unstack(arrays: list[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        return tuple(tuple(array[i] for i in range(len(array))) for array in arrays)

    return jax.jit(unstack, out_shardings=shardings)


def dimensions(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """The dimensions that `axis` names, None for none."""
    if axis is None:
        return None
    one = whole(axis)
    dimensions = several_whole(axis if one is None else (one,))
    if dimensions is None:
        raise TypeError(
            f"`axis` was {axis!r}; None, a whole number or several were wanted."
        )
    return dimensions


class TreeFunctions:
    """One function object for each way to reduce or gather, so that each compiles once.

    Args:
      reduction: how arrays are combined.
    """

    def __init__(self, reduction: Reduction | LocalReduction | EagerReduction) -> None:
        self._reduction = reduction
        self._known: dict[Hashable, Callable[[PyTree], PyTree]] = {}

    def reducing(
        self,
        op: ReduceOp,
        axis: tuple[int, ...] | None,
        options: CommunicationOptions | None,
        is_weighted: bool,
        alone: bool = False,
    ) -> Callable[[PyTree], PyTree]:
        """A function that reduces a tree; if weighted, a pair of it and weights."""
        key = op, axis, options, is_weighted, alone
        if key not in self._known:
            reduction = self._reduction.alone() if alone else self._reduction
            leaves = functools.partial(reduction.reduce_leaves, options=options)
            self._known[key] = _reducer(op, axis, is_weighted, leaves)
        return self._known[key]

    def gathering(self, axis: int, in_step: bool) -> Callable[[PyTree], PyTree]:
        """A function that joins all replicas' trees along `axis`."""
        # Checked before it is looked up: True is found under 1, and a list is not.
        dimension = checked_axis(axis)
        key = dimension, in_step
        if key not in self._known:
            self._known[key] = _gatherer(dimension, self._reduction.gathered, in_step)
        return self._known[key]

    @functools.cached_property
    def fingerprinting(self) -> Callable[[PyTree], jax.Array]:
        """A function from a tree to its fingerprints, `[replicas, arrays, 2]`."""

        def fingerprints_of(tree: PyTree) -> jax.Array:
            return fingerprints(tree, self._reduction.gathered)

        return fingerprints_of


def _reducer(
    op: ReduceOp,
    axis: tuple[int, ...] | None,
    is_weighted: bool,
    reduce_leaves: Callable[[ReduceOp, list[Leaf]], list[Leaf]],
) -> Callable[[PyTree], PyTree]:
    """Reduces a replica's tree over `axis`, and then over all replicas.

    If it is weighted, the tree is a pair: what is reduced, and the weights.
    """

    def reduce(tree: PyTree) -> PyTree:
        tree, weights = tree if is_weighted else (tree, None)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
        plain: dict[int, Leaf] = {}
        weighted: dict[int, tuple[jax.Array, jax.Array]] = {}
        for i, leaf in enumerate(leaves):
            own = _weights(leaf, weights, op, axis)
            if own is not None:
                weighted[i] = _sums(leaf, own, axis)
            else:
                plain[i] = leaf if axis is None else reduced_over(op, leaf, axis)
        pairs = [each for pair in weighted.values() for each in pair]
        found = iter(reduce_leaves(ReduceOp.SUM, pairs) if pairs else ())
        results = dict(zip(plain, reduce_leaves(op, list(plain.values())), strict=True))
        for i in weighted:
            total, count = next(found), next(found)
            results[i] = total / count if OPERATIONS[op].divides else total
        return jax.tree.unflatten(treedef, [results[i] for i in range(len(leaves))])

    return reduce


def _weights(
    leaf: Leaf, weights: Leaf, op: ReduceOp, axis: tuple[int, ...] | None
) -> jax.Array | None:
    """The weights of the entries of `leaf`; None if each counts 1.

    Rows of a batch that are not real weigh nothing where rows are reduced.
    """
    is_over_rows = axis is not None and (0 in axis or -jnp.ndim(leaf) in axis)
    if weights is None:
        if not is_over_rows:
            return None
        if OPERATIONS[op].is_sum:
            return masks.of_argument(leaf)
        masks.not_needed()  # copies of real rows leave extremes as they are
        return None
    if not OPERATIONS[op].is_sum:
        raise ValueError(
            f"`weights` were given for {op.name}, which has none; only {sums()} have."
        )
    given, weights = weights, mesh.array_of(weights)
    shape, wanted = weights.shape, jnp.shape(leaf)
    if shape != wanted[: len(shape)]:
        raise ValueError(
            f"`weights` have shape {shape} on each replica, and a value has {wanted}; "
            "its first dimensions, all or some, were wanted."
        )
    for each in (leaf, given) if is_over_rows else ():
        if (mask := masks.of_argument(each)) is not None:
            weights = _of_real_rows(weights, mask)
    return weights


def _of_real_rows(weights: jax.Array, mask: jax.Array) -> jax.Array:
    """`weights`, `[]` or `[rows, ...]`, as 0 in rows that are not real."""
    along = mask.reshape(mask.shape + (1,) * (weights.ndim - 1))
    return jnp.where(along, weights, jnp.zeros((), weights.dtype))


def _sums(
    leaf: Leaf, weights: jax.Array, axis: tuple[int, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum, and that of the weights."""
    leaf = mesh.array_of(leaf)
    along = weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim))
    # What has no weight has no influence, not even NaN.
    kept = jnp.where(along != 0, leaf * along, jnp.zeros((), leaf.dtype))
    along = jnp.broadcast_to(along, leaf.shape)
    if along.dtype == bool:
        along = along.astype(jnp.int32)
    over = () if axis is None else axis
    return (
        reduced_over(ReduceOp.SUM, kept, over),
        reduced_over(ReduceOp.SUM, along, over),
    )


def _gatherer(
    axis: int, gathered: Callable[[Leaf, int], jax.Array], in_step: bool
) -> Callable[[PyTree], PyTree]:
    """Joins all replicas' trees along `axis`.

    Outside a step rows that only fill up a batch are left out afterwards. Inside one
    shapes are static, and they stay.
    """

    def gather(tree: PyTree) -> PyTree:
        leaves = jax.tree.leaves(tree)
        if in_step:
            masks.keeps_rows(leaves)
        elif all(masks.is_of_rows(axis, leaf) for leaf in leaves):
            masks.not_needed()
        return jax.tree.map(lambda leaf: gathered(leaf, axis), tree)

    return gather


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
        _arrays.check_alive(leaf, where)
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
