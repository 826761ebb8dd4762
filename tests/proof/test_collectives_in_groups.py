"""A collective of a group needs its members to decide alike, and nobody else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from jax import lax

import jaxstrategy as js

AXIS = "replica"
PAIRS = [[0, 1], [2, 3]]
VALUES = np.array([1.0, 2.0, 3.0, 4.0], np.float32)


def index():
    return lax.axis_index(AXIS)


def paired(x):
    return lax.psum(x, AXIS, axis_index_groups=PAIRS)


def pair_sums(values):
    return np.repeat(values.reshape(2, 2).sum(1), 2)


def until_large(values):
    while (small := pair_sums(values) < 50).any():
        values = np.where(small, pair_sums(values + 1), values)
    return values


LEGAL = {
    "by the sum of the pair": (
        lambda x: lax.cond(paired(x) > 5, lambda: paired(2 * x), lambda: -x),
        [-1, -2, 14, 14]),
    "by the replica's id": (
        lambda x: lax.cond(index() < 2, lambda: paired(x), lambda: -x),
        [3, 3, -3, -4]),
    "by the id of the context": (
        lambda x: lax.cond(
            2 * js.get_replica_context().replica_id_in_sync_group - 1 < 3,
            lambda: paired(x), lambda: -x),
        [3, 3, -3, -4]),
    "by another id": (
        lambda x: lax.cond(
            index() != 0,
            lambda: lax.pmax(x, AXIS, axis_index_groups=[[0], [1, 2, 3]]),
            lambda: -x),
        [-1, 4, 4, 4]),
    "in each branch another": (
        lambda x: lax.cond(
            2 <= index(), lambda: paired(x), lambda: paired(paired(x))),
        [6, 6, 7, 7]),
    "a gathering": (
        lambda x: lax.cond(
            index() >= 2,
            lambda: lax.all_gather(x, AXIS, axis_index_groups=PAIRS)[0],
            lambda: x),
        [1, 2, 3, 3]),
    "parts of a sum": (
        lambda x: lax.cond(
            index() < 2,
            lambda: lax.psum_scatter(
                jnp.stack([x, 10 * x]), AXIS, axis_index_groups=PAIRS),
            lambda: x),
        [3, 30, 3, 4]),
    "within nested branches": (
        lambda x: lax.cond(
            index() < 2,
            lambda: jax.jit(
                lambda v: lax.cond(paired(v) > 2, paired, lambda w: w, v))(x),
            lambda: x),
        [3, 3, 3, 4]),
    "turns of a loop": (
        lambda x: lax.while_loop(
            lambda v: paired(v) < 50, lambda v: paired(v + 1), x),
        until_large(VALUES)),
    "an id that is no less than 0": (
        lambda x: lax.cond(index() >= 0, lambda: lax.psum(x, AXIS), lambda: x),
        [10] * 4),
    "an id that is no more than all": (
        lambda x: lax.cond(index() > 3, lambda: x, lambda: lax.psum(x, AXIS)),
        [10] * 4),
}  # fmt: skip


def test_members_that_decide_alike_meet(four):
    def step(x):
        return {name: each(x) for name, (each, _) in LEGAL.items()}

    found = four.run(step, (four.per_replica(list(VALUES)),))
    for name, (_, expected) in LEGAL.items():
        copies = four.experimental_local_results(found[name])
        np.testing.assert_array_equal(np.stack(copies), expected, name)


ALONE = {
    "by its own value": lambda x: lax.cond(x > 2, paired, lambda v: v, x),
    "by an id inside of a pair": (
        lambda x: lax.cond(index() < 1, paired, lambda v: v, x)),
    "by the sum of other pairs": lambda x: lax.cond(
        lax.psum(x, AXIS, axis_index_groups=[[0, 2], [1, 3]]) > 5,
        paired, lambda v: v, x),
    "all, by the sum of the pair": lambda x: lax.cond(
        paired(x) > 5, lambda v: lax.psum(v, AXIS), lambda v: v, x),
    "all, by the replica's id": lambda x: lax.cond(
        index() < 2, lambda v: lax.psum(v, AXIS), lambda v: v, x),
    "sent on, by the replica's id": lambda x: lax.cond(
        index() < 2,
        lambda v: lax.ppermute(v, AXIS, [(0, 1), (1, 0), (2, 3), (3, 2)]),
        lambda v: v, x),
    "in a branch that not all of the pair reach": lambda x: lax.cond(
        x > 2, lambda v: lax.cond(index() < 2, paired, lambda w: w, v),
        lambda v: v, x),
    "as often as its own value says": lambda x: lax.while_loop(
        lambda v: v < 9, lambda v: paired(v) + index(), x),
    "whose result nobody needs": lambda x: lax.cond(
        x > 2, lambda v: (lax.psum(v, AXIS), v)[1], lambda v: v, x),
}  # fmt: skip


@each_of("name", ALONE)
def test_members_that_may_decide_otherwise_are_refused(four, name):
    # JAX promises nowhere to leave out a collective whose result nobody needs.
    with pytest.raises(
        js.errors.DivergentCollectiveError, match=r"differ between replicas"
    ):
        four.run(ALONE[name], (four.per_replica(list(VALUES)),))


def test_a_merge_call_needs_all_replicas(four):
    def merging(x):
        def merged(strategy, v):
            return strategy.run(lambda v: v * 2.0, (v,))

        return paired(js.get_replica_context().merge_call(merged, (x,)))

    def step(x):
        return lax.cond(index() < 2, merging, lambda v: v, x)

    with pytest.raises(js.errors.DivergentCollectiveError, match="`merge_call`"):
        four.run(step, (four.per_replica(list(VALUES)),))
