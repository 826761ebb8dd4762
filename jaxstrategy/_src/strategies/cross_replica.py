"""Values of all replicas in cross-replica context: `CrossReplicaValues`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias, final

import jax
from jax.core import Tracer

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.masks import filled_rows
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_placement import replicas_with
from jaxstrategy._src.replicas.replicas import SAME
from jaxstrategy._src.strategies.in_sync import assert_in_sync
from jaxstrategy._src.strategies.local_versions import local_versions
from jaxstrategy._src.strategies.many_leaves import in_parts
from jaxstrategy._src.strategies.reducers import TreeFunctions, dimensions
from jaxstrategy._src.values import arrays, per_replica, trees
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Leaf, PyTree
from jaxstrategy._src.values.versions import Versions
from jaxstrategy._src.variables import components

Column: TypeAlias = tuple[Leaf, ...]
"""The versions of one leaf that some replicas have."""

_LEAF = jax.tree.structure(0)


@final
class CrossReplicaValues:
    """Reads, reduces, joins and compares the versions of all replicas.

    Args:
      strategy: whose replicas, and how they combine values.
      executor: runs functions on them.
    """

    def __init__(self, strategy: AbstractStrategy, executor: AbstractExecutor) -> None:
        self._strategy = strategy
        self._executor = executor
        self._functions = TreeFunctions(strategy._reduction)

    def reduced(
        self,
        op: ReduceOp,
        value: PyTree,
        axis: int | Sequence[int] | None,
        weights: PyTree | None,
        options: CommunicationOptions | None,
        in_step: bool,
    ) -> PyTree:
        """One value from all versions, leaf by leaf.

        Args:
          op: what is done with the versions.
          value: a pytree of `PerReplica`s, arrays and numbers.
          axis: the dimensions of each version over which to reduce, too.
          weights: what each entry counts; None for 1.
          options: how, instead of as the strategy does.
          in_step: whether it is part of a step that is traced.
        """
        is_weighted = weights is not None
        reducing = functools.partial(
            self._functions.reducing, op, dimensions(axis), options, is_weighted
        )

        def across(tree: PyTree, alone: bool = False) -> PyTree:
            given = (tree, weights) if is_weighted else tree
            return self._executor.across(reducing(alone), given)

        if in_step:
            return self._beside_variables(across(value))
        each_alone = functools.partial(across, alone=True)
        return self._beside_variables(in_parts(across, value, each_alone))

    def gathered(self, value: PyTree, axis: int, in_step: bool) -> PyTree:
        """All versions joined along `axis`, leaf by leaf."""
        function = self._functions.gathering(axis, in_step)
        across = functools.partial(self._executor.across, function)
        found = across(value) if in_step else in_parts(across, value)
        joined = self._beside_variables(found)
        return joined if in_step else filled_rows.without_filling(value, joined, axis)

    def assert_in_sync(self, tree: PyTree, name: str) -> None:
        """Nothing if all replicas hold the same bits of `tree`, else an error."""
        fingerprints = functools.partial(
            self._executor.across, self._functions.fingerprinting
        )
        assert_in_sync(tree, name, self._strategy._replicas, fingerprints)

    def local_results(self, value: PyTree, in_step: bool) -> tuple[PyTree, ...]:
        """The version of each replica of this process; in a step that of all."""
        leaves, treedef = jax.tree.flatten(value, is_leaf=trees.is_whole)
        if isinstance(value, Versions):
            return value.values
        if treedef == _LEAF and not isinstance(value, (PerReplica, Handle, jax.Array)):
            return (value,)
        if value is None:
            return (None,)
        columns = self._columns(leaves, in_step)
        if treedef == _LEAF:
            return columns[0]
        n = self._count(in_step)
        columns = [column * n if len(column) == 1 else column for column in columns]
        return tuple(
            jax.tree.unflatten(treedef, [column[i] for column in columns])
            for i in range(n)
        )

    def _count(self, in_step: bool) -> int:
        replicas = self._strategy._replicas
        return replicas.count if in_step else len(replicas.own)

    def _beside_variables(self, tree: PyTree) -> PyTree:
        """`tree` where mirrored variables are, so that both compute together."""
        home = self._strategy._parameter_replicas
        if home == self._strategy._replicas:
            return tree
        where = home.sharding(SAME)
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, Tracer) else mesh.place(leaf, where),
            tree,
        )

    def _columns(self, leaves: Sequence[Leaf], in_step: bool) -> list[Column]:
        """For each leaf the versions of this process's replicas, in a step of all."""
        n = self._count(in_step)
        values = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
        if in_step:
            found = iter([value.values for value in values])
        else:
            found = iter(local_versions(values, self._strategy._replicas))
        return [
            _checked_number(next(found), n)
            if isinstance(leaf, PerReplica)
            else self._components(leaf, in_step)
            if isinstance(leaf, Handle)
            else leaf.values
            if isinstance(leaf, Versions)
            else self._copies(leaf, n, in_step)
            for leaf in leaves
        ]

    def _components(self, variable: Handle, in_step: bool) -> Column:
        """The copies of a variable, each an array of its own."""

        def divide(held: PyTree) -> Column:
            (copies,) = self._columns([held], in_step)
            # Else all copies were one object, and that the one the variable has.
            is_shared = not in_step and not isinstance(held, PerReplica)
            return tuple(map(mesh.twin, copies)) if is_shared else copies

        return components.of(variable, variable.distributed(), divide)

    def _copies(self, leaf: Leaf, n: int, in_step: bool) -> Column:
        """The copies that `n` replicas hold of a leaf that is no `PerReplica`."""
        arrays.check_alive(leaf, "An array")
        if in_step and isinstance(leaf, jax.Array) and n > 1:
            # Captured by the merge function: it may well differ between replicas.
            return per_replica.from_local(leaf, self._strategy._replicas).values
        if arrays.is_mirrored(leaf):  # a variable of central storage has one copy
            replicas = self._strategy._replicas
            is_ours = replicas.inner_placement(leaf, SAME) is not None
            holders = replicas if is_ours else replicas_with(leaf.sharding)
            assert holders is not None, "it is mirrored"
            return (leaf,) * len(holders.own)
        return (leaf,) * n


def _checked_number(versions: Column, n: int) -> Column:
    if len(versions) != n:
        raise ValueError(
            f"A PerReplica with {len(versions)} versions was given to a strategy with "
            f"{n} replicas here."
        )
    return versions
