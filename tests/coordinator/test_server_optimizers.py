"""Optimizers of Optax on parameter servers, against Optax on the whole state."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxstrategy as js
from jaxstrategy.coordinator import Threads

ROWS = np.arange(14.0, dtype="float32").reshape(7, 2) / 10


def strategy_of(shards=None, devices=1):
    partitioner = shards and js.experimental.partitioners.FixedShardsPartitioner(shards)
    return js.ParameterServerStrategy(
        variable_partitioner=partitioner, backend=Threads(1, 2, devices)
    )


def variable(strategy, value, name="v", **options):
    with strategy.scope():
        return js.Variable(value, name=name, **options)


TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 5)),
}


def trained_by_optax(tx, value, gradients):
    state = tx.init(value)
    for gradient in gradients:
        changes, state = tx.update(gradient, state, value)
        value = optax.apply_updates(value, changes)
    return np.asarray(value)


@pytest.mark.slow
@pytest.mark.parametrize("name, shards", [("adam", 3), ("schedule", None)])
def test_it_updates_as_optax_does(name, shards):
    strategy, tx = strategy_of(shards), TRANSFORMATIONS[name]
    v = variable(strategy, ROWS)
    optimizer = strategy.optimizer(tx, {"v": v})
    gradients = [np.sin(ROWS + i).astype("float32") for i in range(4)]

    def step(gradient):
        optimizer.apply({"v": gradient})

    for gradient in gradients[:3]:
        strategy.run(step, (gradient,))
    optimizer.apply({"v": gradients[3]})  # the coordinator does so, too
    expected = trained_by_optax(tx, jnp.asarray(ROWS), gradients)
    np.testing.assert_allclose(np.asarray(v), expected, rtol=1e-5, atol=1e-6)


def test_rows_are_added_up_and_replicas_reduce_before_they_apply():
    # With Adam alone nobody would see it: its first step has the same size anyway.
    strategy = strategy_of(shards=3)
    v = variable(strategy, ROWS)
    optimizer = strategy.optimizer(optax.sgd(1.0), v)
    ids, values = np.array([4, 0, 4]), np.array([[1, 2], [3, 4], [5, 6]], "float32")
    optimizer.apply(js.IndexedSlices(values, ids))
    expected = ROWS.copy()
    np.subtract.at(expected, ids, values)
    np.testing.assert_allclose(np.asarray(v), expected, rtol=1e-6)
    strategy = strategy_of(devices=2)
    v = variable(strategy, 0.0, aggregation="none")
    optimizer = strategy.optimizer(optax.sgd(1.0), v)

    def step(x):
        optimizer.apply(js.get_replica_context().all_reduce("sum", x))

    strategy.run(step, (strategy.per_replica([1.0, 2.0]),))
    assert float(v) == -3.0


def test_its_state_is_variables_beside_theirs():
    strategy = strategy_of()
    a, b = variable(strategy, 0.0, "a"), variable(strategy, 0.0, "b")
    optimizer = strategy.optimizer(optax.adam(0.1), [a, b])
    for target, (slots,) in zip((a, b), optimizer.slots, strict=True):
        assert {slot.device for slot in slots} == {target.device}
    names = [slot.name for slot in optimizer.slots[0][0]]
    assert len(names) == 3 and all(name.startswith("a") for name in names)


def test_what_is_wrong_is_told():
    strategy = strategy_of()
    v = variable(strategy, np.zeros(3, "float32"), "v")
    own = js.Variable(1.0, name="own")
    with pytest.raises(TypeError, match="`tx` was 3; a transformation of Optax"):
        strategy.optimizer(3, v)
    with pytest.raises(TypeError, match="`variables` holds 4, a int; variables were"):
        strategy.optimizer(optax.sgd(0.1), [v, 4])
    with pytest.raises(ValueError, match="'own' is not on a parameter server of"):
        strategy.optimizer(optax.sgd(0.1), [own])
    optimizer = strategy.optimizer(optax.sgd(0.1), [v])
    with pytest.raises(ValueError, match="that of the variables, .* was wanted"):
        optimizer.apply(np.zeros(3, "float32"))
    with pytest.raises(ValueError, match=r"variable 'v' has shape \(2,\); \(3,\) was"):
        optimizer.apply([np.zeros(2, "float32")])
