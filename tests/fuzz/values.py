"""Arguments for public names: right ones by name of the parameter, and odd ones."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxstrategy as js


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


class Silent:
    """An object of the user's, without anything."""

    def __repr__(self):
        return "Silent()"


class Unprintable:
    """One that cannot even be printed."""

    def __repr__(self):
        raise ValueError("no text")


@dataclasses.dataclass
class Point:
    x: object
    y: object


SCALARS = [
    *(None, True, False, 0, 1, 2, 3, -1, 7, 2**31, -(2**31) - 1, 2**63, 2**64),
    *(-(2**63), 10**400, -(10**400), 10**5000, 0.0, 0.5, -1.5, math.nan, math.inf),
    *(-math.inf, 1e308, 1j, complex(math.nan, 1), b"", b"\xff\xfe", "", " ", "a"),
    *("x" * 5000, *"sum mean SUM min no cpu:0 cpu:99 GPU:0 gpu localhost:1".split()),
    *("٣", "\0", "\n", "\ud800", "😀", "a/b", "..", "0", "-1", "1e5", "host:port"),
    *("[::1]:1", "worker", "chief", "/job:worker/task:0"),
    *("/job:worker/device:CPU:x", "{}", "[]"),
]


TRACED = []  # what JAX traces while a call is made


def leaked():
    """A value of a trace that is over."""
    found = []
    jax.jit(lambda x: found.append(x + 1))(1.0)
    return found[0]


def odd(draw, strategy):
    """Anything."""
    return draw.choice(
        [
            lambda: draw.choice(TRACED) if TRACED else draw.choice(SCALARS),
            lambda: draw.choice(SCALARS),
            lambda: draw.choice(SCALARS),
            lambda: draw.choice(containers(draw))(),
            lambda: draw.choice(arrays(draw))(),
            lambda: draw.choice(ours(draw, strategy))(),
            lambda: draw.choice(types())(),
        ]
    )()


def containers(draw):
    one = draw.choice(SCALARS + TRACED)
    return [
        list,
        tuple,
        dict,
        set,
        lambda: [one],
        lambda: (one, one),
        lambda: {one: one},
        lambda: {"a": one, "b": draw.choice(SCALARS)},
        lambda: {"worker": ["a:1", "b:2"], "chief": one},
        lambda: {"worker": one},
        lambda: {1: one, "1": one},
        # No deeper, and no list in itself: JAX counts calls while it flattens such a
        # tree, and does not count back when it gives up (jaxlib 0.10.2 to 0.12), so
        # that Python refuses all that follows.
        lambda: nested(draw.choice([5, 200])),
        lambda: iter([one, one]),
        lambda: range(3),
        lambda: Point(one, 1),
        lambda: [[0, 1], [2, 3]],
        lambda: [[0], [1, 2], [5]],
    ]


def arrays(draw):
    shape = draw.choice([(), (0,), (1,), (2,), (3,), (2, 0), (2, 3), (4, 2, 3)])
    kinds = ["float32", "int32", "bool", "complex64", "bfloat16", "int8", "uint32"]
    kind = jnp.dtype(draw.choice(kinds))
    return [
        lambda: np.ones(shape, kind),
        lambda: jnp.zeros(shape, kind),
        lambda: np.full(shape, np.nan, np.float64),
        lambda: np.array("text"),
        lambda: np.array([object()]),
        lambda: np.zeros(shape, "datetime64[s]"),
        lambda: np.zeros(shape, [("a", "f4")]),
        lambda: np.float64(1e300),
        lambda: np.int64(2**40),
        lambda: jax.random.key(0),
        lambda: jax.random.split(jax.random.key(1), 2),
        lambda: jax.ShapeDtypeStruct(shape, kind),
        deleted,
        leaked,
    ]


def deleted():
    array = jnp.ones(3) + 1
    array.delete()
    return array


