"""TensorFlow's coordinator on 2 workers and 1 parameter server, to be timed.

    python _tensorflow_coordinator.py

Needs TensorFlow and NumPy, not JAX. It reads one JSON object a line and answers each
with one: `{"case": name, "count": k}` with the seconds that k of these take. Workers
and the server are processes of their own, started and ended here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

LAYERS = ((64, 256), (256, 256), (256, 256), (256, 10))
ROWS, WIDTH, BATCH, IDS = 100_000, 64, 64, 8


def main() -> None:
    """The coordinator, or one of its servers."""
    if len(sys.argv) > 1:
        serve()
        return
    ports = [free_port() for _ in range(3)]
    addresses = [f"localhost:{port}" for port in ports]
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
    servers = [start(cluster, *task) for task in tasks]
    try:
        coordinate(cluster)
    finally:
        for server in servers:
            server.kill()
            server.wait()


def free_port() -> int:
    """A port of the loopback address that nobody uses."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(cluster: dict[str, list[str]], task: str, index: int) -> subprocess.Popen:
    """One server, as a process."""
    config = {"cluster": cluster, "task": {"type": task, "index": index}}
    environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
    return subprocess.Popen([sys.executable, __file__, "serve"], env=environment)


def serve() -> None:
    """Be a server for ever."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    )
    server.join()


def coordinate(cluster: dict[str, list[str]]) -> None:
    """Answer requests."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    cases = Cases(tf, strategy, coordinator)
    print(json.dumps({"version": tf.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        seconds = cases.seconds(request["case"], request["count"])
        print(json.dumps({"seconds": seconds}), flush=True)


class Cases:
    """What is timed, by its name in `coordinator.py`."""

    def __init__(self, tf: Any, strategy: Any, coordinator: Any) -> None:
        self._tf, self._coordinator = tf, coordinator
        random = np.random.default_rng(0)
        with strategy.scope():
            self._scalar = tf.Variable(0.0)
            self._layers = [
                tf.Variable(0.05 * random.normal(size=shape).astype("float32"))
                for shape in LAYERS
            ]
            self._table = tf.Variable(
                random.normal(size=(ROWS, WIDTH)).astype("float32")
            )
            self._arrays = {
                size: tf.Variable(np.zeros(size * 250_000, "float32"))
                for size in (1, 10, 100)
            }
        self._x = tf.constant(random.normal(size=(BATCH, 64)).astype("float32"))
        self._y = tf.constant(random.integers(0, 10, BATCH).astype("int32"))
        self._ids = tf.constant(random.integers(0, ROWS, (BATCH, IDS)), tf.int32)
        self._functions: dict[str, Any] = {}

    def seconds(self, case: str, count: int) -> float:
        """How long so many take, after one that is not counted."""
        if case not in self._functions:
            self._functions[case] = self._made(case)
            self._run(case, 4)
        begin = time.perf_counter()
        self._run(case, count)
        return time.perf_counter() - begin

    def _run(self, case: str, count: int) -> None:
        function = self._functions[case]
        if case == "fetch":
            for _ in range(count):
                self._coordinator.schedule(function).fetch()
            return
        for _ in range(count):
            self._coordinator.schedule(function)
        self._coordinator.join()

    def _made(self, case: str) -> Any:
        tf = self._tf
        made: dict[str, Callable[[], Any]] = {
            "trivial": lambda: tf.constant(1),
            "fetch": lambda: tf.constant(1),
            "assign_add": lambda: self._scalar.assign_add(1.0),
            "perceptron": self._perceptron,
            "embedding": self._embedding,
            "lookup": self._lookup,
        }
        if case not in made:
            array = self._arrays[int(case.removeprefix("move "))]
            return tf.function(lambda: array.assign_add(array + 1.0))
        return tf.function(made[case])

    def _perceptron(self) -> Any:
        tf = self._tf
        with tf.GradientTape() as tape:
            h = self._x
            for layer in self._layers[:-1]:
                h = tf.nn.relu(h @ layer)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                self._y, h @ self._layers[-1]
            )
            loss = tf.reduce_mean(losses)
        for layer, gradient in zip(
            self._layers, tape.gradient(loss, self._layers), strict=True
        ):
            layer.assign_sub(0.01 * gradient)
        return loss

    def _embedding(self) -> Any:
        tf = self._tf
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(self._table, self._ids)
            loss = tf.reduce_mean(tf.reduce_sum(rows, 1) ** 2)
        gradient = tape.gradient(loss, self._table)
        self._table.scatter_sub(
            tf.IndexedSlices(0.1 * gradient.values, gradient.indices)
        )
        return loss

    def _lookup(self) -> Any:
        tf = self._tf
        rows = tf.nn.embedding_lookup(self._table, self._ids)
        self._scalar.assign_add(1.0)
        return tf.reduce_sum(rows)


if __name__ == "__main__":
    main()
