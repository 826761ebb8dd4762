"""Updates of the rows that were looked up: Optax's numbers with whole gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of

import jaxstrategy as js

ROWS, FEATURES = 40, 3
OPTIMIZERS = {
    "sgd": (js.sharded.SGD(0.1), optax.sgd(0.1)),
    "adagrad": (js.sharded.Adagrad(0.1), optax.adagrad(0.1)),
}


@pytest.fixture(params=[False, True], ids=["whole", "divided"])
def eight(request):
    sharding = js.StateSharding("state", min_bytes=0) if request.param else None
    return js.MirroredStrategy(jax.devices(), sharding=sharding)


def some_rows():
    return np.random.default_rng(0).normal(size=(ROWS, FEATURES)).astype(np.float32)


def some_ids(*shape, highest=ROWS):
    return np.random.default_rng(1).integers(0, highest, shape)


def loss(rows):
    return (rows**2).sum(-1).mean()


def on_one_device(optimizer, table, ids, steps, op="mean"):
    """Optax with the whole gradient of NumPy's rows."""
    state = optimizer.init(table)
    factor = 1 if op == "mean" else ids.shape[0]

    def total(table):
        return factor * loss(jnp.asarray(table)[ids.reshape(-1)])

    @jax.jit
    def step(table, state):
        updates, state = optimizer.update(jax.grad(total)(table), state)
        return optax.apply_updates(table, updates), state

    for _ in range(steps):
        table, state = step(table, state)
    return table


@pytest.mark.slow
@each_of("name", OPTIMIZERS)
def test_sparse_steps_are_those_of_the_whole_gradient(eight, name):
    sparse, dense = OPTIMIZERS[name]
    embedding = js.sharded.Embedding(ROWS, FEATURES, sparse)
    state = eight.init(embedding.from_rows, some_rows())

    @eight.run
    def step(state, ids):
        rows = state.lookup(ids)
        return state.update(ids, jax.grad(loss)(rows))

    ids = some_ids(8, 6, highest=7)  # of which many are there several times
    for _ in range(5):
        state = step(state, eight.per_replica(ids))
    wanted = on_one_device(dense, some_rows(), ids, 5)
    np.testing.assert_allclose(state.table, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state.table[7:], some_rows()[7:])
    for slot in state.slots.values():
        assert slot.sharding == state.table.sharding
        changed = np.asarray(slot != np.float32(0.1)).any(-1)
        np.testing.assert_array_equal(changed, np.isin(np.arange(ROWS), ids))


@each_of("op", ["mean", "sum"])
def test_the_replicas_rows_are_reduced_as_is_said(op):
    two = js.MirroredStrategy(jax.devices()[:2])
    embedding = js.sharded.Embedding(ROWS, FEATURES, js.sharded.SGD(0.1))
    state = two.init(embedding.from_rows, some_rows())

    @two.run
    def step(state, ids):
        return state.update(ids, jax.grad(loss)(state.lookup(ids)), op=op)

    ids = some_ids(2, 6)
    new = step(state, two.per_replica(ids))
    wanted = on_one_device(optax.sgd(0.1), some_rows(), ids, 1, op)
    assert isinstance(new.table, js.Mirrored)
    np.testing.assert_allclose(new.table, wanted, rtol=1e-5, atol=1e-6)


def test_outside_of_a_strategy_there_is_one_replica():
    embedding = js.sharded.Embedding(ROWS, FEATURES, js.sharded.Adagrad(0.1))
    state = embedding.from_rows(some_rows())
    ids = some_ids(2, 3)
    for update in (
        lambda state: state.update(ids, jax.grad(loss)(state.lookup(ids))),
        jax.jit(lambda state: state.update(ids, jax.grad(loss)(state.lookup(ids)))),
    ):
        wanted = on_one_device(optax.adagrad(0.1), some_rows(), ids, 1)
        np.testing.assert_allclose(update(state).table, wanted, rtol=1e-5, atol=1e-6)


@each_of("combiner", ["sum", "mean", "sqrtn"])
def test_groups_are_updated_as_they_are_looked_up(combiner):
    embedding = js.sharded.Embedding(ROWS, FEATURES, js.sharded.SGD(0.1))
    state = embedding.from_rows(some_rows())
    ids = np.array([[1, 2, 2], [4, -1, -1], [-1, -1, -1]])
    weights = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])

    def total(state):
        return loss(state.lookup(ids, combiner, weights=weights))

    whole = jax.grad(total)(state).table
    groups = state.lookup(ids, combiner, weights=weights)
    new = state.update(ids, jax.grad(loss)(groups), combiner, weights=weights)
    np.testing.assert_allclose(new.table, some_rows() - 0.1 * whole, rtol=1e-5)


def test_a_gradient_that_is_reduced_already_is_applied(eight):
    embedding = js.sharded.Embedding(ROWS, FEATURES, js.sharded.SGD(0.1))
    state = eight.init(embedding.from_rows, some_rows())

    @eight.run
    def step(state, ids):
        slices = state.gradient(ids, jax.grad(loss)(state.lookup(ids)))
        return state.apply(js.get_replica_context().all_reduce("mean", slices))

    ids = some_ids(8, 6)
    new = step(state, eight.per_replica(ids))
    wanted = on_one_device(optax.sgd(0.1), some_rows(), ids, 1)
    np.testing.assert_allclose(new.table, wanted, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_reduced_is_told_of(two):
    embedding = js.sharded.Embedding(ROWS, FEATURES, js.sharded.SGD(0.1))
    state = two.init(embedding.from_rows, some_rows())

    def step(state, ids):
        slices = state.gradient(ids, jax.grad(loss)(state.lookup(ids)))
        return state.apply(slices)

    with pytest.warns(js.errors.NotMirroredWarning, match=r"state.table"):
        two.run(step, (state, two.per_replica(some_ids(2, 6))))