def ours(draw, strategy):
    return [
        lambda: strategy,
        lambda: strategy.extended,
        lambda: js.PerReplica(np.ones((2, 3), np.float32)),
        lambda: js.PerReplica(jnp.zeros((2, 0))),
        lambda: strategy.mirror(np.float32(1)),
        lambda: js.Variable(1.0),
        lambda: js.IndexedSlices(jnp.ones((1, 2)), jnp.zeros(1, int), (3, 2)),
        lambda: js.ReduceOp.SUM,
        lambda: js.RunOptions(),
        lambda: js.InputOptions(),
        lambda: js.VariableAggregation.MEAN,
        lambda: js.profiling.Topology(1e9, 1e-6, 2),
        lambda: js.cluster_resolver.ClusterSpec({"worker": ["a:1"]}),
        lambda: js.HierarchicalCopyAllReduce(),
        lambda: strategy.mesh,
        lambda: jax.devices()[0],
        lambda: js.get_replica_context(),
    ]


def types():
    return [
        Silent,
        Unprintable,
        lambda: int,
        lambda: Silent,
        lambda: print,
        lambda: len,
        lambda: lambda: 1,
        lambda: lambda x: x,
        lambda: lambda *a, **k: a,
        lambda: lambda x: 1 / 0,
        lambda: jnp.sum,
        lambda: NotImplemented,
        lambda: ...,
        lambda: np,
        lambda: optax.sgd(0.1),
    ]


def values_by_name(draw, strategy):
    """What a parameter of that name is given when it is to be right, or nearly."""
    batch = np.ones((4, 3), np.float32)

    def step(*args, **kwargs):
        return args

    return {
        "axis": [0, 1, -1, None, (0, 1), 5],
        "reduce_op": ["sum", "mean", js.ReduceOp.SUM, "min"],
        "op": ["sum", "mean", "max"],
        "value": [js.PerReplica(np.ones((2, 3), np.float32)), 1.0, batch],
        "values": [[jnp.ones(2), jnp.zeros(2)], batch],
        "per_replica_value": [js.PerReplica(np.ones((2, 3), np.float32))],
        "tree": [{"a": batch}, batch],
        "fn": [step, lambda: 1, lambda x: x],
        "step_fn": [step],
        "dataset_fn": [lambda context: [batch]],
        "dataset": [[batch], [{"x": batch}], js.batches(batch, 2)],
        "value_fn": [lambda context: 1.0, lambda context: batch],
        "args": [(), (batch,), (1.0, 2.0)],
        "kwargs": [{}, {"x": 1.0}],
        "devices": [None, jax.devices()[:2], ["cpu:0", "cpu:1"], "cpu:0"],
        "device": ["cpu:0", jax.devices()[1]],
        "logical_axes": [None, {}, {"core": 2}, {"a": 2, "b": 1}, {"replica": 2}],
        "replicas_per_device": [1, 2, np.int64(3), 0],
        "options": [None, js.RunOptions(), js.InputOptions()],
        "initial_value": [1.0, batch, lambda: 2.0],
        "aggregation": ["sum", "mean", "none", "only_first_replica"],
        "synchronization": ["auto", "on_read", "on_write", "none"],
        "dtype": ["float32", jnp.int32, None],
        "batch_size": [1, 2, 4],
        "step": [0, 1, 5],
        "state": [{"a": batch, "n": 1}],
        "state_like": [{"a": batch, "n": 1}],
        "init": [{"a": batch, "n": 1}],
        "directory": ["checkpoints"],
        "cluster_spec": [{"worker": ["a:1", "b:2"]}],
        "cluster": [{"worker": ["a:1", "b:2"]}],
        "task_type": ["worker", None],
        "task_id": [0, 1],
        "optimizer": [optax.sgd(0.1)],
        "mask": [np.ones(4, bool)],
        "shape": [(3,), ()],
        "strategy": [strategy],
        "destinations": [jax.devices()[0], "cpu:0"],
        "value_destination_pairs": [[(batch, "cpu:0")]],
        "var": [js.Variable(1.0)],
        "loss": [batch],
        "per_example_loss": [batch],
    }


def argument(draw, strategy, name):
    """For a parameter of that name: mostly a right one."""
    right = values_by_name(draw, strategy).get(name)
    if right is not None and draw.random() < 0.6:
        return draw.choice(right)
    return odd(draw, strategy)
