"""A tree of very many arrays, worked on in several programs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence

import jax

from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.strategies.equal_parts import equal_parts
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.values.types import Leaf, PyTree

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
    """`function`, which gives each leaf by itself something, of `tree`.

    Args:
      function: compiled for each structure and types of arrays. If the tree has very
        many leaves, it gets lists of some, most of them alike.
      tree: a pytree.
      of_few: gives the same, and is for leaves of types of which there are few.
    """
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
