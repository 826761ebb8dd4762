"""Contexts, steps and values of `compat.v1`: numbers of TensorFlow 2.21."""

import copy
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import slow

import jaxstrategy as js
from jaxstrategy.compat import v1


def mirrored(n=2):
    return v1.MirroredStrategy(js.simulate(8)[:n])


def mirrored_on_four():
    return mirrored(4)


def central(n=2):
    return v1.experimental.CentralStorageStrategy(js.simulate(8)[:n])


def one():
    return v1.OneDeviceStrategy("CPU:0")


def shared():
    return v1.Strategy.over(
        js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=2)
    )


def sharded():
    sharding = js.StateSharding("state", min_bytes=0)
    return v1.Strategy.over(js.MirroredStrategy(js.simulate(8)[:2], sharding=sharding))


def tpu():
    return v1.experimental.TPUStrategy()


def workers():
    alone = js.cluster_resolver.SimpleClusterResolver({})
    return v1.experimental.MultiWorkerMirroredStrategy(cluster_resolver=alone)


of_each_kind = pytest.mark.parametrize(
    "make",
    [mirrored, central, *slow(mirrored_on_four, one, shared, sharded, workers)],
    ids=lambda make: make.__name__,
)


def replica_id():
    return v1.get_replica_context().replica_id_in_sync_group


def each(s, value):
    """The versions of this process's replicas, as numbers of Python."""
    return [float(x) for x in s.experimental_local_results(value)]


@of_each_kind
def test_the_scope_is_of_the_strategy_in_both_generations(make):
    s = make()
    assert v1.get_strategy() is not s and not v1.has_strategy()
    with s.scope() as x:
        assert x is s
        assert v1.get_strategy() is s and js.get_strategy() is s.core
        assert v1.has_strategy() and js.has_strategy()
        assert v1.in_cross_replica_context() and js.in_cross_replica_context()
        assert v1.get_replica_context() is None and js.get_replica_context() is None
        with s.scope() as again:
            assert again is s
        assert v1.get_strategy() is s
    assert not v1.has_strategy() and not js.has_strategy()


def test_a_replica_context_is_entered_where_it_is_the_current_one():
    s, kept = mirrored(), []

    def step():
        with v1.get_replica_context() as context:
            kept.append(context)
            assert v1.get_replica_context() is context
            return context.all_reduce("sum", 1.0)

    assert float(s.run(step)) == 2
    with pytest.raises(js.errors.ContextError, match="`__enter__` was called on a rep"):
        kept[0].__enter__()
    with v1.get_replica_context() as context:
        assert context is v1.get_replica_context()
    with s.scope(), pytest.raises(js.errors.ContextError, match="Mismatching contexts"):
        context.__enter__()


def test_strategies_that_cannot_be_set_or_entered():
    s = mirrored()
    with pytest.raises(TypeError, match=r"`experimental_set_strategy` was given 3"):
        v1.experimental_set_strategy(3)
    with s.scope(), pytest.raises(RuntimeError, match="must not be called inside a"):
        v1.experimental_set_strategy(s)
    s, other = mirrored(), mirrored(4)
    with pytest.raises(RuntimeError, match="`strategy.scope` was called inside `run`"):
        s.run(lambda: s.scope().__enter__())
    with s.scope():
        with pytest.raises(RuntimeError, match="Mixing different Strategy objects"):
            other.scope().__enter__()
        default = v1.Strategy.__deepcopy__(_default(), {})
        assert default is _default()
        with pytest.raises(RuntimeError, match="the default strategy's scope was"):
            default.scope()
    assert not v1.has_strategy()


def _default():
    found = []
    thread = threading.Thread(target=lambda: found.append(v1.get_strategy()))
    thread.start()
    thread.join()
    return found[0]


