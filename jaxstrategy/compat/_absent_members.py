"""Members that today's classes have and those of older generations lack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

NAMES_IN_2018 = {
    "batch_reduce_to": "batch_reduce",
    "broadcast_to": "broadcast",
    "call_for_each_replica": "call_for_each_tower",
    "experimental_local_results": "unwrap",
    "experimental_make_numpy_dataset": "distribute_dataset",
    "experimental_run": "call_for_each_tower",
    "experimental_run_steps_on_iterator": "run_steps_on_dataset",
    "experimental_run_v2": "call_for_each_tower",
    "make_dataset_iterator": "distribute_dataset",
    "make_input_fn_iterator": "distribute_dataset",
    "num_replicas_in_sync": "num_towers",
    "reduce_to": "reduce",
    "replica_id_in_sync_group": "tower_id",
    "run": "call_for_each_tower",
    "strategy": "distribution_strategy",
}
"""Members of 2018 by what the same is called since TensorFlow 1.13."""

NAMES_IN_V1 = {
    "batch_reduce": "extended.batch_reduce_to",
    "broadcast": "extended.broadcast_to",
    "call_for_each_tower": "extended.call_for_each_replica",
    "distribute_dataset": "make_dataset_iterator",
    "distribution_strategy": "strategy",
    "fetch": "extended.read_var",
    "num_towers": "num_replicas_in_sync",
    "run_steps_on_dataset": "extended.experimental_run_steps_on_iterator",
    "tower_id": "replica_id_in_sync_group",
    **{
        name: f"extended.{name}"
        for name in (
            "call_for_each_replica",
            "colocate_vars_with",
            "experimental_run_steps_on_iterator",
            "non_slot_devices",
            "parameter_devices",
            "read_var",
            "update",
            "update_non_slot",
            "value_container",
            "worker_devices",
        )
    },
}
"""Members of TensorFlow 1.13 by where 2018 had the same."""


def missing_member(
    face: object, core: object, name: str, way: str, names: Mapping[str, str]
) -> NoReturn:
    """Raises the error for an attribute that `face` does not have.

    Args:
      face: an object of an older generation.
      core: the one of today over which it stands.
      name: the attribute.
      way: how the user comes to `core`, in code.
      names: what the members of other generations are called in this one.

    Raises:
      AttributeError: always. If `core` has such a public attribute, it says so, and
        so it does of what this generation calls by another name.
    """
    text = f"{type(face).__name__!r} object has no attribute {name!r}"
    if not name.startswith("_") and hasattr(type(core), name):
        text += f", which is younger: `{way}.{name}` is today's"
    here = names.get(name)
    if here and hasattr(type(face), here.split(".")[0]):
        text += f"; in this generation it is `{here}`"
    raise AttributeError(f"{text}.", name=name, obj=face)
