"""Contexts and calls of 2018: `call_for_each_tower`, `merge_call` and who asks.

The numbers are those of TensorFlow's tests of 2018.
"""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.towers import STRATEGIES, in_default, in_towers, mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib


@pytest.fixture(params=STRATEGIES)
def d(request):
    return STRATEGIES[request.param]()


def state():
    """The answers of all functions that say where code is."""
    tower, cross = contrib.get_tower_context(), contrib.get_cross_tower_context()
    assert (tower is None) != (cross is None)
    current = contrib.get_distribution_strategy()
    return tower, cross, current, contrib.has_distribution_strategy()


def assert_default():
    tower, cross, current, has = state()
    assert tower is contrib.get_tower_context()
    assert cross is None and not has
    assert current is tower.distribution_strategy
    assert current is contrib.get_distribution_strategy()
    assert current.num_towers == tower.num_towers == 1


# Contexts.


def test_outside_is_the_default_context():
    assert_default()
    context = contrib.get_tower_context()
    assert id(context) == id(contrib.get_tower_context())
    assert context.tower_id == 0 and context.is_single_tower
    assert context.device == js.get_replica_context().devices


def test_the_scope_is_cross_tower_context(d):
    with d.scope() as entered:
        assert entered is d
        assert state() == (None, d, d, True)
        with d.scope() as again:
            assert again is d
            assert state() == (None, d, d, True)
        assert state() == (None, d, d, True)
    assert_default()


def test_a_tower_knows_its_strategy(d):
    seen = []

    def fn():
        tower, cross, current, has = state()
        assert type(tower) is contrib.TowerContext and cross is None
        assert current is d and tower.distribution_strategy is d and has
        assert tower is contrib.get_tower_context()
        assert tower.num_towers == d.num_towers
        assert tower.is_single_tower == d.is_single_tower
        assert tower.device == tuple(d.worker_devices)
        assert contrib.require_tower_context(tower) is None
        with tower as same:
            assert same is contrib.get_tower_context()
        seen.append(tower)

    with d.scope():
        d.call_for_each_tower(fn)
    assert seen
    assert_default()


def test_the_default_context_merges_with_itself():
    default = contrib.get_distribution_strategy()

    def merge_fn(d, s):
        assert d is default
        assert state() == (None, default, default, False)
        return "foo_" + s

    assert in_default(merge_fn, "bar") == "foo_bar"
    assert_default()


def test_a_merge_function_is_in_cross_tower_context(d):
    def merge_fn(given, word, *, name):
        assert given is d and (word, name) == ("a", "b")
        assert state() == (None, d, d, True)
        return word + name

    def fn():
        return contrib.get_tower_context().merge_call(merge_fn, "a", name="b")

    with d.scope():
        assert d.call_for_each_tower(fn) == "ab"


NEED_A_SCOPE = {
    "call_for_each_tower": lambda d, v: d.call_for_each_tower(lambda: 1),
    "broadcast": lambda d, v: d.broadcast(1.0),
    "reduce": lambda d, v: d.reduce("sum", 1.0),
    "batch_reduce": lambda d, v: d.batch_reduce("sum", [(1.0, v)]),
    "update": lambda d, v: d.update(v, lambda v: v.assign(2.0)),
    "update_non_slot": lambda d, v: d.update_non_slot(["CPU:0"], lambda: None),
    "unwrap": lambda d, v: d.unwrap(1.0),
    "group": lambda d, v: d.group(1.0),
    "worker_device_index": lambda d, v: d.worker_device_index,
    "map": lambda d, v: d.map([1], lambda x: x),
    "fetch": lambda d, v: d.fetch(1.0),
    "colocate_vars_with": lambda d, v: d.colocate_vars_with(v),
}


@pytest.mark.parametrize("method", NEED_A_SCOPE)
def test_methods_want_to_be_inside_the_scope(method):
    d, other, call = mirrored(2), mirrored(4), NEED_A_SCOPE[method]
    with d.scope():
        v = js.Variable(1.0)
    needs = (
        rf'Need to be inside "with distribution_strategy.scope\(\)" for .*`{method}`'
    )
    with pytest.raises(RuntimeError, match=needs):
        call(d, v)
    with pytest.raises(RuntimeError, match=needs):
        in_default(lambda _: call(d, v))
    mixed = f"Mixing different DistributionStrategy objects: .*`{method}`"
    with other.scope(), pytest.raises(RuntimeError, match=mixed):
        call(d, v)
    assert v == 1.0


