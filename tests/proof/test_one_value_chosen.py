"""A choice between a value and itself is that value, whoever chooses."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import jaxstrategy as js

AXIS = "replica"
ROWS = np.arange(4, dtype=np.float32)


def rows(strategy):
    return strategy.per_replica([ROWS + i for i in range(4)])


@jax.jit
def either(choice, one, other):
    return jnp.where(choice, one, other)


@jax.custom_jvp
def ruled(choice, one, other):
    return jnp.where(choice, one, other)


@ruled.defjvp
def _(primals, tangents):
    return ruled(*primals), jnp.where(primals[0], *tangents[1:])


ONE = {
    "where": lambda x, s: jnp.where(x > 2, s, s),
    "select": lambda x, s: lax.select(x > 2, s, s),
    "select_n": lambda x, s: lax.select_n(jnp.int32(x[0]) % 3, s, s, s),
    "where, by a function": lambda x, s: jnp.where(jnp.any(x > 2), s, s),
    "where in a function": lambda x, s: either(x > 2, s, s),
    "where in branches": lambda x, s: lax.cond(
        s[0] > 0, lambda v: either(x > 2, v, v), lambda v: v, s
    ),
    "where in a loop": lambda x, s: lax.fori_loop(
        0, 2, lambda _, v: either(x > 2, v, v) + 1, s
    ),
    "of one number": lambda x, s: (lambda v: jnp.where(x > 2, v, v))(s[0]),
    "of one literal": lambda x, s: either(x > 2, 1.0, 1.0) + s,
    "of one form": lambda x, s: either(x > 2, s[::-1], s[::-1]),
    "where with rules": lambda x, s: ruled(x > 2, s, s),
    "cond": lambda x, s: lax.cond(x[0] > 2, lambda v: v, lambda v: v, s),
    "switch": lambda x, s: lax.switch(jnp.int32(x[0]), [lambda: s] * 3),
    "a reduction": lambda x, s: (lambda v: jnp.where(x > 2, v, v))(lax.pmean(x, AXIS)),
}


def test_a_choice_between_the_same_is_the_same(four):
    def step(x, s):
        return {name: choose(x, s) for name, choose in ONE.items()}

    for name, out in four.run(step, (rows(four), ROWS)).items():
        assert not isinstance(out, js.PerReplica), name
        first, *others = [np.asarray(shard.data) for shard in out.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first, name)


TWO = {
    "two values": lambda x, s: either(x > 2, s, s + 1),
    "two literals": lambda x, s: either(x > 2, 0.0, -0.0) + s,
    "zeros of two signs": lambda x, s: 1 / either(x > 2, 0.0 * s, -0.0 * s),
    "two forms": lambda x, s: either(x > 2, s, s[::-1]),
    "two axes": lambda x, s: either(
        x > 2, jnp.broadcast_to(s[:, None], (4, 4)), jnp.broadcast_to(s, (4, 4))
    ),
    "the same and another": lambda x, s: lax.select_n(jnp.int32(x[0]) % 3, s, s, s + 1),
    "values of one function": lambda x, s: [either(x > 2, s, v) for v in (s, x)][1],
    "one value that varies": lambda x, s: either(x > 2, x, x),
    "what a loop carries": lambda x, s: lax.fori_loop(
        0, 2, lambda _, c: (either(x > 2, *c), c[1] + 1), (s, s)
    )[0],
}


def test_a_choice_between_others_varies(four):
    def step(x, s):
        return {name: choose(x, s) for name, choose in TWO.items()}

    for name, out in four.run(step, (rows(four), ROWS)).items():
        assert isinstance(out, js.PerReplica), name


def test_one_function_called_with_one_value_and_with_two(four):
    def step(x, s):
        return either(x > 2, s, s), either(x > 2, s, s + 1), either(x > 2, s, s)

    out = four.run(step, (rows(four), ROWS))
    assert [isinstance(each, js.PerReplica) for each in out] == [False, True, False]


def test_parts_of_one_value_are_others():
    """A nested `shard_map` may give a function two parts of one operand."""
    axes = {"row": 2, "column": 2}
    strategy = js.MirroredStrategy(logical_axes=axes)
    P = PartitionSpec

    def step(x, s):
        def on_parts(x, one, other):
            return jnp.where(x > 2, one, other)

        return jax.shard_map(
            on_parts, in_specs=(P(), P("row"), P("column")), out_specs=P("row"),
            axis_names={"row", "column"}, check_vma=False,
        )(x, s, s)  # fmt: skip

    x = strategy.per_replica([1.0, 3.0])
    assert isinstance(strategy.run(step, (x, np.arange(4.0))), js.PerReplica)
