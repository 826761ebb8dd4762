"""The passes that divide a step, each by itself: the equations that come of it."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.divided import drawn, whole
from jax import lax
from jax.extend import core

from jaxstrategy.tracing._without_meshes import without_meshes
from jaxstrategy.tracing.division._cut import cut
from jaxstrategy.tracing.replication._jaxprs import jaxpr_of
from jaxstrategy.tracing.replication._lowered import closed

AXIS = "replica"
W = np.ones(4, np.float32)


def traced(function, *args):
    return jax.make_jaxpr(function, axis_env=[(AXIS, 2)])(*args).jaxpr


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def divided(function, varying):
    """The cut of a step whose arguments vary as given, by the names of equations."""
    jaxpr = traced(function, *[W] * len(varying))
    differ = {v for v, does in zip(jaxpr.invars, varying, strict=True) if does}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "psum" and differ & {
            a for a in eqn.invars if not isinstance(a, core.Literal)
        }:
            differ.update(eqn.outvars)
    found = cut(jaxpr, lambda a: not isinstance(a, core.Literal) and a in differ)
    return tuple(map(names, (found.inside, found.outside, found.copied)))


def test_what_follows_the_last_sum_leaves():
    inside, outside, copied = divided(
        lambda w, x: w - lax.psum(w * x, AXIS) * 0.1, [False, True]
    )
    assert (inside, outside, copied) == (["mul", "psum"], ["mul", "sub"], [])


def test_what_something_local_needs_stays():
    def step(w, x):
        norm = jnp.tanh(lax.psum(x, AXIS))
        return norm * x, w + norm

    inside, outside, copied = divided(step, [False, True])
    assert (inside, outside) == (["psum", "tanh", "mul"], ["add"])
    assert copied == []  # it is made of a sum, not of arguments


def test_what_both_need_of_arguments_alone_is_made_twice():
    inside, outside, copied = divided(
        lambda w, x: jnp.exp(w) - lax.psum(jnp.exp(w) * x, AXIS), [False, True]
    )
    assert inside == ["exp", "mul", "psum"] and outside == ["exp", "sub"]

    def step(w, x):
        e = jnp.exp(w)
        return e - lax.psum(e * x, AXIS)

    inside, outside, copied = divided(step, [False, True])
    assert (inside, outside, copied) == (["exp", "mul", "psum"], ["sub"], ["exp"])


def test_what_has_an_effect_stays():
    def step(w, x):
        total = lax.psum(x, AXIS)
        jax.debug.callback(lambda t: None, total)
        return w + total

    inside, outside, _ = divided(step, [False, True])
    assert "debug_callback" in inside and outside == ["add"]


# Types of no mesh.


def test_no_type_names_the_mesh_of_what_was_captured():
    w = whole(2).mirror(drawn(4, 4))

    def step(x):
        held = jax.new_ref(w)
        held[...] += 1.0

        def loss(w):
            turn = lambda h, row: (jnp.tanh(h * row), h.sum())  # noqa: E731
            h, sums = lax.scan(jax.checkpoint(turn), x, w)
            return jax.nn.softmax(h).max() + sums.sum() + jnp.zeros_like(w).sum()

        add = lambda i, _: held.__setitem__(..., held[...] + i)  # noqa: E731
        lax.fori_loop(0, 2, add, None)
        return jax.jit(jax.grad(loss))(held[...]), jnp.ones_like(w)

    x = np.ones(4, np.float32)
    want = jax.jit(step)(x)
    made = jax.make_jaxpr(step)(x)
    assert "NamedSharding" in str(made)
    bare = without_meshes(made.jaxpr)
    assert "NamedSharding" not in str(bare)
    moved = jaxpr_of([*bare.constvars, *bare.invars], bare.eqns, bare.outvars)
    consts = list(map(np.asarray, made.consts))
    found = core.jaxpr_as_fun(closed(moved))(*consts, x)
    for have, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(have, wanted, rtol=1e-6)


def test_a_jaxpr_of_no_mesh_stays_the_same_object():
    jaxpr = traced(lambda x: jax.nn.relu(x).sum(), W)
    assert without_meshes(jaxpr) is jaxpr
