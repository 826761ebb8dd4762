"""Collectives, callbacks and derivatives of replicas that share devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids, mirrored, replica
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback

import jaxstrategy as js

AXIS = "replica"
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]
HALVES = [[0, 2, 4, 6], [7, 5, 3, 1]]


def stacked(tree):
    is_own = lambda x: isinstance(x, js.PerReplica)  # noqa: E731
    return jax.tree.map(
        lambda x: (
            np.asarray(x.stacked)
            if is_own(x)
            else np.broadcast_to(np.asarray(x), (8, *x.shape))
        ),
        tree,
        is_leaf=is_own,
    )


@pytest.mark.slow
@each_of("devices", [1, 2])
def test_collectives_of_jax(devices):
    each = 8 // devices
    eight = js.MirroredStrategy(jax.devices()[:devices], replicas_per_device=each)
    rng = np.random.default_rng(2)
    given = {
        name: rng.integers(-9, 9, size=(8, size, 2 * size)).astype(np.float32)
        for name, size in {"all": 8, "pairs": 2, "across": 2, "halves": 4}.items()
    }
    members = {"all": None, "pairs": PAIRS, "across": ACROSS, "halves": HALVES}

    def of(x, **groups):
        return {
            "psum": lax.psum(x, AXIS, **groups),
            "count": lax.psum(x > 0, AXIS, **groups),
            "pmax": lax.pmax(x, AXIS, **groups),
            "pmin": lax.pmin(x, AXIS, **groups),
            "gather": lax.all_gather(x, AXIS, axis=1, **groups),
            "gather tiled": lax.all_gather(x, AXIS, axis=1, tiled=True, **groups),
            "scatter": lax.psum_scatter(x, AXIS, **groups),
            "scatter tiled": lax.psum_scatter(
                x, AXIS, scatter_dimension=1, tiled=True, **groups
            ),
            "exchange": lax.all_to_all(x, AXIS, 0, 1, **groups),
            "exchange back": lax.all_to_all(x.T, AXIS, 1, 0, **groups),
            "exchange tiled": lax.all_to_all(x, AXIS, 1, 0, tiled=True, **groups),
        }

    def step(arrays):
        return {
            name: of(x, axis_index_groups=members[name]) for name, x in arrays.items()
        }

    found, wanted = (
        stacked(strategy.run(step, ({n: js.PerReplica(x) for n, x in given.items()},)))
        for strategy in (eight, mirrored(8))  # which has JAX's own collectives
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    np.testing.assert_array_equal(found["all"]["psum"][0], given["all"].sum(0))


def test_groups_of_other_sizes(eight):
    groups = [[0, 5], [1, 2, 3, 4, 6, 7]]

    def step(x):
        return tuple(
            collective(x, AXIS, axis_index_groups=groups)
            for collective in (lax.psum, lax.pmax, lax.pmin)
        )

    total, largest, smallest = stacked(eight.run(step, (ids(eight, 1.0),)))
    is_first = np.isin(np.arange(8), [0, 5])
    np.testing.assert_array_equal(total, np.where(is_first, 7, 29))
    np.testing.assert_array_equal(largest, np.where(is_first, 6, 8))
    np.testing.assert_array_equal(smallest, np.where(is_first, 1, 2))


def test_collectives_that_send(eight):
    def step(x):
        return (
            lax.ppermute(x, AXIS, [(i, (i + 3) % 8) for i in range(8)]),
            lax.ppermute(x + 1, AXIS, [(0, 5), (6, 0)]),
            lax.pbroadcast(x, (AXIS,), 6),
            lax.pswapaxes(jnp.arange(8.0) + 10 * x, AXIS, 0),
        )

    ring, some, one, swapped = stacked(eight.run(step, (ids(eight),)))
    np.testing.assert_array_equal(ring, np.roll(np.arange(8), 3))
    np.testing.assert_array_equal(some, [7, 0, 0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(one, np.full(8, 6))
    np.testing.assert_array_equal(
        swapped, np.arange(8)[:, None] + 10 * np.arange(8)[None]
    )


@each_of(
    ("collective", "kind", "shape"),
    [
        # A device sends one sum of its lanes, and gets the parts of its lanes.
        (lambda x: lax.psum_scatter(x, AXIS, tiled=True), "reduce-scatter", [4, 2, 3]),
        (lambda x: lax.psum_scatter(x[:8], AXIS), "reduce-scatter", [4, 3]),
        # A device sends the arrays of its lanes, once.
        (lambda x: lax.all_gather(x, AXIS), "all-gather", [2, 4, 16, 3]),
        (lambda x: replica().all_gather(x, 0), "all-gather", [2, 4, 16, 3]),
        (lambda x: lax.psum(x, AXIS), "all-reduce", [16, 3]),
        (lambda x: lax.pmax(x, AXIS), "all-reduce", [16, 3]),
    ],
)
def test_a_device_sends_once_for_its_lanes(collective, kind, shape):
    strategy = js.MirroredStrategy(jax.devices()[:2], replicas_per_device=4)
    x = js.PerReplica(np.zeros((8, 16, 3), np.float32))
    run = jax.jit(lambda x: strategy.run(lambda x: collective(x) + x.sum(), (x,)))
    text = run.lower(x).compile().as_text()
    shapes = "f32[" + ",".join(map(str, shape)) + "]"
    sent = re.findall(r"= (\S+?)(?:\{\S*)? ((?:all|reduce|collective)-[a-z-]+)\(", text)
    assert sent == [(shapes, kind)]


def test_collectives_under_a_users_vmap(eight):
    def step(x):
        rows = jnp.arange(16.0).reshape(2, 8)

        def mapped(function):
            return jax.vmap(function, axis_name="rows")(rows)

        both = (AXIS, "rows")
        return (
            mapped(lambda y: lax.psum_scatter(y + x, AXIS, tiled=True)),
            mapped(lambda y: lax.psum(y[0] + x, both)),
            mapped(lambda y: lax.pmax(y[0] + x, both)),
            mapped(lambda y: y[0] + lax.axis_index(both)),
        )

    found, wanted = (stacked(s.run(step, (ids(s),))) for s in (eight, mirrored(8)))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    np.testing.assert_array_equal(found[1], np.full((8, 2), 2 * 28 + 8 * 8))


def test_groups_that_decide_alike(eight):
    """A loop that the first four leave before the others, and a branch of theirs."""
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(x):
        def total(value):
            return replica().all_reduce("sum", value, groups=groups)

        limit = total(x)  # 6, 22
        each_of = lax.while_loop(
            lambda c: c < limit, lambda c: c + total(jnp.ones_like(c)), 0.0
        )
        branch = lax.cond(limit > 10, lambda: total(2 * x), lambda: x)
        return each_of, branch

    each_of, branch = stacked(eight.run(step, (ids(eight),)))
    np.testing.assert_array_equal(each_of, [8] * 4 + [24] * 4)
    np.testing.assert_array_equal(branch, [0, 1, 2, 3, 44, 44, 44, 44])


def test_a_collective_without_a_rule_is_refused(eight):
    def step(x):
        numbers = jnp.zeros(8, jnp.int32)
        return lax.ragged_all_to_all(
            jnp.full(8, x), jnp.zeros(8), numbers, numbers, numbers, numbers,
            axis_name=AXIS,
        )  # fmt: skip

    with pytest.raises(NotImplementedError, match="(?s)`ragged_all_to_all`, which has"):
        eight.run(step, (ids(eight),))


# Callbacks of replicas that share devices: once for each that comes to them.

FLOAT = jax.ShapeDtypeStruct((), np.float32)


def replies(strategy, step):
    """What a step's callbacks were called with, and its results."""
    found = []

    def tell(x):
        found.append(float(x))
        return np.float32(x)

    results = strategy.run(functools.partial(step, tell=tell), (ids(strategy),))
    jax.effects_barrier()
    return sorted(found), np.asarray(results.stacked)


