"""A program of arrays and variables, as a user with a strict checker writes it."""

from __future__ import annotations

import tempfile

import jax
import numpy as np

import jaxstrategy as js

strategy = js.MirroredStrategy(js.simulate(8))


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return js.masked_mean((x @ w) ** 2)


@strategy.run
def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value = loss(w, x)
    value = js.get_replica_context().all_reduce("mean", value)
    return w - 0.001 * value, value


@strategy.run(options=js.RunOptions(donate_argnums=0))
def overwrite(w: jax.Array, x: jax.Array) -> jax.Array:
    return w + js.get_replica_context().all_reduce(js.ReduceOp.SUM, x)


@strategy.step
def counted(by: int = 1) -> jax.Array:
    total: jax.Array = js.get_replica_context().all_reduce("sum", by)
    return total


@strategy.step(options=js.RunOptions(check_finite=True))
def checked(x: jax.Array) -> jax.Array:
    return x * 2


class Trainer:
    def __init__(self) -> None:
        with strategy.scope():
            self.weights = js.Variable(np.ones(4, np.float32), name="weights")
            self.seen = js.Variable(0, synchronization="on_read", aggregation="sum")

    def train(self, x: jax.Array) -> None:
        def one(x: jax.Array) -> None:
            mean = js.get_replica_context().all_reduce("mean", x)
            self.weights.assign_sub(0.1 * mean.mean(axis=0))
            self.seen.assign_add(1)

        strategy.run(one, args=(x,))


def batches(context: js.InputContext) -> list[np.ndarray]:
    rows = context.get_per_replica_batch_size(16)
    return [np.ones((rows, 4), np.float32)] * 3


def main() -> None:
    w = strategy.mirror(np.ones(4, np.float32))
    dataset = strategy.experimental_distribute_dataset(
        js.batches(np.ones((40, 4), np.float32), 16)
    )
    for x in dataset:
        w, value = step(w, x)
        print(float(value))
    for x in strategy.distribute_datasets_from_function(batches):
        w, value = step(w, x)
    many = strategy.several(step)
    for grouped in js.experimental.grouped(dataset, 2):
        w, values = many(w, grouped)
        print(values)

    values = strategy.per_replica([float(i) for i in range(8)])
    print(strategy.reduce("sum", values), strategy.reduce("mean", values))
    print([v.shape for v in strategy.experimental_local_results(values)])
    print(strategy.num_replicas_in_sync, strategy.extended.worker_devices[0].platform)
    print(overwrite(strategy.mirror(0.0), values), counted(), checked(values))

    trainer = Trainer()
    trainer.train(strategy.per_replica(np.ones((8, 2, 4), np.float32)))
    print(trainer.weights.value().sum(), trainer.seen.shape, trainer.weights[0])

    with tempfile.TemporaryDirectory() as folder:
        with js.checkpoint.CheckpointManager(folder, strategy, keep=3) as manager:
            w, number = manager.restore_or_init(w)
            manager.save(number + 1, w, metrics={"accuracy": 0.5})
    x = next(iter(dataset))
    print(strategy.explain(step, (w, x)))
    with (
        js.profiling.MetricLogger(print) as log,
        strategy.profile(step) as timed,
    ):
        for number, batch in enumerate(dataset):
            w, value = timed(w, batch)
            log(number, {"loss": value})
    print(timed.report())
    with js.experimental.eager_replicas():
        print(step(w, x))


if __name__ == "__main__":
    main()
