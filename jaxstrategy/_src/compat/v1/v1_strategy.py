"""A strategy with the methods of TensorFlow 1: `Strategy`."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, final

import jax
from jax.core import Tracer

from jaxstrategy._src import options as _options
from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.compat.adapters import (
    NAMES_IN_V1,
    AdapterScope,
    OlderStrategy,
    StrategyAdapters,
    checked_core,
)
from jaxstrategy._src.compat.older_inputs import (
    OF_GROUPS,
    GetsNext,
    InputIterator,
    MakesIterators,
    NumpyDataset,
    as_dataset,
    numpy_dataset,
    require_iterator,
)
from jaxstrategy._src.compat.v1.v1_extended import StrategyExtended
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import StrategyAdapter
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.strategies import strategy
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Function, PyTree

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jaxstrategy._src.strategies.extended import Beside


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


@final
class DistributedDatasetV1(MakesIterators, DistributedDataset):
    """What the methods of a strategy of `compat.v1` make of a dataset.

    Args:
      dataset: the same as a strategy of today has made it.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)])
    >>> iterator = dataset.make_initializable_iterator()
    >>> iterator.initializer
    []
    >>> iterator.get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        super().__init__(
            dataset._start,
            dataset._transfer,
            dataset._options,
            dataset._name,
            dataset._sized,
        )

    def _read(self) -> DistributedDataset:
        return self


class Strategy(OlderStrategy):
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

    def __init__(self, core: strategy.Strategy) -> None:
        if type(self) is Strategy:
            raise TypeError(
                "`Strategy` is what all strategies of TensorFlow 1 have in common. "
                "Make one of them, such as `MirroredStrategy()`; or of a strategy of "
                "`jaxstrategy`: `Strategy.over(strategy)`."
            )
        super().__init__(core)
        self._extended = self._extended_class(core)
        ADAPTERS.add(self)

    @staticmethod
    def over(core: strategy.Strategy | StrategyAdapter) -> Strategy:
        """The object with these methods for a strategy of today, the same each time.

        For what the classes of TensorFlow 1 have no arguments for.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> devices = js.simulate(8)[:2]
        >>> v1.Strategy.over(js.MirroredStrategy(devices, replicas_per_device=4))
        compat.v1.MirroredStrategy(8 replicas, 4 on each device, on cpu:0, cpu:1)
        """
        return ADAPTERS.of(checked_core(core))

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
        """A `with` block in which this is the current strategy."""
        return AdapterScope(self, self._core.scope())

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
        """
        chosen = None if isinstance(options, RunOptions) else options
        return self._core.run(fn, args, kwargs, chosen)

    def experimental_run_v2(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        """`run` under its name of TensorFlow 1.14 to 2.1."""
        return self._core.run(fn, args, kwargs)

    # Values.

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
    ) -> PyTree:
        """One value from all replicas' versions, leaf by leaf."""
        return self._core.reduce(reduce_op, value, axis)

    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """The version of `value` of each replica of this process, as a tuple."""
        return self._core.experimental_local_results(value)

    def unwrap(self, value: PyTree) -> tuple[PyTree, ...]:
        """`experimental_local_results` under its older name."""
        _context.require_cross_replica(self._core, "unwrap")
        return self._core.experimental_local_results(value)

    def group(self, value: PyTree, name: str | None = None) -> PyTree:
        """Waits until `value` is computed, as running a `tf.group` of it did.

        While a step is traced there is nothing to wait for.
        """
        _context.require_cross_replica(self._core, "group")
        leaves = jax.tree.leaves(self._core.experimental_local_results(value))
        jax.block_until_ready([x for x in leaves if not isinstance(x, Tracer)])
        return leaves[0] if len(leaves) == 1 and name is None else None

    # Data.

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDatasetV1:
        """`dataset`, each of its global batches divided over the replicas."""
        made = self._core.experimental_distribute_dataset(dataset, options)
        return DistributedDatasetV1(made)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDatasetV1:
        """The batches of what `dataset_fn` makes, each for one replica."""
        made = self._core.distribute_datasets_from_function(dataset_fn, options)
        return DistributedDatasetV1(made)

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDatasetV1:
        """`distribute_datasets_from_function` under its older name."""
        made = self._core.distribute_datasets_from_function(dataset_fn, options)
        return DistributedDatasetV1(made)

    def make_dataset_iterator(
        self, dataset: Any, options: InputOptions | None = None
    ) -> InputIterator:
        """An iterator over global batches, which are divided over the replicas.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> iterator = strategy.make_dataset_iterator(js.batches(np.arange(8), 4))
        >>> strategy.experimental_run(lambda x: 10 * x, iterator).values
        (Array([ 0, 10], dtype=int32), Array([20, 30], dtype=int32))
        >>> iterator.initialize()  # begins again
        []
        """
        made = self._core.experimental_distribute_dataset(dataset, options)
        return InputIterator(made)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """An iterator over the elements of an input function, each for one replica.

        The function is called once, and not again by `initialize()`. Its elements go to
        the replicas in turn, undivided, scalars too. At the end, elements that are
        fewer than the replicas are left out.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> def input_fn(context):
        ...     n, i = context.num_input_pipelines, context.input_pipeline_id
        ...     rows = strategy.experimental_make_numpy_dataset(np.arange(5))
        ...     return rows.shard(n, i)
        >>> iterator = strategy.make_input_fn_iterator(input_fn)
        >>> [[int(x) for x in element.values] for element in iterator]
        [[0, 1], [2, 3]]
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"Input replication mode not supported: {shown(replication_mode)}. "
                "Input functions of `make_input_fn_iterator` are called once for each "
                "worker, InputReplicationMode.PER_WORKER; for one pipeline per replica "
                "use `distribute_datasets_from_function` with `InputOptions`."
            )

        def dataset_fn(context: InputContext) -> Any:
            return as_dataset(input_fn(context))

        # What cannot be called is refused, by its type.
        given = dataset_fn if callable(input_fn) else input_fn
        made = self._core.distribute_datasets_from_function(given, OF_GROUPS)
        return InputIterator(made)

    def experimental_run(
        self, fn: Function, input_iterator: GetsNext | None = None
    ) -> PyTree:
        """Runs `fn` on each replica with the next element, as one argument."""
        if input_iterator is None:
            return self._core.run(fn, ())
        return self._core.run(fn, (require_iterator(input_iterator).get_next(),))

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: object = None
    ) -> NumpyDataset:
        """The rows of arrays as a dataset.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> rows = strategy.experimental_make_numpy_dataset((np.arange(4), np.ones(4)))
        >>> iterator = strategy.make_dataset_iterator(rows.batch(4))
        >>> x, y = iterator.get_next()
        >>> x.values
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        return numpy_dataset(numpy_input)

    # Variables.

    def colocate_vars_with(
        self, colocate_with_variable: Beside
    ) -> AbstractContextManager[None]:
        """`extended.colocate_vars_with`, where it was before."""
        return self._extended.colocate_vars_with(colocate_with_variable)

    # Sessions, which JAX has not.

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: there are no sessions, and a cluster comes from a resolver."""

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of the configuration of a session; there are none here."""
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


def _common() -> type[Strategy]:
    """The class for strategies without one of their own, once those with are known."""
    importlib.import_module("jaxstrategy._src.compat.v1.v1_strategies")
    return OtherStrategy


ADAPTERS: StrategyAdapters[Strategy] = StrategyAdapters(_common)
"""The strategies with TensorFlow 1's methods, one for each strategy of today."""
