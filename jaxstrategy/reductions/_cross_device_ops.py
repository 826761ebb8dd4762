"""Ways to reduce, of which users may write their own: `CrossDeviceOps`."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.values._per_replica import PerReplica


class CrossDeviceOps(abc.ABC):
    """Base class of ways to reduce; subclass it for your own.

    The methods ending in `_implementation` are called while a step is traced, in
    cross-replica context: a value is a `PerReplica` around this replica's array, whose
    `values` has those of all replicas.

    >>> import jaxstrategy as js
    >>> class InOrder(js.CrossDeviceOps):
    ...     def reduce_implementation(self, op, value, destinations, options):
    ...         total = sum(value.values)
    ...         mean = op is js.ReduceOp.MEAN
    ...         return total / value.num_replicas if mean else total
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4], cross_device_ops=InOrder())
    >>> strategy.reduce("sum", strategy.per_replica([1.0, 2.0, 3.0, 4.0]))
    Array(10., dtype=float32)
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> jax.Array:
        """One array `[...]` from all replicas' versions, each `[...]`.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          per_replica_value: the versions.
          destinations: where the result is wanted; it is on all replicas.
          options: by default those of the class.

        Raises:
          ValueError: `reduce_op` is not a reduction.
          TypeError: a class of this library is called by itself: give it to a strategy.
        """
        op = ReduceOp(reduce_op)
        options = options or CommunicationOptions()
        return self.reduce_implementation(op, per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """One array for each pair of a value and its destinations, in the same order.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value_destination_pairs: values with versions `[...]`, and where each result,
            `[...]`, is wanted.
          options: by default those of the class.

        Raises:
          ValueError: `reduce_op` is not a reduction.
          TypeError: a class of this library is called by itself: give it to a strategy.
        """
        op = ReduceOp(reduce_op)
        options = options or CommunicationOptions()
        return self.batch_reduce_implementation(op, value_destination_pairs, options)

    def broadcast(self, tensor: jax.Array, destinations: object) -> jax.Array:
        """`tensor` on all replicas, in its own shape."""
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions,
    ) -> jax.Array:
        """One array from all replicas' versions; every replica must get it.

        Args:
          reduce_op: SUM, MEAN, MIN or MAX; raise `ValueError` for what you do not do.
          per_replica_value: versions of shape `[...]`.
          destinations: where the result is wanted; it is on all replicas.
          options: the strategy's, or those of the call.

        Returns:
          An array of shape `[...]`, the same on all replicas.
        """

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Several of them; by default one after the other, in their own shapes.

        Raises:
          TypeError: a class of this library is called by itself: give it to a strategy.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(
        self, tensor: jax.Array, destinations: object
    ) -> jax.Array:
        """By default `tensor` as it is: a step's array is on all replicas already.

        Its shape is kept.
        """
        return tensor
