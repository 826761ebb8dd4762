"""What a strategy does across replicas: reduce, gather, read, compare versions."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy._src import masks
from jaxstrategy._src.errors import (
    DonatedValueError,
    PlacementError,
    TracedValueError,
)
from jaxstrategy._src.options import CommunicationOptions, ReduceOp
from jaxstrategy._src.reductions.compression import CompressionState, initial_state
from jaxstrategy._src.reductions.fingerprint import groups
from jaxstrategy._src.reductions.operations import (
    OPERATIONS,
    reduced_over,
    sums,
)
from jaxstrategy._src.reductions.reduction import HowReduced
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import (
    WHOLE,
    inner_spec,
    of_stacked,
    of_versions,
    replicas_with,
    with_inner,
)
from jaxstrategy._src.replicas.replicas import REPLICATED, STACKED, Replicas
from jaxstrategy._src.text import several_whole, whole
from jaxstrategy._src.tracing import step_arguments
from jaxstrategy._src.values import arrays as _arrays, building, per_replica, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree, TreeFunction
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, Versions, is_slices
from jaxstrategy._src.variables import access

Column: TypeAlias = tuple[Leaf, ...]
"""The versions of one leaf that some replicas have."""

_LEAF = jax.tree.structure(0)


def local_results(
    value: PyTree, replicas: Replicas, in_step: bool
) -> tuple[PyTree, ...]:
    """The version of each replica of this process; in a step that of all."""
    leaves, treedef = jax.tree.flatten(value, is_leaf=trees.is_whole)
    if isinstance(value, Versions):
        return value.values
    if treedef == _LEAF and not isinstance(value, (PerReplica, Handle, jax.Array)):
        return (value,)
    if value is None:
        return (None,)
    columns = _columns(leaves, replicas, in_step)
    if treedef == _LEAF:
        return columns[0]
    n = _count(replicas, in_step)
    columns = [column * n if len(column) == 1 else column for column in columns]
    return tuple(
        jax.tree.unflatten(treedef, [column[i] for column in columns]) for i in range(n)
    )


def _count(replicas: Replicas, in_step: bool) -> int:
    return replicas.count if in_step else len(replicas.local_ids)


def _columns(leaves: Sequence[Leaf], replicas: Replicas, in_step: bool) -> list[Column]:
    """For each leaf the versions of this process's replicas, in a step of all."""
    n = _count(replicas, in_step)
    values = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
    if in_step:
        versions = iter([value.values for value in values])
    else:
        versions = iter(_local_versions(values, replicas))
    return [
        _checked_number(next(versions), n)
        if isinstance(leaf, PerReplica)
        else _components(leaf, replicas, in_step)
        if isinstance(leaf, Handle)
        else leaf.values
        if isinstance(leaf, Versions)
        else _copies(leaf, n, replicas, in_step)
        for leaf in leaves
    ]


def _components(variable: Handle, replicas: Replicas, in_step: bool) -> Column:
    """The copies of a variable, as separate array objects."""

    def divide(contents: PyTree) -> Column:
        (copies,) = _columns([contents], replicas, in_step)
        # Else all copies were one object, and that the one the variable has.
        is_shared = not in_step and not isinstance(contents, PerReplica)
        return tuple(map(mesh.twin, copies)) if is_shared else copies

    return access.copies_of(variable, variable.distributed(), divide)


def _copies(leaf: Leaf, n: int, replicas: Replicas, in_step: bool) -> Column:
    """The copies that `n` replicas hold of a leaf that is no `PerReplica`."""
    _arrays.check_alive(leaf, "An array")
    if in_step and isinstance(leaf, jax.Array) and n > 1:
        # Captured by the merge function: it may well differ between replicas.
        return per_replica.from_local(leaf, replicas).values
    if _arrays.is_mirrored(leaf):  # a variable of central storage has one copy
        is_ours = replicas.inner_placement(leaf, REPLICATED) is not None
        holders = replicas if is_ours else replicas_with(leaf.sharding)
        assert holders is not None, "it is mirrored"
        return (leaf,) * len(holders.local_ids)
    return (leaf,) * n


def _checked_number(versions: Column, n: int) -> Column:
    if len(versions) != n:
        raise ValueError(
            f"A PerReplica with {len(versions)} versions was given to a strategy with "
            f"{n} replicas here."
        )
    return versions


