"""Updates of `compat.v1`: numbers of TensorFlow 2.21."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.first_generation import (
    central,
    each,
    mirrored,
    of_each_kind,
    one,
    replica_id,
    sharded,
    shared,
    tpu,
)

import jaxstrategy as js
from jaxstrategy.compat import v1


def variable(s, value, **options):
    with s.scope():
        return js.Variable(value, **options)


def copies(v):
    return [float(x) for x in v.strategy.experimental_local_results(v)]


def numbers(tree):
    return jax.tree.map(float, tree)


# update.


@of_each_kind
def test_arguments_of_update(make):
    s = make()
    v = variable(s, 1.0)
    result = s.extended.update(
        v, lambda v, a, b=0: v.assign_add(a + b), args=(2.0,), kwargs={"b": 3.0}
    )
    assert float(result) == float(v) == 6


@of_each_kind
def test_the_documented_update(make):
    s = make()
    v = variable(s, 5.0, aggregation="sum")
    s.extended.update(v, lambda v: v.assign(1.0))
    assert set(copies(v)) == {1.0}


@pytest.mark.parametrize(("make", "n"), [(mirrored, 2), (central, 1), (one, 1)])
def test_results_of_each_copy(make, n):
    s = make()
    v, update = variable(s, 5.0), s.extended.update
    result = update(v, lambda v: v.assign(1.0), group=False)
    assert type(result) is tuple and numbers(result) == (1.0,) * n

    def fn(v):
        return {"a": v.assign_add(1.0), "b": 3, "c": "x"}

    result = update(v, fn, group=False)
    assert numbers(result["a"]) == (2.0,) * n
    assert result["b"] == (3,) and result["c"] == ("x",)
    assert update(v, lambda v: None, group=False) == (None,)


@of_each_kind
def test_the_context_of_update(make):
    s = make()
    v = variable(s, 1.0)

    def fn(*_):
        assert v1.get_replica_context() is None and v1.in_cross_replica_context()
        assert v1.get_strategy() is s and js.get_strategy() is s.core
        return "seen"

    assert s.extended.update(v, fn) == "seen"
    assert s.extended.update_non_slot(None, fn) == "seen"
    assert not v1.has_strategy()


# update_non_slot.


@of_each_kind
def test_results_of_update_non_slot(make):
    s = make()
    v = variable(s, 1.0)
    place = s.extended.non_slot_devices([v])
    update = s.extended.update_non_slot
    assert update(place, lambda a: a + 1, args=(2,)) == 3
    result = update(place, lambda a, b: a + b, (jnp.float32(1),), {"b": 2})
    assert isinstance(result, jax.Array) and float(result) == 3
    assert result.devices() == ({v.device} if place is v else set(place))


@pytest.mark.parametrize(
    ("make", "n"), [(mirrored, 2), (lambda: mirrored(4), 4), (one, 1)]
)
def test_results_of_each_device(make, n):
    s = make()
    update = s.extended.update_non_slot
    place = s.extended.non_slot_devices([])
    result = update(place, lambda a: a + 1, args=(jnp.float32(2),), group=False)
    assert type(result) is tuple and numbers(result) == (3.0,) * n
    assert update(place, lambda a: a + 1, args=(2,), group=False) == (3,)
    assert update(None, lambda a: a + 1, args=(2,)) == 3
    assert update(None, lambda a: a + 1, args=(2,), group=False) == (3,)


def test_update_non_slot_of_the_default_strategy():
    s = v1.get_strategy()
    v = js.Variable(1.0, name="v")
    place = s.extended.non_slot_devices([v])
    assert place is v
    assert s.extended.update_non_slot(place, lambda a: a, args=(5,), group=False) == (
        5,
    )
    s.extended.update_non_slot(v, lambda: v.assign_add(1.0))
    assert float(v) == 2


@pytest.mark.parametrize(
    "make", [mirrored, lambda: mirrored(4), one, central, shared, sharded, tpu]
)
def test_variables_are_changed_once_on_each_copy(make):
    s = make()
    captured, given = variable(s, 0.5), variable(s, 5.0)

    def fn(given):
        captured.assign_add(1.0)
        given.assign_add(1.0)

    place = s.extended.non_slot_devices([captured, given])
    s.extended.update_non_slot(place, fn, args=(given,))
    assert set(copies(captured)) == {1.5} and set(copies(given)) == {6.0}
    s.extended.update_non_slot(None, fn, args=(given,))
    assert set(copies(captured)) == {2.5} and set(copies(given)) == {7.0}


@pytest.mark.parametrize("make", [mirrored, one, central, shared])
def test_update_non_slot_in_a_merge_function(make):
    s = make()
    beta = variable(s, 0.5)

    def merge_fn(strategy, x):
        total = strategy.reduce("sum", x)
        place = strategy.extended.non_slot_devices([beta])
        strategy.extended.update_non_slot(
            place, lambda x: beta.assign(beta * x), args=(total,)
        )

    def step():
        x = replica_id() + 1.0
        v1.get_replica_context().merge_call(merge_fn, args=(x,))

    n = s.num_replicas_in_sync
    for _ in range(2):
        s.run(step)
    assert set(copies(beta)) == {0.5 * (n * (n + 1) / 2) ** 2}


def test_updates_that_are_refused():
    s = mirrored()
    v, x = variable(s, 1.0), s.run(lambda: replica_id() + 1.0)
    place = s.extended.non_slot_devices([v])
    update = s.extended.update_non_slot
    with pytest.raises(
        ValueError, match="`extended.update_non_slot` was given a PerRe"
    ):
        update(place, lambda x: 10 * x, args=(x,))
    with pytest.raises(ValueError, match="`extended.update` was given a PerReplica"):
        s.extended.update(v, lambda v, x: v.assign(x), args=(x,))
    with pytest.raises(
        RuntimeError, match="`strategy.extended.update_non_slot` was called inside"
    ):
        s.run(lambda: update(place, lambda: 0))
    with pytest.raises(
        RuntimeError, match="`strategy.extended.update` was called insi"
    ):
        s.run(lambda: s.extended.update(v, lambda v: 0))
    with pytest.raises(
        TypeError, match="`extended.update_non_slot` was given 3, which"
    ):
        update(place, 3)
    with pytest.raises(TypeError, match="`args` was a float; a tuple"):
        update(place, lambda x: x, 3.0)
    with pytest.raises(TypeError, match="`destinations` was 3; a device"):
        update(3, lambda: 0)
    with pytest.raises(TypeError, match="`extended.update` was given 3, a int"):
        s.extended.update(3, lambda v: 0)


class OwnError(Exception):
    pass


@pytest.mark.parametrize("make", [mirrored, one, central, v1.get_strategy])
def test_after_an_exception_contexts_are_as_before(make):
    s = make()
    v = variable(s, 1.0)

    def fail(*_):
        raise OwnError

    with pytest.raises(OwnError):
        s.extended.update(v, fail)
    with pytest.raises(OwnError):
        s.extended.update_non_slot(v, fail)
    assert not v1.has_strategy() and not v1.in_cross_replica_context()
    assert float(v) == 1


def test_places_as_a_list_or_a_tuple():
    s = mirrored()
    place = s.extended.non_slot_devices([])
    v = variable(s, 1.0)
    for each_place in (place, list(place), ["CPU:0", "CPU:1"]):
        s.extended.update_non_slot(each_place, lambda: v.assign_add(1.0))
    assert copies(v) == [4, 4]


def test_one_call_serves_all_devices():
    s = mirrored(4)
    calls = []
    s.extended.update_non_slot(s.extended.non_slot_devices([]), lambda: calls.append(1))
    assert calls == [1]


# Places.


def test_where_non_slot_variables_are():
    cpus = tuple(jax.devices())
    assert mirrored().extended.non_slot_devices(None) == cpus[:2]
    assert mirrored().extended.non_slot_devices(["anything"]) == cpus[:2]
    assert one().extended.non_slot_devices([]) == cpus[:1]
    for s in (v1.get_strategy(), central()):
        b, a = variable(s, 1.0, name="b"), variable(s, 1.0, name="a")
        assert s.extended.non_slot_devices([b, a]) is a
        with pytest.raises(
            ValueError, match="`extended.non_slot_devices` was given no"
        ):
            s.extended.non_slot_devices([])


@pytest.mark.parametrize("make", [mirrored, one, tpu])
def test_variables_beside_the_non_slot_devices(make):
    s = make()
    place = s.extended.non_slot_devices([])
    for block in (s.extended.colocate_vars_with, s.colocate_vars_with):
        with s.scope(), block(place):
            v = js.Variable(1.0)
        assert v.devices == place and s.extended.variable_created_in_scope(v)
        with s.scope(), block(v):
            w = js.Variable(1.0)
        assert w.devices == v.devices
    with pytest.raises(RuntimeError, match="was called outside of the scope of"):
        with s.extended.colocate_vars_with(place):
            pass
    other = mirrored(4)
    with other.scope(), pytest.raises(ValueError, match="of .*not one made in the sc"):
        with other.extended.colocate_vars_with(v):
            pass


def test_the_documented_update_beside_other_variables():
    s = mirrored()
    with s.scope():
        var1 = js.Variable(1.0)
        with s.extended.colocate_vars_with(var1):
            var2, var3 = js.Variable(2.0), js.Variable(3.0)

    def fn(v1, v2, v3):
        v1.assign(v2 + v3)

    s.extended.update(var1, fn, args=(var2, var3))
    assert copies(var1) == [5, 5]


def test_updates_of_divided_state():
    s = sharded()
    v = variable(s, np.zeros((4, 3), "float32"))
    s.extended.update(v, lambda v, x: v.assign_add(x), args=(np.ones((4, 3)),))
    np.testing.assert_array_equal(s.extended.read_var(v), np.ones((4, 3)))
    s.extended.update_non_slot(None, lambda: v.assign_add(np.ones((4, 3), "float32")))
    np.testing.assert_array_equal(s.extended.read_var(v), np.full((4, 3), 2))
    assert each(s, s.run(lambda: v.value().sum())) == [24, 24]
