"""Who gives the methods of older generations something odd is told by their names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstrategy.compat import contrib, v1


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
