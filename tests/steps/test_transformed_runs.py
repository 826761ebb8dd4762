"""`run` inside `jax.jvp`, `jax.vjp` and `jax.vmap`: what is plain is equal everywhere.

There the rules of a function take its place, and they may do what they like.
"""

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import each_of
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jaxstrategy as js

AXIS = "replica"


def place():
    return 1.0 + lax.axis_index(AXIS)


def copies_of(array):
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def varies(out):
    """Whether a result varies; if not, its copies are compared."""
    if isinstance(out, js.PerReplica):
        return True
    first, *others = copies_of(out)
    for other in others:
        np.testing.assert_array_equal(other, first)
    return False


@jax.custom_jvp
def locally_pushed(x):
    return lax.psum(x, AXIS)


locally_pushed.defjvp(lambda p, t: (lax.psum(p[0], AXIS), t[0] * place()))


@jax.custom_vjp
def locally_pulled(x):
    return lax.psum(x, AXIS)


locally_pulled.defvjp(lambda x: (x * place(), x), lambda x, g: (g,))


@jax.custom_batching.custom_vmap
def locally_batched(x):
    return lax.psum(x, AXIS)


@locally_batched.def_vmap
def _(size, is_batched, x):
    return x * place(), True


def locally_solved(x):
    return lax.custom_linear_solve(
        lambda v: v * x * place(), x, lambda _, b: b, symmetric=True
    )


@jax.custom_jvp
def pushed_on(x):
    return x


pushed_on.defjvp(lambda p, t: (p[0], locally_pushed(t[0])))


def locally_ruled():
    made = Primitive("ruled")
    made.def_abstract_eval(lambda x: x)
    mlir.register_lowering(made, mlir.lower_fun(jnp.sin, multiple_results=False))
    ad.defjvp(made, lambda t, x: t * place())
    return made.bind


HIDING = {
    "custom_jvp": locally_pushed,
    "custom_vjp": locally_pulled,
    "custom_vmap": locally_batched,
    "linear solve": locally_solved,
    "primitive": locally_ruled(),
    "custom_jvp of a custom_jvp": lambda x: pushed_on(x),
}


def test_a_result_whose_rule_differs_between_replicas_varies(four):
    def step(s):
        return {name: function(s) for name, function in HIDING.items()}

    for name, out in four.run(step, (jnp.float32(2.0),)).items():
        assert varies(out), name


@each_of("around", ("jvp", "vjp", "vmap"))
def test_under_the_transformation_all_copies_are_kept(four, around):
    x = jnp.float32(2.0)
    if around == "jvp":
        step = jax.jit(lambda s: locally_pushed(s))
        out, moved = jax.jvp(lambda x: four.run(step, (x,)), (x,), (jnp.float32(1.0),))
        expected = [1.0, 2.0, 3.0, 4.0]
    elif around == "vjp":
        step = jax.jit(lambda s: locally_pulled(s))
        moved, _ = jax.vjp(lambda x: four.run(step, (x,)), x)
        expected = [2.0, 4.0, 6.0, 8.0]
    else:
        step = jax.jit(lambda s: locally_batched(s))
        moved = jax.vmap(lambda x: four.run(step, (x,)))(x[None])
        expected = [2.0, 4.0, 6.0, 8.0]
    assert isinstance(moved, js.PerReplica)
    # Under `vmap` the mapped dimension is the first one.
    np.testing.assert_array_equal(np.ravel(moved.stacked), expected)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_batching.custom_vmap
def shifted(x):
    return x + 1


@shifted.def_vmap
def _(size, is_batched, x):
    return x + 1, True


ORDINARY = {
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "logsumexp": jax.nn.logsumexp,
    "custom_vjp": doubled,
    "custom_vmap": shifted,
    "norm": jnp.linalg.norm,
    "solve": lambda x: jnp.linalg.solve(jnp.diag(x), x),
    "largest": lambda x: js.get_replica_context().all_reduce("max", x),
}


def test_ordinary_rules_keep_what_is_equal(four):
    def step(s):
        return {name: function(s) for name, function in ORDINARY.items()}

    for name, out in four.run(step, (jnp.array([0.5, 1.0, 2.0]),)).items():
        assert not varies(out), name
