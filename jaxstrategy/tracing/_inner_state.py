"""The placement of state that is built, over the devices of each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import jax
from jax.sharding import NamedSharding
from jax.tree_util import KeyPath

from jaxstrategy.replicas._inner_placement import WHOLE, inner_spec
from jaxstrategy.replicas._inner_specs import (
    Spec,
    checked_spec,
    has_inner_axes,
    is_spec,
    sharding_by,
)
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values import _arrays, _optimizer_state, _per_replica
from jaxstrategy.values._annotations import annotated_leaves
from jaxstrategy.values._types import Leaf, PyTree


@final
class InnerState:
    """What is known of where the arrays lie that a function builds.

    Args:
      specs: what the user gave: a pytree of specs, or a prefix of the result.
      args: the arguments of the function: an array of the result whose path ends like
        that of an argument, and that has its shape, lies as that does. So moments lie
        as their parameters.
      replicas: those of the strategy.
    """

    def __init__(
        self, specs: PyTree, args: Sequence[PyTree], replicas: Replicas
    ) -> None:
        self._specs = specs
        self._replicas = replicas
        self._placed = list(_placed(args, replicas))

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be divided so, or the user wants it to be."""
        return self._specs is not None or has_inner_axes(self._replicas)

    def shardings(self, types: PyTree) -> list[NamedSharding]:
        """For each array of the result its placement, whole over the replicas.

        Args:
          types: the result, with types for arrays.

        Raises:
          TypeError: `specs` has something else than specs.
          ValueError: `specs`, or an annotation, does not fit the result.
        """
        return [sharding_by(spec, self._replicas) for spec in self._all_specs(types)]

    def typed(self, types: PyTree) -> PyTree:
        """`types`, which say how the arrays lie over the devices of a replica."""
        leaves, structure = jax.tree.flatten(types)
        if not self.is_asked:
            return types
        told = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, self.shardings(types), strict=True)
        ]
        return jax.tree.unflatten(structure, told)

    def _all_specs(self, types: PyTree) -> Iterator[Spec]:
        given = self._given(types)
        flags = _optimizer_state.optimizer_leaves(types, _per_replica.is_per_replica)
        found = annotated_leaves(types)
        for own, is_optimizer, (path, leaf, said) in zip(
            given, flags, found, strict=True
        ):
            where = f"`result{jax.tree_util.keystr(path)}`"
            if own is not None:
                what = f"The entry of `specs` for {where}"
                yield checked_spec(own, leaf.shape, self._replicas, what)
            elif said is not None and has_inner_axes(self._replicas):
                yield self._annotated(said, leaf, is_optimizer, where)
            else:
                yield self._as_argument(path, leaf)

    def _given(self, types: PyTree) -> list[Spec | None]:
        """For each array of the result what `specs` says of it."""
        leaves = jax.tree.leaves(types)
        if self._specs is None:
            return [None] * len(leaves)
        try:
            found = jax.tree.broadcast(self._specs, types, is_leaf=_is_end)
        except ValueError as error:
            raise ValueError(
                f"`specs` does not fit what the function builds: {error}\nGive a "
                "spec (`jax.P`) for all of it, or a pytree of them that has its "
                "structure, or the upper part of that; None leaves an array, or a part "
                "of the pytree, as it is annotated."
            ) from error
        return jax.tree.leaves(found, is_leaf=_is_end)

    def _annotated(
        self, said: object, leaf: Leaf, is_optimizer: bool, where: str
    ) -> Spec:
        try:
            what = f"The annotation of {where}"
            return checked_spec(said, leaf.shape, self._replicas, what)
        except ValueError:
            # A factored moment has the annotation of its parameter, but not its shape.
            if not is_optimizer:
                raise
            return WHOLE

    def _as_argument(self, path: KeyPath, leaf: Leaf) -> Spec:
        for shape, end, spec in self._placed:
            is_alike = leaf.shape == shape and len(path) >= len(end)
            if is_alike and path[len(path) - len(end) :] == end:
                return spec
        return WHOLE


def _is_end(node: object) -> bool:
    return node is None or is_spec(node)


def _placed(
    args: Sequence[PyTree], replicas: Replicas
) -> Iterator[tuple[tuple[int, ...], KeyPath, Spec]]:
    """The shapes, paths and divisions of arguments that lie over inner axes."""
    if not has_inner_axes(replicas):
        return
    for arg in args:
        for path, leaf in jax.tree.leaves_with_path(arg):
            if not _arrays.is_placed(leaf):
                continue
            if any(spec := inner_spec(leaf, replicas)):
                yield leaf.shape, path, spec
