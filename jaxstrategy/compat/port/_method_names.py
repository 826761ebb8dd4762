"""Methods and properties of strategies and contexts that mean something else here."""

from __future__ import annotations

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Method:
    """A method that programs of some generations call.

    Args:
      name: of the method or property.
      generations: by their short names.
      text: how it differs.
      receiver: a pattern of the objects that are meant; none: the name is a
        strategy's or context's only.
      new: its name here, if it has another.
    """

    name: str
    generations: tuple[str, ...]
    text: str = ""
    receiver: str = ""
    new: str = ""


STRATEGY = r"(?:^|[._])(?:\w*_?strategy|distribution|dist|get_strategy\(\))$"
_ITERATOR = r"(?:^|[._])(?:it|\w*iter\w*)$"
_TF2, _TF1, _2018 = ("tf2",), ("tf1",), ("2018",)
_ALL, _NEWER = ("tf2", "tf1", "2018"), ("tf2", "tf1")
_ONCE = (
    "the function is traced once for all replicas, and compiled: what Python does in "
    "it "
    "(`print`, counters) happens once"
)
_INITIALIZER = (
    "call `iterator.initialize()`, or leave it out: iterators start by themselves; "
    "nothing is run in a session"
)
_BATCHES = (
    "batches have one shape: the last one is filled up, and a mask says which rows are "
    "real (`js.masked_mean`, `js.batch_mask`); `remainder='error'` refuses instead"
)
_APPLY = (
    "TensorFlow's optimizers reduce gradients over the replicas: "
    "`js.get_replica_context().all_reduce('sum', gradients)`, then Optax's update"
)
_TRACED = "is traced in a step: `jnp.where` instead of `if`, no list index"

METHODS: tuple[Method, ...] = (
    Method(
        "run",
        _NEWER,
        f"{_ONCE}; a result that is equal on all replicas is a plain array",
        STRATEGY,
    ),
    Method("experimental_run_v2", _NEWER, _ONCE, new="run"),
    Method(
        "reduce",
        _NEWER,
        "a value that is equal on all replicas is a plain array here, and SUM counts "
        "it "
        "once for each replica; TensorFlow refuses it",
        STRATEGY,
    ),
    Method("experimental_distribute_dataset", _NEWER, _BATCHES),
    Method("replica_id_in_sync_group", _NEWER, _TRACED),
    Method(
        "merge_call",
        _ALL,
        "the function is called once for each trace, and may stand in `lax.scan`",
    ),
    Method("apply_gradients", _ALL, _APPLY),
    Method("minimize", ("tf1", "2018"), _APPLY),
    Method(
        "numpy",
        _TF2,
        "`float(x)` or `np.asarray(x)`: variables have a method `numpy`, arrays not",
    ),
    Method("experimental_run", _TF1, _ONCE),
    Method("make_dataset_iterator", _TF1, _BATCHES),
    Method("call_for_each_replica", _TF1, _ONCE),
    Method("initializer", ("tf1", "2018"), _INITIALIZER, _ITERATOR),
    Method(
        "run",
        ("tf1", "2018"),
        "a session ran what was built before; here calls do their work at once, and "
        "arrays are results",
        r"(?:^|[._])\w*sess(?:ion)?$",
    ),
    Method(
        "update_config_proto",
        _TF1,
        "gives a copy back; there are no sessions to configure",
    ),
    Method(
        "update_non_slot",
        ("tf1", "2018"),
        "calls the function once for all copies; variables change once on each",
    ),
    Method("call_for_each_tower", _2018, _ONCE),
    Method("tower_id", _2018, _TRACED),
    Method(
        "worker_device_index",
        _2018,
        "a value that differs by tower: an argument of `call_for_each_tower`",
    ),
    Method("batch_reduce", _2018, "results are arrays, on the destinations' devices"),
    Method(
        "run_steps_on_dataset",
        _2018,
        "each step is compiled once; outputs are those of the last one",
    ),
)

# Of programs whose `tf.keras` becomes Keras 3.
KERAS_METHODS: tuple[Method, ...] = (
    Method(
        "apply_gradients",
        _ALL,
        "TensorFlow's optimizers reduce gradients over the replicas. In a step of "
        "`run`: `js.get_replica_context().all_reduce('sum', gradients)`, then "
        "`stateless_apply` of Keras' optimizer, which changes nothing in place",
    ),
    Method(
        "update_state",
        _ALL,
        "in a step of `run`: `js.keras.stateless_update_state(metric, values, ...)`, "
        "with `sample_weight=js.batch_mask(batch)` for the real rows only",
    ),
    Method("reset_states", _ALL, "has this name in Keras 3", new="reset_state"),
)