def equal_parts(types: Sequence[Hashable], most: int) -> list[list[int]]:
    """Divides the positions of leaves into parts, most with the same types in order.

    So one program does for all of these, however many there are. The parts follow from
    the types alone, so that all processes of a job find the same.

    >>> equal_parts(["weight", "bias"] * 4, most=4)
    [[0, 2, 1, 3], [4, 6, 5, 7]]
    >>> equal_parts(["weight", "bias"] * 4 + ["scale"], most=4)
    [[0, 1], [2, 3], [4, 5], [6, 7, 8]]
    """
    by_type: dict[Hashable, list[int]] = {}
    for position, kind in enumerate(types):
        by_type.setdefault(kind, []).append(position)
    groups, parts = list(by_type.values()), []
    while groups:
        count = -(-sum(map(len, groups)) // most)
        # As few parts as there can be, with equally many leaves of each type.
        shares = [len(group) // count for group in groups]
        if any(shares):
            for start in range(count):
                pairs = zip(groups, shares, strict=True)
                part = [g[start * n : (start + 1) * n] for g, n in pairs]
                parts.append([position for each in part for position in each])
            pairs = zip(groups, shares, strict=True)
            groups = [rest for group, n in pairs if (rest := group[n * count :])]
        else:  # too few of each type: parts of about one size
            positions = [position for group in groups for position in group]
            size = -(-len(positions) // count)
            parts += [
                positions[start : start + size]
                for start in range(0, len(positions), size)
            ]
            groups = []
    return parts


# XLA takes longer than in proportion to compile many arrays at once: a sum of 125, 500
# and 2,000 written by hand takes 0.3, 1.6 and 13 s of processor time, of 10,000 over 10
# minutes.
_AT_ONCE = 128
# XLA compiles a kernel for each type of array that it cuts out of joined ones, in 20 ms
# of processor time: the first sum of 500 arrays of as many types takes 7 s, not 1.4, if
# they are joined. On eight CPU devices a collective less saves 0.15 ms of a call.
_FEW = 4


def in_parts(
    function: TreeFunction, tree: PyTree, for_rare: TreeFunction | None = None
) -> PyTree:
    """Maps a function of trees over a wide tree in parts, to bound compile times.

    `for_rare`, if given, is applied to leaves whose type occurs only a few times.
    """
    # A variable is not to be read here, and an object not to be looked into.
    trees.object_kinds()
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_leaf)
    if len(leaves) <= _AT_ONCE or any(map(trees.is_object, leaves)):
        return function(tree)
    types = [_type_of(leaf) for leaf in leaves]
    work: list[tuple[TreeFunction, Sequence[int]]] = [(function, range(len(types)))]
    if for_rare is not None:
        count = collections.Counter(types)
        common = [i for i, kind in enumerate(types) if count[kind] >= _FEW]
        rare = [i for i, kind in enumerate(types) if count[kind] < _FEW]
        work = [(function, common), (for_rare, rare)]
    results: list[Leaf] = [None] * len(leaves)
    try:
        for apply, indices in work:
            for part in equal_parts([types[i] for i in indices], _AT_ONCE):
                chosen = [indices[i] for i in part]
                done = apply([leaves[i] for i in chosen])
                for i, result in zip(chosen, done, strict=True):
                    results[i] = result
    except (TypeError, ValueError, DonatedValueError):
        return function(tree)  # its errors name leaves by their place in it
    return jax.tree.unflatten(treedef, results)


def _is_leaf(node: object) -> bool:
    return trees.is_whole(node) or is_slices(node) or trees.is_object(node)


def _type_of(leaf: Leaf) -> Hashable:
    """The type of a leaf, as far as compiled programs depend on it."""
    if isinstance(leaf, IndexedSlices):
        return _type_of(leaf.values), _type_of(leaf.indices), leaf.dense_shape
    array = per_replica.contents(leaf) if isinstance(leaf, PerReplica) else leaf
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    return type(leaf), shape if isinstance(shape, tuple) else None, str(dtype)


# A larger version stays on its device: each is copied to all devices of the process.
_SMALL_BYTES = 65536


def _local_versions(
    values: Sequence[PerReplica], replicas: Replicas
) -> list[tuple[jax.Array, ...]]:
    """For each value the versions of this process's replicas, without padded rows."""
    local = _local_replicas(replicas)
    small = [i for i, value in enumerate(values) if _is_small(value, local)]
    copied = in_parts(
        functools.partial(_everywhere, local=local), [values[i] for i in small]
    )
    everywhere = dict(zip(small, copied, strict=True))
    if any(isinstance(value.mask, Tracer) for value in values):
        masks.warn_of_traced("experimental_local_results")
        return [value.values for value in values]
    return [
        masks.real_versions(value, everywhere[i] if i in everywhere else value.values)
        for i, value in enumerate(values)
    ]


@functools.lru_cache(maxsize=64)
def _local_replicas(replicas: Replicas) -> Replicas:
    """The replicas of this process, on a mesh of their own."""
    if replicas.are_all_local:
        return replicas
    groups = map(replicas.devices_of, replicas.local_ids)
    return Replicas.on(
        list(dict.fromkeys(device for group in groups for device in group)),
        logical_axes=replicas.inner_sizes,
        per_device=replicas.per_device,
    )


def _is_small(value: PerReplica, local: Replicas) -> bool:
    """Whether its versions are to be copied to all devices of this process."""
    array = per_replica.contents(value)
    _arrays.check_alive(array, "A PerReplica")
    if local.count == 1 or not _arrays.is_placed(array) or not array.shape:
        return False
    version_bytes = int(np.prod(array.shape[1:])) * array.dtype.itemsize
    return (
        version_bytes <= _SMALL_BYTES
        and Replicas.dividing(array) is not None
        and array.sharding.addressable_devices == local.all_devices
    )


def _everywhere(
    values: Sequence[PerReplica], local: Replicas
) -> tuple[tuple[jax.Array, ...], ...]:
    """The versions of each value, each copied to all devices of this process."""
    if not values:
        return ()
    stacked = []
    for value in values:
        array = value.stacked
        if not array.is_fully_addressable:
            replicas = Replicas.dividing(array)
            assert replicas is not None, "`_is_small` has asked"
            array = local.stacked(replicas.versions(array))
        stacked.append(array)
    specs = [of_versions(inner_spec(array, local)) for array in stacked]
    versions = _unstacked(tuple(with_inner(spec, local) for spec in specs))(stacked)
    if step_arguments.must_count(local.devices):
        step_arguments.count_dispatch(versions[0][0])
    return versions


@functools.lru_cache(maxsize=64)
def _unstacked(shardings: tuple[NamedSharding, ...]) -> Function:
    def unstack(arrays: list[jax.Array]) -> tuple[tuple[jax.Array, ...], ...]:
        return tuple(tuple(array[i] for i in range(len(array))) for array in arrays)

    return jax.jit(unstack, out_shardings=shardings)


def dimensions(axis: int | Sequence[int]) -> tuple[int, ...]:
    one = whole(axis)
    found = several_whole(axis if one is None else (one,))
    if found is None:
        raise TypeError(
            f"`axis` was {axis!r}; None, a whole number or several were wanted."
        )
    return found


def reducer(
    how: HowReduced,
    axis: tuple[int, ...] | None,
    is_weighted: bool,
    reduce_leaves: Callable[[HowReduced, list[Leaf]], list[Leaf]],
) -> TreeFunction:
    """Reduces a replica's tree over `axis`, and then over all replicas.

    If it is weighted, the tree is a pair: what is reduced, and the weights.
    """

    op, as_sum = how.op, dataclasses.replace(how, op=ReduceOp.SUM)

    def reduce(tree: PyTree) -> PyTree:
        tree, weights = tree if is_weighted else (tree, None)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_slices)
        plain: dict[int, Leaf] = {}
        weighted: dict[int, tuple[jax.Array, jax.Array]] = {}
        for i, leaf in enumerate(leaves):
            leaf_weights = _weights(leaf, weights, op, axis)
            if leaf_weights is not None:
                weighted[i] = _sums(leaf, leaf_weights, axis)
            else:
                plain[i] = leaf if axis is None else reduced_over(op, leaf, axis)
        terms = [term for pair in weighted.values() for term in pair]
        totals = iter(reduce_leaves(as_sum, terms) if terms else ())
        reduced = reduce_leaves(how, list(plain.values()))
        results = dict(zip(plain, reduced, strict=True))
        for i in weighted:
            total, count = next(totals), next(totals)
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
            return masks.mask_of_argument(leaf)
        masks.ignores_padding()  # copies of real rows leave extremes as they are
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
        if (mask := masks.mask_of_argument(each)) is not None:
            along = mask.reshape(mask.shape + (1,) * (weights.ndim - 1))
            weights = jnp.where(along, weights, jnp.zeros((), weights.dtype))
    return weights


def _sums(
    leaf: Leaf, weights: jax.Array, axis: tuple[int, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum, and that of the weights."""
    leaf = mesh.array_of(leaf)
    along = weights.reshape(weights.shape + (1,) * (leaf.ndim - weights.ndim))
    # What has no weight has no influence, not even NaN.
    products = jnp.where(along != 0, leaf * along, jnp.zeros((), leaf.dtype))
    along = jnp.broadcast_to(along, leaf.shape)
    if along.dtype == bool:
        along = along.astype(jnp.int32)
    over = () if axis is None else axis
    return (
        reduced_over(ReduceOp.SUM, products, over),
        reduced_over(ReduceOp.SUM, along, over),
    )


def gatherer(
    axis: int, in_step: bool, gathered: Callable[[Leaf, int], jax.Array]
) -> TreeFunction:
    """Joins all replicas' trees along `axis`.

    Outside a step rows that only fill up a batch are left out afterwards. Inside one
    shapes are static, and they stay.
    """

    def gather(tree: PyTree) -> PyTree:
        leaves = jax.tree.leaves(tree)
        if in_step:
            masks.keeps_padding(leaves)
        elif all(masks.is_of_rows(axis, leaf) for leaf in leaves):
            masks.ignores_padding()
        return jax.tree.map(lambda leaf: gathered(leaf, axis), tree)

    return gather


def compared_copies(tree: PyTree, replicas: Replicas, name: str) -> PyTree:
    """`tree`, None for leaves without copies or versions: sharded state too."""

    def keep(path: KeyPath, leaf: Leaf) -> Leaf:
        content = per_replica.contents(leaf) if isinstance(leaf, PerReplica) else leaf
        if isinstance(content, Tracer):
            raise not_known(f"{name}{jax.tree_util.keystr(path)}")
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
        is_sharded = replicas.state_sharding is not None
        if not is_sharded or replicas.dimension_of(leaf) is None:
            in_parts = ""
            if is_sharded:
                in_parts = " and not divided over them in this order"
            raise PlacementError(
                f"{where} lies on several devices, as {leaf.sharding}, but not whole "
                f"on each of this strategy's, {replicas.device_names}{in_parts}: there "
                "are no copies to compare. Use the strategy it belongs to; if entry i "
                "belongs to replica i, pass `PerReplica(array)`."
            )
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
    if mesh.has_sharding(array, replicas.sharding(REPLICATED)):  # on whatever mesh
        return True
    return replicas.inner_placement(array, REPLICATED) is not None


def _is_divided_variable(node: object) -> bool:
    return isinstance(node, Handle) and not node.division.is_whole


def not_known(what: str) -> TracedValueError:
    return TracedValueError(
        f"`assert_in_sync` cannot look at `{what}` while JAX traces the function that "
        "calls it (`jax.jit`, `jax.grad`, `jax.lax.scan`): there are no copies to "
        "compare yet. Call it outside, between steps."
    )


def differing(
    compared: PyTree, by_replica: np.ndarray, name: str
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The paths of leaves that differ, each with the groups of replicas that agree."""
    paths, _ = jax.tree.flatten_with_path(compared, is_leaf=per_replica.is_per_replica)
    return {
        f"{name}{jax.tree_util.keystr(path)}": agreeing
        for i, (path, _) in enumerate(paths)
        if len(agreeing := groups(by_replica[:, i])) > 1
    }


def compression_state(
    params: PyTree,
    options: CommunicationOptions | None,
    replicas: Replicas,
    *,
    own: bool = False,
) -> CompressionState:
    """An empty error-feedback state, on the devices of its replicas.

    `own`: the state of one replica, as seen in a step. While a function is traced that
    builds state its arrays are placed with the rest.
    """
    state = initial_state(params, options)

    def zeros(
        like: Leaf, memory: jax.ShapeDtypeStruct | None
    ) -> jax.Array | PerReplica | None:
        if memory is None:
            return None
        if own or replicas.count == 1:
            return jnp.zeros(memory.shape, memory.dtype)
        shape = (replicas.count, *memory.shape)
        if is_traced:
            return PerReplica(jnp.zeros(shape, memory.dtype))
        inner = inner_spec(like, replicas) if memory.shape == like.shape else WHOLE
        where = with_inner(of_stacked(inner), replicas, STACKED)
        return PerReplica(jnp.zeros(shape, memory.dtype, device=where))

    is_traced = isinstance(jnp.zeros(()), Tracer)
    errors = jax.tree.map(zeros, params, state.errors, is_leaf=is_slices)
    if own or is_traced:
        return CompressionState(errors, state.bases)
    return CompressionState(errors, building.replicate(state.bases, replicas))
