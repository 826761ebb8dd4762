"""The strategies and contexts of `compat.v1`: numbers of TensorFlow 2.21."""

import copy
import gc
import threading
import weakref

import pytest
from helpers.cases import slow
from helpers.first_generation import central, mirrored, one, shared, tpu, workers

import jaxstrategy as js
from jaxstrategy.compat import v1

KINDS = [mirrored, central, *slow(workers, shared)]
of_each_kind = pytest.mark.parametrize("make", KINDS)


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
