"""Derivatives through replicas that share devices: those of each replica's function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

import jaxstrategy as js

AXIS = "replica"
X = np.arange(8.0, dtype=np.float32)


def test_gradients_from_outside(eight):
    def loss(w, x):
        step = lambda w, x: lax.pmean((w * x) ** 2, AXIS)  # noqa: E731
        return eight.run(step, (w, js.PerReplica(x)))

    of_w, of_x = jax.jit(jax.grad(loss, (0, 1)))(2.0, X)
    np.testing.assert_allclose(of_w, np.mean(2 * 2 * X**2))
    np.testing.assert_allclose(of_x, 2 * 4 * X / 8)


@jax.custom_jvp
def doubled(x):
    return 2 * x


@doubled.defjvp
def _jvp(primals, tangents):
    # Not the derivative, so that it is seen who is asked.
    return doubled(*primals), lax.psum(tangents[0], AXIS)


def test_a_rule_for_tangents_sums_over_all_replicas(eight):
    def squares(x):
        return eight.run(lambda x: doubled(x) * doubled(x), (js.PerReplica(x),)).stacked

    values, tangents = jax.jvp(squares, (X,), (X,))
    np.testing.assert_allclose(values, 4 * X**2)
    np.testing.assert_allclose(tangents, 2 * (2 * X) * X.sum())
    gradient = jax.grad(lambda x: squares(x).sum())(X)
    np.testing.assert_allclose(gradient, np.full(8, (4 * X).sum()))


@jax.custom_vjp
def scaled(x, w, n):
    return lax.psum(x * w, AXIS) * n


def _forward(x, w, n):
    return scaled(x, w, n), (x, w, n)


def _backward(kept, cotangent):
    x, w, n = kept
    total = lax.psum(cotangent, AXIS) * n
    return total * w, total * x, None


scaled.defvjp(_forward, _backward)


def test_a_rule_for_cotangents_sums_over_all_replicas(eight):
    n = np.arange(8)

    def loss(x, w):
        def step(x, w, n):
            return scaled(x, w, n) * x

        given = js.PerReplica(x), w, js.PerReplica(n)
        return eight.run(step, given).stacked.sum()

    w = np.float32(3)
    of_x, of_w = jax.grad(loss, (0, 1))(X, w)
    total = X.sum()  # of what comes to `scaled`, which is x
    direct = w * X.sum() * n
    np.testing.assert_allclose(of_x, total * n * w + direct)
    np.testing.assert_allclose(of_w, (total * n * X).sum())
    plain = jax.jit(loss)(X, w)
    np.testing.assert_allclose(plain, (w * X.sum() * n * X).sum())


def test_a_rule_that_raises_is_asked_only_if_somebody_differentiates(eight):
    @jax.custom_vjp
    def only_forward(x):
        return 2 * x

    def no_gradient(*_):
        raise NotImplementedError("there is no gradient")

    only_forward.defvjp(lambda x: (2 * x, None), no_gradient)
    run = lambda x: eight.run(only_forward, (js.PerReplica(x),)).stacked  # noqa: E731
    np.testing.assert_array_equal(run(X), 2 * X)
    with pytest.raises(NotImplementedError, match="there is no gradient"):
        jax.grad(lambda x: run(x).sum())(X)


def test_a_rule_for_vmap_does_not_see_the_lanes(eight):
    @custom_vmap
    def total(x):
        return lax.psum(x, AXIS)

    @total.def_vmap
    def _of_many(size, is_batched, x):
        return lax.psum(x, AXIS), True

    found = eight.run(lambda x: total(x) + x, (js.PerReplica(X),))
    np.testing.assert_array_equal(found.stacked, 28 + X)


def test_a_linear_system_of_all_replicas(eight):
    def step(x):
        matrix = jnp.eye(3) * (2 + x)
        solve = jax.scipy.sparse.linalg.cg
        return solve(lambda v: lax.pmean(matrix @ v, AXIS), jnp.ones(3))[0]

    found = eight.run(step, (js.PerReplica(X),))
    np.testing.assert_allclose(found, np.full(3, 1 / 5.5), rtol=1e-6)


def test_gradients_inside_are_each_replicas_own(eight):
    def step(x):
        own = jax.grad(lambda x: lax.psum(x * x, AXIS))(x)
        again = jax.grad(jax.checkpoint(lambda x: lax.pmean(x, AXIS) ** 2))(x)
        return own, again

    own, again = eight.run(step, (js.PerReplica(X),))
    # As TensorFlow: the gradient of a sum over replicas is the sum of the gradients.
    np.testing.assert_array_equal(own.stacked, 8 * 2 * X)
    np.testing.assert_array_equal(np.asarray(again), 2 * 3.5)
