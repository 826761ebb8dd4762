"""Every old name, its new one or what a person must do: `NAMES`, by old names."""

from jaxstrategy.compat.port._array_names import ARRAYS
from jaxstrategy.compat.port._contrib_names import CONTRIB
from jaxstrategy.compat.port._distribute_names import DISTRIBUTE
from jaxstrategy.compat.port._name import Name
from jaxstrategy.compat.port._other_names import OTHERS
from jaxstrategy.compat.port._v1_names import V1

ROWS: tuple[Name, ...] = (*DISTRIBUTE, *V1, *CONTRIB, *ARRAYS, *OTHERS)
NAMES: dict[str, Name] = {row.old: row for row in ROWS}


# Where TensorFlow's own code, and programs of 2018, import the names from.
INTERNAL: dict[str, str] = {
    "tensorflow.contrib.distribute.python.*": "tf.contrib.distribute",
    "tensorflow.python.training.distribute": "tf.contrib.distribute",
    "tensorflow.python.training.distribution_strategy_context": "tf.contrib.distribute",
    "tensorflow.python.distribute.cluster_resolver.*": "tf.distribute.cluster_resolver",
    "tensorflow.python.distribute.coordinator.*": "tf.distribute.coordinator",
    "tensorflow.python.distribute.*": "tf.distribute",
    "tensorflow.python.ops.variables": "tf",
    "tensorflow.python.framework.dtypes": "tf",
}
# Names that only TensorFlow's own modules have, or had before.
FORMER: dict[str, str] = {
    "tf.distribute.CollectiveAllReduceStrategy": "tf.distribute."
    "MultiWorkerMirroredStrategy",
    "tf.distribute.DistributionStrategy": "tf.distribute.Strategy",
    "tf.distribute.Mirrored": "tf.types.experimental.distributed.Mirrored",
    "tf.distribute.PerReplica": "tf.types.experimental.distributed.PerReplica",
}


def row_of(name: str) -> Name:
    """The row of a name of TensorFlow: its own, or of the nearest thing above it.

    Args:
      name: with `tf.` first.
    """
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        row = NAMES.get(".".join(parts[:end]))
        if row is not None and (end == len(parts) or row.new is None or not row.exact):
            return row
    return NAMES["tf"]
