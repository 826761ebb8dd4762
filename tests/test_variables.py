"""`Variable`: kinds, contexts, assignment, arithmetic, memory."""

import copy
import gc
import json
import operator
import pickle
import threading
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js

ORACLE = json.loads((Path(__file__).parent / "oracle" / "variables.json").read_text())


def ids(strategy, start=0.0):
    """`start + i` for replica i."""
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([np.float32(start + i) for i in range(n)])


def copies(strategy, variable):
    return [v.tolist() for v in strategy.experimental_local_results(variable)]


def variable(strategy, value=10.0, kind="auto", aggregation="none", **more):
    with strategy.scope():
        return js.Variable(value, synchronization=kind, aggregation=aggregation, **more)


# TensorFlow's table.


def row_id(row):
    parts = [row["synchronization"], row["aggregation"], row["op"], row["context"]]
    return "-".join(parts).lower()


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


@pytest.mark.parametrize("row", ORACLE["variables"], ids=row_id)
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


@pytest.mark.parametrize(
    "row",
    ORACLE["reductions"],
    ids=lambda row: "-".join([row["dtype"], *row["values"], row["op"], row["where"]]),
)
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

AGGREGATIONS = {"sum": np.sum, "mean": np.mean, "only_first_replica": lambda x: x[0]}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_mirrored_variables_take_the_aggregate(strategy, aggregation):
    v = variable(strategy, 3.0, "on_write", aggregation)
    x = ids(strategy, 1.0)
    total = AGGREGATIONS[aggregation](np.asarray(x.stacked))

    def step(x):
        return v.assign_sub(x), v.assign_add(2 * x), v.assign(v + x)

    out = strategy.run(step, (x,))
    expected = (3 - total, 3 + total, None)
    assert out[:2] == pytest.approx(expected[:2])
    # In the sum v counts too, once for each replica.
    own = (3 + total) + np.asarray(x.stacked)
    assert out[2] == v.numpy() == pytest.approx(AGGREGATIONS[aggregation](own))
    assert len(set(copies(strategy, v))) == 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_read_variables_are_aggregated_when_read(strategy, aggregation):
    v = variable(strategy, 1.0, "on_read", aggregation)
    out = strategy.run(lambda x: v.assign_add(x), (ids(strategy),))
    expected = 1 + np.arange(strategy.num_replicas_in_sync)
    if strategy.num_replicas_in_sync > 1:
        assert isinstance(out, js.PerReplica)
    assert copies(strategy, v) == expected.tolist()
    assert v.value() == v.numpy() == pytest.approx(AGGREGATIONS[aggregation](expected))
    assert v.assign(7.0) == v.value() == 7


def test_what_is_equal_on_all_replicas_may_be_assigned_without_aggregation(strategy):
    v = variable(strategy, np.zeros(2))
    out = strategy.run(
        lambda x: v.assign(js.get_replica_context().all_reduce("sum", x) + v),
        (js.PerReplica(np.ones((strategy.num_replicas_in_sync, 2), np.float32)),),
    )
    assert isinstance(out, js.Mirrored)
    assert v.numpy().tolist() == [strategy.num_replicas_in_sync] * 2


@pytest.mark.parametrize("whole", [0, 7, -7, 8, 1_000_003])
def test_integer_shares_read_back_exactly(strategy, whole):
    v = variable(strategy, 0, "on_read", "sum")
    assert v.assign(whole) == v.value() == whole
    shares = copies(strategy, v)
    assert sum(shares) == whole and len(set(shares[1:])) <= 1
    strategy.extended.update(v, lambda v: v.assign(1))
    assert v.value() == strategy.num_replicas_in_sync


