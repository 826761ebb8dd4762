"""An array that was donated is told by name when a step captures it."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js


def donated(strategy):
    array = strategy.mirror(jnp.ones(6))
    give = strategy.run(lambda w: w + 1, options=js.RunOptions(donate_argnums=0))
    give(array)
    return array


def of_function(w):
    def step(x):
        return (x * w).sum()

    return step


def of_container(w):
    state = {"w": w}
    return lambda x: (x * state["w"]).sum()


def test_a_step_made_after_it_was_donated(two):
    for make in (of_function, of_container):
        x = two.per_replica(np.ones((2, 6), np.float32))
        with pytest.raises(js.errors.DonatedValueError) as caught:
            two.run(make(donated(two)))(x)
        message = str(caught.value)
        assert message.startswith("What `")
        assert (
            "captures, float32[6], used at test_donated_captures.py:"
            in message.replace(str(__file__).rpartition("/")[0] + "/", "")
        )
        assert "was donated to an earlier call, which has reused its memory" in message


def test_a_step_that_knew_it_before(two):
    x = two.per_replica(np.ones((2, 6), np.float32))
    array = two.mirror(jnp.ones(6))
    step = two.run(of_function(array))
    step(x)
    two.run(lambda w: w + 1, options=js.RunOptions(donate_argnums=0))(array)
    with pytest.raises(js.errors.DonatedValueError, match="`captured w` was donated"):
        step(x)


def test_one_that_is_not_used_is_no_hindrance(two):
    array = donated(two)

    def step(x):
        held = array
        return x.sum() if held is not None else x

    x = two.per_replica(np.ones((2, 6), np.float32))
    assert float(two.reduce("sum", two.run(step)(x))) == 12