def test_one_object_for_each_strategy_of_today():
    core = js.MirroredStrategy(js.simulate(8)[:2])
    with core.scope():
        s = v1.get_strategy()
        assert type(s) is v1.MirroredStrategy and s.core is core
    assert v1.Strategy.over(core) is s is v1.Strategy.over(s)
    with pytest.raises(TypeError, match=r"Make one of them, such as `MirroredStrategy"):
        v1.Strategy(core)
    with pytest.raises(TypeError, match="`core` was 3; a strategy of `jaxstrategy`"):
        v1.Strategy.over(3)
    with pytest.raises(TypeError, match="`core` was 3; what `jaxstrategy.get_replica"):
        v1.ReplicaContext(3)
    watched = weakref.ref(core)
    del core, s
    gc.collect()
    assert watched() is None


def test_how_it_is_shown():
    assert repr(mirrored()) == "compat.v1.MirroredStrategy(2 replicas on cpu:0, cpu:1)"
    assert repr(one()) == "compat.v1.OneDeviceStrategy(1 replica on cpu:0)"
    assert repr(v1.get_strategy()) == "compat.v1.DefaultStrategy(1 replica)"
    servers = js.ParameterServerStrategy(
        workers=1, parameter_servers=1, backend="threads"
    )
    assert repr(v1.Strategy.over(servers)) == f"compat.v1.Strategy.over({servers!r})"
    assert ">cpu:1</td>" in mirrored()._repr_html_()
    assert repr(v1.get_replica_context()) == (
        "compat.v1.ReplicaContext(compat.v1.DefaultStrategy(1 replica))"
    )


def test_younger_methods_are_told_where_to_find():
    s = mirrored()
    for asked, name, told in [
        (s, "gather", "which is younger: `strategy.core.gather` is today's"),
        (s, "nothing", "'MirroredStrategy' object has no attribute 'nothing'"),
        (
            s.extended,
            "experimental_logical_device",
            "`strategy.core.extended.experimental_logical_device` is today's",
        ),
        (
            v1.get_replica_context(),
            "all_gather",
            "`jaxstrategy.get_replica_context\\(\\).all_gather` is today's",
        ),
    ]:
        with pytest.raises(AttributeError, match=told):
            getattr(asked, name)
        assert not hasattr(asked, name)


def test_what_sessions_wanted_does_nothing():
    s = mirrored()
    for _ in range(2):
        assert s.experimental_initialize() == [] and s.experimental_finalize() == []
    with s.scope():
        assert s.experimental_finalize() == [] and s.experimental_initialize() == []
        assert v1.get_strategy() is s
    assert s.configure() is None
    given = {"worker": ["localhost:1"]}
    assert s.configure({}, given, task_type="worker", task_id=0) is None
    assert s.update_config_proto(None) is None
    config = {"gpu_options": ["a"]}
    changed = s.update_config_proto(config)
    assert changed == config == {"gpu_options": ["a"]}
    assert changed is not config and changed["gpu_options"] is not config["gpu_options"]


def test_tpu_steps_per_run():
    assert tpu().steps_per_run == 1
    s = v1.experimental.TPUStrategy(steps_per_run=3)
    assert s.steps_per_run == copy.deepcopy(s).steps_per_run == 3
    assert s.cluster_resolver is s.core.cluster_resolver is not None
    assert mirrored().cluster_resolver is None
    with pytest.raises(ValueError, match="`steps_per_run` was 0; 1 or more was wanted"):
        v1.experimental.TPUStrategy(steps_per_run=0)
    with pytest.raises(TypeError, match="`steps_per_run` was 'a'; a whole number"):
        v1.experimental.TPUStrategy(steps_per_run="a")


# Steps and `merge_call` of `compat.v1`: numbers of TensorFlow 2.21.


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
    with pytest.raises(RuntimeError, match="`strategy.extended.update_non_slot` was c"):
        s.run(lambda: update(place, lambda: 0))
    with pytest.raises(TypeError, match="`extended.update_non_slot` was given 3, whic"):
        update(place, 3)
    with pytest.raises(TypeError, match="`args` was a float; a tuple"):
        update(place, lambda x: x, 3.0)
    with pytest.raises(TypeError, match="`destinations` was 3; a device"):
        update(3, lambda: 0)


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


# Values of `compat.v1`, reduced, copied and read: numbers of TensorFlow 2.21.


