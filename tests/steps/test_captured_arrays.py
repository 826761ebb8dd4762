"""Arrays that a nested step captures, which its program is given as arguments."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxstrategy as js


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(js.simulate(8)[:2])


# Messages name results as the user has written them.


def test_a_forgotten_reduction_names_the_result(two):
    offset = jnp.ones(3)
    x = two.per_replica([np.ones(3, np.float32), np.zeros(3, np.float32)])

    def step(state, x):
        return {"w": state["w"] - x * offset}

    with pytest.warns(js.errors.NotMirroredWarning) as caught:
        two.run(step, ({"w": np.ones(3, np.float32)}, x))
    (text,) = (str(each.message) for each in caught)
    assert "`step` was given `state['w']` equal on all replicas" in text
    assert "returns `step(...)['w']`, what takes its place" in text
    assert "(...)[0]" not in text


def test_a_result_that_is_given_back_names_the_result(two):
    offset = jnp.ones(3)

    def step(n, x):
        return {"n": n[:1] + x * offset}

    x = two.per_replica([np.ones(3, np.float32), np.zeros(3, np.float32)])
    n = two.run(step, (np.ones(2, np.float32), x))["n"]
    with pytest.warns(js.errors.NotMirroredWarning, match="it is `step") as caught:
        two.run(step, (n, x))
    text = str(caught[0].message)
    assert "it is `step(...)['n']`, which that call returned" in text
    assert "`n`, an argument of `step`" in text


def test_broken_promises_name_the_results(two):
    offset = jnp.ones(3)

    def step(x):
        return {"n": x * offset, "m": x + offset}

    x = two.per_replica([np.ones(3, np.float32), np.zeros(3, np.float32)])
    promised = js.RunOptions(expect_mirrored=True)
    with pytest.raises(js.errors.NotMirroredError) as caught:
        two.run(step, (x,), options=promised)
    assert caught.value.path == "step(...)['m']"
    assert str(caught.value).startswith("`step(...)['m']` was expected")
    assert caught.value.__notes__[0] == "The same holds for `step(...)['n']`."


def test_an_expectation_that_does_not_fit_is_told_as_it_was_written(two):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    promised = js.RunOptions(expect_mirrored=(True, False))
    told = (
        "`expect_mirrored` is (True, False), which does not fit what the step returns: "
        "`step(...)` is {'y': *}."
    )

    def step(model, x):
        return {"y": model(x)}

    x = two.per_replica([np.ones((1, 2), np.float32)] * 2)
    with pytest.raises(ValueError, match=re.escape(told)):
        two.run(step, (model, x), options=promised)
