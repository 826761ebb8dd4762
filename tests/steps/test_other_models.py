"""Models of other libraries, which are pytrees."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.objects import WIDTH, divided, loss_of, mean, rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Line:
    weight: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="line")

    def __call__(self, x):
        return x @ self.weight


def equinox_line(weight):
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        weight: jax.Array
        name: str = eqx.field(static=True, default="line")

        def __call__(self, x):
            return x @ self.weight

    return Model(weight)


@each_of("make", (Line, equinox_line))
def test_other_pytree_models(two, make):
    ours: Any = make(jnp.eye(WIDTH))
    theirs: Any = ours
    tx = optax.sgd(0.1)

    def step(model, x, y, reduce):
        grads = reduce(jax.grad(loss_of)(model, x, y))
        updates, _ = tx.update(grads, tx.init(model))
        return optax.apply_updates(model, updates)

    run = two.run(lambda model, x, y: step(model, x, y, mean))
    for i in range(3):
        ours = run(ours, *divided(two, *rows(i)))
        theirs = step(theirs, *rows(i), lambda grads: grads)
    assert type(ours) is type(theirs) and ours.name == "line"
    np.testing.assert_allclose(ours.weight, theirs.weight, atol=1e-5)
