"""The names of `tf.compat.v1.distribute`, TensorFlow 1.13 to 1.15."""

from jaxstrategy.compat.port._name import Form, Name, modules, renamed

_HERE = "jaxstrategy.compat.v1"

_KEYWORDS = "name shape dtype initializer trainable synchronization aggregation".split()
_GET_VARIABLE = Form(4, {name: name for name in _KEYWORDS}, bare=False)
_SCOPE = Form(1, {"name_or_scope": "name_or_scope", "reuse": "reuse"}, bare=False)
_ONE = "one variable for each name and strategy"


def variables(old: str, new: str) -> list[Name]:
    """Rows of the functions that make variables by their names."""
    return [
        Name(f"{old}.get_variable", f"{new}.get_variable", _ONE, form=_GET_VARIABLE),
        Name(f"{old}.variable_scope", f"{new}.variable_scope", form=_SCOPE),
        *renamed(old, new, "AUTO_REUSE get_variable_scope"),
    ]


V1: list[Name] = [
    *variables("tf.compat.v1.distribute", _HERE),
    *modules(
        [
            ("tf.compat.v1.distribute", _HERE),
            ("tf.compat.v1.distribute.experimental", f"{_HERE}.experimental"),
            ("tf.compat.v1.distribute.cluster_resolver", f"{_HERE}.cluster_resolver"),
        ]
    ),
    *renamed(
        "tf.compat.v1.distribute",
        _HERE,
        "CrossDeviceOps HierarchicalCopyAllReduce InputContext InputReplicationMode "
        "MirroredStrategy NcclAllReduce OneDeviceStrategy ReduceOp "
        "ReductionToOneDevice "
        "ReplicaContext RunOptions Server Strategy StrategyExtended "
        "experimental_set_strategy get_loss_reduction get_replica_context get_strategy "
        "has_strategy in_cross_replica_context",
        {
            "MirroredStrategy": "takes no `num_gpus`: `devices=['GPU:0', 'GPU:1']`",
            "OneDeviceStrategy": "results are plain arrays",
            "ReplicaContext": "`replica_id_in_sync_group` is traced in a step: "
            "`jnp.where` "
            "instead of `if`; `devices` has the devices of all replicas",
            "RunOptions": "is taken and has no effect: shapes are static, and XLA "
            "compiles each step in any case",
            "Server": "no session configuration; `join()` ends with the job",
            "Strategy": "no sessions: methods do their work at once, `initialize()` "
            "and "
            "such return [] or None; a dataset's last batch is filled up",
            "StrategyExtended": "`update` and `update_non_slot` call the function once "
            "for all copies; each copy changes once",
            "get_loss_reduction": "SUM: what divides a loss by the replicas is the "
            "program's own",
        },
    ),
    *renamed(
        "tf.compat.v1.distribute.cluster_resolver",
        f"{_HERE}.cluster_resolver",
        "ClusterResolver GCEClusterResolver KubernetesClusterResolver "
        "KubernetesExecutableLocation SimpleClusterResolver SlurmClusterResolver "
        "TFConfigClusterResolver TPUClusterResolver UnionResolver",
    ),
    *renamed(
        "tf.compat.v1.distribute.experimental",
        f"{_HERE}.experimental",
        "CentralStorageStrategy CollectiveCommunication CollectiveHints "
        "CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy "
        "ParameterServerStrategy TPUStrategy",
        {
            "CentralStorageStrategy": "an on-read variable has a copy per replica "
            "here; "
            "there `synchronization` is ignored",
            "MultiWorkerMirroredStrategy": "`TF_CONFIG` is read; one process per host, "
            "started by `python -m jaxstrategy.launch`",
            "ParameterServerStrategy": "each worker runs the whole program; the chief "
            "makes the variables",
        },
    ),
]
