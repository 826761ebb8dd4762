"""What references hold, and what is equal under the rules of transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import jaxstrategy as js


def varies(out):
    """Whether a result varies; if not, its copies are compared."""
    if isinstance(out, js.PerReplica):
        return True
    copies = {np.asarray(shard.data).tobytes() for shard in out.addressable_shards}
    assert len(copies) == 1
    return False


def local(strategy):
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([np.arange(3.0) + i for i in range(count)])


# Each writes this replica's `x` and what all have, `s`, to a reference that holds `s`.


def put(ref, value, at=...):
    ref[at] = value


def by_branches(decides, first, second):
    def write(ref, x, s):
        put(ref, x)
        lax.cond(decides(x, s)[0] > 1, lambda: first(ref, s), lambda: second(ref, s))

    return write


def in_a_loop_without_turns(ref, x, s):
    put(ref, x)
    lax.fori_loop(0, jnp.int32(s[0]), lambda i, c: (put(ref, s), c)[1], 0)


def read_in_the_next_turn(ref, x, s):
    other = jax.new_ref(s)

    def turn(i, carry):
        put(other, ref[...])
        put(ref, s)
        put(ref, x)
        return carry

    lax.fori_loop(0, 2, turn, 0)
    put(ref, other[...])


def own(x, s):
    return x


def same(x, s):
    return s


def nothing(ref, s):
    pass


# How a reference is written, and whether it varies afterwards.
CASES = {
    "in full": (lambda ref, x, s: (put(ref, x), put(ref, s)), False),
    "by a slice": (lambda ref, x, s: (put(ref, x), put(ref, s, np.s_[0:3])), False),
    "in jit": (lambda ref, x, s: (put(ref, x), jax.jit(put)(ref, s)), False),
    "by all branches": (by_branches(same, put, lambda ref, s: put(ref, s * 2)), False),
    "in part": (lambda ref, x, s: (put(ref, x), put(ref, s[:2], np.s_[0:2])), True),
    "by index": (
        lambda ref, x, s: (put(ref, x), put(ref, s, jnp.array([0, 0, 1]))), True),
    "added to": (
        lambda ref, x, s: (put(ref, x), jax.ref.addupdate(ref, ..., s)), True),
    "by one branch": (by_branches(same, put, nothing), True),
    "by branches that differ": (
        by_branches(own, put, lambda ref, s: put(ref, s * 2)), True),
    "in a loop without turns": (in_a_loop_without_turns, True),
    "read in the next turn": (read_in_the_next_turn, True),
}  # fmt: skip


def test_what_is_overwritten_in_full_counts_no_more(four):
    def step(x, s):
        found = []
        for write, _ in CASES.values():
            ref = jax.new_ref(s)
            write(ref, x, s)
            found.append(ref[...])
        return found

    found = four.run(step, (local(four), jnp.array([0.0, 1.0, 2.0])))
    for (name, (_, wanted)), out in zip(CASES.items(), found, strict=True):
        assert varies(out) == wanted, name


def test_a_mirrored_variable_may_hold_something_else_for_a_while(two):
    with two.scope():
        v = js.Variable(jnp.zeros(3))

    def step(x):
        v.assign(x)
        seen = v.read_value()
        v.assign(js.get_replica_context().all_reduce("sum", seen))

    two.run(step, (local(two),))
    np.testing.assert_array_equal(v.read_value(), [1.0, 3.0, 5.0])

    def keeps(x):
        v.assign(x)

    with pytest.raises(ValueError, match="its copies would drift apart"):
        two.run(keeps, (local(two),))


def test_a_reference_from_outside_is_refused(two):
    ref = jax.new_ref(jnp.zeros(3))

    def captures(x):
        return x + ref[...]

    def writes(x):
        ref[...] = x

    inner = jax.jit(lambda x: x + ref[...])
    for step in (captures, writes, lambda x: inner(x)):
        with pytest.raises(TypeError, match="uses a `jax.Ref` that was made outside"):
            two.run(step, (jnp.ones(3),))


def test_a_reference_as_argument_is_refused(two):
    ref = jax.new_ref(jnp.zeros(3))
    with pytest.raises(TypeError, match="`refs.'r'.` is a `jax.Ref`.*js.Variable"):
        two.run(lambda refs: refs["r"][...], ({"r": ref},))


def test_a_reference_that_was_not_written_holds_whatever_lay_there(four):
    kind = jax.ShapeDtypeStruct((4,), jnp.float32)
    out = four.run(lambda: jax.freeze(jax.empty_ref(kind)))
    assert isinstance(out, js.PerReplica)


def test_one_that_was_written_in_full_holds_that(four):
    def step():
        ref = jax.empty_ref(jax.ShapeDtypeStruct((4,), jnp.float32))
        ref[...] = jnp.arange(4.0)
        return ref[...]

    assert four.run(step).tolist() == [0, 1, 2, 3]


# `run` inside `jax.jvp`, `jax.vjp` and `jax.vmap`: what is plain is equal everywhere.

AXIS = "replica"


def place():
    return 1.0 + lax.axis_index(AXIS)


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
