"""How one strategy reduces: its operations and options, on its replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from jaxstrategy._options import CommunicationOptions, ReduceOp
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._context import (
    AbstractReduction,
    AbstractStrategy,
)
from jaxstrategy.reductions._all_reduce import Axes, checked
from jaxstrategy.reductions._cross_device_ops import (
    CrossDeviceOps,
    PlannedOps,
    checked_ops,
)
from jaxstrategy.reductions._gather import all_gather
from jaxstrategy.reductions._sparse import reduce_slices
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas import _mesh
from jaxstrategy.strategies._reducers import gatherer, reducer
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PyTree
from jaxstrategy.values._slices import is_slices


@final
class Reduction(AbstractReduction):
    """What a strategy does with the replicas' versions of something.

    Args:
      strategy: whose replicas they are.
      ops: the operations, by default ours.
      options: the same, in more detail.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self._strategy = strategy
        self._axes: Axes = () if strategy.is_default else (_mesh.REPLICA_AXIS,)
        self.ops = checked_ops(ops)
        self.options = options
        # Made when it is needed: a strategy can be made before the devices are.
        self._plan: Any = None
        if isinstance(self.ops, PlannedOps) and not strategy.is_default:
            self._plan = self._planned()
        # One function for each way to reduce, so that each is compiled once.
        self._of_tree: dict[Any, Callable[[PyTree], PyTree]] = {}

    def of_tree(
        self,
        op: ReduceOp,
        axis: tuple[int, ...] | None,
        options: CommunicationOptions | None,
        is_weighted: bool,
    ) -> Callable[[PyTree], PyTree]:
        """A function of one replica's tree, the same one each time.

        If it is weighted, of a pair of the tree and the weights.
        """
        key = op, axis, options, is_weighted
        if key not in self._of_tree:
            of_leaves = functools.partial(self.of_leaves, options=options)
            self._of_tree[key] = reducer(op, axis, is_weighted, of_leaves)
        return self._of_tree[key]

    def of_gathered(self, axis: int, in_step: bool) -> Callable[[PyTree], PyTree]:
        """A function of one replica's tree that joins all replicas' along `axis`."""
        key = "gather", axis, in_step
        if key not in self._of_tree:
            self._of_tree[key] = gatherer(axis, self.gathered, in_step)
        return self._of_tree[key]

    def gathered(self, leaf: Any, axis: int) -> jax.Array:
        """Every replica's array, joined along `axis` in replica order."""
        return all_gather(leaf, axis, self._axes)

    def first(self, leaf: Any) -> jax.Array:
        """The array of the first replica."""
        return self.gathered(_mesh.array_of(leaf)[None], 0)[0]

    def of_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Any]:
        """This replica's arrays reduced over all, or over its group, inside a step."""
        results = list(leaves)
        dense = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
        for i, leaf in enumerate(leaves):
            if is_slices(leaf):
                results[i] = self._of_slices(op, leaf, groups)
        reduced = self._of_dense(op, [leaves[i] for i in dense], options, groups)
        for i, result in zip(dense, reduced, strict=True):
            results[i] = result
        return results

    def _of_slices(self, op: ReduceOp, leaf: Any, groups: Groups | None) -> Any:
        if groups is not None:
            raise ValueError(
                "`groups` was given for IndexedSlices, whose rows go to all replicas. "
                "Reduce `slices.to_dense()` instead."
            )
        n = self._strategy.num_replicas_in_sync
        return reduce_slices(op, leaf, self._axes, n)

    def _of_dense(
        self,
        op: ReduceOp,
        leaves: list[Any],
        options: CommunicationOptions | None,
        groups: Groups | None,
    ) -> list[Any]:
        if isinstance(self.ops, PlannedOps):
            self._plan = self._plan or self._planned()
            plan = self._plan.with_options(options).within(groups)
            return plan.reduce(op, leaves, self._axes)
        if groups is not None:
            raise ValueError(
                f"`groups` was given, but {type(self.ops).__name__} reduces over all "
                "replicas. Use a strategy with one of jaxstrategy's own cross-device "
                "operations."
            )
        replicas = self._strategy.replicas
        pairs = [
            (_per_replica.from_local(checked(op, leaf), replicas), self._strategy)
            for leaf in leaves
        ]
        with _context.entered(strategy=self._strategy, replica=None, in_step=True):
            results = self.ops.batch_reduce(op, pairs, options or self.options)
        if len(results) != len(pairs):
            raise ValueError(
                f"{type(self.ops).__name__} returned {len(results)} results for "
                f"{len(pairs)} values. `batch_reduce_implementation` must return one "
                "for each pair, in order."
            )
        return results

    def _planned(self) -> Any:
        assert isinstance(self.ops, PlannedOps)
        return self.ops.plan(self._strategy.devices).with_options(self.options)
