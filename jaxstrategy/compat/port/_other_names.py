"""What else of TensorFlow such programs use: variables and losses, and advice."""

from jaxstrategy.compat.port._keras_uses import KERAS
from jaxstrategy.compat.port._name import Form, Name, decided, renamed

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
        "jaxstrategy.compute_average_loss",
        "takes weights and sizes by keyword only",
        form=_LOSS,
    ),
    Name(
        "tf.nn.scale_regularization_loss",
        "jaxstrategy.scale_regularization_loss",
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
            "`keras.losses`, then `js.compute_average_loss`",
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
            "summary": "`js.profiling` logs scalars to TensorBoard",
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
            "`js.ParameterServerLost`, `js.ClusterError` and others",
            "types": "types of JAX: `jax.Array`, `jax.typing.ArrayLike`",
            "TensorShape": "shapes are tuples",
            "py_function py_func numpy_function": "`jax.pure_callback`, or call it "
            "outside of the step",
            "clip_by_global_norm clip_by_value clip_by_norm": "`optax.clip` and others",
        },
    ),
]