def test_each_replica_calls_once(eight):
    def step(x, tell):
        jax.debug.callback(tell, x)
        # A method for batches is not used.
        pure = jax.pure_callback(tell, FLOAT, x, vmap_method="expand_dims")
        return 2 * pure + io_callback(tell, FLOAT, x + 10)

    found, results = replies(eight, step)
    assert found == sorted([*range(8), *range(8), *range(10, 18)])
    np.testing.assert_array_equal(results, 3 * np.arange(8) + 10)


def test_an_ordered_callback_is_called_in_order(eight):
    def step(x, tell):
        first = io_callback(tell, FLOAT, x, ordered=True)
        return io_callback(tell, FLOAT, first + 10, ordered=True)

    found, results = replies(eight, step)
    assert found == [*range(8), *range(10, 18)]
    np.testing.assert_array_equal(results, np.arange(10, 18))


def callback(tell, x):
    jax.debug.callback(tell, x)


def pure(tell, x):
    return jax.pure_callback(tell, FLOAT, x)


def with_effects(tell, x):
    return io_callback(tell, FLOAT, x)


@each_of("call", [callback, pure, with_effects])
def test_a_branch_calls_for_those_that_take_it(eight, call):
    def step(x, tell):
        def yes():
            call(tell, x)
            return x + 1

        # What is not used is not computed, but for its effects.
        value = lax.cond(x > 3, yes, lambda: x)
        again = pure(tell, value) if call is pure else value
        return lax.cond(x > 5, lambda: again, lambda: x)

    found, results = replies(eight, step)
    expected = list(range(4, 8)) if call is not pure else found
    assert found == expected
    np.testing.assert_array_equal(results, [0, 1, 2, 3, 4, 5, 7, 8])


def test_a_loop_calls_until_its_replica_has_ended(eight):
    def step(x, tell):
        def turn(value):
            jax.debug.callback(tell, value)
            return value + 3

        return lax.while_loop(lambda value: value < 5, turn, x)

    found, results = replies(eight, step)
    wanted = [value for i in range(8) for value in range(i, 5, 3)]
    assert found == sorted(wanted)
    np.testing.assert_array_equal(results, [6, 7, 5, 6, 7, 5, 6, 7])


def test_a_callback_where_only_a_group_comes_is_refused(eight):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(x, tell):
        total = lax.psum(x, "replica", axis_index_groups=groups)

        def yes():
            jax.debug.callback(tell, x)
            return lax.psum(x, "replica", axis_index_groups=groups)

        return lax.cond(total > 10, yes, lambda: x)

    with pytest.raises(NotImplementedError, match="(?s)`cond` has a callback and a"):
        replies(eight, step)


def test_infinities_are_looked_for_on_each_replica(eight):
    options = js.RunOptions(check_finite=True)
    with pytest.raises(js.NonFiniteError, match="on replicas 0, 1, 2, 3 of 8"):
        eight.run(lambda x: jnp.log(x - 3), (ids(eight),), options=options)


# Derivatives through replicas that share devices: those of each replica's function.

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
