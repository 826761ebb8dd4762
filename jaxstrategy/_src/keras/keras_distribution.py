"""The `keras.distribution` of a strategy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import keras

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import AnyStrategy, checked_core
from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.strategies.parameter_server import ParameterServerStrategy


@final
class AnyRows(keras.distribution.DataParallel):
    """A batch whose rows do not divide equally lies whole on each device.

    Keras' own class refuses it (Keras 3.15).
    """

    def get_data_layout(
        self, data_shape: Sequence[int]
    ) -> keras.distribution.TensorLayout:
        """The layout of a batch of this shape."""
        if data_shape and data_shape[0] % self.num_model_replicas == 0:
            return super().get_data_layout(data_shape)
        axes = [None] * len(data_shape)
        return keras.distribution.TensorLayout(axes, self.device_mesh)


if TYPE_CHECKING:
    import keras

_made: weakref.WeakKeyDictionary[AbstractStrategy, keras.distribution.DataParallel] = (
    weakref.WeakKeyDictionary()
)


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
    try:
        import keras
    except ModuleNotFoundError as missing:
        if missing.name != "keras":
            raise
        raise MissingExtraError(
            "`js.keras` needs Keras, which is not installed. Install the extra: "
            "pip install 'jaxstrategy[keras]'"
        ) from missing
    _check_backend(keras.config.backend())
    _check_strategy(core)
    if core not in _made:
        pass

        # Keras would divide files of TensorFlow's datasets, and refuse all others.
        _made[core] = AnyRows(devices=list(core.devices), auto_shard_dataset=False)
    return _made[core]


def _check_backend(backend: str) -> None:
    if backend != "jax":
        raise ValueError(
            f"A Keras model was made in the scope of a strategy of JAX, but Keras runs "
            f'on "{backend}". Set the environment variable KERAS_BACKEND=jax before '
            "Keras is imported, or make the model outside of the scope."
        )


def _check_strategy(strategy: AbstractStrategy) -> None:
    reason = _reason_against(strategy)
    if reason:
        raise ValueError(
            f"A Keras model cannot be made in the scope of {strategy!r}: {reason}. Use "
            "a `MirroredStrategy`, `OneDeviceStrategy` or "
            "`MultiWorkerMirroredStrategy` with one replica on each device; for "
            "variables that are divided, leave the scope and set Keras' own "
            "`keras.distribution.ModelParallel`."
        )


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
