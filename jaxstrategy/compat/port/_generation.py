"""Which generation of `tf.distribute` a program is written for: `generation_of`."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import final


@final
class Generation(enum.Enum):
    """The three generations; `said` is how messages call them."""

    TF2 = "tf2"
    TF1 = "tf1"
    CONTRIB = "2018"

    @property
    def said(self) -> str:
        return {
            "tf2": "`tf.distribute` of TensorFlow 2",
            "tf1": "`tf.compat.v1.distribute` of TensorFlow 1.13 to 1.15",
            "2018": "`tf.contrib.distribute` of TensorFlow 1.7 to 1.12",
        }[self.value]


_TOWERS = frozenset(
    "call_for_each_tower get_tower_context get_cross_tower_context num_towers tower_id "
    "distribute_dataset run_steps_on_dataset is_single_tower get_update_device "
    "TowerContext "
    "DistributionStrategy worker_device_index cross_tower_ops increment_var".split()
)
_REPLICAS = frozenset(
    "num_replicas_in_sync get_replica_context experimental_local_results "
    "experimental_run_v2 replica_id_in_sync_group experimental_distribute_dataset "
    "call_for_each_replica make_dataset_iterator make_input_fn_iterator "
    "cross_device_ops".split()
)
_ITERATORS = frozenset(
    "experimental_run make_dataset_iterator make_input_fn_iterator "
    "call_for_each_replica experimental_run_steps_on_iterator non_slot_devices "
    "experimental_make_numpy_dataset update_config_proto read_var update_non_slot "
    "experimental_initialize experimental_finalize".split()
)
_GRAPHS = frozenset(
    "tf.Session tf.ConfigProto tf.get_variable tf.placeholder tf.app tf.flags "
    "tf.global_variables_initializer tf.variable_scope tf.enable_eager_execution "
    "tf.train.AdamOptimizer tf.train.GradientDescentOptimizer tf.layers "
    "tf.train.get_or_create_global_step tf.logging tf.train.MonitoredTrainingSession "
    "tf.disable_v2_behavior tf.train.MomentumOptimizer".split()
)


def generation_of(
    names: Collection[str], attributes: Collection[str]
) -> Generation | None:
    """The generation of a program; None if it does not use `tf.distribute`.

    Args:
      names: of TensorFlow that it uses, with `tf.` first.
      attributes: all names after a dot, and imported ones.
    """
    attributes = set(attributes)
    if _any_in(names, "tf.contrib.distribute"):
        older = attributes & _TOWERS or not attributes & _REPLICAS
        return Generation.CONTRIB if older else Generation.TF1
    newer = _any_in(names, "tf.distribute") or _any_in(names, "tf.compat.v1.distribute")
    if names and attributes & _TOWERS and not newer:
        return Generation.CONTRIB
    if _any_in(names, "tf.compat.v1.distribute") or (names and attributes & _ITERATORS):
        return Generation.TF1
    if _any_in(names, "tf.distribute"):
        graphs = any(_any_in(names, graph) for graph in _GRAPHS)
        return Generation.TF1 if graphs else Generation.TF2
    if names and attributes & _REPLICAS:
        return Generation.TF2
    return None


def _any_in(names: Collection[str], module: str) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for name in names)
