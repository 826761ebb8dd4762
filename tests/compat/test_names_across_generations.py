"""Names of one generation, asked of another: the error says what it is called there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy._src.compat import adapters
from jaxstrategy.compat import contrib, v1

TWO = jax.devices()[:2]


def test_names_of_one_generation_are_told_in_another():
    for name, here in [
        ("call_for_each_tower", "extended.call_for_each_replica"),
        ("call_for_each_replica", "extended.call_for_each_replica"),
        ("distribute_dataset", "make_dataset_iterator"),
        ("update_non_slot", "extended.update_non_slot"),
        ("num_towers", "num_replicas_in_sync"),
    ]:
        with pytest.raises(AttributeError, match=f"; in this generation it is `{here}"):
            getattr(v1.MirroredStrategy(TWO), name)
    d = contrib.MirroredStrategy(TWO)
    with pytest.raises(AttributeError, match="; in this generation it is `call_for_ea"):
        d.call_for_each_replica  # noqa: B018
    both = r"`strategy.core.run` is today's; in this generation it is `call_for_each_t"
    with pytest.raises(AttributeError, match=both):
        d.run  # noqa: B018
    with pytest.raises(AttributeError, match=r"`strategy.core.extended` is today's\.$"):
        d.extended  # noqa: B018
    with pytest.raises(AttributeError, match="in this generation it is `tower_id`"):
        contrib.get_tower_context().replica_id_in_sync_group  # noqa: B018
    with pytest.raises(AttributeError, match=r"Context' .* attribute 'nothing'\.$"):
        contrib.get_tower_context().nothing  # noqa: B018
    with pytest.raises(AttributeError, match="it is `replica_id_in_sync_group`"):
        v1.get_replica_context().tower_id  # noqa: B018
    with pytest.raises(AttributeError, match="it is `batch_reduce_to`"):
        v1.MirroredStrategy(TWO).extended.batch_reduce  # noqa: B018
    d, s = contrib.MirroredStrategy(TWO), v1.MirroredStrategy(TWO)
    tower, replica = contrib.get_tower_context(), v1.get_replica_context()
    for here in adapters.NAMES_IN_2018.values():
        assert hasattr(type(d), here) or hasattr(type(tower), here), here
    for here in adapters.NAMES_IN_V1.values():
        first, _, second = here.partition(".")
        assert hasattr(type(s), first) or hasattr(type(replica), first), here
        assert not second or hasattr(type(s.extended), second), here


def check_arguments_of_merge_call_are_a_tuple(strategy):
    def step(x):
        context = strategy.get_replica_context()
        return context.merge_call(lambda strategy, x: x, x)  # as 2018 gave them

    with pytest.raises(TypeError, match=r"`args` was a .*Write `args=\(x,\)`"):
        js.MirroredStrategy(TWO).run(step, (1.0,))
    with pytest.raises(TypeError, match="`kwargs` was a int"):
        js.get_replica_context().merge_call(print, (), 3)


def test_arguments_of_merge_call_are_a_tuple():
    for strategy in [js, v1]:
        check_arguments_of_merge_call_are_a_tuple(strategy)


# Who gives the methods of older generations something odd is told by their names.


def strategies():
    devices = jax.devices()[:2]
    return v1.MirroredStrategy(devices), contrib.MirroredStrategy(devices)


def test_a_value_that_differs_between_towers_is_no_copy():
    for method in ["broadcast", "fetch"]:
        _, d = strategies()
        with d.scope():
            value = d.call_for_each_tower(
                lambda: contrib.get_tower_context().tower_id + jnp.zeros(2)
            )
            with pytest.raises(TypeError, match=rf"`{method}` was given a PerDevice,"):
                getattr(d, method)(value, jax.devices()[0])


def test_a_variable_of_a_negative_size_is_refused():
    for shape in [-1, [2, -1], np.array([-3])]:
        s, _ = strategies()
        with s.scope(), pytest.raises(ValueError, match=r"`shape` was .*, at least 0"):
            v1.get_variable("w", shape)
        with s.scope():
            assert v1.get_variable("w", [0, 2]).shape == (0, 2)


def test_an_extended_object_is_made_of_a_strategy_of_either_generation():
    s, _ = strategies()
    for strategy in (s, s.core):
        extended = v1.StrategyExtended(strategy)
        assert extended.worker_devices == tuple(jax.devices()[:2])
        with s.scope():
            assert extended.reduce_to("sum", 2.0, jax.devices()[0]) == 4.0
    with pytest.raises(TypeError, match="`container_strategy` was 3; a strategy was"):
        v1.StrategyExtended(3)


def test_the_older_multi_worker_strategy():
    for name in ["AUTO", "RING", "NCCL"]:
        communication = js.experimental.CollectiveCommunication[name]
        assert communication is js.experimental.CommunicationImplementation(name)
        alone = js.cluster_resolver.SimpleClusterResolver({})
        strategy = js.experimental.MultiWorkerMirroredStrategy(communication, alone)
        assert isinstance(strategy, js.MultiWorkerMirroredStrategy)
        x = strategy.per_replica(np.arange(8.0))
        assert strategy.reduce("sum", x) == 28
    with pytest.raises(ValueError, match="`implementation` was 'MPI'"):
        js.experimental.MultiWorkerMirroredStrategy("MPI")


def test_all_gather_takes_options(two):
    options = js.experimental.CommunicationOptions(implementation="RING")

    def step(x):
        return js.get_replica_context().all_gather(x, 0, options)

    x = two.per_replica([[1.0], [2.0]])
    np.testing.assert_array_equal(two.run(step, (x,)), [1.0, 2.0])
    with pytest.raises(TypeError, match="CommunicationOptions"):
        two.run(lambda x: js.get_replica_context().all_gather(x, 0, "RING"), (x,))
