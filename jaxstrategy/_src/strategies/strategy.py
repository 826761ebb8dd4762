"""`Strategy`, the base class of all strategies, with its reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxstrategy._src.communication_options import CommunicationOptions, checked_options
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import checked_core
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import StateSharding, checked_sharding
from jaxstrategy._src.strategies.choices import (
    Choices,
    in_order,
    name_methods_after,
)
from jaxstrategy._src.strategies.explaining import ExplainsSteps
from jaxstrategy._src.strategies.placing_values import PlacesValues
from jaxstrategy._src.strategies.running import RunsSteps
from jaxstrategy._src.text import html
from jaxstrategy._src.values.arrays import PyTree


class Strategy(RunsSteps, ExplainsSteps, PlacesValues):
    """Runs one step on many replicas. Make one of its subclasses.

    Args:
      devices: the devices of the replicas, in replica order.
      cross_device_ops: how values are reduced over the replicas.
      communication_options: the same, in more detail.
      sharding: which state each replica keeps a part of, instead of all of it.
      logical_axes: names and sizes of further axes of the mesh, such as `{"core": 2}`:
        so many devices together are one replica, which divides its arrays over them
        as `jax.lax.with_sharding_constraint` says.
      replicas_per_device: how many replicas share a device.

    Raises:
      ValueError: no device, or one twice; operations that name other replicas.
      TypeError: something else than devices, operations or options.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> isinstance(strategy, js.Strategy), isinstance(js.get_strategy(), js.Strategy)
    (True, True)
    """

    def __init__(
        self,
        devices: Sequence[Device],
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
    ) -> None:
        checked_options(communication_options, of_strategy=True)
        replicas = Replicas.on(
            devices, checked_sharding(sharding), logical_axes, replicas_per_device
        )
        replicas = in_order(replicas, communication_options)
        self._compose(Choices(replicas, cross_device_ops, communication_options))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_methods_after(cls)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        *,
        weights: PyTree | None = None,
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
          A pytree of mirrored arrays, each of the shape `[...]` of a version, without
          the dimensions `axis`; MEAN of integers has JAX's default float dtype. Of
          state that is divided (`js.Sharded`) they are divided, too.

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
        op, in_step = ReduceOp(reduce_op), context.in_step
        return self._values.reduced(op, value, axis, weights, options, in_step)

    def gather(self, value: PyTree, axis: int = 0) -> PyTree:
        """Every replica's version joined along `axis`, in replica order, leaf by leaf.

        Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`. A leaf that
        is not a `PerReplica` counts as what every replica holds, and is repeated; to
        have divided state (`js.Sharded`) whole, use `js.to_host` instead. Rows that
        only fill up a batch from a dataset are left out when rows are joined. In
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
        return self._values.gathered(value, axis, context.in_step)

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """The version of `value` of each replica of this process, as a tuple.

        A pytree gives a tuple of pytrees. A mirrored array, divided state
        (`js.Sharded`, each entry is all of it), or a container of plain values gives
        one entry per replica too; a single plain value gives a tuple of one. Of a batch
        from a dataset they are the real rows.

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
        return self._values.local_results(value, context.in_step)

    def assert_in_sync(self, tree: PyTree, name: str = "tree") -> None:
        """Checks that all replicas hold the same bits of `tree`.

        For state that should be equal on all replicas, now and then between steps. The
        copies of each mirrored array, and the versions of each `PerReplica`, are
        compared by 64 bits computed from them where they are: one pass over the memory
        and one small collective, however large the arrays. It waits for the steps
        before it, and changes nothing; with several processes, each must call it. A
        change of a single number of up to 64 bits is always found, anything else is
        missed once in 2**64.

        Bits are compared, not numbers: 0.0 and -0.0 differ, NaNs of the same bits do
        not. What has one copy only (host and single-device arrays, state of which each
        replica keeps its own part, numbers, strings, functions, None) is passed over.

        Args:
          tree: a pytree.
          name: how the error calls it.

        Raises:
          OutOfSyncError: it names the arrays that differ and the replicas that hold
            them; its `leaves` has both for programs.
          PlacementError: an array lies on several devices, but neither whole on each of
            this strategy's nor as its divided state; or a `PerReplica` belongs to
            another strategy.
          DonatedValueError: an array was donated before.
          TracedValueError: inside a function traced by JAX (`jax.jit`, `jax.grad`).
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
        >>> state = {"w": strategy.mirror(1.0), "n": strategy.per_replica([7, 7, 8, 7])}
        >>> strategy.assert_in_sync(state["w"])
        >>> try:
        ...     strategy.assert_in_sync(state, "state")
        ... except js.errors.OutOfSyncError as error:
        ...     print(error.leaves)
        {"state['n']": ((0, 1, 3), (2,))}
        """
        _context.require_host(self, "assert_in_sync")
        self._values.assert_in_sync(tree, name)

    def __repr__(self) -> str:
        replicas = self._replicas
        comma = "," if replicas.per_device > 1 else ""
        where = f"{replicas.description}{comma} on {replicas.device_names}"
        sharding = replicas.state_sharding
        divided = "" if sharding is None else f", sharding={sharding.shard!r}"
        return f"{type(self).__name__}({where}{divided})"

    def _repr_html_(self) -> str:
        rows = [
            (i, self._replicas.device_names_of(i), device.device_kind)
            for i, device in enumerate(self.devices)
        ]
        header = ("replica", "device", "kind")
        return html.rows_of(repr(self), header, rows)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "A strategy can be deep-copied (`copy.deepcopy`) but not copied: a copy "
            "would be another strategy that shares this one's compiled steps."
        )

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make "
            "a strategy in each process instead."
        )


def checked_strategy(strategy: object) -> Strategy:
    """The strategy that an argument `strategy` means, with its public methods."""
    core = checked_core(strategy)
    assert isinstance(core, Strategy), "there are no others"
    return core


name_methods_after(Strategy)
