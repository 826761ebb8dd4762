"""Names of `tf.distribute` that are not here, and what to use instead."""

from __future__ import annotations

from importlib.util import find_spec

_OF_TENSORFLOW_2 = (
    "coordinator",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "InputOptions",
)

# Names of 2019 and later, by those of 2018.
_NAMES_OF_2018 = {
    "get_replica_context": "get_tower_context",
    "get_strategy": "get_distribution_strategy",
    "has_strategy": "has_distribution_strategy",
    "in_cross_replica_context": "get_cross_tower_context",
    "ReplicaContext": "TowerContext",
    "Strategy": "DistributionStrategy",
    "CrossDeviceOps": "CrossTowerOps",
    "NcclAllReduce": "AllReduceCrossTowerOps",
    "ReductionToOneDevice": "ReductionToOneDeviceCrossTowerOps",
    "PerReplica": "PerDevice",
    "ReduceOp": "VariableAggregation",
}

# Names that were at the top of the package once.
_MOVED = {
    "errors": (
        "CancelledError ClosureAbortedError ClosureInputError CompiledStepError "
        "ContextError DivergentCollectiveError DonatedValueError "
        "DoubleReductionWarning LateReplicaWarning LeakedTracerError "
        "MissingExtraError NotMirroredError NotMirroredVariableError "
        "NotMirroredWarning ObjectError OutOfSyncError PaddedRowsWarning "
        "ParameterServerLost PlacementError RecompilationWarning "
        "SimulationError TracedValueError WholeTableWarning "
    ),
    "training": (
        "compute_average_loss scale_regularization_loss pipeline "
        "DynamicLossScale all_finite cast_floating progress training_loop "
    ),
    "experimental": (
        "PowerSGD CompressionState Versions eager_replicas CompiledStep "
        "compilation_cache grouped "
    ),
    "profiling": ("Explanation Topology "),
    "planning": ("describe "),
}


ADVICE = {
    "compat.v1.distribute": (
        "Here its names are those of `compat.v1` itself: `from jaxstrategy.compat "
        "import v1 as distribute`."
    ),
    **{
        f"compat.v1.{name}": f"It is one of 2.x, and here `jaxstrategy.{name}`."
        for name in _OF_TENSORFLOW_2
    },
    **{
        f"compat.v1.{name}": f"There it is `compat.v1.experimental.{name}`, and here."
        for name in (
            "CentralStorageStrategy",
            "MultiWorkerMirroredStrategy",
            "ParameterServerStrategy",
            "TPUStrategy",
        )
    },
    **{
        f"compat.v1.{older}": (
            f"It is of 2018, and in `compat.contrib`; since 1.13 it is `{name}`."
        )
        for name, older in _NAMES_OF_2018.items()
        if name not in ("NcclAllReduce", "PerReplica")
    },
    "compat.contrib.MultiWorkerAllReduce": (
        "Here it is `jaxstrategy.HierarchicalCopyAllReduce`, which sums inside each "
        "process first."
    ),
    "compat.contrib.DistributeConfig": (
        "It is for Estimators. `jaxstrategy.training.training_loop` trains with any "
        "strategy."
    ),
    "compat.contrib.run_standard_tensorflow_server": (
        "It is for parameter servers: `jaxstrategy.Server(cluster_spec, ...).join()`."
    ),
    **{
        f"compat.contrib.{name}": (
            f"In 2018 it was `{older}`, which is here; it is `jaxstrategy.{name}` now."
        )
        for name, older in _NAMES_OF_2018.items()
    },
}


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that `module` does not have.

    A name of `tf.distribute` is followed by what to use instead.
    """
    full = f"{module}.{name}".removeprefix("jaxstrategy.")
    text = f"module {module!r} has no attribute {name!r}"
    if module == "jaxstrategy":
        homes = [home for home, names in _MOVED.items() if name in names.split()]
        text += "".join(f"; it is `jaxstrategy.{home}.{name}`" for home in homes)
        if name.isidentifier() and find_spec(f"{module}.{name}"):
            text += f"; it is a module: `import {module}.{name}`"
    if full in ADVICE:
        text = f"{text}, which TensorFlow has. {ADVICE[full]}"
    return AttributeError(text, name=name)