def per_replica(s):
    """1, 2, ... of the replicas."""
    return s.run(lambda: replica_id() + 1.0)


@of_each_kind
def test_reduce_without_an_axis(make):
    s = make()
    x, n = per_replica(s), s.num_replicas_in_sync
    total = n * (n + 1) / 2
    assert float(s.reduce("SUM", x)) == float(s.reduce("sum", x)) == total
    assert (
        float(s.reduce(v1.ReduceOp.MEAN, x)) == float(s.reduce("Mean", x)) == total / n
    )
    assert float(s.reduce("SUM", 3.0)) == 3 * n


def test_options_by_their_older_name():
    s = mirrored()
    x = per_replica(s)
    hints = v1.experimental.CollectiveHints(bytes_per_pack=1)
    extended = s.extended
    for method, target in (
        (extended.reduce_to, (x, "CPU:0")),
        (extended.batch_reduce_to, ([(x, "CPU:0")],)),
    ):
        for given in (
            {"options": hints},
            {"experimental_hints": hints},
            {"experimental_hints": None},
        ):
            (result,) = jax.tree.leaves(method("sum", *target, **given))
            assert float(result) == 3
        with pytest.raises(ValueError, match="are two names of one argument, and both"):
            method("sum", *target, hints, experimental_hints=hints)
        with pytest.raises(TypeError, match="`experimental_hints` was 3; `experimenta"):
            method("sum", *target, experimental_hints=3)


def test_where_values_are_broadcast_to():
    s = mirrored()
    with s.scope():
        v = js.Variable([1.0, 2.0])
    cpus = jax.devices()
    for given in (np.float32(5), jnp.float32(5)):
        result = s.extended.broadcast_to(given, "CPU:1")
        assert isinstance(result, jax.Array) and result.devices() == {cpus[1]}
        result = s.extended.broadcast_to(given, v)
        assert result.devices() == set(cpus[:2]) and float(result) == 5
        assert isinstance(result, js.Mirrored)
    for several in (["CPU:0", "CPU:1"], ("/device:CPU:0", cpus[1])):
        assert s.extended.broadcast_to(3.0, destinations=several) == 3
        result = s.extended.broadcast_to(np.float32(3), destinations=several)
        assert result.devices() == set(cpus[:2])
    result = s.extended.broadcast_to({"a": np.ones(3)}, per_replica(s))
    assert result["a"].devices() == set(cpus[:2])
    method = s.extended.broadcast_to
    for wrong in (None, [], ()):
        with pytest.raises(ValueError, match="`extended.broadcast_to` was given"):
            method(np.ones(2), wrong)
    with pytest.raises(ValueError, match="`extended.broadcast_to` was given a PerRepl"):
        method(per_replica(s), "CPU:0")
    with pytest.raises(RuntimeError, match="`strategy.extended.broadcast_to` was call"):
        s.run(lambda: method(np.ones(2), "CPU:0"))


def test_reading_on_read_variables():
    s = mirrored()
    with s.scope():
        total = js.Variable(1.0, synchronization="on_read", aggregation="sum")
        mean = js.Variable(4.0, synchronization="on_read", aggregation="mean")
        first = js.Variable(
            0.0, synchronization="on_read", aggregation="only_first_replica"
        )
        none = js.Variable(0.0, synchronization="on_read")

    def step():
        i = replica_id()
        total.assign_add(2.0 + i)
        mean.assign(6.0 * i)
        first.assign(7.0 + i)
        return total.value(), mean.value()

    s.extended.update(total, lambda v: v.assign(1.0))
    own = s.run(step)
    assert each(s, own[0]) == [3, 4] and each(s, own[1]) == [0, 6]
    read = s.extended.read_var
    assert [float(read(v)) for v in (total, mean, first)] == [7, 3, 7]
    with pytest.raises(ValueError, match="aggregation NONE"):
        read(none)
    with pytest.raises(RuntimeError, match="`extended.read_var` was called inside `ru"):
        s.run(lambda: read(total))

    def merged(strategy):
        return strategy.extended.read_var(total)

    assert float(s.run(lambda: v1.get_replica_context().merge_call(merged))) == 7
