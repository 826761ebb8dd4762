"""A strategy with the methods of TensorFlow 1: `Strategy`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, final

import jax
from jax.core import Tracer

from jaxstrategy import _options
from jaxstrategy._options import ReduceOp
from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.compat._absent_members import NAMES_IN_V1
from jaxstrategy.compat._face_scope import FaceScope
from jaxstrategy.compat._faces import Faces
from jaxstrategy.compat._older_strategy import OlderStrategy, checked_core
from jaxstrategy.compat.v1._v1_dataset import DistributedDatasetV1
from jaxstrategy.compat.v1._v1_extended import StrategyExtended
from jaxstrategy.compat.v1._v1_feeding import FeedsReplicas
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._strategy_face import StrategyFace
from jaxstrategy.inputs._input_options import InputContext, InputOptions
from jaxstrategy.strategies import _strategy
from jaxstrategy.values._types import Function, PyTree

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jaxstrategy.strategies._colocating import Beside


class RunOptions(NamedTuple):
    """Options of `Strategy.run` in TensorFlow 1. None of them has an effect here.

    Shapes are static, and XLA compiles each step in any case. What can be chosen here
    is in `jaxstrategy.RunOptions`, which `run` takes, too.

    Attributes:
      experimental_enable_dynamic_batch_size: without effect.
      experimental_bucketizing_dynamic_shape: without effect.
      experimental_xla_options: without effect.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.run(lambda x: 2 * x, (3,), options=v1.RunOptions())
    Array(6, dtype=int32, weak_type=True)
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class Strategy(FeedsReplicas, OlderStrategy):
    """A strategy with the methods of `tf.compat.v1.distribute.Strategy`.

    `MirroredStrategy` and the others make one. Behind each is a strategy of today,
    `strategy.core`; each of those has one such object.

    Args:
      core: a strategy of today, given by the class of a strategy.

    Raises:
      TypeError: it is made itself, or of something else; `over` is for that.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     v1.get_strategy() is strategy, js.get_strategy() is strategy.core
    (True, True)
    """

    _module = "compat.v1"
    _names = NAMES_IN_V1
    _extended_class: ClassVar[type[StrategyExtended]] = StrategyExtended

    def __init__(self, core: _strategy.Strategy) -> None:
        if type(self) is Strategy:
            raise TypeError(
                "`Strategy` is what all strategies of TensorFlow 1 have in common. "
                "Make one of them, such as `MirroredStrategy()`; or of a strategy of "
                "`jaxstrategy`: `Strategy.over(strategy)`."
            )
        super().__init__(core)
        self._extended = self._extended_class(core)
        FACES.add(self)

    @staticmethod
    def over(core: _strategy.Strategy | StrategyFace) -> Strategy:
        """The object with these methods for a strategy of today, the same each time.

        For what the classes of TensorFlow 1 have no arguments for.

        Args:
          core: a strategy of `jaxstrategy`.

        Raises:
          TypeError: it is something else.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> devices = js.simulate(8)[:2]
        >>> v1.Strategy.over(js.MirroredStrategy(devices, replicas_per_device=4))
        compat.v1.MirroredStrategy(8 replicas, 4 on each device, on cpu:0, cpu:1)
        """
        return FACES.of(checked_core(core))

    @property
    def extended(self) -> StrategyExtended:
        """The additional methods, for library code and optimizers."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take a step together."""
        return self._core.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None where there is none."""
        return self._core.cluster_resolver

    # Contexts and steps.

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block in which this is the current strategy.

        Raises:
          ContextError: inside another strategy's scope, or inside `run`.
        """
        return FaceScope(self, self._core.scope())

    def run(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        options: RunOptions | _options.RunOptions | None = None,
    ) -> PyTree:
        """Runs `fn(*args, **kwargs)` on every replica, as one compiled program.

        It is `run` of today's strategies: `PerReplica`s in the arguments arrive as this
        replica's version, and what may differ between replicas is a `PerReplica`.

        Args:
          fn: the step, as one replica sees it.
          args: its positional arguments, a tuple or list.
          kwargs: its keyword arguments.
          options: see `jaxstrategy.RunOptions`; those of `compat.v1` have no effect.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TracedValueError: Python code in `fn` needs the value of a traced array.
          TypeError: `fn` cannot be called, or arguments are none.
        """
        chosen = None if isinstance(options, RunOptions) else options
        return self._core.run(fn, args, kwargs, chosen)

    def experimental_run_v2(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        """`run` under its name of TensorFlow 1.14 to 2.1.

        Raises:
          As `run`.
        """
        return self._core.run(fn, args, kwargs)

    # Values.

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
    ) -> PyTree:
        """One value from all replicas' versions, leaf by leaf.

        Args:
          reduce_op: a `ReduceOp`, or its name in any case.
          value: a pytree of `PerReplica`s, arrays and numbers.
          axis: also reduce over this dimension of each version, or these.

        Returns:
          A pytree of mirrored arrays, each of the shape of a version without `axis`.

        Raises:
          ValueError: there is no such reduction; `axis` is out of range.
          TypeError: a leaf is not a number.
          ContextError: inside `run`.
        """
        return self._core.reduce(reduce_op, value, axis)

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """The version of `value` of each replica of this process, as a tuple.

        Raises:
          ContextError: inside `run`, where there is one version.
        """
        return self._core.experimental_local_results(value)

    def unwrap(self, value: PyTree) -> tuple[PyTree, ...]:
        """`experimental_local_results` under its older name.

        Raises:
          ContextError: inside `run`, where there is one version.
        """
        _context.require_cross_replica(self._core, "unwrap")
        return self._core.experimental_local_results(value)

    def group(self, value: PyTree, name: str | None = None) -> PyTree:
        """Waits until `value` is computed, as running a `tf.group` of it did.

        While a step is traced there is nothing to wait for.

        Args:
          value: a pytree of `PerReplica`s, arrays and other values.
          name: of the operation, in TensorFlow.

        Returns:
          None; a single value of one version, without a `name`, is returned itself.

        Raises:
          ContextError: inside `run`.
        """
        _context.require_cross_replica(self._core, "group")
        leaves = jax.tree.leaves(self._core.experimental_local_results(value))
        jax.block_until_ready([x for x in leaves if not isinstance(x, Tracer)])
        return leaves[0] if len(leaves) == 1 and name is None else None

    # Data.

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDatasetV1:
        """`dataset`, each of its global batches divided over the replicas.

        Args:
          dataset: as of `jaxstrategy.Strategy.experimental_distribute_dataset`.
          options: see `jaxstrategy.InputOptions`.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.
          ValueError: `options` ask for an input pipeline for each replica.
          ContextError: inside `run`.
        """
        made = self._core.experimental_distribute_dataset(dataset, options)
        return DistributedDatasetV1(made)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDatasetV1:
        """The batches of what `dataset_fn` makes, each for one replica.

        Args:
          dataset_fn: given an `InputContext`, returns a dataset.
          options: see `jaxstrategy.InputOptions`.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns no dataset.
          ContextError: inside `run`.
        """
        made = self._core.distribute_datasets_from_function(dataset_fn, options)
        return DistributedDatasetV1(made)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDatasetV1:
        """`distribute_datasets_from_function` under its older name.

        Args:
          dataset_fn: given an `InputContext`, returns a dataset.
          options: see `jaxstrategy.InputOptions`.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns no dataset.
          ContextError: inside `run`.
        """
        made = self._core.distribute_datasets_from_function(dataset_fn, options)
        return DistributedDatasetV1(made)

    # Variables.

    def colocate_vars_with(
        self, colocate_with_variable: Beside
    ) -> AbstractContextManager[None]:
        """`extended.colocate_vars_with`, where it was before.

        Args:
          colocate_with_variable: one of the strategy, or devices.

        Raises:
          ValueError: the variable belongs to another strategy, or to none.
          TypeError: it is neither a variable nor devices.
          ContextError: outside the strategy's `scope()`.
        """
        return self._extended.colocate_vars_with(colocate_with_variable)

    # Sessions, which JAX has not.

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: there are no sessions, and a cluster comes from a resolver.

        Args:
          session_config: of a session, in TensorFlow.
          cluster_spec: the tasks of a cluster, in TensorFlow.
          task_type: of this process, in TensorFlow.
          task_id: of this process, in TensorFlow.
        """

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of the configuration of a session; there are none here.

        Args:
          config_proto: any object; it is not changed.
        """
        return copy.deepcopy(config_proto)

    def experimental_initialize(self) -> list[Any]:
        """An empty list: of what a session has to run before training."""
        return []

    def experimental_finalize(self) -> list[Any]:
        """An empty list: of what a session has to run after training."""
        return []


@final
class OtherStrategy(Strategy):
    """Of a strategy that TensorFlow 1 had not."""

    def __repr__(self) -> str:
        return f"compat.v1.Strategy.over({self.core!r})"


FACES: Faces[Strategy] = Faces(lambda: OtherStrategy)
"""The strategies with TensorFlow 1's methods, one for each strategy of today."""
