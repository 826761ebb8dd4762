"""`strategy.extended` and variables: `update`, colocation, where reductions go."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids
from helpers.variables import copies, variable

import jaxstrategy as js

KINDS = {
    "one": lambda: js.OneDeviceStrategy("CPU:1"),
    "mirrored-1": lambda: js.MirroredStrategy(["CPU:0"]),
    "mirrored-2": lambda: js.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored-8": lambda: js.MirroredStrategy(jax.devices()),
    "central": lambda: js.experimental.CentralStorageStrategy(["CPU:1", "CPU:2"]),
    "central-elsewhere": lambda: js.experimental.CentralStorageStrategy(
        ["CPU:2", "CPU:1"], "CPU:5"
    ),
}


# Variables on the replicas, and elsewhere.
QUICK = ("mirrored-2", "central-elsewhere")


@pytest.fixture(params=QUICK, scope="module")
def strategy(request):
    return KINDS[request.param]()


def made(strategy, start=1.0, **options):
    with strategy.scope():
        return js.Variable(start, **options)


def on_read(strategy, start=0.0, aggregation="sum"):
    return made(strategy, start, synchronization="on_read", aggregation=aggregation)


def in_merge_call(strategy, fn, *args):
    """What `fn(strategy, *args)` returns in `merge_call`, while a step is traced."""
    return strategy.run(lambda *a: js.get_replica_context().merge_call(fn, a), args)


@each_of("how", ["outside", "in scope", "in merge_call"])
def test_update_passes_arguments(strategy, how):
    v = made(strategy)

    def update(strategy):
        return strategy.extended.update(
            v, lambda v, a, b: v.assign_add(a + b), args=(2,), kwargs={"b": 3}
        )

    if how == "in merge_call":
        result = in_merge_call(strategy, update)
    elif how == "in scope":
        with strategy.scope():
            result = update(strategy)
    else:
        result = update(strategy)
    assert result == 6 and isinstance(result, js.Mirrored)
    assert copies(strategy, v) == [6.0] * len(v.devices)
    if how != "in merge_call":  # a step's results are on all replicas
        assert result.devices() == set(strategy.extended.parameter_devices)


def test_update_gives_one_result_for_each_copy_if_asked(strategy):
    v, o = made(strategy), on_read(strategy, 1.0)
    update = strategy.extended.update
    for var in (v, o):
        n = len(var.devices)
        results = update(var, lambda v: v.assign(v * 2), group=False)
        assert results == (2.0,) * n and type(results) is tuple
        where = [device for x in results for device in x.devices()]
        assert set(where) == set(var.devices)
        assert update(var, lambda v: None, group=False) == (None,)
        # One object for all copies, as where TensorFlow's calls all return that.
        assert update(var, lambda v: 3, group=False) == (3,)
        nested = update(var, lambda v: {"v": v, "n": (1, None)}, group=False)
        assert nested == {"v": (2.0,) * n, "n": ((1,), (None,))}


def test_update_in_a_step_gives_one_result_for_each_copy(strategy):
    v, n = made(strategy), len(strategy.extended.parameter_devices)

    def merge(strategy):
        results = strategy.extended.update(v, lambda v: v.assign(4.0), group=False)
        nothing = strategy.extended.update(v, lambda v: None, group=False)
        return len(results), nothing == (None,), results[-1]

    assert in_merge_call(strategy, merge) == (n, True, 4.0)


def test_on_read_copies_are_updated_one_by_one(strategy):
    o, n = on_read(strategy), strategy.num_replicas_in_sync
    strategy.run(lambda x: o.assign(x), (ids(strategy),))
    result = strategy.extended.update(o, lambda v: v.assign(v * 2 + 1))
    wanted = [2.0 * i + 1 for i in range(n)]
    assert copies(strategy, o) == wanted
    assert [float(x) for x in strategy.experimental_local_results(result)] == wanted
    assert o.value() == sum(wanted)
    strategy.extended.update(o, lambda v: v.assign(5.0))
    assert copies(strategy, o) == [5.0] * n and o.value() == 5.0 * n


def test_whatever_the_function_returns_comes_back(strategy):
    shared = object()
    for var in (made(strategy), on_read(strategy, 1.0)):
        update, var_copies = strategy.extended.update, len(var.devices)
        assert update(var, lambda v: None) is None
        assert update(var, lambda v: ("text", 3, True)) == ("text", 3, True)
        assert update(var, lambda v: v) is var
        assert update(var, lambda v: shared) is shared
        result = update(var, lambda v: {"new": v.assign_add(1.0), "old": (v, None)})
        versions = strategy.experimental_local_results(result["new"])
        assert [float(x) for x in versions] == [2.0] * var_copies
        assert result["old"][0] is var and result["old"][1] is None


def seen():
    return (
        js.in_cross_replica_context(),
        js.get_replica_context(),
        js.get_strategy(),
        js.has_strategy(),
    )


@each_of("make", [made, on_read])
def test_the_update_context_is_cross_replica(strategy, make):
    v, found = make(strategy), []

    def look(v):
        found.append(seen())

    strategy.extended.update(v, look)
    with strategy.scope():
        strategy.extended.update(v, lambda v: look(v))
    in_merge_call(strategy, lambda s: s.extended.update(v, look))
    assert found == [(True, None, strategy, True)] * 3


def test_an_error_in_the_function_leaves_the_contexts_as_they_were(strategy):
    def fail(v):
        v.assign(2.0)
        raise KeyError("mine")

    for v in (made(strategy), on_read(strategy)):
        with pytest.raises(KeyError, match="mine"):
            strategy.extended.update(v, fail)
        assert not js.in_cross_replica_context() and not js.has_strategy()
        # The next read is not one of a copy.
        v.assign(8.0)
        assert v.value() == 8.0


def test_update_inside_run_is_refused(strategy):
    v = made(strategy)
    with pytest.raises(js.errors.ContextError, match="`strategy.extended.update` was"):
        strategy.run(lambda: strategy.extended.update(v, lambda v: v.assign(2.0)))
    assert v.value() == 1.0


def test_per_replica_arguments_of_mirrored_variables_are_refused(strategy):
    x, v = ids(strategy), made(strategy)
    for arguments in ({"args": (x,)}, {"args": ([1, {"x": x}],)}):
        with pytest.raises(ValueError, match="was given a PerReplica.*reduce_to"):
            strategy.extended.update(v, lambda v, x: v.assign(2.0), **arguments)
    with pytest.raises(ValueError, match="was given a PerReplica"):
        strategy.extended.update(v, lambda v, x: None, kwargs={"x": x})


@each_of("args, kwargs, words", [
    (2.0, None, "`args` was a float; a tuple"),
    ((), [1], "`kwargs` was a list; a dict"),
])  # fmt: skip
def test_arguments_in_another_form_are_refused(two, args, kwargs, words):
    with pytest.raises(TypeError, match=words):
        two.extended.update(made(two), lambda v: None, args, kwargs)


@each_of("value", [3.0, "v", None, [1.0], np.ones(2)])
def test_what_is_no_variable_is_refused(strategy, value):
    with pytest.raises(TypeError, match="`extended.update` was given .* a jaxstrategy"):
        strategy.extended.update(value, lambda v: v)


def test_another_strategys_variable_is_refused(strategy, four):
    v = made(four, name="theirs")
    with pytest.raises(ValueError, match="variable 'theirs' of MirroredStrategy"):
        strategy.extended.update(v, lambda v: v.assign(2.0))
    assert v.value() == 1.0


def test_ordinary_variables_are_updated_by_every_strategy(strategy):
    v = js.Variable(1.0)
    result = strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,))
    assert (result, v.value()) == (3.0, 3.0)
    assert strategy.extended.update(v, lambda v: v.assign(1.0), group=False) == (1.0,)

    def merge(strategy):
        return strategy.extended.update(v, lambda v: v.assign_add(4.0))

    assert in_merge_call(strategy, merge) == 5.0
    assert v.value() == 5.0


def test_under_the_default_strategy_everything_goes_through_as_it_is():
    strategy, v, argument = js.get_strategy(), js.Variable(1.0), jnp.ones(3)
    given = []

    def fn(*args, **kwargs):
        given.extend([*args, *kwargs.values()])
        return v.assign(2.0)

    update = strategy.extended.update
    assert update(v, fn, args=(argument, None), kwargs={"k": "text"}) == 2.0
    assert given[0] is v and given[1] is argument and given[2:] == [None, "text"]
    assert update(v, fn, group=False) == (2.0,)
    merged = js.get_replica_context().merge_call(
        lambda s, x: s.extended.update(v, lambda v: v.assign_sub(x)), (1.0,)
    )
    assert (merged, v.value()) == (1.0, 1.0)


def test_several_updates_compile_once(strategy, compilations):
    v, o = made(strategy, np.ones(3)), on_read(strategy, np.ones(3))

    def change(v, x):
        return v.assign(2.0 * v - x)

    def both(x):
        strategy.extended.update(v, change, args=(x,))
        strategy.extended.update(o, change, args=(x,))

    for i in range(3):  # the second call has other layouts and numbers that are cached
        both(float(i))
    compilations()
    for i in range(3, 8):
        both(float(i))
    assert compilations() == 0
    expected = np.ones(3)
    for i in range(8):
        expected = 2.0 * expected - i
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)
    assert copies(strategy, o) == [expected.tolist()] * strategy.num_replicas_in_sync


@each_of("kind", ["one", "mirrored-2", "mirrored-8"])
def test_update_under_the_users_jit(kind):
    strategy = KINDS[kind]()
    v, o = made(strategy), on_read(strategy, 1.0)

    @jax.jit
    def several(x):
        strategy.extended.update(o, lambda o, x: o.assign_add(x), args=(x,))
        for _ in range(3):
            strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(x,))
        return v.value()

    assert (several(2.0), several(1.0)) == (7.0, 10.0)
    assert v.value() == 10.0
    assert copies(strategy, o) == [4.0] * strategy.num_replicas_in_sync


def test_colocated_variables_are_on_that_variables_devices(strategy):
    with strategy.scope():
        first = js.Variable(1.0, name="first")
        with strategy.extended.colocate_vars_with(first):
            second, third = js.Variable(jnp.ones(3)), js.Variable(0, name="third")
    assert second.devices == third.devices == first.devices
    assert first.devices == strategy.extended.parameter_devices
    assert strategy.extended.variable_created_in_scope(second)


def test_colocation_is_refused_outside_of_the_scope(strategy):
    first = made(strategy)
    words = "`extended.colocate_vars_with` was called outside of the scope"
    with pytest.raises(js.errors.ContextError, match=words):
        with strategy.extended.colocate_vars_with(first):
            pass


@each_of("given, wanted", [
    ("CPU:3", [3]),
    (["CPU:3", "CPU:2"], [3, 2]),
    (["CPU:0", "CPU:1"], [0, 1]),
])  # fmt: skip
def test_colocation_with_devices(two, given, wanted):
    with two.scope(), two.extended.colocate_vars_with(given):
        v = js.Variable(1.0, aggregation="sum")
        o = on_read(two)
    assert [device.id for device in v.devices] == wanted
    assert two.extended.variable_created_in_scope(v) and o.devices == two.devices
    two.run(lambda x: v.assign_add(x), (ids(two, 1.0),))
    assert v.value() == 4.0 and copies(two, v) == [4.0] * len(wanted)


def test_the_default_strategys_variables_beside_a_device():
    extended = js.get_strategy().extended
    with extended.colocate_vars_with("CPU:2"):
        v = js.Variable(1.0)
    assert v.devices == (jax.devices()[2],)
    with extended.colocate_vars_with(v):
        assert js.Variable(1.0).devices == v.devices
    words = r"the default strategy was given the devices cpu:0, cpu:1.*one copy"
    with pytest.raises(ValueError, match=words):
        extended.colocate_vars_with(["CPU:0", "CPU:1"])


def test_colocation_with_devices_is_refused_where_servers_have_variables():
    strategy = js.ParameterServerStrategy(workers=1, backend="threads")
    words = "was given cpu:0, but variables of this strategy are on parameter servers"
    with strategy.scope(), pytest.raises(ValueError, match=words):
        strategy.extended.colocate_vars_with("CPU:0")
    strategy.close()


@each_of("given, error, words", [
    ("CPU:99", ValueError, "Unknown device 'CPU:99'"),
    ("elsewhere", ValueError, "'elsewhere' is not the name of a device"),
    ([], ValueError, "The list of devices is empty"),
    ([3.0], TypeError, "A device was expected, got 3.0"),
])  # fmt: skip
def test_colocation_with_no_devices_is_refused(two, given, error, words):
    with two.scope(), pytest.raises(error, match=words):
        two.extended.colocate_vars_with(given)


def test_colocation_with_what_is_not_this_strategys(strategy, four):
    colocate = strategy.extended.colocate_vars_with
    with pytest.raises(ValueError, match="not one made in the scope of"):
        colocate(made(four))
    with pytest.raises(ValueError, match="of no strategy, not one made in the scope"):
        colocate(js.Variable(1.0))
    with pytest.raises(TypeError, match="`extended.colocate_vars_with` was given 3.0"):
        colocate(3.0)
    first = made(strategy)
    with four.scope(), pytest.raises(js.errors.ContextError, match="Mixing different"):
        with colocate(first):
            pass


def test_variable_created_in_scope(strategy, four):
    mine, ordinary, theirs = (
        made(strategy),
        js.Variable(1.0),
        made(four),
    )
    created = strategy.extended.variable_created_in_scope
    assert created(mine) and created(on_read(strategy))
    assert not created(ordinary) and not created(theirs)
    assert not created(made(copy.deepcopy(strategy)))
    default = js.get_strategy().extended.variable_created_in_scope
    assert default(ordinary) and not default(mine)
    copy_of_mine = strategy.experimental_local_results(mine)[-1]
    assert created(copy_of_mine) and not default(copy_of_mine)
    with pytest.raises(TypeError, match="`extended.variable_created_in_scope` was"):
        created(1.0)


@each_of("kind, workers, parameters", [
    ("one", [1], [1]),
    ("mirrored-1", [0], [0]),
    ("mirrored-2", [0, 1], [0, 1]),
    ("mirrored-8", [*range(8)], [*range(8)]),
    ("central", [1, 2], [1]),
    ("central-elsewhere", [2, 1], [5]),
])  # fmt: skip
def test_devices(kind, workers, parameters):
    strategy = KINDS[kind]()
    extended = strategy.extended
    assert [device.id for device in extended.worker_devices] == workers
    assert [device.id for device in extended.parameter_devices] == parameters
    assert made(strategy).devices == extended.parameter_devices
    assert on_read(strategy).devices == extended.worker_devices
    shards = made(strategy).distributed().addressable_shards
    assert [shard.device.id for shard in shards] == parameters


@each_of("op", ["sum", "mean", "min", "max"])
def test_a_value_reduced_to_a_variable_lies_on_its_devices(strategy, op):
    x = ids(strategy, 1.0)
    wanted = getattr(np, op)(np.asarray(x.stacked))
    for var in (
        made(strategy, 7.0),
        on_read(strategy, 7.0),
        js.Variable(7.0),
    ):
        out = strategy.extended.reduce_to(op, x, var)
        assert out == wanted and isinstance(out, js.Mirrored)
        assert out.devices() == set(var.devices)
        assert len(out.addressable_shards) == len(var.devices)
        ordinary = var.strategy is None
        assert ordinary or copies(strategy, var) == [7.0] * len(var.devices)
        assert not ordinary or var.value() == 7.0


# `extended.update` as optimizers use it: reduced gradients, copies of other variables.

OPTIMIZED = {
    "mirrored": lambda: js.MirroredStrategy(jax.devices()[:4]),
    "central": lambda: js.experimental.CentralStorageStrategy(
        ["CPU:2", "CPU:1"], "CPU:5"
    ),
}


@pytest.fixture(params=OPTIMIZED)
def optimized(request):
    return OPTIMIZED[request.param]()


def merged(fn, *args):
    return js.get_replica_context().merge_call(fn, args)


def test_a_gradient_that_was_not_reduced_is_refused_with_its_line(two):
    v = variable(two, 1.0, name="v")

    def apply(strategy, g):
        strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(g,))

    def step(x):
        g = js.grad(lambda: v * x, v)()
        merged(apply, g)

    words = r"'v' is mirrored, but `step` assigns it a value that may differ[\s\S]*"
    words += r"since: .*test_extended.py:\d+: .*\n *\(from argument `x`"
    with pytest.raises(js.errors.NotMirroredError, match=words) as raised:
        two.run(step, (ids(two),))
    assert raised.value.path == "v" and __file__ in raised.value.line
    with pytest.raises(ValueError, match=words):
        two.run(step, kwargs={"x": ids(two)})
    assert copies(two, v) == [1, 1]


def test_values_in_any_form_come_through_merge_calls(two):
    v, w = variable(two, jnp.zeros(3)), variable(two, 0.0)
    rows = js.IndexedSlices(jnp.ones(1), jnp.array([1]))

    def apply(strategy, tree, rows, total):
        update = strategy.extended.update
        update(v, lambda v, r: v.assign_add(r), args=(rows,))
        update(v, lambda v, tree: v.assign_add(tree["a"][0]), kwargs={"tree": tree})
        update(w, lambda w: w.assign(total))  # captured
        w.assign_add(total)  # a cross-replica assignment

    def step(x):
        total = js.get_replica_context().all_reduce("sum", x)
        merged(apply, {"a": [jnp.full(3, total)]}, rows, total)

    two.run(step, (ids(two, 1.0),))
    assert v.numpy().tolist() == [3, 4, 3] and w == 6.0


@pytest.mark.slow
def test_on_read_copies_take_each_replicas_version(optimized):
    o = variable(optimized, 1.0, "on_read", "none")
    n = optimized.num_replicas_in_sync
    result = optimized.extended.update(
        o, lambda o, x, by: o.assign_add(x[0] * by), args=([ids(optimized)],),
        kwargs={"by": 2.0},
    )  # fmt: skip
    wanted = [2.0 * i + 1 for i in range(n)]
    assert copies(optimized, o) == wanted == copies(optimized, result)

    def apply(strategy, x):
        strategy.extended.update(o, lambda o, x: o.assign(x), args=(x,))

    optimized.run(lambda x: merged(apply, x), (ids(optimized),))
    assert copies(optimized, o) == list(range(n))


def test_an_update_that_reads_an_on_read_variable_sees_the_component(optimized):
    v, o = (
        variable(optimized, 0.0),
        variable(optimized, 3.0, "on_read", "sum"),
    )
    calls = []

    def copy(v):
        v.assign_add(1.0)  # undone, where it starts again
        calls.append(1)
        return v.assign_add(o)

    # The copies are equal, but that cannot be known: what differs is known later.
    with pytest.raises(ValueError, match="is mirrored, but `copy` assigns it a"):
        optimized.extended.update(v, copy)
    assert v == 0.0
    assert 1 <= len(calls) <= 2
    seen = optimized.extended.update(v, lambda v: v + o, group=False)
    assert seen == (3.0,) * len(v.devices)
    one = js.OneDeviceStrategy("CPU:0")  # of one replica nothing differs
    w, o = variable(one, 1.0), variable(one, 3.0, "on_read", "sum")
    one.extended.update(w, lambda w: w.assign_add(o))
    assert w == 4.0


def test_an_error_after_a_component_was_read_is_the_functions(two):
    v, o = variable(two, 1.0), variable(two, 0.0, "on_read", "sum")

    def fail(v):
        v.assign(2.0)
        try:
            o.value()
        except Exception:
            raise AssertionError("no error of ours") from None
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        two.extended.update(v, fail)
    assert v == 1.0
