"""A strategy as its parts: `ComposedStrategy`, and what it does across replicas."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Self, TypeAlias, final

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jaxstrategy._src import masks
from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.cross_device_ops import (
    CrossDeviceOps,
    PlannedOps,
    UserPlan,
    checked_ops,
)
from jaxstrategy._src.reductions.packing import overlap_on
from jaxstrategy._src.reductions.plan import AbstractPlan
from jaxstrategy._src.reductions.reduction import (
    EagerReduction,
    LocalReduction,
    Reduction,
)
from jaxstrategy._src.replicas import devices, mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import replicas_with
from jaxstrategy._src.replicas.replica_placements import (
    SAME,
)
from jaxstrategy._src.strategies.choices import Choices, ProcessRole
from jaxstrategy._src.strategies.extended import StrategyExtended
from jaxstrategy._src.strategies.reducers import (
    TreeFunctions,
    assert_in_sync,
    dimensions,
    in_parts,
    local_versions,
)
from jaxstrategy._src.values import arrays, per_replica, trees
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import Versions
from jaxstrategy._src.variables import components
from jaxstrategy._src.variables.policy import ReplicatedVariables, VariablePolicy

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
        # Where mirrored variables are, if they are elsewhere: both compute together.
        home, own = strategy._parameter_replicas, strategy._replicas
        # Comparing asks the default strategy for its devices, which would start JAX.
        is_same = home is own or home == own
        self._beside = None if is_same else home.sharding(SAME)

    def reduced(
        self,
        op: ReduceOp,
        value: PyTree,
        axis: int | Sequence[int] | None,
        weights: PyTree | None,
        options: CommunicationOptions | None,
        in_step: bool,
    ) -> PyTree:
        """One value from all versions, leaf by leaf."""
        is_weighted = weights is not None
        over = None if axis is None else dimensions(axis)

        def across(tree: PyTree, alone: bool = False) -> PyTree:
            given = (tree, weights) if is_weighted else tree
            reducing = self._functions.reducing(op, over, options, is_weighted, alone)
            return self._executor.across(reducing, given)

        if in_step or isinstance(value, (PerReplica, jax.Array)):  # one leaf
            found = across(value)
        else:
            found = in_parts(across, value, functools.partial(across, alone=True))
        return found if self._beside is None else self._beside_variables(found)

    def gathered(self, value: PyTree, axis: int, in_step: bool) -> PyTree:
        """All versions joined along `axis`, leaf by leaf."""
        function = self._functions.gathering(axis, in_step)
        across = functools.partial(self._executor.across, function)
        found = across(value) if in_step else in_parts(across, value)
        joined = found if self._beside is None else self._beside_variables(found)
        return joined if in_step else masks.without_filling(value, joined, axis)

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
        where = self._beside
        assert where is not None, "they are elsewhere"
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


class ComposedStrategy(AbstractStrategy):
    """A strategy as its parts: replicas, a reduction, a variable policy, an executor.

    The public methods stand in classes over this one, by what they are about; each
    checks where it is called, and asks a part.
    """

    _choices: Choices
    _compiled_reduction: Reduction
    _variable_policy: VariablePolicy
    _executor: AbstractExecutor
    _values: CrossReplicaValues
    _extended: StrategyExtended

    def _compose(self, choices: Choices) -> None:
        """Make the parts."""
        devices.set_up_by_environment()
        self._choices = choices
        self._replicas = choices.replicas
        self._compiled_reduction = _reduction_for(self, choices)
        self._overlap = overlap_on(choices.replicas, choices.options)
        policy = choices.variables or ReplicatedVariables(self._replicas)
        # Its base class has what lower folders may ask of it.
        self._variable_policy = policy  # pyright: ignore[reportIncompatibleVariableOverride]
        self._executor = choices.executor(self, choices.processes)
        self._values = CrossReplicaValues(self, self._executor)
        self._extended = StrategyExtended(self, self._executor, _role_of(choices))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._compose(self._choices)
        return twin

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` of the replicas' devices.

        Its axes are `"replica"` and those of `logical_axes`.
        """
        return self._replicas.mesh

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each replica, the first if it has several, in replica order.

        With `replicas_per_device` a device is there as often as replicas share it.
        """
        return self._replicas.devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take a step together."""
        return self._replicas.count

    @property
    def extended(self) -> StrategyExtended:
        """Reductions to chosen devices, for code that needs them."""
        return self._extended

    @property
    def _reduction(self) -> Reduction | LocalReduction | EagerReduction:
        """The reduction by which the replicas' values become one, where code runs."""
        context = _context.current()
        if context.local is not None:
            return context.local.reduction
        if context.eager is not None:
            return context.eager.reduction
        return self._compiled_reduction

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that the strategy was given; None where there is no cluster."""
        return None

    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block in which this is the current strategy.

        Inside it, code is in cross-replica context: `get_strategy()` is this strategy.
        Entering it again inside is allowed. `run` enters it by itself.

        A function jitted by you is traced once, so what it learns about contexts
        (`has_strategy()`) stays what it was on the first call. Functions called inside
        `run` are traced there again.

        Raises:
          ContextError: inside another strategy's scope, or inside `run`.
        """
        return _context.Scope(self)


def _role_of(choices: Choices) -> ProcessRole:
    """What this process is among those of the job."""
    processes = choices.processes
    is_first = processes is None or processes.index == 0
    is_chief = is_first if choices.is_chief is None else choices.is_chief
    several = processes is not None and processes.count > 1
    waits = choices.is_between_graph and choices.is_chief is not None
    is_between = several or choices.is_between_graph
    return ProcessRole(is_chief, is_between, waits, choices.task)


def _reduction_for(strategy: AbstractStrategy, choices: Choices) -> Reduction:
    """The way in which the replicas of `strategy` combine values."""
    ops = checked_ops(choices.ops)
    if isinstance(ops, PlannedOps):
        plan = ops.plan(strategy._replicas)
    else:
        plan = _of_user(strategy, ops)
    return Reduction(
        strategy._replicas, plan.with_options(choices.options, strategy._replicas)
    )


def _of_user(strategy: AbstractStrategy, ops: CrossDeviceOps) -> AbstractPlan:
    replicas = strategy._replicas

    def as_per_replica(array: jax.Array) -> PerReplica:
        return per_replica.from_local(array, replicas)

    cross_replica = functools.partial(
        _context.entered, strategy=strategy, replica=None, in_step=True
    )
    return UserPlan(ops, strategy, as_per_replica, cross_replica)
