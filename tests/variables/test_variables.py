"""`Variable`: how one is made, what it holds after assignments, how steps use it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.oracle import recorded
from helpers.replicas import ids
from helpers.threads import in_threads
from helpers.variables import copies, variable

import jaxstrategy as js


def test_a_callable_is_called_once(strategy):
    calls = []

    def start():
        calls.append(1)
        return jnp.arange(3.0)

    v = variable(strategy, start)
    assert len(calls) == 1
    assert copies(strategy, v) == [[0, 1, 2]] * strategy.num_replicas_in_sync
    o = variable(strategy, start, "on_read", "mean")
    assert len(calls) == 2 and o.numpy().tolist() == [0, 1, 2]


def test_what_a_variable_knows(two):
    v = variable(two, 1, name="v")
    assert (v.name, v.shape, v.dtype, v.trainable) == ("v", (), "int32", True)
    assert v.synchronization is js.VariableSynchronization.AUTO
    assert v.aggregation is js.VariableAggregation.NONE
    assert v.strategy is two and v.devices == two.devices
    o = variable(two, 1.0, js.VariableSynchronization.ON_READ, None)
    assert o.name == "Variable" and o.devices == two.devices
    assert o.aggregation is js.VariableAggregation.NONE


def test_trainable_by_default_unless_on_read():
    assert js.Variable(1.0).trainable
    assert not js.Variable(1.0, synchronization="on_read").trainable
    assert js.Variable(1.0, True, synchronization="on_read").trainable is True
    assert js.Variable(1.0, trainable=False).trainable is False


def test_dtype_is_that_of_the_value_unless_given():
    assert js.Variable(1).dtype == "int32"
    assert js.Variable([1.0, 2.0]).dtype == "float32"
    assert js.Variable(np.ones(2, np.float16)).dtype == "float16"
    assert js.Variable(1, dtype="bfloat16").dtype == "bfloat16"
    assert js.Variable(js.Variable(2.0)).value() == 2


@each_of("choice, words", [({"synchronization": "read"},
      "`synchronization` was 'read'; a VariableSynchronization or one of 'auto', "
      "'none', 'on_write', 'on_read' was wanted"),
     ({"synchronization": None}, "`synchronization` was None"),
     ({"aggregation": "max"},
      "`aggregation` was 'max'; a VariableAggregation or one of 'none', 'sum', "
      "'mean', 'only_first_replica' was wanted"),
     ({"aggregation": 3}, "`aggregation` was 3"),
     ({"synchronization": "none"}, "`synchronization` was NONE, which no strategy"),
     ({"dtype": "int32", "aggregation": "mean"},
      "holds int32, which has no aggregation MEAN. Use 'sum' or 'only_first"),
     ({"dtype": bool, "aggregation": "sum"},
      "holds bool, which has no aggregation SUM. Use 'only_first_replica'"),
])  # fmt: skip
def test_choices_that_are_none(choice, words):
    with pytest.raises(ValueError, match=words):
        js.Variable(1.0, **choice)


@each_of(
    "start, words",
    [("text", "Variable 'v' was given 'text' to start with; an array, a number or a "
              "function that returns one was wanted"),
     (lambda: object(), "was given <object object"),
     (None, "was given None"),
     (js.PerReplica(np.zeros(2)), "was given a PerReplica to start with")])  # fmt: skip
def test_what_no_variable_starts_with(start, words):
    with pytest.raises(TypeError, match=words):
        js.Variable(start, name="v")


def test_a_traced_value_to_start_with(two):
    words = "Variable 'v' was given a value of the step that makes it"
    with pytest.raises(TypeError, match=words):
        two.run(lambda x: js.Variable(x, name="v").value(), (ids(two),))
    with pytest.raises(TypeError, match=words):
        jax.jit(lambda x: js.Variable(x, name="v").value())(1.0)


class Once:
    """Makes its variable when it is first called, as Keras layers do."""

    def __init__(self, **choices):
        self.v = None
        self.choices = choices

    def get(self):
        if self.v is None:
            self.v = js.Variable(lambda: 5.0, **self.choices)
        return self.v


@pytest.mark.slow
@each_of("kind", ["auto", "on_read"])
def test_a_step_may_make_a_variable_when_it_is_first_traced(strategy, kind):
    made = Once(synchronization=kind, aggregation="sum")

    def step(x):
        return made.get().assign_add(x)

    for _ in range(2):
        strategy.run(step, (ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert made.v.strategy is strategy
    start = 5 * n if kind == "on_read" else 5
    assert made.v.value() == start + 2 * sum(range(n))


def test_a_variable_made_anew_in_each_trace(two):
    words = "Variable 'v' was made inside a step that is traced again.*self.v is None"
    with pytest.raises(ValueError, match=words):
        two.run(lambda: js.Variable(0.0, name="v").value())


def test_variables_as_arguments(strategy):
    v = variable(strategy, 1.0)
    o = variable(strategy, 1.0, "on_read")  # has no value outside of steps

    def step(first, rest, *, named):
        assert first is v and rest["o"][0] is o and named is v
        rest["o"][0].assign_add(1.0)
        return first.assign_add(named.value())

    for expected in (2, 4):
        assert strategy.run(step, (v, {"o": [o]}), {"named": v}) == expected
    assert copies(strategy, o) == [3] * strategy.num_replicas_in_sync


def test_another_variable_as_argument_is_another_program(two, compilations):
    v, w = variable(two, 1.0), variable(two, 2.0)

    def step(v):
        return v.assign_add(1.0)

    assert (two.run(step, (v,)), two.run(step, (w,))) == (2, 3)
    compilations()
    assert (two.run(step, (v,)), two.run(step, (w,))) == (3, 4)
    assert compilations() == 0


def test_variables_in_merge_calls(strategy):
    v = variable(strategy, 1.0)
    o = variable(strategy, 0.0, "on_read", "sum")

    def step(x):
        o.assign(x)

        def inner(x):
            return o.assign_add(x)

        def merge(strategy, x, v):
            total = strategy.reduce("sum", x)
            strategy.run(inner, (x,))
            return v.assign_add(total), o.value(), strategy.reduce("max", o), v

        return js.get_replica_context().merge_call(merge, (x, v))

    n = strategy.num_replicas_in_sync
    total = sum(range(n))
    out = strategy.run(step, (ids(strategy),))
    assert out[:3] == (1 + total, 2 * total, 2 * (n - 1)) and out[3] is v
    assert v == 1 + total and all(isinstance(each, js.Mirrored) for each in out)


@each_of("aggregation", ["sum", "mean", "only_first_replica"])
def test_on_read_variables_assigned_in_merge_calls(two, aggregation):
    v = variable(two, 1.0, "on_read", aggregation)

    def step(x):
        def merge(strategy, x):
            return (
                v.assign(4.0),
                v.value(),
                v.assign_add(2.0),
                v.assign_sub(x),
                v.value(),
            )

        return js.get_replica_context().merge_call(merge, (x,))

    out = two.run(step, (ids(two),))
    assert out[1] == 4 and out[4] == v.value()
    ours = {"sum": (5.0, [4, 1]), "mean": (5.5, [6, 5])}
    expected = ours.get(aggregation, (6.0, [6, 5]))
    assert (out[4], copies(two, v)) == expected


def test_a_loop_whose_condition_would_not_see_the_variable_change(two):
    v = variable(two, 0.0)

    def step():
        return jax.lax.while_loop(lambda c: v < 5, lambda c: v.assign_add(1.0), 0.0)

    words = r"condition of a `while_loop` reads a variable[\s\S]*lambda c: v < 5"
    with pytest.raises(ValueError, match=words):
        two.run(step)
    # It may read one that the body leaves alone.
    limit = variable(two, 3.0)
    assert two.run(lambda: jax.lax.while_loop(lambda c: c < limit.value(),
                                              lambda c: c + 1, 0.0)) == 3  # fmt: skip


def test_jitted_functions_inside_steps_see_each_steps_variable(two):
    v = variable(two, 2.0)

    @jax.jit
    def inner(x):
        return v.assign_add(1.0) * x

    def first(x):
        return inner(x)

    x = two.per_replica([1.0, 2.0])
    assert two.run(first, (x,)).stacked.tolist() == [3, 6]
    assert two.run(lambda x: inner(x) + v, (x,)).stacked.tolist() == [8, 12]
    assert inner(1.0) == 5
    assert two.run(first, (jnp.ones(2),)).tolist() == [6, 6]  # traced again
    assert v.value() == 6


@each_of("kind", ["auto", "on_read"])
def test_the_users_jit_around_several_runs(strategy, kind):
    v = variable(strategy, 1.0, kind, "sum")

    @strategy.run
    def step(x):
        return v.assign_add(x)

    @jax.jit
    def whole(x):
        step(x)
        before = v.value()
        v.assign(2 * v.value())
        step(x)
        return before, v.value()

    n = strategy.num_replicas_in_sync
    x, total = ids(strategy), sum(range(n))
    start = 1 if kind == "auto" else n
    for _ in range(2):
        before, after = whole(x)
        assert before == start + total and after == 2 * before + total
        start = float(after)
    assert v.value() == start


def test_threads_may_use_one_variable(two):
    v = variable(two, 0.0, aggregation="sum")
    o = variable(two, 0.0, "on_read", "sum")

    @two.run
    def step(x):
        o.assign_add(x)
        return v.assign_add(x)

    def work():
        for _ in range(10):
            step(x)
            v.assign_add(1.0)
            repr((v, o.value()))

    x = ids(two)
    in_threads(*[work] * 4)
    # What a thread adds to v outside of `run` may be lost, steps are not.
    assert o.value() == 40 and 40 <= v.value() <= 80


def test_a_variable_of_another_strategy(two, four):
    v = variable(two, name="v")
    words = r"Variable 'v' belongs to MirroredStrategy\(2 .* in a step of Mirrored.*\(4"
    for use in (lambda: v.value(), lambda: v.assign(1.0), lambda: v + 1):
        with pytest.raises(js.errors.ContextError, match=words):
            four.run(use)
    with pytest.raises(js.errors.ContextError, match=words):
        four.run(lambda v: v.value(), (v,))


def test_an_ordinary_variable_in_steps_of_several_strategies(two, four):
    v = js.Variable(1.0, name="v")
    assert v.strategy is None and v.devices == tuple(jax.devices()[:1])

    def step():
        return v.assign_add(1.0)

    one = js.OneDeviceStrategy("CPU:3")
    assert [float(s.run(step)) for s in (two, four, one, two)] == [2, 3, 4, 5]
    assert v.value() == 5 and v.value().devices() == set(jax.devices()[:1])
    with pytest.raises(ValueError, match="'v' is mirrored, but"):
        two.run(lambda x: v.assign(x), (ids(two),))
    summed = js.Variable(0.0, aggregation="sum")
    assert two.run(lambda x: summed.assign(x), (ids(two),)) == 1
    assert summed.value() == 1


@each_of("central", [False, True])
def test_what_lives_elsewhere_is_not_part_of_a_traced_function(two, central):
    if central:
        two = js.experimental.CentralStorageStrategy(two.devices, "CPU:5")
        v = variable(two, 1.0, name="v")
    else:
        v = js.Variable(1.0, name="v")
    place = "cpu:5" if central else "cpu:0"
    assert two.run(lambda: v.assign_add(1.0)) == 2
    words = f"Variable 'v' lives on {place}, not on all replicas"
    with pytest.raises(js.errors.PlacementError, match=words):
        jax.jit(lambda: two.run(lambda: v.assign_add(1.0)))()
    assert v.value() == 2


def test_variables_under_the_default_strategy():
    v = js.Variable(1.0, aggregation="sum")
    default = js.get_strategy()
    assert default.run(lambda x: v.assign_add(x), (2.0,)) == v.value() == 3
    assert default.reduce("sum", v) == 3
    assert default.experimental_local_results(v) == (3,)


# What each kind of variable holds after each assignment, as TensorFlow recorded it.

ORACLE = recorded("variables.json")


def deviation(row):
    """What we do instead of TensorFlow in this row, or None: error text or copies."""
    kind, aggregation = row["synchronization"], row["aggregation"]
    op, context = row["op"], row["context"]
    match kind, aggregation, op, context:
        case "AUTO", "NONE", _, "replica":
            # There the copies drift apart.
            return r"is mirrored, but .* assigns it a value that may differ[\s\S]*x\.py"
        case "AUTO", _, _, "cross_per_replica":
            # There the copies drift apart, whatever the aggregation.
            return "was given a PerReplica outside `run`"
        case "ON_READ", _, _, "cross_per_replica":
            # There an AttributeError or TypeError by accident, or the one below.
            return {"assign": [1, 2], "assign_add": [11, 12], "assign_sub": [9, 8]}[op]
        case "ON_READ", "SUM", "assign_add" | "assign_sub", "cross":
            # There an error. The aggregate changes by 4: the first copy takes it.
            return [14, 10] if op == "assign_add" else [6, 10]
        case "ON_READ", "NONE", _, "cross":
            # There too, in other words; and its `assign` has changed the copies.
            return "aggregation NONE, so `.*` outside `run` does not say which"
    return None


def change(strategy, v, op, context):
    """Make the call of a row of the table."""
    if context == "replica":
        # A file of its own: errors are to name the line.
        code = compile("lambda x: getattr(v, op)(x + 1)", "x.py", "eval")
        strategy.run(eval(code, {"v": v, "op": op}), (ids(strategy),))
    elif context == "cross":
        getattr(v, op)(4.0)
    elif context == "update":
        strategy.extended.update(v, lambda v: getattr(v, op)(4.0))
    else:
        getattr(v, op)(ids(strategy, 1.0))


@each_of("row", ORACLE["variables"])
def test_the_table_is_tensorflows(two, row):
    v = variable(two, row["start"], row["synchronization"], row["aggregation"])
    ours = deviation(row)
    if isinstance(ours, str):
        with pytest.raises(ValueError, match=ours):
            change(two, v, row["op"], row["context"])
        assert copies(two, v) == [row["start"]] * 2
        return
    change(two, v, row["op"], row["context"])
    expected = row["copies"] if ours is None else ours
    assert copies(two, v) == expected
    if ours is None and not isinstance(row["read"], str):
        assert v.value() == v.read_value() == row["read"]
    if row["synchronization"] == "ON_READ" and row["aggregation"] == "NONE":
        with pytest.raises(ValueError, match="no value outside `run`"):
            v.read_value()


def reduced(strategy, op, where, x):
    if where == "reduce":
        return strategy.reduce(op, x)
    return strategy.run(lambda x: js.get_replica_context().all_reduce(op, x), (x,))


@pytest.mark.slow
@each_of("row", ORACLE["reductions"])
def test_reductions_are_tensorflows(two, row):
    dtype = jnp.dtype(row["dtype"])
    if dtype.itemsize == 8 and dtype.kind in "iu":
        dtype = jnp.dtype("int32")  # 64-bit types are off in JAX
    values = [complex(v) if dtype.kind == "c" else eval(v) for v in row["values"]]
    x = two.per_replica([np.asarray(v).astype(dtype) for v in values])
    if dtype.kind == "b":
        with pytest.raises(TypeError, match="of a bool array is not defined"):
            reduced(two, row["op"], row["where"], x)
        return
    out = reduced(two, row["op"], row["where"], x)
    if dtype == np.uint8:
        # There the mean is that of the wrapped sum, and `all_reduce` is an error.
        assert out == (44 if row["op"] == "SUM" else 150)
    elif dtype.kind == "c":
        # There `all_reduce` is an error.
        assert out == sum(values) / (1 if row["op"] == "SUM" else 2)
    else:
        assert out == float(row["result"])
    is_mean = row["op"] == "MEAN" and dtype.kind in "iu"
    assert out.dtype == (jnp.dtype("float32") if is_mean else dtype)


# The same with any number of replicas; NumPy is the oracle.


@pytest.mark.slow
@each_of("whole", [0, 7, -7, 8, 1_000_003])
def test_integer_shares_read_back_exactly(strategy, whole):
    v = variable(strategy, 0, "on_read", "sum")
    assert v.assign(whole) == v.value() == whole
    shares = copies(strategy, v)
    assert sum(shares) == whole and len(set(shares[1:])) <= 1
    strategy.extended.update(v, lambda v: v.assign(1))
    assert v.value() == strategy.num_replicas_in_sync


def test_random_keys(two):
    key = variable(two, jax.random.key(0))
    own = variable(two, jax.random.key(0), "on_read", "only_first_replica")

    def step():
        key.assign(jax.random.split(key.value())[0])
        changed = own.assign(js.get_replica_context().fold_in(own.value()))
        return changed.dtype == key.dtype

    assert two.run(step)
    data = jax.random.key_data(jax.random.split(jax.random.key(0))[0]).tolist()
    assert jax.random.key_data(key.value()).tolist() == data
    assert len({repr(k) for k in two.experimental_local_results(own)}) == 2
    assert f": [{data[0]}," in repr(key) and "key<fry>[]" in repr(key)
    key.assign(jax.random.key(3))
    assert jax.random.key_data(key.value()).tolist() == [0, 3]
    for other, dtype in ((1.0, "float32"), (np.zeros(2, np.uint32), "uint32")):
        with pytest.raises(TypeError, match=f"holds key<fry> and was given {dtype}"):
            key.assign(other)


@each_of("aggregation, assigned, added", [
    ("none", 5, 15), ("mean", 5, 15), ("only_first_replica", 5, 15), ("sum", 10, 20),
])  # fmt: skip
def test_a_constant_of_the_step(two, aggregation, assigned, added):
    v = variable(two, 10.0, aggregation=aggregation)
    two.run(lambda: v.assign_add(jnp.float32(5)))
    assert copies(two, v) == [added] * 2
    two.run(lambda: v.assign(jnp.float32(5)))
    assert copies(two, v) == [assigned] * 2


# Variables, `reduce` and `all_reduce` combine values in one way: the strategy's.

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


def test_an_aggregation_is_a_reduce_operation(two):
    assert js.ReduceOp(js.VariableAggregation.SUM) is js.ReduceOp.SUM
    assert js.ReduceOp.from_variable_aggregation("mean") is js.ReduceOp.MEAN
    x = two.per_replica(np.float32([1, 2]))
    assert two.reduce(js.VariableAggregation.MEAN, x) == 1.5
    for none in (js.VariableAggregation.NONE, "only_first_replica"):
        with pytest.raises(ValueError, match="Could not convert from VariableAggreg"):
            js.ReduceOp.from_variable_aggregation(none)


# What variables hold between steps: arrays that steps borrow, or references.


@pytest.fixture(params=["on_write", "on_read"])
def made(request, strategy):
    with strategy.scope():
        return strategy, js.Variable(
            np.zeros(3), synchronization=request.param, aggregation="mean"
        )


# Steps that capture dicts whose keys are variables, as optimizers keep their slots.

KEYS = {
    "variable": lambda v: v,
    "tuple": lambda v: (v, "slot"),
    "reference": lambda v: v.ref(),
}


@each_of("key_of", KEYS.values())
@each_of("is_view", [False, True])
def test_a_step_may_capture_them(two, key_of, is_view):
    with two.scope():
        v, slot = js.Variable(1.0, aggregation="sum"), js.Variable(2.0)
    slots = {key_of(v): slot}
    slots = types.MappingProxyType(slots) if is_view else slots

    def step(x):
        v.assign_add(slots[key_of(v)] * x)

    for expected in (1 + 2 * 2 * 3, 1 + 2 * 2 * 2 * 3):
        two.run(step, (np.float32(3),))
        assert float(v) == expected


def test_a_call_does_not_read_them(two, monkeypatch):
    with two.scope():
        v = js.Variable(1.0)
    slots = {v: 2.0}
    step = two.step(lambda x: x * slots[v])
    step(np.float32(1))

    def read(self):
        raise AssertionError("it was read")

    monkeypatch.setattr(js.Variable, "__repr__", read)
    assert float(step(np.float32(3))) == 6
