"""Contexts and calls of 2018: `call_for_each_tower`, `merge_call` and who asks."""

import pytest
from helpers.towers import STRATEGIES, in_default, mirrored

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


def test_methods_want_to_be_inside_the_scope():
    d, other = mirrored(2), mirrored(4)
    with d.scope():
        v = js.Variable(1.0)
    for method, call in NEED_A_SCOPE.items():
        needs = (
            r'Need to be inside "with distribution_strategy.scope\(\)" for '
            rf".*`{method}`"
        )
        with pytest.raises(RuntimeError, match=needs):
            call(d, v)
        with pytest.raises(RuntimeError, match=needs):
            in_default(lambda _, call=call: call(d, v))
        mixed = f"Mixing different DistributionStrategy objects: .*`{method}`"
        with other.scope(), pytest.raises(RuntimeError, match=mixed):
            call(d, v)
    assert v == 1.0


def test_methods_are_not_for_towers():
    d, default = mirrored(2), contrib.get_distribution_strategy()
    with d.scope():
        v = js.Variable(1.0)
    words = "Method requires being in cross-tower context, use get_tower_context"
    methods = {k: call for k, call in NEED_A_SCOPE.items() if k != "colocate_vars_with"}

    def fn():
        for method, call in methods.items():
            with pytest.raises(RuntimeError, match=rf"{words}.*`{method}`"):
                call(d, v)

    with d.scope():
        d.call_for_each_tower(fn)
    del methods["worker_device_index"]
    for call in methods.values():
        with pytest.raises(RuntimeError, match=words):
            call(default, v)


def test_the_default_strategy_merges_and_has_no_devices():
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
    for name in ["worker_devices", "parameter_devices", "worker_device_index"]:
        with pytest.raises(RuntimeError, match=f"`{name}` is not supported by the def"):
            getattr(contrib.get_distribution_strategy(), name)


def test_scopes_are_not_nested():
    d, other = mirrored(2), mirrored(4)
    default = contrib.get_distribution_strategy()
    with default.scope() as entered:
        assert entered is default and not contrib.has_distribution_strategy()
    with d.scope():
        with pytest.raises(RuntimeError, match="Must not nest DistributionStrategy sc"):
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


def test_what_was_done_around_sessions_does_nothing():
    d = mirrored(2)
    for _ in range(2):
        assert d.finalize() == [] and d.initialize() == []
    assert d.configure(session_config=object()) is None
    with pytest.raises(ValueError, match="`configure` was given a cluster"):
        d.configure(None, {"worker": ["a:1"]}, "worker", 0)
