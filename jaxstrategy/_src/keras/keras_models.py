"""Models of Keras that were made in a strategy's scope, and their distribution.

Keras keeps one distribution for all models, and asks for it in `fit`, while programs of
TensorFlow call `fit` outside of the scope. Besides, it gives all batches of an epoch
the layout of the first, so that the last, of fewer rows, would be refused (Keras 3.15).
So models know their strategy here, and batches are placed one by one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import AnyStrategy, checked_core
from jaxstrategy._src.flax.linen import moments
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.iterator import DistributedIterator
from jaxstrategy._src.inputs.sources import Source
from jaxstrategy._src.strategies.current import get_replica_context
from jaxstrategy._src.strategies.parameter_server import ParameterServerStrategy
from jaxstrategy._src.values.arrays import PyTree


@final
class AnyRows(keras.distribution.DataParallel):
    """A batch whose rows do not divide equally lies whole on each device.

    Keras' own class refuses it (Keras 3.15).
    """

    def get_data_layout(
        self, data_shape: Sequence[int]
    ) -> keras.distribution.TensorLayout:
        if data_shape and data_shape[0] % self.num_model_replicas == 0:
            return super().get_data_layout(data_shape)
        axes = [None] * len(data_shape)
        return keras.distribution.TensorLayout(axes, self.device_mesh)


_distributions: weakref.WeakKeyDictionary[
    AbstractStrategy, keras.distribution.DataParallel
] = weakref.WeakKeyDictionary()


def distribution(strategy: AnyStrategy) -> keras.distribution.DataParallel:
    """The distribution of Keras that has the replicas of `strategy`, always the same.

    `strategy.scope()` sets it by itself. Its mesh has the devices in replica order, and
    variables lie whole on each.

    Raises:
      MissingExtraError: Keras is not installed.
      TypeError: `strategy` is none.
      ValueError: Keras runs on another backend than JAX; or the strategy does other
        things than equal steps on whole variables, one replica on each device.

    >>> import os
    >>> os.environ["KERAS_BACKEND"] = "jax"
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> js.keras.distribution(strategy).num_model_replicas
    2
    """
    core = checked_core(strategy)
    if (backend := keras.config.backend()) != "jax":
        raise ValueError(
            f"A Keras model was made in the scope of a strategy of JAX, but Keras runs "
            f'on "{backend}". Set the environment variable KERAS_BACKEND=jax before '
            "Keras is imported, or make the model outside of the scope."
        )
    if reason := _reason_against(core):
        raise ValueError(
            f"A Keras model cannot be made in the scope of {core!r}: {reason}. Use "
            "a `MirroredStrategy`, `OneDeviceStrategy` or "
            "`MultiWorkerMirroredStrategy` with one replica on each device; for "
            "variables that are divided, leave the scope and set Keras' own "
            "`keras.distribution.ModelParallel`."
        )
    if core not in _distributions:
        # Keras would divide files of TensorFlow's datasets, and refuse all others.
        _distributions[core] = AnyRows(
            devices=list(core.devices), auto_shard_dataset=False
        )
    return _distributions[core]


def _reason_against(strategy: AbstractStrategy) -> str:
    replicas = strategy._replicas
    if isinstance(strategy, ParameterServerStrategy):
        return "its variables are on parameter servers"
    if strategy._parameter_replicas != replicas:
        return "its variables are on other devices than its replicas"
    if replicas.per_device > 1:
        return "several replicas share a device, and Keras takes one step for all"
    if replicas.inner_axes:
        return "its replicas have several devices each (`logical_axes`)"
    if replicas.state_sharding is not None:
        return "it divides state (`sharding`), and Keras' state would lie whole"
    return ""


_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")
_RUNNING = ("fit", "evaluate", "predict", *_ON_BATCH)
_FUNCTIONS = ("train", "test", "predict")


@final
class _Owner:
    def __init__(self, strategy: AbstractStrategy) -> None:
        self.strategy = strategy
        self.loops = 0


_owners: weakref.WeakKeyDictionary[keras.Model, _Owner] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def scope(strategy: AbstractStrategy) -> Iterator[None]:
    _add_to_models()
    try:
        chosen = distribution(strategy)
    except ValueError:
        # The scope may be about something else; a model that is made in it is refused.
        yield
        return
    with _entered.block(chosen):
        yield


@final
class _Entered(threading.local):
    """The distributions of the scopes that this thread is in.

    Tasks of asyncio are in scopes of their own, and leave them in any order, while
    Keras has one distribution for a thread: the last of those that are left goes on.
    """

    def __init__(self) -> None:
        self._before: Any = None  # of the user, who may have set one
        self._blocks: list[tuple[object, keras.distribution.DataParallel]] = []

    @contextlib.contextmanager
    def block(self, chosen: keras.distribution.DataParallel) -> Iterator[None]:
        if not self._blocks:
            self._before = keras.distribution.distribution()
        own = (object(), chosen)
        self._blocks.append(own)
        keras.distribution.set_distribution(chosen)
        try:
            yield
        finally:
            self._blocks.remove(own)
            last = self._blocks[-1][1] if self._blocks else self._before
            keras.distribution.set_distribution(last)


_entered = _Entered()


@functools.cache
def _add_to_models() -> None:
    keras.Model.__new__ = staticmethod(_with_owner(keras.Model.__new__))
    for name in (*_RUNNING, "build"):
        setattr(keras.Model, name, _on_devices(getattr(keras.Model, name)))
    for kind in _FUNCTIONS:
        name = f"make_{kind}_function"
        made = _placing(getattr(keras.Model, name), f"{kind}_function")
        setattr(keras.Model, name, made)


def _with_owner(new: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new)
    def made(cls: type[keras.Model], *args: Any, **options: Any) -> keras.Model:
        strategy = _scope_strategy()
        if strategy is not None:
            distribution(strategy)
        model = new(cls, *args, **options)
        if strategy is not None and isinstance(model, keras.Model):
            _owners[model] = _Owner(strategy)
        return model

    return made


def _scope_strategy() -> AbstractStrategy | None:
    context = _context.current()
    return context.strategy if context.replica is None and not context.in_step else None


_OF_STEPS = (DistributedDataset, DistributedIterator, Source)  # unknown to Keras


def _on_devices(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(model: keras.Model, *args: Any, **options: Any) -> Any:
        owner = _owners.get(model)
        _check_scope(model, owner, method.__name__)
        if owner is None:
            return method(model, *args, **options)
        is_loop = method.__name__ in _RUNNING
        data = args[0] if args else options.get("x")
        if is_loop and isinstance(data, _OF_STEPS):
            raise TypeError(
                f"`{method.__name__}` was given {data!r}. Keras divides batches over "
                "the devices itself: give arrays of all rows with `batch_size`, a "
                "generator of global batches, or a `keras.utils.PyDataset`. A loop of "
                "your own, with `js.keras.stateless_call` in `strategy.run`, takes it."
            )
        with distribution(owner.strategy).scope():
            if method.__name__ == "fit":
                _check_seeds()
            owner.loops += is_loop
            try:
                return method(model, *args, **options)
            finally:
                owner.loops -= is_loop

    return called


def _check_scope(model: keras.Model, owner: _Owner | None, method: str) -> None:
    """Raise where the model was made under another strategy than is current."""
    strategy = _scope_strategy()
    if strategy is None or (owner is not None and owner.strategy is strategy):
        return
    made = "outside of its scope" if owner is None else f"under {owner.strategy!r}"
    raise ValueError(
        f"`{method}` of the Keras model {model.name!r} was called in the scope of "
        f"{strategy!r}, but the model was made {made}. Make and compile the model in "
        "that scope, or call the method outside of it."
    )


def _check_seeds() -> None:
    """Raise unless all processes would shuffle alike, for which Keras asks NumPy."""
    if jax.process_count() == 1:
        return
    _, keys, position, *_ = np.random.get_state()
    # Of 64 bits JAX would drop half.
    state = np.append(np.asarray(keys, np.uint32), np.uint32(position))
    try:
        multihost_utils.assert_equal(state)
    except AssertionError as different:
        raise ValueError(
            "`fit` was called by processes whose random numbers differ: each would "
            "shuffle its data in another order. Call `keras.utils.set_random_seed` "
            "with one number in all of them before the model is made."
        ) from different


def _placing(make: Callable[..., Any], attribute: str) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(model: keras.Model, *args: Any, **options: Any) -> Any:
        owner = _owners.get(model)
        if owner is None:
            return make(model, *args, **options)
        _check_variables(model, owner)
        result = make(model, *args, **options)
        function = getattr(model, attribute)
        if not isinstance(function, _OnPlacedBatches):
            chosen = distribution(owner.strategy)
            setattr(model, attribute, _OnPlacedBatches(function, chosen))
        if owner.loops:
            # From here on Keras would place batches: `_OnPlacedBatches` does.
            keras.distribution.set_distribution(None)
        return result

    return made


def _check_variables(model: keras.Model, owner: _Owner) -> None:
    """Raise where a part of the model was made outside of the scope."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *getattr(optimizer, "variables", ())]
    devices = set(owner.strategy.devices)
    for variable in variables:
        if variable.value.sharding.device_set != devices:
            raise ValueError(
                f"The variable {variable.path!r} of the Keras model {model.name!r} is "
                f"not on the devices of {owner.strategy!r}: it was made outside of its "
                "scope. Make layers, optimizers and metrics in the scope, too."
            )


