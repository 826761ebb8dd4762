"""`Variable`: how one is made, how steps come by it, and the rest of the library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
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


def in_scan(get, x):
    jax.lax.scan(lambda c, _: (c, get().assign_add(x)), 0, length=2)
    return get().assign_add(0.0)


def in_merge(get, x):
    def merge(strategy, x):
        return get().assign_add(2 * strategy.reduce("max", x)), get()

    return js.get_replica_context().merge_call(merge, (x,))[0]


@pytest.mark.slow
@each_of("inside", [in_scan, in_merge])
def test_a_variable_made_deep_inside_a_step(two, inside):
    made = Once()

    def step(x):
        return inside(made.get, js.get_replica_context().all_reduce("max", x))

    for expected in (7, 9):
        assert two.run(step, (ids(two),)) == made.v.value() == expected


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


@pytest.mark.slow
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


def test_expecting_mirrored_results(two):
    v = variable(two, 1.0, aggregation="mean")
    o = variable(two, 1.0, "on_read", name="o")
    options = js.RunOptions(expect_mirrored=True)
    assert two.run(lambda x: v.assign(x), (ids(two),), options=options) == 0.5
    words = r"was expected to be mirrored[\s\S]*from variable 'o'"
    with pytest.raises(js.errors.NotMirroredError, match=words):
        two.run(lambda: o.value(), options=options)


def test_variables_under_the_default_strategy():
    v = js.Variable(1.0, aggregation="sum")
    default = js.get_strategy()
    assert default.run(lambda x: v.assign_add(x), (2.0,)) == v.value() == 3
    assert default.reduce("sum", v) == 3
    assert default.experimental_local_results(v) == (3,)
