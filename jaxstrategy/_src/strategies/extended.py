"""Reductions to chosen devices, and variables: `strategy.extended`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies.calls import name_methods_after
from jaxstrategy._src.strategies.colocating import ColocatesVariables
from jaxstrategy._src.strategies.destinations import Destinations, checked_pairs
from jaxstrategy._src.strategies.logical_placement import check_logical_device
from jaxstrategy._src.strategies.updating import UpdatesVariables
from jaxstrategy._src.values.types import PyTree


@final
class StrategyExtended(UpdatesVariables, ColocatesVariables):
    """Additional methods of a strategy, for library code and optimizers.

    It is `strategy.extended`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     w = js.Variable(1.0)
    >>> @strategy.run
    ... def step(x):
    ...     def apply(strategy, grad):
    ...         grad = strategy.extended.reduce_to("mean", grad, w)
    ...         strategy.extended.update(w, lambda w, g: w.assign_sub(g), (grad,))
    ...     js.get_replica_context().merge_call(apply, (x,))
    >>> step(strategy.per_replica([0.25, 0.75]))
    >>> float(w)
    0.5
    """

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that compute, in replica order.

        Of the default strategy JAX's first one, where TensorFlow raises an error.
        """
        return self._strategy.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that hold mirrored variables.

        Of the default strategy JAX's first one, where TensorFlow raises an error.
        """
        return self._strategy._parameter_replicas.devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one that saves checkpoints, in TensorFlow.

        `js.checkpoint` needs no such question: all processes call it.
        """
        return self._role.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one that writes metrics."""
        return self._role.is_chief

    @property
    def experimental_should_init(self) -> bool:
        """Whether initial values that this process makes count."""
        return self._role.is_chief or not self._role.waits

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process of the job runs the whole program."""
        return self._role.is_between_graph

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: one program is compiled for all replicas."""
        return True

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over the replicas and placed on `destinations`.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value: as for `strategy.reduce`.
          destinations: a device or its name for one copy there; several devices, a
            variable (which is not changed), a `PerReplica` or a mirrored value for a
            copy on each device of theirs.
            While a step is traced (in `merge_call`, or under your own `jax.jit`) the
            result is on all replicas, whatever is asked for.
          options: how, instead of as the strategy does.

        Raises:
          ValueError: `reduce_op` is not a reduction, or there is no destination.
          TypeError: a leaf is not a number, or `destinations` names no devices.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> x = strategy.per_replica([1.0, 2.0])
        >>> strategy.extended.reduce_to("sum", x, "CPU:1").devices()
        {CpuDevice(id=1)}
        """
        pairs = [(value, destinations)]
        return self.batch_reduce_to(reduce_op, pairs, options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """Several `reduce_to` in one program: one result per pair, in order.

        Raises:
          ValueError: something else than a sequence of pairs; else as `reduce_to`.
          TypeError: as `reduce_to`.
          ContextError: inside `run`.
        """
        context = _context.require_cross_replica(
            self._strategy, "extended.batch_reduce_to"
        )
        pairs = checked_pairs(value_destination_pairs)
        places = [self._place(destinations) for _, destinations in pairs]
        op = ReduceOp(reduce_op)
        results = self._strategy.reduce(
            op, [value for value, _ in pairs], options=options
        )
        if context.in_step:
            return results
        return [
            place.placed(result) for place, result in zip(places, results, strict=True)
        ]

    def copy_to(self, value: PyTree, destinations: Destinations) -> PyTree:
        """Copies of `value`, one on each device of `destinations`.

        Args:
          value: a pytree of arrays and numbers, the same for all replicas; a variable
            stands for its value. Other leaves (strings, bools) stay as they are. With
            several processes it is that of the first process of `destinations`.
          destinations: as of `reduce_to`. While a step is traced (in `merge_call`, or
            under your own `jax.jit`) the value is on all replicas already, and comes
            back.

        Returns:
          The pytree with an array for each array or number, on one device or mirrored
          on several. One that lies there already comes back itself.

        Raises:
          ValueError: a leaf is a `PerReplica`; there is no destination, or no such
            device.
          TypeError: `destinations` names no devices.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     v = js.Variable([1.0, 2.0])
        >>> x = strategy.extended.copy_to(3.0, v)
        >>> x, isinstance(x, js.Mirrored)
        (Array(3., dtype=float32, weak_type=True), True)
        >>> strategy.extended.copy_to(v, "CPU:1").devices()
        {CpuDevice(id=1)}
        """
        context = _context.require_cross_replica(self._strategy, "extended.copy_to")
        place = self._place(destinations)
        return place.copies(value, context.in_step)

    @contextlib.contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """A `with` block for what is on one logical device, in TensorFlow's programs.

        It changes nothing: all of a replica's devices compute one program, and XLA
        chooses where what is not divided is computed.

        Args:
          logical_device_id: the number of a device of each replica.

        Raises:
          ValueError: a replica has no such device.

        >>> import jaxstrategy as js
        >>> _ = js.simulate(8)
        >>> strategy = js.TPUStrategy(cores_per_replica=2)
        >>> with strategy.scope(), strategy.extended.experimental_logical_device(1):
        ...     w = js.Variable(3.0)
        """
        check_logical_device(logical_device_id, self._strategy._replicas)
        yield


name_methods_after(StrategyExtended)