@pytest.mark.parametrize("method", sorted({*NEED_A_SCOPE} - {"colocate_vars_with"}))
def test_methods_are_not_for_towers(method):
    d = mirrored(2)
    with d.scope():
        v = js.Variable(1.0)

    words = "Method requires being in cross-tower context, use get_tower_context"

    def fn():
        with pytest.raises(RuntimeError, match=rf"{words}.*`{method}`"):
            NEED_A_SCOPE[method](d, v)

    with d.scope():
        d.call_for_each_tower(fn)
    default = contrib.get_distribution_strategy()
    if method != "worker_device_index":
        with pytest.raises(RuntimeError, match=words):
            NEED_A_SCOPE[method](default, v)


def test_the_default_strategy_merges():
    w = js.Variable(1.0, name="w")

    def merge_fn(d):
        assert d.num_towers == 1 and d.is_single_tower
        assert d.call_for_each_tower(lambda x, y: x + y, 2, y=3) == 5
        value = object()
        assert d.reduce("sum", value, "CPU:3") is value
        assert d.reduce(contrib.VariableAggregation.MEAN, value) is value
        assert d.batch_reduce("mean", [(value, w)]) == [value]
        assert d.broadcast(value) is value and d.broadcast(value, "CPU:1") is value
        assert d.unwrap(value) == [value] and d.group(value) is value
        assert d.update(w, lambda v, a: v.assign_add(a), 4.0) == 5.0
        assert d.value_container(w) is w and d.read_var(w) == 5.0
        with pytest.raises(ValueError, match="should be a tuple"):
            d.batch_reduce("mean", [value])
        with pytest.raises(ValueError, match="`aggregation` was 'none'"):
            d.batch_reduce("none", [])

    in_default(merge_fn)
    assert w == 5.0


@pytest.mark.parametrize(
    "name", ["worker_devices", "parameter_devices", "worker_device_index"]
)
def test_the_default_strategy_has_no_devices(name):
    with pytest.raises(RuntimeError, match=f"`{name}` is not supported by the default"):
        getattr(contrib.get_distribution_strategy(), name)


def test_scopes_are_not_nested():
    d, other = mirrored(2), mirrored(4)
    default = contrib.get_distribution_strategy()
    with default.scope() as entered:
        assert entered is default and not contrib.has_distribution_strategy()
    with d.scope():
        with pytest.raises(
            RuntimeError, match="Must not nest DistributionStrategy scopes"
        ):
            default.scope()
        with pytest.raises(RuntimeError, match="Mixing different DistributionStrategy"):
            other.scope()

        def fn():
            with pytest.raises(RuntimeError, match="requires being in cross-tower"):
                d.scope()

        d.call_for_each_tower(fn)


def test_a_tower_context_is_required():
    d, kept = mirrored(2), []
    default = contrib.get_tower_context()

    def fn():
        kept.append(contrib.get_tower_context())
        with pytest.raises(RuntimeError, match="Mismatching DistributionStrategy obj"):
            contrib.require_tower_context(default)
        with pytest.raises(RuntimeError, match="Mismatching DistributionStrategy obj"):
            default.merge_call(lambda d: None)

    def later():
        for use in (contrib.require_tower_context, lambda c: c.tower_id):
            with pytest.raises(RuntimeError, match=r"Mismatching tower context\."):
                use(kept[0])

    with d.scope():
        d.call_for_each_tower(fn)
        d.call_for_each_tower(later)
        with pytest.raises(RuntimeError, match=r"inside `call_for_each_tower\(\)`"):
            contrib.require_tower_context(kept[0])
        with pytest.raises(RuntimeError, match=r"inside `call_for_each_tower\(\)`"):
            with default:
                pass
    assert contrib.require_tower_context(default) is None
    uses = [
        contrib.require_tower_context,
        lambda c: c.merge_call(lambda d: None),
        lambda c: c.device,
        lambda c: c.__enter__(),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="Mismatching DistributionStrategy obj"):
            use(kept[0])
    with pytest.raises(TypeError, match=r"`require_tower_context` was given 3"):
        contrib.require_tower_context(3)
    with pytest.raises(TypeError, match=r"A `TowerContext` was made of"):
        contrib.TowerContext(d)


def test_the_default_context_is_entered_from_its_merge_call():
    default = contrib.get_tower_context()

    def merge_fn(d):
        with default as entered:
            assert entered is default
            assert_default()
        assert contrib.get_cross_tower_context() is d

    default.merge_call(merge_fn)
    assert_default()


def test_contexts_belong_to_their_thread():
    found = []
    with mirrored(2).scope():
        thread = threading.Thread(target=lambda: found.append(state()))
        thread.start()
        thread.join()
    _, cross, _, has = found[0]
    assert cross is None and not has