@final
class _OnPlacedBatches:
    """A function of Keras' loops, over batches that are placed on devices."""

    def __init__(
        self, function: Callable[..., Any], chosen: keras.distribution.DataParallel
    ) -> None:
        self._function = function
        self._chosen = chosen
        whole = keras.distribution.TensorLayout([], chosen.device_mesh)
        self._whole = jax.jit(lambda tree: tree, out_shardings=whole.backend_layout)

    def __call__(self, state: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
        outputs, state = self._function(state, map(self._placed, batches))
        if jax.process_count() > 1:
            outputs = self._whole(outputs)
        return outputs, state

    def _placed(self, batch: Any) -> Any:
        return jax.tree.map(self._placed_array, batch)

    def _placed_array(self, array: Any) -> jax.Array:
        """The rows divided over the devices, or all on each if they do not divide."""
        sharding = self._chosen.get_data_layout(array.shape).backend_layout
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return jax.device_put(array, sharding)
        rows = np.asarray(array)
        return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)


@final
@keras.saving.register_keras_serializable("jaxstrategy")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with statistics over all replicas.

    For loops of your own: in a step of `strategy.run`, mean and variance are those of
    the real rows of all replicas (`js.batch_mask`), so that the model trains as on one
    device with the whole batch, and the moving statistics are equal on all. Elsewhere,
    as under `fit`, it is Keras' layer, whose arguments it takes. Keras' own
    `synchronized=True` is for TensorFlow only.

    >>> import keras
    >>> import jaxstrategy as js
    >>> model = keras.Sequential([
    ...     keras.Input((4,)), js.keras.BatchNormalization(), keras.layers.Dense(1)])
    """

    # Keras has no types, and says None of what `build` makes.
    axis: Any
    moving_mean: Any
    moving_variance: Any
    momentum: Any

    def call(self, inputs: jax.Array, training: Any = None, mask: Any = None) -> Any:
        """The inputs, `[rows, ..., features]`, normalized: of the same shape."""
        replica = get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return super().call(inputs, training=training, mask=mask)
        if not training or not self.trainable:
            return super().call(inputs, training=False, mask=mask)
        return self._normalized(inputs, mask)

    def _normalized(self, inputs: jax.Array, mask: jax.Array | None) -> Any:
        x: Any = keras.ops.cast(inputs, "float32")
        axes = tuple(i for i in range(x.ndim) if i != self.axis % x.ndim)
        if mask is not None:
            mask = jnp.expand_dims(mask, range(jnp.ndim(mask), x.ndim))
        # Of differences, because a difference of squares loses digits to a large mean.
        found = moments(x, axes, mask=mask, fast=False, groups=None)
        old = self.moving_mean.value, self.moving_variance.value
        new = found.moved(*old, self.momentum)
        self.moving_mean.assign(new[0])
        self.moving_variance.assign(new[1])
        mean, variance = found.or_stored(*old)
        outputs = keras.ops.batch_normalization(
            x, mean, variance, self.axis, self.beta, self.gamma, self.epsilon
        )
        return keras.ops.cast(outputs, self.compute_dtype)


Values: TypeAlias = list[jax.Array]

# Keras names the state of what draws random numbers so, in every layer (3.0 to 3.15).
_SEEDS = "seed_generator"


def stateless_call(
    model: Any,
    trainable_variables: Sequence[jax.Array],
    non_trainable_variables: Sequence[jax.Array],
    *args: PyTree,
    **kwargs: PyTree,
) -> tuple[PyTree, Values]:
    """`model.stateless_call` of one replica: each draws random numbers of its own.

    Keras keeps the state of `Dropout` and other layers that draw among the variables
    that are not trained, equal on all replicas, so that all would drop the same. Here
    each replica draws with its own, made of the common one and its number, and the
    common one counts on.

    Args:
      model: a model or layer of Keras that is built.
      trainable_variables: values for `model.trainable_variables`, in their order.
      non_trainable_variables: values for `model.non_trainable_variables`.
      *args: what the model is called with.
      **kwargs: likewise, such as `training=True`.

    Returns:
      The model's outputs, and the new values of the variables that are not trained.
      These are equal on all replicas, if what layers keep there is reduced, as the
      layer `js.keras.BatchNormalization` does.

    Raises:
      ValueError: there are more or fewer values than variables.

    >>> import keras, numpy as np
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5)])
    >>> @strategy.run
    ... def step(others, x):
    ...     return js.keras.stateless_call(model, [], others, x, training=True)
    >>> others = strategy.mirror([v.value for v in model.non_trainable_variables])
    >>> y, others = step(others, strategy.per_replica(np.ones((2, 4, 2))))
    >>> y.shape
    (4, 2)
    """
    variables = model.non_trainable_variables
    if len(variables) != len(non_trainable_variables):
        raise ValueError(
            f"`stateless_call` was given {len(non_trainable_variables)} values for the "
            f"{len(variables)} variables of `{model.name}` that are not trained. Give "
            "`[v.value for v in model.non_trainable_variables]`, or what an earlier "
            "call returned."
        )
    replica = get_replica_context()
    draws = [_SEEDS in variable.path for variable in variables]
    own = [
        replica.fold_in(value) if is_seed else value
        for value, is_seed in zip(non_trainable_variables, draws, strict=True)
    ]
    outputs, new = model.stateless_call(trainable_variables, own, *args, **kwargs)
    drawn = [
        # How often was drawn is the same on all; what with is not.
        common + replica.all_reduce("max", after - before) if is_seed else after
        for common, before, after, is_seed in zip(
            non_trainable_variables, own, new, draws, strict=True
        )
    ]
    return outputs, drawn


def stateless_update_state(
    metric: Any, metric_variables: Sequence[jax.Array], *args: PyTree, **kwargs: PyTree
) -> Values:
    """`metric.stateless_update_state` with the batches of all replicas.

    For metrics whose variables add up over batches: means, accuracies, `AUC`, counts of
    confusions, and all others of `keras.metrics` that are sums of rows. What each
    replica adds is summed over them.

    Args:
      metric: a metric of Keras that is built.
      metric_variables: values for `metric.variables`, equal on all replicas.
      *args: what `metric.update_state` takes, such as labels and predictions of this
        replica's rows, `[rows, ...]`.
      **kwargs: likewise; with `sample_weight=js.batch_mask(batch)`, rows that only
        fill up a batch do not count.

    Returns:
      The new values, equal on all replicas: for `metric.stateless_result`.

    >>> import keras, numpy as np
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> metric = keras.metrics.Mean()
    >>> @strategy.run
    ... def step(state, x):
    ...     return js.keras.stateless_update_state(metric, state, x)
    >>> state = strategy.mirror([v.value for v in metric.variables])
    >>> state = step(state, strategy.per_replica(np.array([[1.0, 2.0], [3.0, 6.0]])))
    >>> float(metric.stateless_result(state))
    3.0
    """
    before = list(metric_variables)
    after = metric.stateless_update_state(before, *args, **kwargs)
    added = [new - old for new, old in zip(after, before, strict=True)]
    total = get_replica_context().all_reduce("sum", added)
    return [old + more for old, more in zip(before, total, strict=True)]
