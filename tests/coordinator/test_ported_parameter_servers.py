"""The loop of TensorFlow's tutorial on parameter servers, with its names and structure.

Its data: three heroes of seven in each example, and whether one of them is the first.
A plain loop of NumPy is the oracle: one worker takes the same steps in the same order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxstrategy as js

HEROES, WIDTH, BATCH, EPOCHS, STEPS = 8, 4, 16, 4, 5


def examples(count, seed):
    rng = np.random.default_rng(seed)
    features = np.stack(
        [rng.permutation(np.arange(1, HEROES))[:3] for _ in range(count)]
    )
    labels = (features == 1).any(axis=1, keepdims=True)
    return {"features": features.astype(np.int32)}, labels.astype(np.int32)


TRAIN, TEST = examples(64, seed=0), examples(16, seed=1)
RNG = np.random.default_rng(2)
FIRST = {
    "embedding": RNG.normal(size=(HEROES, WIDTH)).astype(np.float32),
    "kernel": RNG.normal(size=(WIDTH, 1)).astype(np.float32),
    "bias": np.zeros((1, 1), np.float32),
}


def batches(data, size, count):
    """So many batches of rows, again and again from the beginning."""
    (inputs, labels), rows = data, np.arange(count * size).reshape(count, size)
    for index in rows % len(labels):
        yield inputs["features"][index], labels[index]


def by_a_plain_loop():
    """What the steps return, and the weights after them."""
    held = {name: value.astype(np.float64) for name, value in FIRST.items()}
    losses = []
    for ids, labels in batches(TRAIN, BATCH, EPOCHS * STEPS):
        x = held["embedding"][ids].mean(axis=1)
        logits = x @ held["kernel"] + held["bias"]
        entropy = np.logaddexp(0, logits) - labels * logits
        losses.append(entropy.mean())
        given = (1 / (1 + np.exp(-logits)) - labels) / len(labels)
        table = np.zeros_like(held["embedding"])
        rows = np.repeat(given @ held["kernel"].T / 3, 3, axis=0)
        np.add.at(table, ids.reshape(-1), rows)
        changes = {
            "embedding": table,
            "kernel": x.T @ given,
            "bias": given.sum(0, keepdims=True),
        }
        held = {name: held[name] - change for name, change in changes.items()}
    return losses, held


class Tutorial:
    """Its model, step and loop, on a worker and two servers."""

    def __init__(self):
        divided = js.experimental.partitioners.FixedShardsPartitioner(num_shards=2)
        self.strategy = strategy = js.ParameterServerStrategy(
            variable_partitioner=divided,
            workers=1,
            parameter_servers=2,
            backend="threads",
        )
        with strategy.scope():
            self.weights = {
                name: js.Variable(value, name=name) for name, value in FIRST.items()
            }
            self.right = js.Variable(0, trainable=False, name="right")
            self.total = js.Variable(0, trainable=False, name="total")
        self.optimizer = strategy.optimizer(optax.sgd(1.0), self.weights)
        self.coordinator = js.coordinator.ClusterCoordinator(strategy)
        self.step_fn = self.coordinator.function(self._step)
        self.eval_step = self.coordinator.function(self._eval_step)

    def model(self, inputs):
        embedding, kernel, bias = self.weights.values()
        rows = js.experimental.embedding_lookup(embedding, inputs["features"])
        return rows.mean(axis=1) @ kernel.value() + bias

    def _count(self, logits, labels):
        self.right.assign_add(((logits > 0) == (labels > 0)).sum())
        self.total.assign_add(labels.size)

    def _step(self, iterator):
        def replica_fn(inputs, labels):
            def loss_fn():
                logits = self.model(inputs)
                entropy = optax.sigmoid_binary_cross_entropy(logits, labels)
                return js.training.compute_average_loss(entropy[:, 0]), logits

            of = js.value_and_grad(loss_fn, self.weights, has_aux=True)
            (loss, logits), gradients = of()
            self.optimizer.apply(gradients)
            self._count(logits, labels)
            return loss

        losses = self.strategy.run(replica_fn, args=next(iterator))
        return self.strategy.reduce(js.ReduceOp.SUM, losses, axis=None)

    def _eval_step(self, iterator):
        def replica_fn(inputs, labels):
            self._count(self.model(inputs), labels)

        self.strategy.run(replica_fn, args=next(iterator))

    def iterator(self, data, size):
        def dataset_fn(context):
            assert context.num_input_pipelines == 1
            return js.batches(
                data, context.get_per_replica_batch_size(size), epochs=None
            )

        def per_worker_dataset_fn():
            return self.strategy.distribute_datasets_from_function(dataset_fn)

        return iter(self.coordinator.create_per_worker_dataset(per_worker_dataset_fn))

    def train(self):
        iterator, losses = self.iterator(TRAIN, BATCH), []
        for _ in range(EPOCHS):
            self.right.assign(0)
            self.total.assign(0)
            for _ in range(STEPS):
                losses.append(self.coordinator.schedule(self.step_fn, args=(iterator,)))
            self.coordinator.join()
            assert self.total.numpy() == STEPS * BATCH
        return self.coordinator.fetch(losses)


@pytest.fixture
def tutorial():
    made = Tutorial()
    yield made
    made.strategy.close()


def test_the_tutorial_trains_and_evaluates_as_a_plain_loop(tutorial):
    embedding = tutorial.weights["embedding"]
    assert [shard.shape for shard in embedding.variables] == [(4, WIDTH)] * 2
    tasks = [shard.device for shard in embedding.variables]
    assert ["/task:0/" in tasks[0], "/task:1/" in tasks[1]] == [True, True]
    losses, held = by_a_plain_loop()
    found = tutorial.train()
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    for name, variable in tutorial.weights.items():
        np.testing.assert_allclose(variable.numpy(), held[name], rtol=1e-3)

    inputs, labels = TEST  # direct evaluation, then a distributed one
    wanted = ((np.asarray(tutorial.model(inputs)) > 0) == (labels > 0)).sum()
    tutorial.right.assign(0)
    tutorial.total.assign(0)
    iterator = tutorial.iterator(TEST, 16)
    tutorial.coordinator.schedule(tutorial.eval_step, args=(iterator,))
    tutorial.coordinator.join()
    assert (tutorial.right.numpy(), tutorial.total.numpy()) == (wanted, labels.size)

    def right(shard, shards):
        ids = jnp.asarray(inputs["features"]).reshape(4, 4, 3)[shard]
        which = jnp.asarray(labels).reshape(4, 4, 1)[shard]
        return ((tutorial.model({"features": ids}) > 0) == (which > 0)).sum()

    counted = tutorial.coordinator.function(right)
    assert tutorial.coordinator.evaluate(counted, 4) == wanted


def test_a_jitted_function_of_an_iterator_is_refused():
    """As it comes of TensorFlow's `@tf.function`."""
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(lambda: [1.0]))
        step = jax.jit(lambda iterator: next(iterator))
        match = r"with `@coordinator\.function` instead of `@jax\.jit`"
        for args in ((iterator,), ([1.0, iterator],)):
            with pytest.raises(TypeError, match=match):
                coordinator.schedule(step, args)