def test_the_default_strategy_places_variables_beside_others_without_a_scope():
    d = contrib.get_distribution_strategy()
    with d.colocate_vars_with(js.Variable(1.0)):
        assert js.Variable(2.0).strategy is None


# Calls.


def merged_sum(three):
    context = contrib.get_tower_context()
    v = three + context.tower_id
    s = context.merge_call(lambda d, v: sum(d.unwrap(v)), v)
    return s + v


def test_the_documents_example():
    assert in_towers(mirrored(2), merged_sum, 3) == [10, 11]
    assert in_towers(mirrored(4), merged_sum, 3) == [21, 22, 23, 24]
    assert in_towers(contrib.OneDeviceStrategy("CPU:1"), merged_sum, 3) == [6]
    assert in_default(lambda d: d.unwrap(d.call_for_each_tower(merged_sum, 3))) == [6]
    assert merged_sum(3) == 6


def test_arguments_follow_the_function():
    def fn(x, y=0):
        return x + contrib.get_tower_context().tower_id + y

    d = mirrored(2)
    assert in_towers(d, fn, 3, y=10) == [13, 14]
    assert in_towers(d, fn, 3, run_concurrently=False) == [3, 4]
    with d.scope(), pytest.raises(TypeError, match="`call_for_each_tower` was given 3"):
        d.call_for_each_tower(3)


def test_merge_calls_pass_arguments_on():
    d = mirrored(2)

    def merge_fn(given, a, k, array):
        assert given is d and (a, k) == (3, "b")
        assert isinstance(array, contrib.PerDevice)
        return array, given.reduce("sum", array)

    def fn():
        context = contrib.get_tower_context()
        x = jnp.float32(context.tower_id) + 1
        own, total = context.merge_call(merge_fn, 3, k="b", array=x)
        return own * 10 + total

    assert in_towers(d, fn) == [13, 23]
    with d.scope(), pytest.raises(TypeError, match="`merge_call` was given 'x'"):
        d.call_for_each_tower(lambda: contrib.get_tower_context().merge_call("x"))


def test_the_number_of_a_tower_as_an_argument(d):
    n = d.num_towers
    with d.scope():
        index = d.worker_device_index
        assert unwrapped(d, d.call_for_each_tower(lambda i: i, index)) == [*range(n)]
        if n == 1:
            assert index == 0 and type(index) is int


def test_the_numbers_of_towers(d):
    def fn():
        context = contrib.get_tower_context()
        return context.tower_id

    assert in_towers(d, fn) == [*range(d.num_towers)]


def test_the_numbers_of_towers_in_a_merge_function():
    d = mirrored(2)

    def merge_fn(d):
        return d.call_for_each_tower(lambda i: i * 10, d.worker_device_index)

    def fn():
        return contrib.get_tower_context().merge_call(merge_fn)

    assert in_towers(d, fn) == [0, 10]


class Mine(Exception):
    """An error of the user's."""


def raised(*_):
    raise Mine


def in_merge_call(merge_fn):
    return lambda: contrib.get_tower_context().merge_call(merge_fn)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "fn",
    [
        raised,
        in_merge_call(raised),
        in_merge_call(lambda d: d.call_for_each_tower(raised)),
        in_merge_call(lambda d: d.call_for_each_tower(in_merge_call(raised))),
    ],
    ids=["tower", "merge", "tower-in-merge", "merge-in-tower-in-merge"],
)
def test_errors_come_out_as_they_are(n, fn):
    d = mirrored(n)
    with d.scope(), pytest.raises(Mine):
        d.call_for_each_tower(fn)
    assert_default()
    with pytest.raises(Mine):
        fn()
    assert_default()


def test_towers_in_a_merge_function():
    def merge_fn(d, x):
        return d.call_for_each_tower(lambda x: 2 * x, x)

    def fn():
        context = contrib.get_tower_context()
        return context.merge_call(merge_fn, context.tower_id + 1)

    assert in_towers(mirrored(2), fn) == [2, 4]


def test_towers_take_the_same_path():
    def merge_on_the_first():
        context = contrib.get_tower_context()
        if context.tower_id == 0:
            context.merge_call(lambda d: None)

    with mirrored(2).scope(), pytest.raises(js.TracedValueError, match="context.tower"):
        contrib.get_distribution_strategy().call_for_each_tower(merge_on_the_first)


def test_variables_that_are_made_anew_in_each_call_are_refused():
    d = mirrored(2)
    with (
        d.scope(),
        pytest.raises(ValueError, match=r"`compat\.v1\.get_variable\(name, "),
    ):
        d.call_for_each_tower(lambda: js.Variable(1.0, name="foo"))


