"""What each name of TensorFlow is called here, and what a person must know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class Form:
    """How a function may be called so that the new one means the same.

    Args:
      positional: the most arguments without a name.
      keywords: the new name of each argument that may be named; without one, it is
        given by its place.
      needed: arguments that must be given, each by its place or its old name.
      texts: whether the first argument may be a string.
      lists: whether it may be a list.
      avoided: a pattern of arguments' code for which it does not mean the same.
      bare: whether the function may be passed on without being called.
    """

    positional: int
    keywords: dict[str, str] = dataclasses.field(default_factory=dict)
    needed: tuple[tuple[int, str], ...] = ()
    texts: bool = True
    lists: bool = True
    bare: bool = True
    avoided: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Name:
    """An old name, what stands for it here, and what a person must know.

    Args:
      old: with its modules, `tf.` first.
      new: with its modules; None if a person must decide.
      text: how the new one differs; without one, what to do.
      exact: names in it, or attributes of it, are not the same here; a module's names
        have rows of their own.
      form: which calls are the same; None: all.
      stays: it may stay TensorFlow's.
      certain: False if it means the same only where values are arrays of JAX, not in
        what stays TensorFlow.
      type: it is a type, which is the same only as an argument of a function that is
        renamed, or as an annotation.
    """

    old: str
    new: str | None
    text: str = ""
    exact: bool = False
    form: Form | None = None
    stays: bool = False
    certain: bool = True
    type: bool = False


def renamed(
    old: str, new: str, names: str, texts: dict[str, str] | None = None
) -> list[Name]:
    """Rows of names that keep their last part, in other modules."""
    texts = texts or {}
    rows = [Name(f"{old}.{n}", f"{new}.{n}", texts.get(n, "")) for n in names.split()]
    assert texts.keys() <= set(names.split())
    return rows


def decided(module: str, rows: dict[str, str]) -> list[Name]:
    """Rows of what a person must decide: advice by names, separated by spaces."""
    return [
        Name(f"{module}.{name}", None, text)
        for names, text in rows.items()
        for name in names.split()
    ]


def modules(pairs: Sequence[tuple[str, str]]) -> list[Name]:
    """Rows of modules, old and new."""
    return [Name(old, new, exact=True) for old, new in pairs]


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


_V1_HERE = "jaxstrategy.compat.v1"

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
    *variables("tf.compat.v1.distribute", _V1_HERE),
    *modules(
        [
            ("tf.compat.v1.distribute", _V1_HERE),
            ("tf.compat.v1.distribute.experimental", f"{_V1_HERE}.experimental"),
            (
                "tf.compat.v1.distribute.cluster_resolver",
                f"{_V1_HERE}.cluster_resolver",
            ),
        ]
    ),
    *renamed(
        "tf.compat.v1.distribute",
        _V1_HERE,
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
        f"{_V1_HERE}.cluster_resolver",
        "ClusterResolver GCEClusterResolver KubernetesClusterResolver "
        "KubernetesExecutableLocation SimpleClusterResolver SlurmClusterResolver "
        "TFConfigClusterResolver TPUClusterResolver UnionResolver",
    ),
    *renamed(
        "tf.compat.v1.distribute.experimental",
        f"{_V1_HERE}.experimental",
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


_CONTRIB_HERE = "jaxstrategy.compat.contrib"

CONTRIB: list[Name] = [
    *variables("tf.contrib.distribute", _CONTRIB_HERE),
    *modules([("tf.contrib.distribute", _CONTRIB_HERE)]),
    *renamed(
        "tf.contrib.distribute",
        _CONTRIB_HERE,
        "AllReduceCrossTowerOps Monitor ReductionToOneDeviceCrossTowerOps "
        "CollectiveAllReduceStrategy CrossTowerOps DistributionStrategy "
        "MirroredStrategy OneDeviceStrategy ParameterServerStrategy TPUStrategy "
        "TowerContext UpdateContext Step StandardInputStep StandardSingleLossStep "
        "get_cross_tower_context get_distribution_strategy get_loss_reduction "
        "get_tower_context get_update_device has_distribution_strategy increment_var "
        "require_tower_context",
        {
            "CollectiveAllReduceStrategy": "`TF_CONFIG` is read; one process per host, "
            "started by `python -m jaxstrategy.launch`",
            "DistributionStrategy": "no sessions: methods do their work at once. A "
            "tower function is traced once for all towers; `tower_id` is traced there",
            "Monitor": "takes no session",
            "StandardSingleLossStep": "takes an optimizer of Optax, and a loss whose "
            "variables were made before; a mean loss is to be divided by `num_towers`",
            "MirroredStrategy": "`num_gpus` takes the first accelerators",
            "TowerContext": "`tower_id` is traced in a tower: `jnp.where` instead of "
            "`if`; `device` has the devices of all towers",
            "get_loss_reduction": "MEAN: nobody records losses here. Optimizers of "
            "2018 divided mean losses by `num_towers`; Optax does not: divide "
            "them yourself",
            "get_update_device": "one call serves all copies: their devices, a tuple",
        },
    ),
    *decided(
        "tf.contrib.distribute",
        {
            "DistributeConfig": "configures Estimators: write the training loop, and "
            "start processes with `python -m jaxstrategy.launch`",
            "run_standard_tensorflow_server": "not needed: start processes with "
            "`python -m jaxstrategy.launch`; `js.Server` if a program must wait",
        },
    ),
]


_WIDE = "32 bits, unless `jax_enable_x64` is set"
_AXES = {"axis": "axis", "keepdims": "keepdims"}
_NEST = (
    "None is a leaf there and no leaf here; a `PerReplica` is a nest here, of an array "
    "with all versions: `strategy.reduce` and `experimental_local_results` take nests"
)
_WHOLE = r"strategy|distribution|\.reduce\b|local_results|\.unwrap\b"


def _function(old: str, new: str, form: Form, text: str = "") -> Name:
    return Name(old, new, text, exact=True, form=form, certain=False)


def _each(names: str, old: str, new: str, form: Form) -> list[Name]:
    return [_function(f"{old}.{n}", f"{new}.{n}", form) for n in names.split()]


def _type(name: str, new: str = "", text: str = "") -> Name:
    target = f"jax.numpy.{new or name}"
    return Name(f"tf.{name}", target, text, exact=True, certain=False, type=True)


_UNARY = Form(1, lists=False)
_BINARY = Form(2, lists=False, bare=False)
_SHAPED = Form(2, {"shape": "shape", "dtype": "dtype"}, bare=False)
_LIKE = Form(2, {"dtype": "dtype"}, lists=False, bare=False)
_MADE = Form(2, {"dtype": "dtype"}, texts=False, bare=False)
_ALONG = Form(2, {"axis": "axis"}, lists=False)
_REDUCED = Form(2, _AXES, lists=False, bare=False)

ARRAYS: list[Name] = [
    *_each(
        "square exp abs sqrt tanh sin cos sign floor negative",
        "tf",
        "jax.numpy",
        _UNARY,
    ),
    *_each(
        "square exp abs sqrt tanh sin cos sign floor log log1p expm1 negative",
        "tf.math",
        "jax.numpy",
        _UNARY,
    ),
    _function("tf.math.is_nan", "jax.numpy.isnan", _UNARY),
    _function("tf.log", "jax.numpy.log", _UNARY),
    _function("tf.stop_gradient", "jax.lax.stop_gradient", _UNARY),
    _function("tf.math.rsqrt", "jax.lax.rsqrt", _UNARY),
    _function("tf.sigmoid", "jax.nn.sigmoid", _UNARY),
    _function("tf.math.sigmoid", "jax.nn.sigmoid", _UNARY),
    *_each("relu sigmoid elu selu softplus", "tf.nn", "jax.nn", _UNARY),
    _function("tf.nn.tanh", "jax.numpy.tanh", _UNARY),
    *_each("softmax log_softmax", "tf.nn", "jax.nn", _ALONG),
    *_each(
        "add subtract multiply maximum minimum matmul equal not_equal greater less "
        "greater_equal less_equal logical_and logical_or",
        "tf",
        "jax.numpy",
        _BINARY,
    ),
    *_each("add subtract multiply maximum minimum", "tf.math", "jax.numpy", _BINARY),
    *_each("zeros ones", "tf", "jax.numpy", _SHAPED),
    *_each("zeros_like ones_like", "tf", "jax.numpy", _LIKE),
    *_each("expand_dims squeeze", "tf", "jax.numpy", _ALONG),
    *_each("stack", "tf", "jax.numpy", Form(2, {"axis": "axis"}, bare=False)),
    _function("tf.concat", "jax.numpy.concatenate", Form(2, {"axis": "axis"})),
    _function(
        "tf.reshape", "jax.numpy.reshape", Form(2, {"shape": "shape"}, lists=False)
    ),
    _function(
        "tf.transpose", "jax.numpy.transpose", Form(2, {"perm": "axes"}, lists=False)
    ),
    _function("tf.tile", "jax.numpy.tile", Form(2, lists=False)),
    _function("tf.fill", "jax.numpy.full", Form(2)),
    _function("tf.eye", "jax.numpy.eye", Form(1)),
    _function("tf.range", "jax.numpy.arange", Form(3, bare=False)),
    _function("tf.cast", "jax.numpy.astype", Form(2, {"dtype": ""}, lists=False)),
    _function("tf.constant", "jax.numpy.array", _MADE),
    _function("tf.convert_to_tensor", "jax.numpy.asarray", _MADE),
    _function(
        "tf.where",
        "jax.numpy.where",
        Form(3, needed=((1, "x"), (2, "y")), bare=False),
    ),
    _function(
        "tf.argmax",
        "jax.numpy.argmax",
        Form(2, {"axis": "axis"}, needed=((1, "axis"),), bare=False),
        "int32 here, int64 there",
    ),
    _function(
        "tf.one_hot",
        "jax.nn.one_hot",
        Form(2, {"depth": "num_classes"}, bare=False),
    ),
    *[
        _function(f"{module}.reduce_{name}", f"jax.numpy.{name}", _REDUCED, text)
        for module in ("tf", "tf.math")
        for name, text in {
            "sum": "",
            "max": "",
            "min": "",
            "prod": "",
            "all": "",
            "any": "",
            "mean": "of whole numbers: a float here, a whole number there",
        }.items()
    ],
    _function(
        "tf.nest.map_structure",
        "jax.tree.map",
        Form(99, bare=False, avoided=_WHOLE),
        _NEST,
    ),
    _function("tf.nest.flatten", "jax.tree.leaves", Form(1, avoided=_WHOLE), _NEST),
    *[
        _type(name)
        for name in "float16 bfloat16 float32 int8 int16 int32 uint8 uint16 uint32 "
        "complex64".split()
    ],
    _type("bool", "bool_"),
    *[_type(name, text=_WIDE) for name in "float64 int64 uint64 complex128".split()],
    Name("tf.Tensor", "jax.Array", exact=True, certain=False, type=True),
]


_VARIABLE = Form(
    1,
    {
        name: name
        for name in "initial_value trainable name dtype synchronization aggregation "
        "shape".split()
    },
)
_LOSS = Form(
    1,
    {"sample_weight": "sample_weight", "global_batch_size": "global_batch_size"},
    bare=False,
)
KERAS = (
    "Keras 3 on the JAX backend: `fit`, `evaluate` and `predict` of a model made in "
    "`strategy.scope()` work as they are; a step of `run` changes no variable in "
    "place: `js.keras.stateless_call`"
)
_GRAPHS = "no graphs here: write what the session ran as function calls"
_V1_VARIABLE = "`js.Variable` in `strategy.scope()`, made once, outside of the step"
_OPTIMIZER = (
    "Optax; TensorFlow's optimizers reduce gradients over the replicas, Optax does "
    "not: "
    "`js.get_replica_context().all_reduce('sum', gradients)` before, or "
    "`js.optax.all_reduce_gradients` first in the chain"
)
_DATA = (
    "may stay: datasets of tf.data are read as they are. Without TensorFlow: "
    "`js.batches(arrays, size)`, Grain or PyTorch loaders"
)
_RUN = "remove it: `strategy.run` compiles; `jax.jit` for other functions"

OTHERS: list[Name] = [
    Name("tf.data", None, _DATA, stays=True),
    Name("tf.contrib.data", None, _DATA, stays=True),
    Name("tf.keras", "keras", KERAS, exact=True),
    Name("tf", None, "not part of this package: JAX, Flax or NumPy"),
    *renamed("tf", "jaxstrategy", "VariableAggregation VariableSynchronization"),
    Name("tf.IndexedSlices", "jaxstrategy.IndexedSlices"),
    Name("tf.Variable", "jaxstrategy.Variable", form=_VARIABLE),
    Name("tf.train.ClusterSpec", "jaxstrategy.cluster_resolver.ClusterSpec"),
    Name("tf.train.Server", "jaxstrategy.Server", "no session configuration"),
    Name(
        "tf.errors.OutOfRangeError",
        "jaxstrategy.OutOfRangeError",
        "`get_next()` raises it at the end of data; it is a StopIteration",
    ),
    Name(
        "tf.nn.compute_average_loss",
        "jaxstrategy.training.compute_average_loss",
        "takes weights and sizes by keyword only",
        form=_LOSS,
    ),
    Name(
        "tf.nn.scale_regularization_loss",
        "jaxstrategy.training.scale_regularization_loss",
        form=Form(1),
    ),
    *renamed("tf.types.experimental.distributed", "jaxstrategy", "PerReplica Mirrored"),
    *decided(
        "tf",
        {
            "function autograph": _RUN,
            "GradientTape gradients": "`jax.value_and_grad` of a loss function; "
            "`js.value_and_grad` where it reads `js.Variable`s",
            "optimizers": _OPTIMIZER,
            "metrics": "on-read variables: `js.Variable(0., synchronization='on_read', "
            "aggregation='sum')`, or metrics of Keras 3 or Flax NNX",
            "losses": "a function of one example's loss, as in `optax.losses` or "
            "`keras.losses`, then `js.training.compute_average_loss`",
            "data.experimental.AutoShardPolicy": "a dataset that is distributed is "
            "read "
            "by each process; `InputContext` says which part is its own",
            "estimator contrib.estimator": "no Estimators: write the loop; `model_fn` "
            "becomes a step for `strategy.run`",
            "Session InteractiveSession ConfigProto GPUOptions Graph get_default_graph "
            "placeholder placeholder_with_default global_variables_initializer "
            "local_variables_initializer initialize_all_variables tables_initializer "
            "control_dependencies get_collection add_to_collection GraphKeys "
            "get_default_session assign assign_add assign_sub Operation "
            "reset_default_graph": _GRAPHS,
            "train.MonitoredTrainingSession train.MonitoredSession "
            "train.SingularMonitoredSession train.SessionRunHook train.Scaffold "
            "train.StopAtStepHook train.LoggingTensorHook train.SessionManager "
            "train.Supervisor train.Coordinator train.start_queue_runners": _GRAPHS,
            "get_variable": f"that of `jaxstrategy.compat.v1`, or {_V1_VARIABLE}",
            "constant_initializer zeros_initializer ones_initializer": "`initializer=` "
            "takes a number, an array, or a function of the shape such as `np.zeros`",
            "variable_scope get_variable_scope AUTO_REUSE": "those of "
            "`jaxstrategy.compat.v1`, for variables by name",
            "name_scope": "no scopes of other names: `jax.named_scope` for profiles",
            "trainable_variables global_variables model_variables "
            "local_variables": "keep the variables in a list or dict of your own",
            "train.get_or_create_global_step train.get_global_step "
            "train.create_global_step": "`js.Variable(0, "
            "aggregation='only_first_replica')`, or a number of the loop",
            "train.Optimizer train.AdamOptimizer train.GradientDescentOptimizer "
            "train.MomentumOptimizer train.RMSPropOptimizer train.AdagradOptimizer "
            "train.FtrlOptimizer train.AdadeltaOptimizer": _OPTIMIZER,
            "train.Checkpoint train.CheckpointManager train.Saver "
            "train.latest_checkpoint saved_model": "`js.checkpoint` saves trees of "
            "arrays and variables; files of TensorFlow are not read",
            "layers contrib.layers contrib.slim": "a model of Keras 3 or Flax NNX, as "
            "`nnx.Linear`",
            "contrib.framework contrib.training contrib.eager": "contrib ended with "
            "TensorFlow 1",
            "summary": "`js.profiling.MetricLogger` logs scalars by your function",
            "print Print": "`jax.debug.print`, which says which replica it was",
            "random random_normal random_uniform set_random_seed "
            "truncated_normal": "`jax.random` with a key; "
            "`js.get_replica_context().fold_in(key)` for another on each replica",
            "device": "devices are the strategy's; elsewhere `jax.device_put`",
            "group": "not needed in a step; outside `strategy.group` of the older "
            "generations, or `jax.block_until_ready`",
            "cond while_loop case map_fn scan": "`jax.lax.cond`, `while_loop`, "
            "`switch`, "
            "`map`, `scan`",
            "identity": "drop it; `variable.read_value()` reads a variable",
            "config tpu.experimental.initialize_tpu_system": "`jax.devices()`, and "
            "`js.simulate(n)` for devices to try with on a CPU",
            "enable_eager_execution disable_v2_behavior enable_v2_behavior "
            "disable_eager_execution executing_eagerly "
            "enable_resource_variables": "remove it: there is one way to run",
            "app flags logging contrib.flags": "absl has it: `absl.app`, `absl.flags`, "
            "`absl.logging`",
            "gfile io": "files by Python's own functions, or `etils.epath`",
            "errors": "this package's exceptions: `js.WorkerLost`, "
            "`js.errors.ParameterServerLost`, `js.ClusterError` and others",
            "types": "types of JAX: `jax.Array`, `jax.typing.ArrayLike`",
            "TensorShape": "shapes are tuples",
            "py_function py_func numpy_function": "`jax.pure_callback`, or call it "
            "outside of the step",
            "clip_by_global_norm clip_by_value clip_by_norm": "`optax.clip` and others",
        },
    ),
]


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
    """The row of a name of TensorFlow: its own, or of the nearest thing above it."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        row = NAMES.get(".".join(parts[:end]))
        if row is not None and (end == len(parts) or row.new is None or not row.exact):
            return row
    return NAMES["tf"]


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
