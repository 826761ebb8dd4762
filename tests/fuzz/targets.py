"""The public names that are called: `TARGETS`, each a function of a strategy."""

import functools
import inspect
import json
import os

import jax.numpy as jnp
import numpy as np

import jaxstrategy as js
from jaxstrategy import planning

# These wait for other processes, or change the process for what comes after.
LEFT_OUT = {
    "Server",
    "MultiWorkerMirroredStrategy",
    "CollectiveAllReduceStrategy",
    "ExperimentalMultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "LaunchedClusterResolver",
    "profile",  # waits for a profiler
    # Made by us alone, and JAX's own way into a variable.
    "DistributedDataset",
    "DistributedIterator",
    "Explanation",
    "PerDeviceDataset",
    "PlannedLayout",
    "Plan",
    "Machine",
    "Report",
    "Comparison",
    "tree_flatten",
    "tree_unflatten",
}


def public(owner):
    """Names and members of a module or object, without modules."""
    for name in dir(owner):
        if name.startswith("_") or name in LEFT_OUT:
            continue
        try:
            member = getattr(owner, name)
        except Exception:  # a property that says why it has no value
            continue
        if not inspect.ismodule(member):
            yield name, member


def functions(owner, prefix):
    for name, member in public(owner):
        if callable(member) and not is_error(member):
            yield f"{prefix}.{name}", functools.partial(lambda m, _: m, member)


def is_error(member):
    return inspect.isclass(member) and issubclass(member, BaseException)


def methods(make, prefix, strategy):
    for name, member in public(make(strategy)):
        if callable(member):
            yield (
                f"{prefix}.{name}",
                lambda strategy, name=name: getattr(make(strategy), name),
            )


TPU = js.tpu.experimental.Topology(
    mesh_shape=[2, 1, 1, 1], device_coordinates=[[[0, 0, 0, 0], [1, 0, 0, 0]]]
)
SPEC = {"worker": ["a:1", "b:2"], "chief": ["c:3"]}


def dataset(strategy):
    source = js.batches(np.ones((8, 3), np.float32), 4)
    return strategy.experimental_distribute_dataset(source)


MAKERS = {
    "strategy": lambda strategy: strategy,
    "one": lambda strategy: js.OneDeviceStrategy("cpu:0"),
    "default": lambda strategy: js.get_strategy(),
    "extended": lambda strategy: strategy.extended,
    "variable": lambda strategy: variable(strategy),
    "on_read": lambda strategy: variable(strategy, synchronization="on_read"),
    "per_replica": lambda strategy: js.PerReplica(np.ones((2, 3), np.float32)),
    "slices": lambda strategy: js.IndexedSlices(
        jnp.ones((1, 2)), jnp.zeros(1, int), (3, 2)
    ),
    "embedding": lambda strategy: js.sharded.Embedding(3, 2),
    "embedding_state": lambda strategy: js.sharded.Embedding(
        3, 2, js.sharded.Adagrad(0.1)
    ).from_rows(np.ones((3, 2))),
    "dataset": dataset,
    "iterator": lambda strategy: iter(dataset(strategy)),
    "source": lambda strategy: js.batches(np.ones((8, 3), np.float32), 4),
    "manager": lambda strategy: js.checkpoint.CheckpointManager("checkpoints"),
    "spec": lambda strategy: js.cluster_resolver.ClusterSpec(SPEC),
    "resolver": lambda strategy: js.cluster_resolver.SimpleClusterResolver(
        js.cluster_resolver.ClusterSpec(SPEC), task_type="worker", task_id=0
    ),
    "tpu_strategy": lambda strategy: js.TPUStrategy(cores_per_replica=2),
    "tpu_resolver": lambda strategy: js.cluster_resolver.TPUClusterResolver("local"),
    "tpu_topology": lambda strategy: TPU,
    "assignment": lambda strategy: js.tpu.experimental.DeviceAssignment.build(TPU),
    "topology": lambda strategy: js.profiling.Topology(1e9, 1e-6, 2),
    "scale": lambda strategy: js.training.DynamicLossScale(),
    "input_context": lambda strategy: js.InputContext(2, 0, 2),
}


