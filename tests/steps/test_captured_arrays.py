"""Arrays that a nested step captures, which its program is given as arguments."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxstrategy as js

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
