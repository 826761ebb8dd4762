"""What the pages of `tf.distribute` show, with the numbers they print.

One test an example, under each strategy its page names: on `StrategyExtended`, the
strategies, `ReplicaContext`, the enums of variables, the module itself, and the
`DistributionStrategy` of 2018. The code is ours.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import slow

import jaxstrategy as js

Central = js.experimental.CentralStorageStrategy

# By name: a strategy, its number of replicas, and how many copies its variables have.
STRATEGIES = {
    "mirrored": (lambda: js.MirroredStrategy(["CPU:0", "CPU:1"]), 2, 2),
    "mirrored-8": (lambda: js.MirroredStrategy(jax.devices()), 8, 8),
    "central": (lambda: Central(["CPU:1", "CPU:2"], "CPU:0"), 2, 1),
    "one": (lambda: js.OneDeviceStrategy("CPU:0"), 1, 1),
}


@pytest.fixture(params=["mirrored", "central", *slow("one", "mirrored-8")])
def case(request):
    make, replicas, copies = STRATEGIES[request.param]
    strategy = make()
    assert strategy.num_replicas_in_sync == replicas
    return strategy, replicas, copies


def versions(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


def on_each(strategy, value):
    """What a step returned, on each replica."""
    results = versions(strategy, value)
    assert len(results) == strategy.num_replicas_in_sync
    return results


# StrategyExtended.


def assign_reduced(var, reduce):
    """The step of both pages on reductions."""

    def merge(strategy, value, var):
        reduced = reduce(strategy.extended, value, var)
        strategy.extended.update(var, lambda var, x: var.assign(x), args=(reduced,))

    value = jnp.asarray(1.0)
    js.get_replica_context().merge_call(merge, args=(value, var))


def batch_reduced(extended, value, var):
    return extended.batch_reduce_to(js.ReduceOp.SUM, [(value, var)])[0]


def reduced(extended, value, var):
    return extended.reduce_to(js.ReduceOp.SUM, value, destinations=var)


@pytest.mark.parametrize("reduce", [batch_reduced, reduced])
def test_reducing_to_a_variable_in_merge_call(case, reduce):
    strategy, replicas, copies = case

    def step(var):
        assign_reduced(var, reduce)

    with strategy.scope():
        v = js.Variable(0.0)
        strategy.run(step, args=(v,))
    assert versions(strategy, v) == [float(replicas)] * copies


def test_update(case):
    strategy, _, copies = case
    with strategy.scope():
        v = js.Variable(5.0)

    def change(v):
        return v.assign(1.0)

    result = strategy.extended.update(v, change)
    assert versions(strategy, v) == [1.0] * copies
    assert isinstance(result, js.Mirrored) and result == 1.0
    assert len(result.addressable_shards) == copies
    v.assign(5.0)

    def merge(strategy, v):
        return strategy.extended.update(v, change)

    def step(v):
        return js.get_replica_context().merge_call(merge, args=(v,))

    assert strategy.run(step, args=(v,)) == 1.0
    assert versions(strategy, v) == [1.0] * copies


def test_a_variable_made_by_the_function_that_uses_it(case):
    strategy, _, copies = case
    x = []

    def create():
        if not x:
            x.append(js.Variable(1.0))
        return x[0]

    with strategy.scope():
        create()
    assert versions(strategy, x[0]) == [1.0] * copies
    assert strategy.run(lambda: create().assign_add(1.0)) == 2.0
    assert len(x) == 1 and versions(strategy, x[0]) == [2.0] * copies


def test_in_the_default_context_library_code_runs_alone():
    def library(x):
        context = js.get_replica_context()
        return context.merge_call(
            lambda strategy, x: strategy.extended.reduce_to("sum", x, "CPU:0"), (x,)
        )

    assert library(jnp.float32(3.0)) == 3.0
    assert js.get_strategy().num_replicas_in_sync == 1


# The enums of variables.


@pytest.mark.parametrize("aggregation, wanted", [
    (js.VariableAggregation.SUM, lambda n: 5.0 + n),
    (js.VariableAggregation.MEAN, lambda n: 6.0),
    (js.VariableAggregation.ONLY_FIRST_REPLICA, lambda n: 6.0),
])  # fmt: skip
def test_a_variable_that_aggregates(case, aggregation, wanted):
    strategy, n, copies = case
    with strategy.scope():
        v = js.Variable(5.0, aggregation=aggregation)

    def step():
        return v.assign_add(jnp.asarray(1.0))

    assert on_each(strategy, strategy.run(step)) == [wanted(n)] * n
    assert versions(strategy, v) == [wanted(n)] * copies


@pytest.mark.slow
def test_gradients_kept_until_they_are_applied(case):
    strategy, n, copies = case
    with strategy.scope():
        weight = js.Variable([2.0])
        kept = js.Variable(
            [0.0],
            trainable=False,
            synchronization=js.VariableSynchronization.ON_READ,
            aggregation=js.VariableAggregation.MEAN,
        )

    def accumulate(x):
        grad = js.grad(lambda: (weight.value() * x).sum(), weight)()
        kept.assign_add(grad)

    x = strategy.per_replica([float(i + 1) for i in range(n)])
    for _ in range(3):
        strategy.run(accumulate, (x,))
    assert versions(strategy, kept) == [[3.0 * (i + 1)] for i in range(n)]
    strategy.extended.update(weight, lambda w, g: w.assign_sub(g), args=(kept.value(),))
    kept.assign([0.0])
    assert versions(strategy, weight) == [[2.0 - 3 * (n + 1) / 2]] * copies
    assert versions(strategy, kept) == [[0.0]] * n


# The module: training loops.


def test_a_custom_training_loop_learns(case):
    strategy, _, copies = case
    rows = np.linspace(-1, 1, 16, dtype=np.float32)
    data = [(rows, 3 * rows + 1)] * 60
    tx = optax.sgd(0.3)
    with strategy.scope():
        w, b = js.Variable(0.0, name="w"), js.Variable(0.0, name="b")
        seen = js.Variable(0.0, synchronization="on_read", aggregation="sum")

    @strategy.run
    def step(x, y):
        def loss_fn():
            return jnp.sum((w * x + b - y) ** 2) / 16

        loss, grads = js.value_and_grad(loss_fn, {"w": w, "b": b})()
        grads = js.get_replica_context().all_reduce("sum", grads)
        values = {"w": w.value(), "b": b.value()}
        updates, _ = tx.update(grads, tx.init(values))
        new = optax.apply_updates(values, updates)
        w.assign(new["w"])
        b.assign(new["b"])
        seen.assign_add(float(len(x)))
        return loss

    for x, y in strategy.experimental_distribute_dataset(data):
        loss = step(x, y)
    assert strategy.reduce("sum", loss) < 1e-4
    np.testing.assert_allclose(versions(strategy, w), [3.0] * copies, atol=0.02)
    np.testing.assert_allclose(versions(strategy, b), [1.0] * copies, atol=0.02)
    assert seen.value() == 16 * 60


def test_a_moving_average(case):
    """`value - variable` is averaged over the replicas first, then applied once."""
    strategy, n, copies = case
    with strategy.scope():
        average = js.Variable([10.0, 11.0], aggregation="mean")

    def step(i):
        value = jnp.stack([1.0 + i, 2.0 - i])
        return average.assign_sub((average.value() - value) * 0.75)

    ids = strategy.per_replica([np.float32(i) for i in range(n)])
    strategy.run(step, (ids,))
    mean = (n - 1) / 2
    wanted = [0.25 * 10 + 0.75 * (1 + mean), 0.25 * 11 + 0.75 * (2 - mean)]
    np.testing.assert_allclose(versions(strategy, average), [wanted] * copies)
    assert n != 2 or wanted == [3.625, 3.875]


# The `DistributionStrategy` of 2018.


def test_an_optimizer_in_merge_call(case):
    """The same in the middle of the towers' step, for all variables at once."""
    strategy, n, copies = case
    with strategy.scope():
        weights = [js.Variable(1.0), js.Variable(2.0)]

    def apply(strategy, grads_and_vars):
        pairs = [(grad, var) for grad, var in grads_and_vars]
        grads = strategy.extended.batch_reduce_to("mean", pairs)
        for grad, (_, var) in zip(grads, grads_and_vars, strict=True):
            strategy.extended.update(var, lambda v, g: v.assign_sub(g), args=(grad,))

    def step(x):
        grads = js.grad(lambda: weights[0] * weights[1] * x, weights)()
        pairs = list(zip(grads, weights, strict=True))
        js.get_replica_context().merge_call(apply, args=(pairs,))
        return weights[0].value()

    x = strategy.per_replica([float(i) for i in range(n)])
    mean = (n - 1) / 2
    assert strategy.run(step, (x,)) == 1 - 2 * mean
    assert versions(strategy, weights[0]) == [1 - 2 * mean] * copies
    assert versions(strategy, weights[1]) == [2 - mean] * copies
