"""The methods of a strategy that place values and divide datasets: `PlacesValues`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import KeyPath

from jaxstrategy._src.communication_options import CommunicationOptions, checked_options
from jaxstrategy._src.contexts import context
from jaxstrategy._src.inputs.dataset import DistributedDataset, Feeding
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    checked_input_options,
)
from jaxstrategy._src.options import ValueContext
from jaxstrategy._src.processes.agreement import Agreement
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.reductions.compression import CompressionState, initial_state
from jaxstrategy._src.replicas.inner_axes import (
    WHOLE,
    inner_spec,
    of_stacked,
    with_inner,
)
from jaxstrategy._src.replicas.replica_placements import SPLIT
from jaxstrategy._src.replicas.replicas import (
    Replicas,
)
from jaxstrategy._src.strategies.composition import ComposedStrategy
from jaxstrategy._src.strategies.reducers import has_copies
from jaxstrategy._src.text.shown import shown, whole
from jaxstrategy._src.tracing.init import build_replicated
from jaxstrategy._src.values import arrays, building, per_replica as _per_replica
from jaxstrategy._src.values.arrays import Leaf, Number, PyTree, TreeT
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import is_slices

# All processes begin passes over datasets in the same order.
_passes = itertools.count()


def feeding_for(replicas: Replicas, processes: Processes | None) -> Feeding:
    """The division of datasets over the replicas."""

    def agree() -> Agreement:
        if processes is None:
            return Agreement()
        return processes.agreement(f"input {next(_passes)}")

    return Feeding(replicas, agree)


def require_function(dataset_fn: object) -> None:
    """Raise unless it can be called."""
    if not callable(dataset_fn):
        raise TypeError(
            f"`dataset_fn` is {dataset_fn!r}, which cannot be called. A function of an "
            "`InputContext` was wanted; a dataset itself is for "
            "`experimental_distribute_dataset`."
        )


def compression_state(
    params: PyTree,
    options: CommunicationOptions | None,
    replicas: Replicas,
    *,
    own: bool = False,
) -> CompressionState:
    """A state in which nothing is owed, on the devices of its replicas.

    While a function is traced that builds state its arrays are placed with the rest.

    Args:
      params: a pytree of arrays like those that are reduced.
      options: with a compression.
      replicas: those that reduce.
      own: whether it is the state of one replica, as seen in a step.

    Raises:
      ValueError: the options ask for no compression.
    """
    state = initial_state(params, options)

    def zeros(
        like: Leaf, memory: jax.ShapeDtypeStruct | None
    ) -> jax.Array | PerReplica | None:
        if memory is None:
            return None
        if own or replicas.count == 1:
            return jnp.zeros(memory.shape, memory.dtype)
        shape = (replicas.count, *memory.shape)
        if is_traced:
            return PerReplica(jnp.zeros(shape, memory.dtype))
        inner = inner_spec(like, replicas) if memory.shape == like.shape else WHOLE
        where = with_inner(of_stacked(inner), replicas, SPLIT)
        return PerReplica(jnp.zeros(shape, memory.dtype, device=where))

    is_traced = isinstance(jnp.zeros(()), Tracer)
    errors = jax.tree.map(zeros, params, state.errors, is_leaf=is_slices)
    if own or is_traced:
        return CompressionState(errors, state.bases)
    return CompressionState(errors, building.replicate(state.bases, replicas))


class PlacesValues(ComposedStrategy):
    """The methods of a strategy that place values, and divide datasets."""

    @overload
    def mirror(self, tree: Number, *, replica: int | None = None) -> jax.Array: ...
    @overload
    def mirror(self, tree: TreeT, *, replica: int | None = None) -> TreeT: ...
    def mirror(self, tree: PyTree, *, replica: int | None = None) -> PyTree:
        """`tree` with every array and number placed whole on every replica's device.

        Shapes stay. Leaves that are neither (strings, bools, functions) stay as they
        are. An array that is mirrored already is not copied.

        If the strategy has a `sharding`, each device gets its part of large arrays, and
        never has more of them. Where that is only for the optimizer, its state is
        known by its type: states of Optax and what stands in one chain with them,
        `opt_state` of Flax's `TrainState`, the variables of an `nnx.Optimizer`. Other
        arrays lie whole until a step divides what it does not read.

        Args:
          tree: the pytree.
          replica: of arrays whose copies differ (see `assert_in_sync`), the replica
            whose copies count; one of the first process's.

        Raises:
          TypeError: a leaf is a `PerReplica`.
          ValueError: this process has no such replica.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> isinstance(strategy.mirror(1.0), js.Mirrored)
        True
        """
        context.require_host(self, "mirror")
        if replica is not None:
            tree = self._copies_of(tree, replica)
        return building.replicate(tree, self._replicas)

    def _copies_of(self, tree: PyTree, replica: int) -> PyTree:
        """`tree` with what one replica has of each array that lies on all."""
        own, number = self._replicas.own, whole(replica)
        if number not in own:
            raise ValueError(
                f"`replica` was {shown(replica)}; the number of a replica of this "
                f"process was wanted, {own[0]} to {own[-1]}."
            )

        def copy(leaf: Leaf) -> Leaf:
            if not arrays.is_placed(leaf) or not has_copies(leaf, self._replicas):
                return leaf
            return self._replicas.copies(leaf)[own.index(number)]

        return jax.tree.map(copy, tree, is_leaf=_per_replica.is_per_replica)

    def per_replica(self, tree: PyTree) -> PyTree:
        """Values that differ between replicas, as `PerReplica`s on their devices.

        Args:
          tree: a pytree in which a *list* holds one version per replica (each of them
            an array, a number, nested lists of numbers, or a pytree of these), and an
            array that is in no list has shape `[replica, ...]`. Tuples and dicts are
            structure.

        Returns:
          The pytree with a `PerReplica` for each array, with one replica too: it is
          what was asked for. `run` takes it, and returns plain arrays there.

        Raises:
          ValueError: the number of versions is not the number of replicas, or they
            differ in shape, dtype or structure.
          TypeError: a leaf is not an array or a number.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> strategy.per_replica([1.5, 2.5])
        PerReplica(float32[] on cpu:0, cpu:1)
        >>> strategy.per_replica({"x": np.zeros((2, 3))})
        {'x': PerReplica(float32[3] on cpu:0, cpu:1)}
        """
        context.require_host(self, "per_replica")

        def is_end(node: object) -> bool:
            return isinstance(node, (list, PerReplica))

        def place(path: KeyPath, node: PyTree) -> PyTree:
            what = f"value{jax.tree_util.keystr(path)}"
            if isinstance(node, PerReplica):
                arrays.check_alive(_per_replica.contents(node), f"`{what}`")
                return node
            if isinstance(node, list):
                return building.stack(node, self._replicas, what)
            return building.place_stacked(node, self._replicas, what)

        return jax.tree.map_with_path(place, tree, is_leaf=is_end)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], PyTree]
    ) -> PyTree:
        """Values from `value_fn(ValueContext(i, n))`, called for each replica in order.

        With several processes, each calls it for its own replicas.

        Returns:
          A pytree like the ones `value_fn` returns, each leaf a `PerReplica`; with one
          replica an array.

        Raises:
          ValueError: the values differ in structure, shape or dtype.
          TypeError: a value is not an array or a number.
          ContextError: inside `run`.
          TracedValueError: of several processes, in a function that JAX traces.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> ids = strategy.experimental_distribute_values_from_function(
        ...     lambda ctx: ctx.replica_id_in_sync_group)
        >>> ids.values
        (Array(0, dtype=int32), Array(1, dtype=int32))
        """
        context.require_host(self, "experimental_distribute_values_from_function")
        n = self.num_replicas_in_sync
        versions = [value_fn(ValueContext(i, n)) for i in self._replicas.own]
        return building.stack(versions, self._replicas, own=True, plain_if_alone=True)

    def compression_state(
        self, params: PyTree, options: CommunicationOptions
    ) -> CompressionState:
        """A state for compressed reductions, in which nothing is left to send.

        `ReplicaContext.all_reduce_compressed` takes it. In Optax
        `optax.all_reduce_gradients` makes it itself, with this method if its `init` is
        called in `scope()` or by `strategy.init`.

        Args:
          params: a pytree of arrays like what is reduced, of any values: parameters,
            for gradients.
          options: with a `compression`.

        Returns:
          A `CompressionState`: for each array that is compressed a `PerReplica` of
          zeros of its shape (with one replica an array), and for `PowerSGD` a mirrored
          array `[columns, rank]`.

        Raises:
          ValueError: `options` have no compression.
          TypeError: `options` are none.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> options = js.experimental.CommunicationOptions(compression="int8")
        >>> params = {"w": np.zeros((3, 100), np.float32), "b": np.zeros(100)}
        >>> strategy.compression_state(params, options).errors
        {'b': None, 'w': PerReplica(float32[3,100] on cpu:0, cpu:1)}
        """
        context.require_host(self, "compression_state")
        checked_options(options, with_compression=True)
        return compression_state(params, options, self._replicas)

    def init(
        self, fn: Callable[..., TreeT], *args: PyTree, specs: PyTree = None
    ) -> TreeT:
        """`fn(*args)` built in mirrored form: on every device at once, from nothing.

        No device ever holds a copy of the result that it does not keep, so state that
        just fits can be built. Leaves of the result that are not arrays stay as they
        are; of a `PerReplica` made in `fn` each device gets its own version.

        If the strategy has a `sharding`, each device keeps its part of large arrays, as
        `mirror` places them. Its numbers are those of whole state, bit by bit, so what
        rounding could change is computed whole and then divided, one array after the
        other.

        With `logical_axes` arrays are made in the parts that the devices of a replica
        keep: as `specs` say, else as Flax's annotations do (`nn.with_partitioning`,
        `nn.with_logical_partitioning` with `nn.logical_axis_rules`, and those of
        `nnx`), else as an argument lies of which the array has the shape and the end of
        the path, such as moments of their parameters. The rest is whole on each device.
        Without `logical_axes`, annotations mean nothing.

        Args:
          fn: builds the state, for example a Flax model's `init`.
          args: its arguments; arrays and random keys in them are traced, numbers and
            everything else `fn` sees as they are.
          specs: a pytree of specs (`jax.P`) over logical axes with the structure of the
            result, or of the upper part of it; None for what they do not say.

        Raises:
          TypeError: an argument is a `PerReplica`, or `fn` returned something that is
            neither an array nor a plain value; `specs` has something else than specs.
          ValueError: a spec or an annotation does not fit its array, or names an axis
            that a replica has not.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> w = strategy.init(jax.random.key, 0)
        >>> isinstance(w, js.Mirrored)
        True
        >>> strategy = js.MirroredStrategy(logical_axes={"core": 2})
        >>> w = strategy.init(jnp.zeros, (4, 6), specs=jax.P(None, "core"))
        >>> w.shape, w.sharding.shard_shape(w.shape)
        ((4, 6), (4, 3))
        """
        context.require_host(self, "init")
        with self.scope():
            return build_replicated(fn, args, self._replicas, specs)

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """`dataset`, each of its global batches divided over the replicas.

        Replica i has the i-th part of the rows, in order. A batch that the replicas
        cannot share equally is filled up with copies of its last row; inside the step
        `masked_mean`, `masked_sum` and `batch_mask` know which rows are real. Some
        batches are read and copied to the devices ahead, in a thread.

        Args:
          dataset: where batches come from: `jaxstrategy.batches` of arrays in memory; a
            list of batches, a function that makes generators, or another iterable; a
            Grain dataset or loader, a PyTorch `DataLoader`, a `tf.data.Dataset`, a
            Hugging Face dataset in NumPy form. A batch is a pytree of arrays of shape
            `[rows, ...]`. A list of bare arrays is a list of batches, alike but for
            their rows; one batch of several arrays is a tuple of them, `[(x, y)]`. With
            several processes each reads the same batches and uses its own rows.
          options: see `InputOptions`.

        Returns:
          An iterable of the same pytrees with `PerReplica`s; with one replica of plain
          arrays, which are not filled up.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.
          ValueError: `options` ask for an input pipeline for each replica.
          ContextError: inside `run`.

        What is wrong with a batch (a scalar, text, other rows in one array than in
        another, another structure than the first) is said when the batch is reached,
        with its number and the array's path; the batches before it are given.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> for batch in strategy.experimental_distribute_dataset([np.arange(4)]):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        context.require_host(self, "experimental_distribute_dataset")
        return self._feeding.of_dataset(dataset, checked_input_options(options))

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The batches of what `dataset_fn` makes, each for one replica.

        For sources of which each process should read its own part: it is told which.

        Args:
          dataset_fn: given an `InputContext`, returns where batches come from, as
            `experimental_distribute_dataset` takes it. It is called once in each
            process, and a step takes as many batches as the process has replicas; with
            `InputReplicationMode.PER_REPLICA`, once for each replica.
          options: see `InputOptions`.

        Returns:
          An iterable of pytrees with `PerReplica`s, with one replica of plain arrays.
          It goes on until no replica has a batch left; those that have none before get
          one without real rows. The batches of the first step may have any sizes;
          later ones are not larger. Scalars are each replica's own.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns nothing that batches can
            be read from.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> def dataset_fn(context):
        ...     rows = context.get_per_replica_batch_size(4)
        ...     return js.batches(np.arange(8), rows)
        >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
        ...     print(batch.values)
        (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        (Array([4, 5], dtype=int32), Array([6, 7], dtype=int32))
        """
        context.require_host(self, "distribute_datasets_from_function")
        require_function(dataset_fn)
        return self._feeding.of_function(dataset_fn, checked_input_options(options))

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The name that `distribute_datasets_from_function` had in TensorFlow 2.0.

        Raises:
          TypeError: `dataset_fn` cannot be called, or returns nothing that batches can
            be read from.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> make = strategy.experimental_distribute_datasets_from_function
        >>> [batch.values for batch in make(lambda context: [np.arange(2)] * 2)]
        [(Array([0, 1], dtype=int32), Array([0, 1], dtype=int32))]
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    @property
    def _feeding(self) -> Feeding:
        return feeding_for(self._replicas, self._choices.processes)
