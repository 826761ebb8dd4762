"""What a strategy makes of the values of all replicas: `Reducing`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxstrategy._options import (
    CommunicationOptions,
    ReduceOp,
    checked_options,
)
from jaxstrategy.contexts import _context
from jaxstrategy.masks import _filled_rows
from jaxstrategy.replicas import _mesh
from jaxstrategy.strategies._in_sync import assert_in_sync
from jaxstrategy.strategies._local_versions import local_versions
from jaxstrategy.strategies._parts import in_parts
from jaxstrategy.strategies._reducers import dimensions
from jaxstrategy.strategies._stepping import Stepping
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import (
    Handle,
    PerReplica,
    PyTree,
)
from jaxstrategy.variables import _components


class Reducing(Stepping):
    """The part of a strategy that reads, reduces and compares values."""

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        *,
        weights: Any = None,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """One value from all replicas' versions, leaf by leaf.

        A leaf that is not a `PerReplica` counts as what every replica holds: its SUM
        is `num_replicas_in_sync` times it, its MEAN is it.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value: a pytree of `PerReplica`s, arrays and numbers.
          axis: also reduce over this dimension, or these, of each replica's version.
            MEAN is then over all elements of all replicas; over dimension 0 of a
            batch from a dataset, only over its real rows.
          weights: what each entry counts, a `PerReplica` or an array whose shape is
            that of a version's first dimensions; True and False will do. Only for SUM
            and MEAN.
          options: how, instead of as the strategy does.

        Returns:
          A pytree of mirrored arrays; MEAN of integers has JAX's default float dtype.

        Raises:
          ValueError: `reduce_op` is not a reduction; `axis` is out of range; `weights`
            have another shape.
          TypeError: a leaf is not a number; `axis` is not a whole number.
          ContextError: inside `run`; use `get_replica_context().all_reduce` there.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> x = strategy.per_replica([[1.0, 2.0], [3.0, 4.0]])
        >>> strategy.reduce("sum", x)
        Array([4., 6.], dtype=float32)
        >>> strategy.reduce("mean", x, axis=0)
        Array(2.5, dtype=float32)
        >>> known = strategy.per_replica([[True, True], [True, False]])
        >>> strategy.reduce("mean", x, axis=0, weights=known)
        Array(2., dtype=float32)
        """
        context = _context.require_cross_replica(self, "reduce")
        checked_options(options)
        is_weighted = weights is not None
        function = self._functions.reducing(
            ReduceOp(reduce_op), dimensions(axis), options, is_weighted
        )
        across = functools.partial(self._across, context, function)
        if is_weighted:
            done = across((value, weights))
        elif axis is None and not context.in_step:
            done = in_parts(across, value)
        else:
            done = across(value)
        return self._beside_variables(done)

    def gather(self, value: PyTree, axis: int = 0) -> PyTree:
        """Every replica's version joined along `axis`, in replica order, leaf by leaf.

        Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`. A leaf that
        is not a `PerReplica` counts as what every replica holds, and is repeated. Rows
        that only fill up a batch from a dataset are left out when rows are joined. In
        `merge_call` and under `jax.jit` shapes are static, so that they stay; a
        `PaddedRowsWarning` says so.

        Raises:
          ValueError: a leaf is a scalar, or `axis` is out of range for one.
          TypeError: `axis` is not a whole number.
          ContextError: inside `run`; use `get_replica_context().all_gather` there.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.gather(strategy.per_replica([[1, 2], [3, 4]]))
        Array([1, 2, 3, 4], dtype=int32)
        """
        context = _context.require_cross_replica(self, "gather")
        in_step = context.in_step
        function = self._functions.gathering(axis, in_step)
        joined = self._beside_variables(self._across(context, function, value))
        return joined if in_step else _filled_rows.without_filling(value, joined, axis)

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """The version of `value` of each replica of this process, as a tuple.

        A pytree gives a tuple of pytrees. A mirrored array, or a container of plain
        values, gives one entry per replica too; a single plain value gives a tuple of
        one. Of a batch from a dataset they are the real rows.

        Versions of up to 64 KiB can be computed with each other and with mirrored
        arrays (`sum(versions)`, `jnp.stack(versions)`): each is copied to all devices
        of this process. Larger ones stay on their replica's device, so that nothing
        large is copied unseen; `jax.device_get` or `strategy.gather` brings them
        together.

        Raises:
          ContextError: inside `run`, where there is one version.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.experimental_local_results(strategy.per_replica([3, 4]))
        (Array(3, dtype=int32), Array(4, dtype=int32))
        >>> strategy.experimental_local_results("plain")
        ('plain',)
        """
        context = _context.require_cross_replica(self, "experimental_local_results")
        in_step = context.in_step
        leaves, treedef = jax.tree.flatten(value, is_leaf=_per_replica.is_whole)
        if treedef == _LEAF and not isinstance(value, (PerReplica, Handle, jax.Array)):
            return (value,)
        if value is None:
            return (None,)
        columns = self._columns(leaves, in_step)
        if treedef == _LEAF:
            return columns[0]
        n = self.num_replicas_in_sync if in_step else len(self._own_replicas)
        columns = [column * n if len(column) == 1 else column for column in columns]
        return tuple(
            jax.tree.unflatten(treedef, [column[i] for column in columns])
            for i in range(n)
        )

    def _beside_variables(self, tree: PyTree) -> PyTree:
        """`tree` where mirrored variables are, so that both compute together."""
        if self.parameter_mesh == self.mesh:
            return tree
        where = _mesh.replicated(self.parameter_mesh)
        return jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, Tracer) else _mesh.put(leaf, where),
            tree,
        )

    @property
    def _own_replicas(self) -> list[int]:
        """The numbers of this process's replicas."""
        return list(self.replicas.own)

    def _columns(self, leaves: Sequence[Any], in_step: bool) -> list[tuple[Any, ...]]:
        """For each leaf the versions of this process's replicas, in a step of all."""
        n = self.num_replicas_in_sync if in_step else len(self._own_replicas)
        values = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
        if in_step:
            found = iter([value.values for value in values])
        else:
            found = iter(local_versions(values, self.mesh))
        return [
            _checked_number(next(found), n)
            if isinstance(leaf, PerReplica)
            else self._components(leaf, in_step)
            if isinstance(leaf, Handle)
            else self._copies(leaf, n, in_step)
            for leaf in leaves
        ]

    def _components(self, variable: Handle, in_step: bool) -> tuple[Any, ...]:
        """The copies of a variable, each an array of its own."""

        def divide(held: Any) -> tuple[Any, ...]:
            (copies,) = self._columns([held], in_step)
            is_shared = not in_step and _per_replica.is_mirrored(held)
            return tuple(map(_mesh.twin, copies)) if is_shared else copies

        return _components.of(variable, variable.distributed(), divide)

    def _copies(self, leaf: Any, n: int, in_step: bool) -> tuple[Any, ...]:
        """What `n` replicas hold of something that is no `PerReplica`."""
        _per_replica.check_alive(leaf, "An array")
        if in_step and isinstance(leaf, jax.Array) and n > 1:
            # Captured by the merge function: it may well differ between replicas.
            return _per_replica.from_local(leaf, self.replicas).values
        if _per_replica.is_mirrored(leaf):  # a variable of central storage has one copy
            return (leaf,) * len(leaf.addressable_shards)
        return (leaf,) * n

    def assert_in_sync(self, tree: PyTree, name: str = "tree") -> None:
        """Nothing if all replicas hold the same bits of `tree`, else an error.

        For state that should be equal on all replicas, now and then between steps. The
        copies of each mirrored array, and the versions of each `PerReplica`, are
        compared by 64 bits computed from them where they are: one pass over the memory
        and one small collective, however large the arrays. It waits for the steps
        before it, and changes nothing; with several processes, each must call it. A
        change of a single number of up to 64 bits is always found, anything else is
        missed once in 2**64.

        Bits are compared, not numbers: 0.0 and -0.0 differ, NaNs of the same bits do
        not. What has one copy only (host and single-device arrays, numbers, strings,
        functions, None) is passed over.

        Args:
          tree: a pytree.
          name: how the error calls it.

        Raises:
          OutOfSyncError: it names the arrays that differ and the replicas that hold
            them; its `leaves` has both for programs.
          PlacementError: an array lies on several devices, but not whole on each of
            this strategy's; or a `PerReplica` belongs to another strategy.
          DonatedValueError: an array was donated before.
          TracedValueError: inside a function traced by JAX (`jax.jit`, `jax.grad`).
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> state = {"w": strategy.mirror(1.0), "n": strategy.per_replica([7, 7, 8, 7])}
        >>> strategy.assert_in_sync(state["w"])
        >>> try:
        ...     strategy.assert_in_sync(state, "state")
        ... except js.OutOfSyncError as error:
        ...     print(error.leaves)
        {"state['n']": ((0, 1, 3), (2,))}
        """
        _context.require_host(self, "assert_in_sync")
        fingerprints = functools.partial(
            self._across, _context.current(), self._functions.fingerprinting
        )
        assert_in_sync(tree, name, self.mesh, fingerprints)


_LEAF = jax.tree.structure(0)


def _checked_number(versions: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    if len(versions) != n:
        raise ValueError(
            f"A PerReplica with {len(versions)} versions was given to a strategy with "
            f"{n} replicas here."
        )
    return versions
