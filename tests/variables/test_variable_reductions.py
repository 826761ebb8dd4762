"""Variables, `reduce` and `all_reduce` combine values in one way: the strategy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.variables import variable

import jaxstrategy as js

AGGREGATIONS = {"sum": np.sum, "mean": np.mean}


class Noted(js.CrossDeviceOps):
    """Sums in order, and notes what it was given."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, op, value, destinations, options):
        self.calls.append((op, value.shape, options.bytes_per_pack))
        total = sum(value.values)
        return total / value.num_replicas if op is js.ReduceOp.MEAN else total


def collectives(strategy, fn, *args):
    found = strategy.explain(fn, args, compiled=False)
    return [(each.operation, each.dtypes) for each in found.collectives]


@each_of("aggregation", AGGREGATIONS)
def test_variables_go_through_the_strategys_operations(aggregation):
    ops = Noted()
    strategy = js.MirroredStrategy(jax.devices()[:4], cross_device_ops=ops)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    v = variable(strategy, np.zeros(3), aggregation=aggregation)
    o = variable(strategy, np.zeros(3), "on_read", aggregation)
    op = js.ReduceOp(aggregation)
    strategy.run(lambda x: v.assign(x), (strategy.per_replica(x),))
    assert [call[:2] for call in ops.calls] == [(op, (3,))]
    o.assign(strategy.per_replica(x))  # which also reads the new value
    assert [call[:2] for call in ops.calls] == [(op, (3,))] * 2
    wanted = AGGREGATIONS[aggregation](x, 0)
    np.testing.assert_allclose(v, wanted, rtol=1e-5)
    np.testing.assert_allclose(o, wanted, rtol=1e-5)
    ops.calls.clear()

    def merge(strategy, x):
        return o.value()

    out = strategy.run(lambda: js.get_replica_context().merge_call(merge, (1,)))
    np.testing.assert_allclose(out, wanted, rtol=1e-5)
    assert [call[:2] for call in ops.calls] == [(op, (3,))]


def test_variables_are_reduced_as_the_options_say():
    options = js.experimental.CommunicationOptions(
        implementation=js.experimental.CommunicationImplementation.RING,
        reduce_dtype=jnp.bfloat16,
    )
    alone = js.cluster_resolver.SimpleClusterResolver({})
    strategy = js.MultiWorkerMirroredStrategy(alone, options)
    v = variable(strategy, np.zeros(8), aggregation="sum")
    n = strategy.num_replicas_in_sync
    x = strategy.per_replica(np.ones((n, 8), np.float32))
    by_variable = collectives(strategy, lambda x: v.assign_add(x), x)
    by_hand = collectives(
        strategy, lambda x: js.get_replica_context().all_reduce("sum", x), x
    )
    assert by_variable == by_hand
    assert "psum" not in dict(by_variable) and ("bfloat16" in str(by_variable))


def test_the_first_replicas_value_is_that_under_any_operations():
    strategy = js.MirroredStrategy(jax.devices()[:4], cross_device_ops=Noted())
    v = variable(strategy, 0.0, aggregation="only_first_replica")
    o = variable(strategy, 0.0, "on_read", "only_first_replica")
    x = strategy.per_replica(np.float32([3, 4, 5, 6]))
    assert strategy.run(lambda x: v.assign(x), (x,)) == 3 and o.assign(x) == 3


def test_reading_copies_under_the_users_jit(two):
    for aggregation, wanted in (("sum", 3), ("mean", 1.5), ("only_first_replica", 1)):
        o = variable(two, 0.0, "on_read", aggregation)
        o.assign(two.per_replica(np.float32([1, 2])))
        assert jax.jit(lambda o=o: o + 0)() == wanted


def test_an_aggregation_is_a_reduce_operation(two):
    assert js.ReduceOp(js.VariableAggregation.SUM) is js.ReduceOp.SUM
    assert js.ReduceOp.from_variable_aggregation("mean") is js.ReduceOp.MEAN
    x = two.per_replica(np.float32([1, 2]))
    assert two.reduce(js.VariableAggregation.MEAN, x) == 1.5
    for none in (js.VariableAggregation.NONE, "only_first_replica"):
        with pytest.raises(ValueError, match="Could not convert from VariableAggreg"):
            js.ReduceOp.from_variable_aggregation(none)


def test_operations_that_are_none_say_which_there_are(two):
    x = two.per_replica(np.float32([1, 2]))
    words = r"is not a valid ReduceOp; 'sum', 'mean', 'min' and 'max' are"
    with pytest.raises(ValueError, match="'prod' " + words):
        js.ReduceOp("prod")
    with pytest.raises(ValueError, match="'avg' " + words):
        two.run(lambda x: js.get_replica_context().all_reduce("avg", x), (x,))
    with pytest.raises(ValueError, match="'AVG' " + words):
        two.reduce("AVG", x)
    with pytest.raises(TypeError, match="got 3.5"):
        js.ReduceOp(3.5)


@pytest.mark.slow
@each_of("make", [js.OneDeviceStrategy, js.MirroredStrategy])
@each_of("aggregation", ["none", "mean"])
def test_one_copy_of_an_on_read_variable_is_its_value(make, aggregation):
    device = jax.devices()[3]
    strategy = make(device) if make is js.OneDeviceStrategy else make([device])
    o = variable(strategy, 2.0, "on_read", aggregation)
    assert o == o.read_value() == 2.0 and o + 1 == 3.0 and o.numpy() == 2.0
    assert o.assign(5.0) == 5.0 and o.assign_add(1.0) == 6.0 and o == 6.0
    strategy.run(lambda: o.assign_sub(1.0), ())
    assert o.value() == 5.0

    def merge(strategy):
        o.assign(7.0)
        return o.value()

    out = strategy.run(lambda: js.get_replica_context().merge_call(merge))
    assert strategy.reduce("sum", out) == 7.0
    assert jax.tree.leaves([o]) == [7.0]