def test_a_step_is_compiled_once(compilations):
    d = mirrored(2)
    with d.scope():
        x = d.worker_device_index
        jax.block_until_ready(d.call_for_each_tower(merged_sum, x))
        compilations()
        for _ in range(3):
            jax.block_until_ready(d.call_for_each_tower(merged_sum, x))
        assert compilations() == 0


# The object.


def test_copies_of_a_strategy():
    d = contrib.MirroredStrategy(["CPU:2", "CPU:1"], prefetch_on_device=False)
    made = copy.deepcopy(d)
    assert type(made) is contrib.MirroredStrategy and made is not d
    assert made.core is not d.core and made.worker_devices == d.worker_devices
    assert made.prefetch_on_device is False
    with pytest.raises(RuntimeError, match="deep-copied"):
        copy.copy(d)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(d)
    default = contrib.get_distribution_strategy()
    assert copy.deepcopy(default) is default


def test_a_strategy_is_made_of_one_of_today():
    core = js.MirroredStrategy(["CPU:0", "CPU:1"], replicas_per_device=2)
    d = contrib.DistributionStrategy.over(core)
    assert type(d) is contrib.MirroredStrategy and d.num_towers == 4
    assert contrib.DistributionStrategy.over(core) is d
    assert contrib.DistributionStrategy.over(d) is d
    assert repr(d).startswith("compat.contrib.MirroredStrategy(4 replicas, 2 on each")
    with pytest.raises(TypeError, match="`core` was 'x'; a strategy"):
        contrib.DistributionStrategy.over("x")
    with pytest.raises(TypeError, match=r"`DistributionStrategy.over\(strategy\)`"):
        contrib.DistributionStrategy(core)


class Own(js.Strategy):
    """A strategy of the user's."""


def test_strategies_that_2018_had_not_have_its_methods():
    core = Own(jax.devices()[:2])
    d = contrib.DistributionStrategy.over(core)
    assert repr(d) == f"compat.contrib.DistributionStrategy.over({core!r})"
    assert in_towers(d, merged_sum, 3) == [10, 11]


def test_what_is_younger_is_said():
    d = mirrored(2)
    with pytest.raises(AttributeError, match=r"'gather', which is younger: `strategy"):
        d.gather(1.0)
    with pytest.raises(AttributeError, match=r"no attribute 'towers'\.$"):
        d.towers()


def test_what_was_done_around_sessions_does_nothing():
    d = mirrored(2)
    for _ in range(2):
        assert d.finalize() == [] and d.initialize() == []
    assert d.configure(session_config=object()) is None
    with pytest.raises(ValueError, match="`configure` was given a cluster"):
        d.configure(None, {"worker": ["a:1"]}, "worker", 0)


def test_numbers_of_towers_and_devices(d):
    n = d.num_towers
    assert d.is_single_tower == (n == 1)
    for _ in range(2):
        for devices in (d.worker_devices, d.parameter_devices, d.non_slot_devices([])):
            assert isinstance(devices, list) and len(devices) == n
            devices.clear()


def test_python_names_the_method_of_the_users_strategy():
    d = mirrored(2)
    with pytest.raises(TypeError, match=r"MirroredStrategy\.reduce\(\) missing"):
        d.reduce()


def test_numpy_is_taken(d):
    with d.scope():
        assert unwrapped(d, np.float32(3.0)) == [3.0]


# Towers that run eagerly.


@pytest.mark.parametrize(("n", "expected"), [(2, [10, 11]), (4, [21, 22, 23, 24])])
def test_towers_that_run_eagerly_merge(n, expected):
    d, made = mirrored(n), []

    def fn(three):
        context = contrib.get_tower_context()
        assert context is contrib.get_tower_context()
        assert context.distribution_strategy is d
        made.append(contrib.get_variable("steps", initializer=6))
        contrib.increment_var(made[-1])
        return merged_sum(three)

    with js.eager_replicas():
        assert in_towers(d, fn, 3) == expected
    assert len(made) == n and len({id(v) for v in made}) == 1
    assert made[0] == 7


def test_towers_that_run_eagerly_decide_by_their_number():
    def fn():
        return "first" if contrib.get_tower_context().tower_id == 0 else "other"

    seen = []
    with js.eager_replicas(), mirrored(2).scope():
        d = contrib.get_distribution_strategy()
        d.call_for_each_tower(lambda: seen.append(fn()))
    assert sorted(seen) == ["first", "other"]