def variable(strategy, **kinds):
    with strategy.scope():
        return js.Variable(np.ones(3, np.float32), aggregation="sum", **kinds)


def in_step(strategy):
    """Calls a method of the replica context, inside a step."""

    def call(name, *args, **kwargs):
        def step(x):
            return getattr(js.get_replica_context(), name)(*args, **kwargs), x

        return strategy.run(step, args=(js.PerReplica(np.ones((2, 3), np.float32)),))

    return call


CONTEXT = ["all_reduce", "all_gather", "merge_call", "fold_in"]


def in_scope(strategy, name):
    """A method of 2018's strategy, in its scope, where alone it may be called."""
    d = js.compat.contrib.DistributionStrategy.over(strategy)
    method = getattr(d, name)

    @functools.wraps(method)
    def call(*args, **kwargs):
        with d.scope():
            return method(*args, **kwargs)

    return call


# What stands in the environment besides, with which the odd text is looked at.
PAIRED = {
    "SM_HOSTS": {"SM_CURRENT_HOST": "algo-1"},
    "SM_CURRENT_HOST": {"SM_HOSTS": '["algo-1", "algo-2"]'},
}


def resolved(kind, variable):
    """A resolver that reads an odd environment, and all that it says."""

    def call(content):
        try:
            text = content if isinstance(content, str) else json.dumps(content)
        except (TypeError, ValueError, RecursionError):
            return None
        try:
            os.environ.update({**PAIRED.get(variable, {}), variable: text})
        except ValueError:  # no environment has it
            return None
        try:
            resolver = kind()
            return [
                resolver.cluster_spec(),
                resolver.task_type,
                resolver.task_id,
                resolver.master(),
            ]
        finally:
            for name in {variable, *PAIRED.get(variable, {})}:
                os.environ.pop(name, None)

    return call


MODULES = (
    "experimental cluster_resolver checkpoint optax sharded profiling training"
).split()


def targets(strategy):
    """Everything that is called, by name."""
    found = dict(functions(js, "js"))
    for module in MODULES:
        found.update(functions(getattr(js, module), module))
    found.update(functions(js.experimental.partitioners, "partitioners"))
    found.update(functions(js.tpu.experimental, "tpu"))
    for name, make in MAKERS.items():
        found.update(methods(make, name, strategy))
    found.update(functions(js.compat.contrib, "contrib"))
    found.update(functions(planning, "planning"))
    found.update(functions(js.compat.v1, "v1"))
    older = js.compat.v1.Strategy.over(strategy)
    found.update(methods(lambda _: older, "v1_strategy", strategy))
    found.update(methods(lambda _: older.extended, "v1_extended", strategy))
    for name, member in public(js.compat.contrib.DistributionStrategy):
        if callable(member):
            found[f"contrib_strategy.{name}"] = functools.partial(in_scope, name=name)
    for name in CONTEXT:
        found[f"replica.{name}"] = lambda strategy, name=name: functools.partial(
            in_step(strategy), name
        )
    kinds = js.cluster_resolver
    for kind, name in [
        (kinds.TFConfigClusterResolver, "TF_CONFIG"),
        (kinds.SlurmClusterResolver, "SLURM_JOB_NODELIST"),
        (kinds.SlurmClusterResolver, "SLURM_PROCID"),
        (kinds.SageMakerClusterResolver, "SM_HOSTS"),
        (kinds.SageMakerClusterResolver, "SM_CURRENT_HOST"),
        (kinds.TPUClusterResolver, "TPU_WORKER_HOSTNAMES"),
        (kinds.TPUClusterResolver, "TPU_NAME"),
    ]:
        found[f"{kind.__name__}:{name}"] = lambda _, kind=kind, name=name: resolved(
            kind, name
        )
    return found


def parameters(function):
    """Names of parameters, and whether each may only be given by name or left out."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return [("value", False, False)]
    if isinstance(function, functools.partial):
        return [("value", False, False), ("axis", False, True)]
    found = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found.append((parameter.name, False, True))
        elif parameter.kind is not parameter.VAR_KEYWORD:
            is_named = parameter.kind is parameter.KEYWORD_ONLY
            is_free = parameter.default is not parameter.empty
            found.append((parameter.name, is_named, is_free))
    return found
