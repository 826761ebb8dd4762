"""Training steps and the coordinator's cases in TensorFlow, to be timed.

Needs NumPy and TensorFlow, not JAX: `_harness.Workers` runs this in a process of
another environment, with as many logical CPU devices as there are replicas. Parameters
and the batch come from a file.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from _harness import Workers, command, seconds_of

HEADS = 4
EPSILON = 1e-6
RATES = {"sgd": 0.1, "adam": 1e-3}
# Adam's, in both frameworks.
BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8


def started(replicas: int, python: str) -> Workers:
    """Starts TensorFlow, to train with so many replicas.

    It answers `"prepare", description, k` with the first losses of a new training, and
    `"burst", k` with the seconds that each of `k` more steps takes.
    """
    quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    return Workers(trainings, [(replicas,)], [quiet], python)


def trainings(replicas: int) -> Callable[..., Any]:
    tf: Any = importlib.import_module("tensorflow")
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    training: Any = None

    def answer(request: str, *args: Any) -> Any:
        nonlocal training
        if request == "prepare":
            description, steps = args
            training = TensorFlowTraining(tf, strategy, description)
            return [training.loss(training.step()) for _ in range(steps)]
        (steps,) = args
        start = time.perf_counter()
        for _ in range(steps - 1):
            training.step()
        training.loss(training.step())
        return (time.perf_counter() - start) / steps

    return answer


class TensorFlowTraining:
    """With `tf.function`; gradients are reduced and applied in a `merge_call`.

    That is what a Keras optimizer does, without its bookkeeping. The losses stay where
    they are.
    """

    def __init__(self, tf: Any, strategy: Any, description: Mapping[str, Any]) -> None:
        self._tf, self._strategy = tf, strategy
        params = dict(np.load(description["file"]))
        x, y = params.pop("batch x"), params.pop("batch y")  # `[replica, row, ...]`
        forward = TENSORFLOW_LOSSES[description["kind"]]
        apply, slots_each = self._optimizer(description["optimizer"])
        with strategy.scope():
            variables = {name: tf.Variable(array) for name, array in params.items()}
            slots = [
                [tf.Variable(np.zeros_like(array)) for _ in range(slots_each)]
                for array in params.values()
            ]
        listed = list(variables.values())

        def update(strategy: Any, grads: Any, count: Any) -> None:
            pairs = list(zip(grads, listed, strict=True))
            means = strategy.extended.batch_reduce_to("MEAN", pairs)
            for variable, mean, own in zip(listed, means, slots, strict=True):
                strategy.extended.update(variable, apply, args=(mean, count, *own))

        def replica(x: Any, y: Any, count: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = forward(tf, variables, x, y)
            grads = map(tf.convert_to_tensor, tape.gradient(loss, listed))
            context = tf.distribute.get_replica_context()
            context.merge_call(update, args=(list(grads), count))
            return loss

        @tf.function(autograph=False)
        def step(x: Any, y: Any, count: Any) -> Any:
            return strategy.run(replica, args=(x, y, count))

        self._step = step
        self._batch = self._split(x), self._split(y)
        self._count = itertools.count(1)

    def _split(self, stacked: np.ndarray) -> Any:
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: self._tf.constant(stacked[context.replica_id_in_sync_group])
        )

    def _optimizer(self, name: str) -> tuple[Callable[..., None], int]:
        """What changes a variable, and how many others it needs for that."""
        ops, rate = self._tf.raw_ops, self._tf.constant(RATES[name])

        def sgd(variable: Any, grad: Any, _: Any) -> None:
            ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=rate, delta=grad
            )

        def adam(variable: Any, grad: Any, count: Any, first: Any, second: Any) -> None:
            ops.ResourceApplyAdam(
                var=variable.handle,
                m=first.handle,
                v=second.handle,
                beta1_power=BETAS[0] ** count,
                beta2_power=BETAS[1] ** count,
                lr=rate,
                beta1=BETAS[0],
                beta2=BETAS[1],
                epsilon=ADAM_EPSILON,
                grad=grad,
            )

        return {"sgd": (sgd, 0), "adam": (adam, 2)}[name]

    def step(self) -> Any:
        count = self._tf.constant(float(next(self._count)))
        return self._step(*self._batch, count)

    def loss(self, returned: Any) -> float:
        local = self._strategy.experimental_local_results(returned)
        return float(np.mean([each.numpy() for each in local]))


def _tensorflow_mlp(tf: Any, params: Mapping[str, Any], x: Any, y: Any) -> Any:
    out = x
    for i in range(len(params) // 2):
        out = tf.tanh(out @ params[f"{i}/kernel"] + params[f"{i}/bias"])
    return tf.reduce_mean(tf.square(out - y))


def _tensorflow_transformer(tf: Any, params: Mapping[str, Any], x: Any, y: Any) -> Any:
    def dense(x: Any, name: str) -> Any:
        flat = tf.reshape(x, (-1, x.shape[-1]))
        out = flat @ params[f"{name}/kernel"] + params[f"{name}/bias"]
        return tf.reshape(out, (*x.shape[:-1], out.shape[-1]))

    def norm(x: Any, name: str) -> Any:
        mean, variance = tf.nn.moments(x, (-1,), keepdims=True)
        scaled = (x - mean) * tf.math.rsqrt(variance + EPSILON)
        return scaled * params[f"{name}/scale"] + params[f"{name}/bias"]

    def attention(x: Any, i: str) -> Any:
        rows, length, width = x.shape
        size = width // HEADS
        heads = tf.reshape(dense(x, f"{i}/qkv"), (rows, length, HEADS, 3, size))
        q, k, v = tf.unstack(tf.transpose(heads, (3, 0, 2, 1, 4)))
        weights = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / size**0.5)
        out = tf.transpose(weights @ v, (0, 2, 1, 3))
        return dense(tf.reshape(out, x.shape), f"{i}/out")

    x = tf.gather(params["embedding"], x) + params["positions"]
    for i in range(sum(name.endswith("/qkv/kernel") for name in params)):
        block = f"block{i}"
        x = x + attention(norm(x, f"{block}/first norm"), block)
        out = dense(norm(x, f"{block}/second norm"), f"{block}/up")
        x = x + dense(tf.nn.gelu(out, approximate=True), f"{block}/down")
    out = dense(norm(x, "norm"), "head")
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=out)
    return tf.reduce_mean(losses)


TENSORFLOW_LOSSES: Mapping[str, Callable[..., Any]] = {
    "mlp": _tensorflow_mlp,
    "transformer": _tensorflow_transformer,
}


# TensorFlow's coordinator.

LAYERS = ((64, 256), (256, 256), (256, 256), (256, 10))
ROWS, WIDTH, BATCH, IDS = 100_000, 64, 64, 8


class CoordinatorCases:
    """What two workers and one parameter server do, to be timed.

    Made in the scope of a strategy; a framework gives the three functions that differ.

    Args:
      coordinator: of the framework.
      variable: makes a variable.
      function: compiles a function.
    """

    def __init__(
        self,
        coordinator: Any,
        variable: Callable[..., Any],
        function: Callable[..., Any],
    ) -> None:
        self._coordinator, self._function = coordinator, function
        random = np.random.default_rng(0)
        self._scalar = variable(0.0)
        self._layers = [
            variable(0.05 * random.normal(size=shape).astype("float32"))
            for shape in LAYERS
        ]
        self._table = variable(random.normal(size=(ROWS, WIDTH)).astype("float32"))
        self._arrays = {
            f"move {size}": variable(np.zeros(size * 250_000, "float32"))
            for size in (1, 10, 100)
        }
        self._x = random.normal(size=(BATCH, 64)).astype("float32")
        self._y = random.integers(0, 10, BATCH).astype("int32")
        self._ids = random.integers(0, ROWS, (BATCH, IDS)).astype("int32")
        self._functions: dict[str, Any] = {}

    def seconds(self, case: str, count: int) -> float:
        """How long so many functions take; a few were run before."""
        if case not in self._functions:
            self._functions[case] = self._function(self._made(case))
            self._run(case, 4)
        return seconds_of(lambda: self._run(case, count))

    def _run(self, case: str, count: int) -> None:
        for _ in range(count):
            value = self._coordinator.schedule(self._functions[case])
            if case == "fetch":
                value.fetch()
        self._coordinator.join()

    def _made(self, case: str) -> Callable[[], Any]:
        if case in self._arrays:
            array = self._arrays[case]
            return lambda: self.assigned(array.assign_add(array + 1.0))
        if case == "assign_add":
            return lambda: self.assigned(self._scalar.assign_add(1.0))
        return getattr(self, {"trivial": "one", "fetch": "one"}.get(case, case))

    def assigned(self, value: Any) -> Any:
        """What a function returns that only assigns."""
        return value


class TensorFlowCases(CoordinatorCases):
    """In TensorFlow."""

    tf: Any = None

    def one(self) -> Any:
        return self.tf.constant(1)

    def perceptron(self) -> Any:
        tf = self.tf
        with tf.GradientTape() as tape:
            h = self._x
            for layer in self._layers[:-1]:
                h = tf.nn.relu(h @ layer)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                self._y, h @ self._layers[-1]
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self._layers)
        for layer, gradient in zip(self._layers, gradients, strict=True):
            layer.assign_sub(0.01 * gradient)
        return loss

    def embedding(self) -> Any:
        tf = self.tf
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self._table, self._ids)
            loss = tf.reduce_mean(tf.reduce_sum(rows, 1) ** 2)
        found = tape.gradient(loss, self._table)
        self._table.scatter_sub(tf.IndexedSlices(0.1 * found.values, found.indices))
        return loss

    def lookup(self) -> Any:
        tf = self.tf
        rows = tf.nn.embedding_lookup(self._table, self._ids)
        self._scalar.assign_add(1.0)
        return tf.reduce_sum(rows)


def free_port() -> int:
    """Returns a port of the loopback address that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def tensorflow_server() -> None:
    """Is a worker or a parameter server, for ever."""
    tf: Any = importlib.import_module("tensorflow")
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()


def tensorflow_coordinator() -> Callable[[str, int], float]:
    """Starts the servers; answers a case and a count with the seconds that it takes."""
    addresses = [f"localhost:{free_port()}" for _ in range(3)]
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    for kind, index in (("worker", 0), ("worker", 1), ("ps", 0)):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        server = subprocess.Popen(
            command(tensorflow_server, (), "answer", sys.executable),
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
        )
        atexit.register(server.kill)
    tf: Any = importlib.import_module("tensorflow")
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    TensorFlowCases.tf = tf
    with strategy.scope():
        cases = TensorFlowCases(coordinator, tf.Variable, tf.function)
    return cases.seconds