@pytest.mark.parametrize("kind", ["auto", "on_read"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64"])
def test_dtypes_and_shapes(two, dtype, kind):
    how = "only_first_replica" if dtype == "bool" else "sum"
    value = np.array([[0, 1, 0], [1, 1, 0]]).astype(jnp.dtype(dtype))
    v = variable(two, value, kind, how)
    assert v.dtype == dtype and v.shape == (2, 3) and v.ndim == 2 and v.size == 6
    x = js.PerReplica(np.stack([value, value]))
    out = two.run(lambda x: (v.value(), v.assign(x))[0], (x,))
    assert out.dtype == dtype
    expected = value if dtype == "bool" else value + value
    assert v.value().dtype == dtype and np.array_equal(v.numpy(), expected)


def test_an_empty_variable(two):
    v = variable(two, np.zeros((0, 3)), "on_read", "sum")
    assert two.run(lambda: v.assign_add(jnp.ones((0, 3)))).shape == (0, 3)
    assert v.numpy().shape == (0, 3) and v.size == 0


def test_random_keys(two):
    key = variable(two, jax.random.key(0))
    own = variable(two, jax.random.key(0), "on_read", "only_first_replica")

    def step():
        key.assign(jax.random.split(key.value())[0])
        return (
            own.assign(js.get_replica_context().fold_in(own.value())).dtype == key.dtype
        )

    assert two.run(step)
    expected = jax.random.split(jax.random.key(0))[0]
    assert np.array_equal(
        jax.random.key_data(key.value()), jax.random.key_data(expected)
    )
    assert len({repr(k) for k in two.experimental_local_results(own)}) == 2
    data = jax.random.key_data(expected).tolist()
    assert f"0: [{data[0]}," in repr(key) and "key<fry>[]" in repr(key)
    with pytest.raises(TypeError, match="holds key<fry> and was given float32"):
        key.assign(1.0)


# Making one.


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


def test_names_need_not_differ(two):
    a, b = variable(two, 1.0, name="same"), variable(two, 2.0, name="same")
    assert two.run(lambda: (a.assign_add(1.0), b.assign_add(1.0))) == (2, 3)


@pytest.mark.parametrize("text", ["sum", "SUM", "Sum"])
def test_names_of_choices_in_any_case(text):
    assert js.Variable(1.0, aggregation=text).aggregation.name == "SUM"


@pytest.mark.parametrize(
    "choice, words",
    [({"synchronization": "read"},
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
      "holds bool, which has no aggregation SUM. Use 'only_first_replica'")],
)  # fmt: skip
def test_choices_that_are_none(choice, words):
    with pytest.raises(ValueError, match=words):
        js.Variable(1.0, **choice)


@pytest.mark.parametrize(
    "start, words",
    [("text", "Variable 'v' was given 'text' to start with; an array, a number or a "
              "function that returns one was wanted"),
     (lambda: object(), "was given <object object"),
     (None, "was given None"),
     (js.PerReplica(np.zeros(2)), "was given a PerReplica to start with")],
    ids=["text", "function", "none", "per-replica"],
)  # fmt: skip
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


@pytest.mark.parametrize("kind", ["auto", "on_read"])
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


def in_scan(get, x):
    jax.lax.scan(lambda c, _: (c, get().assign_add(x)), 0, length=2)
    return get().assign_add(0.0)


def in_branch(get, x):
    jax.lax.cond(True, lambda: get().assign_add(2 * x), lambda: get().value())
    return get().value()


def in_merge(get, x):
    def merge(strategy, x):
        return get().assign_add(2 * strategy.reduce("max", x)), get()

    return js.get_replica_context().merge_call(merge, (x,))[0]


def in_jit(get, x):
    jax.jit(lambda x: get().assign_add(2 * x))(x)
    return get().value()


@pytest.mark.parametrize("inside", [in_scan, in_branch, in_merge, in_jit])
def test_a_variable_made_deep_inside_a_step(two, inside):
    made = Once()

    def step(x):
        return inside(made.get, js.get_replica_context().all_reduce("max", x))

    for expected in (7, 9):
        assert two.run(step, (ids(two),)) == made.v.value() == expected


def test_a_variable_made_under_the_users_jit_around_run(two):
    made = Once(aggregation="sum")

    def step(x):
        return made.get().assign_add(x)

    whole = jax.jit(lambda x: two.run(step, (x,)))
    assert [float(whole(ids(two))) for _ in range(2)] == [6, 7]
    assert made.v.value() == 7


def test_a_variable_made_anew_in_each_trace(two):
    words = "Variable 'v' was made inside a step that is traced again.*self.v is None"
    with pytest.raises(ValueError, match=words):
        two.run(lambda: js.Variable(0.0, name="v").value())


def test_a_variable_made_in_a_later_trace(two):
    made = Once(aggregation="sum")

    def step(x):
        return made.get().assign(jnp.sum(x)) if x.ndim else x

    two.run(step, (1.0,))
    with pytest.raises(ValueError, match="was made inside a step that is traced again"):
        two.run(step, (jnp.ones(2),))


# Ways to it.


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


@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
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


def test_cross_replica_assigns_of_what_has_no_aggregation_in_merge_calls(two):
    v = variable(two, 1.0, "on_read", name="v")

    def step():
        return js.get_replica_context().merge_call(lambda s: v.assign(4.0))

    with pytest.raises(ValueError, match="Variable 'v' has a copy per replica and agg"):
        two.run(step)


def test_variables_in_loops_and_branches(strategy):
    v = variable(strategy, 0.0)
    o = variable(strategy, 0.0, "on_read", "sum")

    def step(x):
        steps = jax.lax.scan(lambda c, _: (c, v.assign_add(1.0)), 0, length=3)[1]
        jax.lax.fori_loop(0, 2, lambda i, _: o.assign_add(x), x)
        turns = jax.lax.while_loop(
            lambda c: c < 4, lambda c: v.assign_add(1.0) * 0 + c + 1, 0.0
        )
        jax.lax.cond(x > 0, lambda: o.assign_add(1.0), lambda: o.value())
        jax.lax.switch(1, [lambda: v.assign(0.0), lambda: v.assign_add(10.0)])
        return steps, turns

    steps, turns = strategy.run(step, (ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert steps.tolist() == [1, 2, 3] and turns == 4
    assert (v.value(), o.value()) == (17, sum(2 * i + (i > 0) for i in range(n)))


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


def test_remat_inside_steps(two):
    v = variable(two, 2.0)

    def step(x):
        return jax.grad(jax.checkpoint(lambda x: jnp.sin(v * x)))(x)

    out = two.run(step, (ids(two),))
    np.testing.assert_allclose(out.stacked, 2 * np.cos([0.0, 2.0]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["auto", "on_read"])
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


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_the_users_scan_around_run(two, wrap):
    v = variable(two, 0.0, "on_read", "sum")

    def step(x):
        return v.assign_add(x)

    def whole(x):
        return jax.lax.scan(lambda c, _: (c, two.run(step, (x,))), 0, length=3)[1]

    out = wrap(whole)(ids(two, 1.0))
    assert out.stacked.tolist() == [[1, 2], [2, 4], [3, 6]]
    assert v.value() == 9


def test_threads_may_use_one_variable(two):
    v = variable(two, 0.0, aggregation="sum")
    o = variable(two, 0.0, "on_read", "sum")
    failed = []

    @two.run
    def step(x):
        o.assign_add(x)
        return v.assign_add(x)

    def work():
        try:
            for _ in range(10):
                step(x)
                v.assign_add(1.0)
                o.value()  # noqa: B018
                repr(v)
        except BaseException as error:
            failed.append(error)

    x = ids(two)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # What a thread adds to v outside of `run` may be lost, steps are not.
    assert not failed and o.value() == 40 and 40 <= v.value() <= 80


def test_a_variable_of_another_strategy(two, four):
    v = variable(two, name="v")
    words = r"Variable 'v' belongs to MirroredStrategy\(2 .* in a step of Mirrored.*\(4"
    for use in (lambda: v.value(), lambda: v.assign(1.0), lambda: v + 1):
        with pytest.raises(js.ContextError, match=words):
            four.run(use)
    with pytest.raises(js.ContextError, match=words):
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


def test_a_step_that_uses_more_ordinary_variables_for_another_shape(two):
    v, w = js.Variable(1.0), js.Variable(2.0)

    def step(x):
        return (v.assign_add(1.0) if x.ndim else w.assign_add(1.0)) * x

    given = [1.0, jnp.ones(2), 1.0, jnp.ones(2)]
    out = [two.run(step, (x,)).tolist() for x in given]
    assert out == [3, [2, 2], 4, [3, 3]] and (v.value(), w.value()) == (3, 4)


def test_an_ordinary_on_read_variable_is_its_one_copy(two):
    v = js.Variable(1.0, synchronization="on_read")
    assert v.value() == 1 and v.assign_add(2.0) == 3
    assert two.run(lambda: v.assign_add(1.0)) == 4
    assert v.value() == 4 and copies(two, v) == [4]


@pytest.mark.parametrize("central", [False, True], ids=["ordinary", "central"])
def test_what_lives_elsewhere_is_not_part_of_a_traced_function(two, central):
    if central:
        two = js.experimental.CentralStorageStrategy(two.devices, "CPU:5")
        v = variable(two, 1.0, name="v")
    else:
        v = js.Variable(1.0, name="v")
    place = "cpu:5" if central else "cpu:0"
    assert two.run(lambda: v.assign_add(1.0)) == 2
    words = f"Variable 'v' lives on {place}, not on all replicas"
    with pytest.raises(js.PlacementError, match=words):
        jax.jit(lambda: two.run(lambda: v.assign_add(1.0)))()
    assert v.value() == 2


# What would make the copies of a mirrored variable drift apart.


def drifts(strategy, step, words, name="v"):
    pattern = rf"Variable '{name}' is mirrored, but `.*` assigns it a [\s\S]*{words}"
    with pytest.raises(ValueError, match=pattern):
        strategy.run(step, (ids(strategy),))


def test_a_branch_that_only_some_replicas_take(two):
    v = variable(two, name="v")

    def step(x):
        jax.lax.cond(x > 0, lambda: v.assign(1.0), lambda: v.value())

    drifts(two, step, r"varies since: .*cond\(x > 0.*\n.*from argument `x`, a PerRep")


def test_a_branch_that_only_some_replicas_take_may_read(two):
    v = variable(two, 3.0)

    def step(x):
        return jax.lax.cond(x > 0, lambda: v.value(), lambda: 2 * v.value())

    assert copies(two, two.run(step, (ids(two),))) == [6, 3]


def test_a_varying_value_that_a_reduced_one_overwrites_is_none(two):
    v = variable(two, name="v")

    @two.run
    def step(x):
        v.assign(x)
        v.assign(js.get_replica_context().all_reduce("sum", x))

    step(ids(two))
    assert copies(two, v) == [1, 1]
    drifts(
        two, lambda x: (v.assign(2.0), v.assign(x)), r"varies since: .*v\.assign\(x\)"
    )


def test_a_value_that_varies_since_an_on_read_variable(two):
    v, o = variable(two, name="v"), variable(two, 1.0, "on_read", name="o")
    words = r"v\.assign\(o\.value\(\)\).*\n.*from variable 'o', which has a copy per"
    drifts(two, lambda x: v.assign(o.value()), words)


def test_an_aggregated_assign_that_only_some_replicas_reach(two):
    v = variable(two, aggregation="mean")

    def step(x):
        jax.lax.cond(x > 0, lambda: v.assign(x), lambda: v.value())

    with pytest.raises(js.DivergentCollectiveError, match="`cond` whose predicate may"):
        two.run(step, (ids(two),))
    assert v.value() == 10


# Assigning.


@pytest.mark.parametrize("kind", ["auto", "on_read"])
@pytest.mark.parametrize("where", ["outside", "step"])
@pytest.mark.parametrize(
    "value, error, words",
    [(np.zeros(3), ValueError, r"'v' has shape \(2,\) and was given \(3,\)"),
     (1.0, ValueError, r"shape \(2,\) and was given \(\)\. Assign a value of its own"),
     (np.ones(2, np.complex64), TypeError, "holds float32 and was given complex64"),
     (1j, TypeError, r"was given complex64, .* Convert it: `value.astype\('float32"),
     ("text", TypeError, "text")],
    ids=["shape", "scalar", "complex", "python-complex", "text"],
)  # fmt: skip
def test_values_that_do_not_fit(two, kind, where, value, error, words):
    v = variable(two, np.zeros(2), kind, name="v", aggregation="mean")
    for op in ("assign", "assign_add", "assign_sub"):
        with pytest.raises(error, match=words):
            if where == "outside":
                getattr(v, op)(value)
            else:
                two.run(lambda op=op: getattr(v, op)(value))
    assert v.numpy().tolist() == [0, 0]


def test_a_per_replica_value_of_another_number_of_replicas(two, four):
    v = variable(two, 0.0, "on_read")
    with pytest.raises(ValueError, match=r"has shape \(2,\) and was given \(4,\)"):
        v.assign(ids(four))


def test_dtypes_that_would_lose_something():
    v = js.Variable(1)
    with pytest.raises(TypeError, match="holds int32 and was given float32"):
        v.assign(1.0)
    v = js.Variable(1.0, dtype="bfloat16")
    with pytest.raises(TypeError, match="holds bfloat16 and was given float32"):
        v.assign(np.float32(1.0))
    assert v.assign(1.5) == 1.5 and v.assign(2) == 2 and v.assign(True) == 1
    assert v.dtype == v.value().dtype == "bfloat16"


def test_numbers_and_lists_of_the_same_shape_are_converted():
    v = js.Variable([1.0, 2.0])
    assert v.assign(np.array([3, 4])).dtype == "float32"
    assert v.assign_add(np.array([True, False])).tolist() == [4, 4]


@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_values_from_other_devices(two, four, kind):
    v = variable(two, 1.0, kind, "sum")
    elsewhere = jax.device_put(2.0, jax.devices()[7])
    assert v.assign(four.mirror(4.0)) == 4 and v.assign_add(elsewhere) == 6
    w = js.Variable(1.0)
    assert w.assign_add(v.value()) == 7 and v.assign_sub(w) == -1
    if kind == "on_read":
        on_one = js.PerReplica(jax.device_put(np.ones(2, "f"), jax.devices()[6]))
        assert v.assign_add(on_one) == 1 and v.assign(on_one) == 2
    assert set(v.value().devices()) == set(two.devices)


@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_assigning_returns_the_new_value(strategy, kind):
    v = variable(strategy, 1.0, kind, "mean")
    for out, expected in (
        (v.assign(2.0), 2), (v.assign_add(3), 5), (v.assign_sub(1.0), 4)
    ):  # fmt: skip
        assert out == expected and not out.weak_type
    out = strategy.run(lambda: v.assign_add(1.0) * 2)
    assert strategy.reduce("mean", out) == 10


@pytest.mark.parametrize("kind", ["auto", "on_read", "ordinary"])
def test_arrays_given_and_read_before_stay_as_they_are(two, kind):
    given = two.mirror(jnp.arange(3.0))
    if kind == "ordinary":
        v = js.Variable(given)
    else:
        v = variable(two, given, kind, "mean")
    if kind == "auto":
        read = [v.value(), v.distributed()]
    else:
        read = [v.value()]
    if kind == "ordinary":
        given = jnp.arange(3.0)
    read += [v.assign(given), v.assign_add(jnp.zeros(3)), v.numpy()]

    def step():
        v.assign_add(jnp.ones(3))

    two.run(step)
    v.assign_add(jnp.ones(3))
    two.run(step)
    assert v.numpy().tolist() == [3, 4, 5]
    for array in (given, *read):
        assert np.asarray(array).tolist() == [0, 1, 2]


# It stands for its value.

BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.mod]
BINARY += [operator.floordiv, operator.pow, operator.lt, operator.le, operator.gt]
BINARY += [operator.ge, divmod]


@pytest.mark.parametrize("function", BINARY, ids=lambda f: f.__name__)
def test_arithmetic_is_that_of_the_value(two, function):
    a, b = np.float32([7, 5]), np.float32([2, 3])
    v, expected = variable(two, a), function(a, b)
    left, right = js.Variable(a), js.Variable(b)
    for out in (
        function(v, b),
        function(a, right),
        function(v, jnp.asarray(b)),
        function(left, right),
    ):
        np.testing.assert_allclose(out, expected)
        assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(out))
    np.testing.assert_allclose(function(2, v), function(2, a))
    np.testing.assert_allclose(function(v, 2), function(a, 2))


@pytest.mark.parametrize("name", ["and_", "or_", "xor", "lshift", "rshift"])
def test_arithmetic_of_bits(name):
    function = getattr(operator, name)
    v = js.Variable(6)
    assert function(v, 3) == function(6, 3) and function(3, v) == function(3, 6)


def test_unary_operators_and_conversions(two):
    v, n = variable(two, -2.25), variable(two, 3)
    assert (-v, +v, abs(v), ~n, round(v, 1)) == (
        2.25,
        -2.25,
        2.25,
        -4,
        np.float32(-2.2),
    )
    assert (float(v), int(v), complex(v), bool(v)) == (-2.25, -2, -2.25 + 0j, True)
    assert f"{v:.1f} {n:03d}" == "-2.2 003" and [5, 6, 7, 8][n] == 8
    m = variable(two, [[1.0, 2.0], [3.0, 4.0]])
    assert (m @ m).tolist() == (m @ np.eye(2) @ m).tolist() == [[7, 10], [15, 22]]
    assert (np.eye(2, dtype="f") @ m).tolist() == [[1, 2], [3, 4]]
    assert len(m) == 2 and [row.tolist() for row in m] == [[1, 2], [3, 4]]
    assert m[1].tolist() == [3, 4] and m[0, 1] == 2 and m[:, 0].tolist() == [1, 3]
    with pytest.raises(TypeError):
        len(v)


def test_numpy_and_jax_functions_take_it(two):
    v = variable(two, [1.0, 4.0])
    assert isinstance(v.numpy(), np.ndarray) and v.numpy().tolist() == [1, 4]
    assert np.asarray(v).tolist() == np.array(v, np.float64).tolist() == [1, 4]
    assert np.sqrt(v).tolist() == jnp.sqrt(v).tolist() == [1, 2]
    assert jnp.stack([v, v]).shape == (2, 2) and jnp.array([v, v]).shape == (2, 2)
    assert jnp.concatenate([v[None], v[None]]).shape == (2, 2)
    assert jnp.where(v > 2, v, 0.0).tolist() == [0, 4]
    assert jnp.dot(v, v) == 17 and jnp.sum(v) == 5 and jax.nn.relu(v).shape == (2,)
    assert jax.jit(lambda x: x + 1)(v).tolist() == [2, 5]
    assert jax.vmap(lambda x: 2 * x)(v).tolist() == [2, 8]
    assert jax.grad(lambda x: jnp.sum(x**2))(v).tolist() == [2, 8]


def test_functions_and_operators_inside_run(strategy):
    v = variable(strategy, [1.0, 4.0])

    def step(x):
        left = np.float32([1, 2]) * v + np.float32(2) * v
        return jnp.sum(jnp.sqrt(v)) + left[1] + v[0] * x + jnp.dot(v, v), v, {"v": v}

    out, mirrored, nested = strategy.run(step, (ids(strategy),))
    n = strategy.num_replicas_in_sync
    assert copies(strategy, out) == [3 + 16 + 17 + i for i in range(n)]
    assert mirrored is v and nested["v"] is v


def test_tree_functions_give_arrays(two):
    tree = {"v": variable(two, 2.0), "o": variable(two, 1.0, "on_read", "sum")}
    out = jax.tree.map(lambda x: x * 2, tree)
    assert out == {"v": 4, "o": 4} and isinstance(out["v"], jax.Array)
    assert jax.tree.leaves(tree) == [2, 2]
    # What has no one value is all of its copies.
    (only,) = jax.tree.map(lambda x: x + 1, [variable(two, 1.0, "on_read")])
    assert isinstance(only, js.PerReplica) and only.stacked.tolist() == [2, 2]


def test_two_variables_are_equal_if_they_are_the_same_one(two):
    v, w = variable(two, 1.0), variable(two, 1.0)
    assert (v == v) is True and (v != w) is True and (v == w) is False
    assert {v: "v", w: "w"}[v] == "v" and v in [w, v] and len({v, w, v}) == 2


# How it prints and copies.


def test_how_it_prints(two):
    v = variable(two, [1.5, 2.0], name="v")
    assert (
        repr(v)
        == str(v)
        == f"{v}"
        == ("Variable 'v' float32[2] mirrored, {\n  0: [1.5, 2. ],\n  1: [1.5, 2. ]\n}")
    )
    o = variable(two, 1, "on_read", name="o")
    o.assign(two.per_replica([3, 4]))
    assert repr(o) == "Variable 'o' int32[] on read, {\n  0: 3,\n  1: 4\n}"
    assert repr(js.Variable(True, name="w")) == "<Variable 'w' bool[] True>"
    big = repr(variable(two, np.zeros((100, 100))))
    assert "float32[100,100]" in big and "..., 0., 0., 0.]" in big and len(big) < 1000


def test_how_it_prints_while_it_is_traced(two):
    v, o = variable(two, 1.0, name="v"), variable(two, 1.0, "on_read", name="o")
    w = js.Variable(1.0, name="w")
    seen = []

    def look():
        seen.append((repr(v), repr(o), repr(w)))
        return v.value()

    expected = (
        "<Variable 'v' float32[] mirrored, being traced>",
        "<Variable 'o' float32[] on read, being traced>",
    )
    assert two.run(look) == jax.jit(look)() == 1
    assert {each[:2] for each in seen} == {expected}
    assert seen[0][2] == "<Variable 'w' float32[], being traced>"


@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_a_deep_copy_is_independent(two, kind):
    v = variable(two, 1.0, kind, name="v", trainable=False)
    if kind == "on_read":
        v.assign(ids(two))
    before = copies(two, v)
    twin = copy.deepcopy([v, v])
    assert twin[0] is twin[1] and twin[0] is not v and twin[0] != v
    twin = twin[0]
    assert (twin.name, twin.trainable, twin.strategy) == ("v", False, two)
    assert (twin.synchronization, twin.dtype) == (v.synchronization, v.dtype)
    two.run(lambda: twin.assign_add(1.0))
    assert copies(two, v) == before
    assert copies(two, twin) == [each + 1 for each in before]
    assert copy.copy(v) is v


def test_a_deep_copy_is_of_the_same_strategy_wherever_it_is_made(two, four):
    v, w = variable(two, 1.0), js.Variable(2.0)
    with four.scope():
        twin, other = copy.deepcopy(v), copy.deepcopy(w)
    assert twin.strategy is two and other.strategy is None and other.value() == 2
    with pytest.raises(js.ContextError, match="was deep-copied inside a step"):
        two.run(lambda: copy.deepcopy(v).value())


def test_pickling_is_refused():
    with pytest.raises(TypeError, match=r"'v' cannot be pickled.*variable\.numpy\(\)"):
        pickle.dumps(js.Variable(1.0, name="v"))


# Memory.

SHAPE = (100_000,)


def live():
    """The bytes of arrays of this shape."""
    gc.collect()
    shapes = (SHAPE, (2, *SHAPE))
    return sum(a.nbytes for a in jax.live_arrays() if a.shape in shapes)


@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_a_variable_that_is_dropped_frees_its_memory(two, kind):
    before = live()
    v = variable(two, np.ones(SHAPE), kind, "sum")

    def by_argument(v):
        v.assign_add(np.ones(SHAPE))

    def by_closure(v=v):
        v.assign_add(np.ones(SHAPE))

    two.run(by_argument, (v,))
    two.run(by_closure, ())
    assert live() > before and v.value()[0] > 2
    dropped = weakref.ref(v)
    del v, by_closure
    gc.collect()
    # The step that it was an argument of is still there.
    assert dropped() is None and live() == before
    with two.scope():
        w = js.Variable(np.ones(SHAPE))
    two.run(by_argument, (w,))
    assert w.value()[0] == 2


@pytest.mark.parametrize("kind", ["auto", "on_read"])
def test_steps_update_in_place(two, kind):
    v = variable(two, np.ones(SHAPE), kind, "mean")

    def step():
        v.assign_add(jnp.ones(SHAPE))

    two.run(step)
    memory = live()
    for _ in range(100):
        two.run(step)
    assert live() == memory and v.value()[0] == 102
    found = two.explain(step).memory
    one = 4 * SHAPE[0]
    assert found.arguments == one and found.donated == one and found.temporary < one
    assert v.value()[0] == 102


@pytest.mark.parametrize("ordinary", [False, True], ids=["mirrored", "ordinary"])
def test_a_variable_that_another_one_takes_the_place_of(two, ordinary):
    def new(value):
        value = np.full(SHAPE, value)
        return js.Variable(value) if ordinary else variable(two, value)

    model = {"v": new(1.0)}

    def step():
        return model["v"].assign_add(jnp.ones(SHAPE))[0]

    assert two.run(step) == 2
    before = live()
    model["v"] = new(5.0)
    assert live() == before
    assert two.run(step) == 6 and model["v"].value()[0] == 6
    assert two.run(step) == 7


def test_reading_costs_no_copy(two):
    v = variable(two, np.ones(SHAPE))
    found = two.explain(lambda: jnp.sum(v.value() * 2)).memory
    argument = two.explain(lambda x: jnp.sum(x * 2), (v.value(),)).memory
    assert found.arguments == argument.arguments == found.donated
    assert found.temporary <= argument.temporary
    before = live()
    two.run(lambda: jnp.sum(v.value() * 2))
    assert live() == before


def test_the_next_calls_compile_nothing(two, compilations):
    v = variable(two, 0.0, aggregation="sum")
    o = variable(two, 0.0, "on_read", "mean")
    w = js.Variable(0.0)

    @two.run
    def step(x):
        w.assign_add(1.0)
        return v.assign_add(x), o.assign(x)

    def several():
        with warnings.catch_warnings():
            warnings.simplefilter("error", js.RecompilationWarning)
            for _ in range(5):
                step(x)
                v.assign_add(1.0), o.assign(o + 1), w.value()

    x = ids(two)
    several()
    compilations()
    several()
    assert compilations() == 0


# With the rest of the library.


def test_reductions_of_variables(strategy):
    n = strategy.num_replicas_in_sync
    v, w = variable(strategy, [2.0]), js.Variable([3.0])
    o = variable(strategy, [0.0], "on_read")
    strategy.run(lambda x: o.assign(x[None]), (ids(strategy),))
    out = strategy.reduce("sum", {"v": v, "o": o, "w": w})
    assert out == {"v": 2 * n, "o": sum(range(n)), "w": 3 * n}
    assert strategy.reduce("mean", v, axis=0) == 2
    assert strategy.gather(o).tolist() == list(range(n))
    assert strategy.gather(v).tolist() == [2] * n


def test_local_results_of_variables(two):
    v, o = variable(two, 2.0), variable(two, 0.0, "on_read")
    o.assign(ids(two))
    both = two.experimental_local_results({"v": v, "o": o})
    assert both == ({"v": 2, "o": 0}, {"v": 2, "o": 1})
    local = two.experimental_local_results(v)
    assert sum(local) == 4


def test_a_variable_as_destination_is_not_changed(two):
    w = js.Variable(5.0)
    for v, where in ((variable(two), 2), (variable(two, 1.0, "on_read", "sum"), 2),
                     (w, 1)):  # fmt: skip
        before = v.numpy()
        out = two.extended.reduce_to("sum", ids(two, 1.0), v)
        assert out == 3 and len(out.devices()) == where and v.value() == before


def test_explaining_a_step_does_not_change_its_variables(two):
    v = variable(two, 1.0, name="v", aggregation="sum")
    o = variable(two, 1.0, "on_read", "sum", name="o")
    w = js.Variable(1.0)

    def step(x):
        o.assign_add(x)
        return v.assign_add(x), o.value(), w.assign_add(1.0)

    found = two.explain(step, (ids(two),))
    assert [c.operation for c in found.collectives] == ["psum"]
    assert [value.path for value in found.per_replica] == ["step(...)[1]"]
    assert (v.value(), o.value(), w.value()) == (1, 2, 1)
    assert two.run(step, (ids(two),))[0] == 2


def test_expecting_mirrored_results(two):
    v = variable(two, 1.0, aggregation="mean")
    o = variable(two, 1.0, "on_read", name="o")
    options = js.RunOptions(expect_mirrored=True)
    assert two.run(lambda x: v.assign(x), (ids(two),), options=options) == 0.5
    words = r"was expected to be mirrored[\s\S]*from variable 'o'"
    with pytest.raises(js.NotMirroredError, match=words):
        two.run(lambda: o.value(), options=options)


def test_donated_arguments_together_with_variables(two):
    v, w = variable(two, 1.0, aggregation="sum"), js.Variable(0.0)
    options = js.RunOptions(donate_argnums=1)

    @two.run(options=options)
    def step(x, state):
        w.assign_add(1.0)
        return state + v.assign_add(x)

    first = state = two.mirror(jnp.zeros(3))
    for _ in range(3):
        state = step(ids(two), state)
    assert state.tolist() == [2 + 3 + 4] * 3 and (v.value(), w.value()) == (4, 3)
    assert first.is_deleted()
    with pytest.raises(js.DonatedValueError):
        step(ids(two), first)
    assert v.value() == 4


def test_variables_under_the_default_strategy():
    v = js.Variable(1.0, aggregation="sum")
    default = js.get_strategy()
    assert default.run(lambda x: v.assign_add(x), (2.0,)) == v.value() == 3
    assert default.reduce("sum", v) == 3
    assert default.experimental_local_results(v) == (3,)


def test_run_inside_merge_call_is_given_the_variable_itself(two):
    with two.scope():
        v = js.Variable(1.0, aggregation="sum")

    def step(x):
        def merge(strategy, x):
            return strategy.run(lambda v, x: v.assign_add(x), (v, x))

        return js.get_replica_context().merge_call(merge, (x,))

    assert float(two.run(step, (two.per_replica([1.0, 2.0]),))) == 4.0
    assert v.numpy() == 4.0


# Rows.


def rows_of(i):
    """Rows (0, i) with values (i + 1) * [[1, 2], [3, 4]]."""
    values = (i + 1.0) * jnp.array([[1.0, 2.0], [3.0, 4.0]])
    return js.IndexedSlices(values, jnp.stack([0 * i, i]), (5, 2))


def numpys_rows(n):
    dense = np.zeros((5, 2), np.float32)
    for i in range(n):
        np.add.at(dense, [0, i], (i + 1.0) * np.array([[1.0, 2.0], [3.0, 4.0]]))
    return dense


@pytest.mark.parametrize("how, sign", [("assign_add", 1), ("assign_sub", -1)])
def test_rows_are_added_where_they_belong(four, how, sign):
    with four.scope():
        v = js.Variable(np.ones((5, 2), np.float32), aggregation="sum")
        mean = js.Variable(np.ones((5, 2), np.float32), aggregation="mean")
        first = js.Variable(
            np.ones((5, 2), np.float32), aggregation="only_first_replica"
        )
        own = js.Variable(
            np.ones((5, 2), np.float32), synchronization="on_read", aggregation="sum"
        )

    @four.run
    def step(i):
        for variable in (v, mean, first, own):
            getattr(variable, how)(rows_of(i))

    step(four.per_replica([0, 1, 2, 3]))
    np.testing.assert_allclose(v.numpy(), 1 + sign * numpys_rows(4))
    np.testing.assert_allclose(mean.numpy(), 1 + sign * numpys_rows(4) / 4)
    np.testing.assert_allclose(first.numpy(), 1 + sign * numpys_rows(1))
    np.testing.assert_allclose(own.numpy(), 4 + sign * numpys_rows(4))


def test_rows_may_be_assigned_and_added_outside_of_run(two):
    with two.scope():
        v = js.Variable(np.ones((5, 2), np.float32))
    v.assign(rows_of(jnp.int32(1)))
    v.assign_add(rows_of(jnp.int32(1)))
    expected = np.zeros((5, 2), np.float32)
    expected[[0, 1]] = 4 * np.array([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_allclose(v.numpy(), expected)


def test_rows_that_differ_are_refused_outside_of_run(two):
    with two.scope():
        v = js.Variable(np.ones((5, 2), np.float32))
    rows = two.run(rows_of, (two.per_replica([0, 1]),))
    with pytest.raises(ValueError, match="given rows that differ between replicas"):
        v.assign_add(rows)


def test_an_embedding_moves_only_the_rows_that_were_touched(four):
    with four.scope():
        table = js.Variable(np.zeros((10_000, 8), np.float32), aggregation="sum")

    def step(ids):
        table.assign_add(js.IndexedSlices(jnp.ones((16, 8)), ids))

    ids = four.per_replica(np.arange(64, dtype=np.int32).reshape(4, 16))
    found = four.explain(step, (ids,))
    assert found.communicated_bytes == 16 * 8 * 4 + 16 * 4
    four.run(step, (ids,))
    assert table.numpy().sum() == 64 * 8


def test_rows_of_an_array_of_another_shape_are_refused(two):
    with two.scope():
        v = js.Variable(np.ones((6, 2), np.float32), name="v")
    with pytest.raises(ValueError, match=r"'v' has shape \(6, 2\) and was given rows"):
        v.assign_add(rows_of(jnp.int32(1)))
