"""Variables of 2018: `update`, `update_non_slot`, `read_var`, tower-local ones."""

import threading

import jax
import jax.numpy as jnp
import pytest
from helpers.replicas import ids
from helpers.towers import STRATEGIES, in_default, mirrored, unwrapped

import jaxstrategy as js
from jaxstrategy.compat import contrib


@pytest.fixture
def d():
    return mirrored(2)


@pytest.fixture(params=STRATEGIES)
def any_strategy(request):
    return STRATEGIES[request.param]()


def test_update(any_strategy):
    d = any_strategy
    with d.scope():
        v = js.Variable(1.0)
        new = d.update(v, lambda v, a, b=0: v.assign_add(a + b), 2.0, b=3.0)
        assert float(new) == 6.0 and unwrapped(d, v) == [6.0] * d.num_towers
        assert d.update(v, lambda v: v) is v
        assert d.update(v, lambda v: 3, grouped=False) == (3,)


def test_arguments_that_differ_between_towers_are_refused(d):
    for method in ["update", "update_non_slot"]:
        with d.scope():
            v = js.Variable(1.0)
            where = v if method == "update" else d.non_slot_devices([v])
            for args, named in [((ids(d.core),), {}), ((), {"g": {"x": ids(d.core)}})]:
                with pytest.raises(TypeError, match=f"`{method}` was given a PerDevic"):
                    getattr(d, method)(where, lambda *_, **__: None, *args, **named)
            with pytest.raises(TypeError, match=f"`{method}` was given 3, which canno"):
                getattr(d, method)(where, 3)


def test_update_non_slot(any_strategy):
    d = any_strategy
    n = d.num_towers
    with d.scope():
        v, power = js.Variable(1.0), js.Variable(0.5)
        where = d.non_slot_devices([v])
        assert isinstance(where, list) and len(where) == n
        assert d.update_non_slot(where, lambda a: a + 1, 2.0) == 3.0
        new = d.update_non_slot(where, lambda by: power.assign_add(by), by=1.0)
        assert float(new) == 1.5 and unwrapped(d, power) == [1.5] * n
        copies = d.update_non_slot(where, lambda: power.assign(2.0), grouped=False)
        assert [float(copy) for copy in copies] == [2.0] * n


def test_non_slot_devices_of_the_default_strategy():
    a, b = js.Variable(1.0, name="a"), js.Variable(2.0, name="b")
    d = contrib.get_distribution_strategy()
    assert d.non_slot_devices([b, a]) is a
    with pytest.raises(ValueError, match="`non_slot_devices` was given no variables"):
        d.non_slot_devices([])
    with pytest.raises(TypeError, match="was given .3, 4.; a list of variables was"):
        d.non_slot_devices([3, 4])

    def merge_fn(d):
        where = d.non_slot_devices([b, a])
        return d.update_non_slot(where, lambda by: b.assign_add(by), 1.0)

    assert in_default(merge_fn) == 3.0 and b == 3.0 and a == 1.0


def test_update_contexts_are_nested_and_of_their_thread(d):
    found = []
    cpu = jax.devices()
    with contrib.UpdateContext("CPU:1") as outer:
        assert outer.devices == (cpu[1],)
        assert contrib.get_update_device() == (cpu[1],)
        with pytest.raises(KeyError), contrib.UpdateContext([cpu[2], "CPU:3"]):
            assert contrib.get_update_device() == (cpu[2], cpu[3])
            raise KeyError
        assert contrib.get_update_device() == (cpu[1],)
        thread = threading.Thread(
            target=lambda: found.append(contrib.get_update_device())
        )
        thread.start()
        thread.join()
        with d.scope():
            v = js.Variable(1.0)
            inner = d.update(v, lambda v: [contrib.get_update_device()])
            assert inner == [(cpu[0], cpu[1])]
            v.assign(2.0)  # of all copies, as elsewhere
            assert unwrapped(d, v) == [2.0, 2.0]
        with outer:
            assert contrib.get_update_device() == (cpu[1],)
    assert found == [None] and contrib.get_update_device() is None
    with pytest.raises(TypeError, match="device"):
        contrib.UpdateContext(3.5)


def test_read_var(any_strategy):
    d = any_strategy
    n = d.num_towers
    with d.scope():
        v = js.Variable(3.0)
        value = d.read_var(v)
        assert isinstance(value, jax.Array) and value == 3.0
        assert unwrapped(d, d.call_for_each_tower(lambda: d.read_var(v))) == [3.0] * n
    assert d.read_var(v) == 3.0
    assert d.read_var(js.Variable(4.0)) == 4.0
    with pytest.raises(TypeError, match="`read_var` was given 3; a jaxstrategy.Varia"):
        d.read_var(3)


def test_increment_var():
    n = 2
    d = mirrored(n)
    with d.scope():
        v = js.Variable(6)

        def fn():
            return contrib.increment_var(v)

        assert unwrapped(d, d.call_for_each_tower(fn)) == [7] * n
        assert unwrapped(d, v) == [7] * n
        with pytest.raises(RuntimeError, match="`increment_var` was called in cross-"):
            contrib.increment_var(v)
    w = js.Variable(1)
    assert contrib.increment_var(w, 3) == 4 and w == 4
    assert in_default(lambda d: d.call_for_each_tower(contrib.increment_var, w)) == 5


def test_tower_local_variables(d):
    with d.scope():
        with d.tower_local_var_scope("sum"):
            total = js.Variable(0.0)
            kept = js.Variable(0.0, synchronization="on_write")
            named = contrib.get_variable("named", [], initializer=jnp.zeros)
        with d.tower_local_var_scope(contrib.VariableAggregation.MEAN):
            mean = js.Variable(0.0)
        after = js.Variable(0.0)

        def fn():
            number = contrib.get_tower_context().tower_id
            total.assign(3.0 + number)
            mean.assign(6.0 * number)
            return total.value(), mean.value()

        own = d.call_for_each_tower(fn)
        assert [unwrapped(d, x) for x in own] == [[3.0, 4.0], [0.0, 6.0]]
        assert total == 7.0 and mean == 3.0
        assert d.read_var(total) == 7.0 and d.read_var(mean) == 3.0
        words = "`read_var` was given the tower-local variable"
        with pytest.raises(RuntimeError, match=words):
            d.call_for_each_tower(lambda: d.read_var(total))
        with pytest.raises(ValueError, match="scan"), d.tower_local_var_scope("scan"):
            pass
    on_read = js.VariableSynchronization.ON_READ
    assert total.synchronization is named.synchronization is on_read
    assert kept.synchronization is js.VariableSynchronization.ON_WRITE
    assert after.synchronization is js.VariableSynchronization.AUTO
    assert not total.trainable and after.trainable
    words = 'Need to be inside "with distribution_strategy.scope'
    with pytest.raises(RuntimeError, match=words), d.tower_local_var_scope("sum"):
        pass
