"""The names of `tf.distribute` of TensorFlow 2, and what is named with them."""

from jaxstrategy.compat.port._name import Name, modules, renamed

_JOBS = "one process per host, started by `python -m jaxstrategy.launch`"
_REMOTE = "the scheduled function is traced once, and sends its changes when it ends"

DISTRIBUTE: list[Name] = [
    *modules(
        [
            ("tf.distribute", "jaxstrategy"),
            ("tf.distribute.experimental", "jaxstrategy.experimental"),
            ("tf.distribute.cluster_resolver", "jaxstrategy.cluster_resolver"),
            ("tf.distribute.coordinator", "jaxstrategy.coordinator"),
            (
                "tf.distribute.experimental.coordinator",
                "jaxstrategy.experimental.coordinator",
            ),
            (
                "tf.distribute.experimental.partitioners",
                "jaxstrategy.experimental.partitioners",
            ),
            ("tf.distribute.experimental.rpc", "jaxstrategy.experimental.rpc"),
        ]
    ),
    *renamed(
        "tf.distribute",
        "jaxstrategy",
        "CrossDeviceOps DistributedDataset DistributedIterator DistributedValues "
        "HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode "
        "MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy "
        "ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext "
        "RunOptions "
        "Server Strategy StrategyExtended TPUStrategy experimental_set_strategy "
        "get_replica_context get_strategy has_strategy in_cross_replica_context",
        {
            "DistributedDataset": "batches have one shape: the last one is filled up, "
            "and "
            "a mask says which rows are real (`js.masked_mean`, `js.batch_mask`)",
            "DistributedIterator": "is read by the host only, not inside a traced "
            "function",
            "DistributedValues": "a value that is equal on all replicas is a plain "
            "array "
            "and no `PerReplica`",
            "InputOptions": "batches are copied ahead by default, two of them",
            "MultiWorkerMirroredStrategy": f"`TF_CONFIG` is read; {_JOBS}",
            "ParameterServerStrategy": "variables lie on processes of JAX; without "
            "TensorFlow's servers",
            "ReplicaContext": "`replica_id_in_sync_group` is traced in a step: "
            "`jnp.where` "
            "instead of `if`; `devices` has the devices of all replicas",
            "RunOptions": "shapes are static, and XLA compiles each step in any case",
            "Server": "no session configuration; `join()` ends with the job",
            "Strategy": "`run` traces the function once for all replicas and compiles "
            "it",
            "StrategyExtended": "made by the library only",
            "TPUStrategy": "on any platform; asks nothing of a cloud",
            "get_replica_context": "outside of `run` the context of the default "
            "strategy",
        },
    ),
    *renamed(
        "tf.distribute.cluster_resolver",
        "jaxstrategy.cluster_resolver",
        "ClusterResolver GCEClusterResolver KubernetesClusterResolver "
        "KubernetesExecutableLocation SimpleClusterResolver SlurmClusterResolver "
        "TFConfigClusterResolver TPUClusterResolver UnionResolver",
        {
            "TPUClusterResolver": "knows the TPU on whose hosts the program runs; "
            "`tf.config.experimental_connect_to_cluster` and "
            "`tf.tpu.experimental.initialize_tpu_system` are not needed",
        },
    ),
    *renamed(
        "tf.distribute.coordinator",
        "jaxstrategy.coordinator",
        "ClusterCoordinator PerWorkerValue RemoteValue "
        "experimental_get_current_worker_index",
        {"ClusterCoordinator": _REMOTE},
    ),
    *renamed(
        "tf.distribute.experimental",
        "jaxstrategy.experimental",
        "CentralStorageStrategy CollectiveCommunication CollectiveHints "
        "CommunicationImplementation CommunicationOptions MultiWorkerMirroredStrategy "
        "ParameterServerStrategy PreemptionCheckpointHandler PreemptionWatcher "
        "TPUStrategy TerminationConfig ValueContext",
        {
            "MultiWorkerMirroredStrategy": f"`TF_CONFIG` is read; {_JOBS}",
            "PreemptionCheckpointHandler": "saves trees of arrays with "
            "`jaxstrategy.checkpoint`, not a `tf.train.Checkpoint`",
        },
    ),
    *renamed(
        "tf.distribute.experimental.coordinator",
        "jaxstrategy.experimental.coordinator",
        "ClusterCoordinator PerWorkerValues RemoteValue",
        {"ClusterCoordinator": _REMOTE},
    ),
    *renamed(
        "tf.distribute.experimental.partitioners",
        "jaxstrategy.experimental.partitioners",
        "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner",
    ),
    *renamed(
        "tf.distribute.experimental.rpc",
        "jaxstrategy.experimental.rpc",
        "Client Server",
        {"Server": "methods are Python functions; connections need a secret"},
    ),
]
