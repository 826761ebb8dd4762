"""A replica context with the methods of TensorFlow 1: `ReplicaContext`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.compat._absent_members import NAMES_IN_V1, missing_member
from jaxstrategy.compat._context_faces import ContextFaces
from jaxstrategy.compat.v1._v1_hints import options_of
from jaxstrategy.compat.v1._v1_strategy import FACES, Strategy
from jaxstrategy.contexts import _replica_context
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import PyTree


@final
class ReplicaContext:
    """One replica's view, inside `run`: `v1.get_replica_context()` returns it.

    Args:
      core: the replica context of today.

    Raises:
      TypeError: it is something else.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> def step():
    ...     context = v1.get_replica_context()
    ...     return context.merge_call(lambda s, x: s.reduce("sum", x), args=(3.0,))
    >>> strategy.run(step)
    Array(6., dtype=float32)
    """

    def __init__(self, core: _replica_context.ReplicaContext) -> None:
        if not isinstance(core, _replica_context.ReplicaContext):
            raise TypeError(
                f"`core` was {shown(core)}; what `jaxstrategy.get_replica_context()` "
                "returns in a step was wanted."
            )
        self._core = core

    def __enter__(self) -> Self:
        """A `with` block in the context where code already is: `run` enters replicas.

        Raises:
          ContextError: this is not the current replica context.
        """
        self._core._require_current("__enter__")
        return self

    def __exit__(
        self, exception_type: object, exception_value: object, traceback: object
    ) -> None:
        """Leaves the block; code stays where it is."""

    @property
    def core(self) -> _replica_context.ReplicaContext:
        """The replica context of today."""
        return self._core

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return FACES.of(self._core.strategy)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take this step together.

        Raises:
          ContextError: this is the context of no strategy, and used in a step.
        """
        return self._core.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The id of this replica, from 0: an int32 scalar that the devices know.

        Raises:
          ContextError: this is not the current replica context.
        """
        return self._core.replica_id_in_sync_group

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all replicas, in replica order; one program serves them.

        Raises:
          ContextError: this is the context of no strategy, and used in a step.
        """
        return self._core.devices

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over all replicas, leaf by leaf; all get the result.

        Args:
          reduce_op: a `ReduceOp`, or its name in any case.
          value: a pytree of arrays and numbers, of the same shapes on all replicas.
          options: how, instead of as the strategy does.
          experimental_hints: the older name of `options`.

        Returns:
          A pytree like `value`, of the same shapes.

        Raises:
          ValueError: there is no such reduction; `value` is None.
          TypeError: a leaf is not a number.
          ContextError: this is not the current replica context.
        """
        chosen = options_of(options, experimental_hints)
        return self._core.all_reduce(reduce_op, value, chosen)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Steps across to all replicas: calls `merge_fn(strategy, *args, **kwargs)`.

        Args:
          merge_fn: called once, in cross-replica context, with a strategy of
            `compat.v1` first.
          args: its further arguments; arrays `[...]` arrive as `PerReplica`s.
          kwargs: its keyword arguments.

        Returns:
          What `merge_fn` returned, each `PerReplica` as this replica's version `[...]`.

        Raises:
          ContextError: this is not the current replica context.
          TypeError: `merge_fn` cannot be called, or `args` is no tuple or list.
        """
        if not callable(merge_fn):
            return self._core.merge_call(merge_fn)  # says so

        def of_face(core: object, /, *across: PyTree, **named: PyTree) -> PyTree:
            return merge_fn(FACES.of(core), *across, **named)

        return self._core.merge_call(of_face, args, kwargs)

    def __repr__(self) -> str:
        return f"compat.v1.ReplicaContext({FACES.of(self._core.strategy)!r})"

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core: Any = vars(self).get("_core")
            way = "jaxstrategy.get_replica_context()"
            missing_member(self, core, name, way, NAMES_IN_V1)


CONTEXTS: ContextFaces[ReplicaContext] = ContextFaces(ReplicaContext)
"""The replica contexts of TensorFlow 1, one for each of today's."""
