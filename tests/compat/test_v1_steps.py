"""Steps and `merge_call` of `compat.v1`: numbers of TensorFlow 2.21."""

import numpy as np
import pytest
from helpers.first_generation import each, mirrored, of_each_kind, replica_id

import jaxstrategy as js
from jaxstrategy.compat import v1


def merge(function, *args):
    return v1.get_replica_context().merge_call(function, args=args)


@of_each_kind
def test_arguments_of_call_for_each_replica(make):
    s = make()

    def step(x, y=0):
        return x + replica_id() + y

    result = s.extended.call_for_each_replica(step, args=(3,), kwargs={"y": 10})
    n = s.num_replicas_in_sync
    expected = [float(13 + i) for i in range(n)]
    assert each(s, result) == expected
    assert each(s, s.run(step, (3,), {"y": 10})) == expected
    with s.scope():
        again = s.extended.call_for_each_replica(step, (3,), {"y": 10})
    assert each(s, again) == expected


def test_calls_that_are_refused_name_the_method():
    s, other = mirrored(), mirrored(4)
    call = s.extended.call_for_each_replica
    with (
        other.scope(),
        pytest.raises(RuntimeError, match="Mixing different Strategy objects"),
    ):
        call(lambda: 0)
    with pytest.raises(RuntimeError, match="`strategy.extended.call_for_each_replica`"):
        s.run(lambda: call(lambda: 0))
    with pytest.raises(TypeError, match="`extended.call_for_each_replica` was given 3"):
        call(3)
    with pytest.raises(TypeError, match="`args` was a float; a tuple"):
        call(lambda x: x, 3.0)
    with pytest.raises(TypeError, match="`run` was given 3, which cannot be called"):
        s.run(3)
    with pytest.raises(TypeError, match=r"^Strategy\.reduce\(\) missing 1"):
        s.reduce("sum")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        s.run(lambda x: x)
    with pytest.raises(TypeError, match="`merge_call` was given 3, which cannot be"):
        s.run(lambda: merge(3))


@of_each_kind
def test_a_merge_function_is_given_the_strategy(make):
    s = make()

    def merge_fn(strategy, x, y, *, k):
        assert strategy is s and v1.get_strategy() is s and (y, k) == ("y", 5)
        assert len(strategy.unwrap(x)) == s.num_replicas_in_sync
        assert strategy.extended.broadcast_to(3.0, "CPU:0") == 3.0
        strategy.group(x)
        return k

    def step():
        x = replica_id() + 1
        context = v1.get_replica_context()
        return context.merge_call(merge_fn, args=(x, "y"), kwargs={"k": 5})

    assert s.run(step) == 5


# Where Python values differ between replicas in TensorFlow.


def test_options_of_run_are_taken():
    s = mirrored()
    x = s.core.mirror(np.ones(3, "float32"))
    options = v1.RunOptions(experimental_enable_dynamic_batch_size=False)
    assert tuple(options) == (False, False, None) and v1.RunOptions()[0] is True
    np.testing.assert_array_equal(s.run(lambda x: 2 * x, (x,), options=options), 2)
    y = s.run(lambda x: x + 1, (x,), options=js.RunOptions(donate_argnums=0))
    assert x.is_deleted()
    np.testing.assert_array_equal(y, np.full(3, 2))


def test_all_reduce_of_the_replica_context():
    s = mirrored(4)
    hints = v1.experimental.CollectiveHints(bytes_per_pack=1)

    def step():
        context, x = v1.get_replica_context(), replica_id() + 1.0
        return (
            context.all_reduce("sum", x),
            context.all_reduce(v1.ReduceOp.MEAN, {"x": x}, options=hints),
            context.all_reduce("MEAN", x, experimental_hints=hints),
        )

    total, mean, hinted = s.run(step)
    assert (float(total), float(mean["x"]), float(hinted)) == (10, 2.5, 2.5)


def variable(s, value, **options):
    with s.scope():
        return js.Variable(value, **options)


def test_updates_that_are_refused():
    s = mirrored()
    v, x = variable(s, 1.0), s.run(lambda: replica_id() + 1.0)
    place = s.extended.non_slot_devices([v])
    update = s.extended.update_non_slot
    with pytest.raises(ValueError, match="`extended.update_non_slot` was given a PerR"):
        update(place, lambda x: 10 * x, args=(x,))
    with pytest.raises(ValueError, match="`extended.update` was given a PerReplica"):
        s.extended.update(v, lambda v, x: v.assign(x), args=(x,))
    with pytest.raises(RuntimeError, match="`strategy.extended.update_non_slot` was c"):
        s.run(lambda: update(place, lambda: 0))
    with pytest.raises(RuntimeError, match="`strategy.extended.update` was called ins"):
        s.run(lambda: s.extended.update(v, lambda v: 0))
    with pytest.raises(TypeError, match="`extended.update_non_slot` was given 3, whic"):
        update(place, 3)
    with pytest.raises(TypeError, match="`args` was a float; a tuple"):
        update(place, lambda x: x, 3.0)
    with pytest.raises(TypeError, match="`destinations` was 3; a device"):
        update(3, lambda: 0)
    with pytest.raises(TypeError, match="`extended.update` was given 3, a int"):
        s.extended.update(3, lambda v: 0)


def test_variables_beside_the_non_slot_devices():
    s = mirrored()
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
