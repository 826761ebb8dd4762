"""Sums of what is reduced already, in whatever way: each is told, nothing else."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from helpers.cases import each_of
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

AXIS = "replica"
GROUPS = [[0, 1], [2, 3]]


def rows(strategy):
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([np.full(4, i, np.float32) for i in range(count)])


def is_told(strategy, step):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", js.errors.DoubleReductionWarning)
        strategy.run(lambda x: step(x), (rows(strategy),))
    return bool(told)


def in_parts(x):
    part = lax.psum_scatter(x, AXIS, tiled=True)
    return lax.all_gather(part / 4, AXIS, tiled=True)


def in_groups(x):
    first = lax.psum_scatter(x, AXIS, tiled=True, axis_index_groups=GROUPS)
    total = lax.psum(first, AXIS, axis_index_groups=[[0, 2], [1, 3]])
    return lax.all_gather(total, AXIS, tiled=True, axis_index_groups=GROUPS)


TWICE = {
    "mean over all_gather": lambda x: replica().all_gather(x, 0).mean(0),
    "mean over lax.all_gather": lambda x: lax.all_gather(x, AXIS).mean(0),
    "largest over all_gather": lambda x: lax.all_gather(x, AXIS).max(0),
    "gathered parts of a sum": in_parts,
    "gathered parts of groups": in_groups,
    "sent around": lambda x: lax.ppermute(
        lax.pmean(x, AXIS), AXIS, [(i, (i + 1) % 4) for i in range(4)]
    ),
    "within accumulate": lambda x: js.get_strategy().accumulate(2)(
        lambda part: replica().all_reduce("mean", part.sum())
    )(x),
}


@each_of("name", TWICE, anew=True)
def test_a_sum_of_it_is_told(four, name):
    assert is_told(four, lambda x: replica().all_reduce("sum", TWICE[name](x)))
    assert not is_told(four, lambda x: replica().all_reduce("mean", TWICE[name](x)))


@each_of("kind", ["RING", "hierarchical"])
def test_a_sum_by_any_algorithm_is_told(four, kind):
    if kind == "RING":
        options = js.experimental.CommunicationOptions(implementation=kind)
        strategy = js.MirroredStrategy(four.devices, communication_options=options)
    else:
        ops = js.HierarchicalCopyAllReduce()
        strategy = js.MirroredStrategy(four.devices, cross_device_ops=ops)
    once = lambda x: replica().all_reduce("sum", x)  # noqa: E731
    assert is_told(strategy, lambda x: once(replica().all_reduce("mean", x)))
    assert not is_told(strategy, once)


def test_a_sum_of_it_is_told_although_it_goes_in_one_pack_with_others(four):
    """The pack differs between replicas; a part of it does not."""

    def step(x):
        mean = replica().all_reduce("mean", x)
        return replica().all_reduce("sum", {"again": mean, "once": x})

    assert is_told(four, step)
    assert not is_told(four, lambda x: replica().all_reduce("sum", {"a": x, "b": x}))


@each_of("size", [3, 24])
def test_a_sum_of_it_is_told_in_a_pack_of_many(four, size):
    """In such a pack short arrays lie in a table, which is joined with the others."""

    def step(x):
        mean = replica().all_reduce("mean", jnp.tile(x[:1], size))
        rest = [jnp.tile(x[:1], 24)] * 20
        return replica().all_reduce("sum", {"again": mean, "once": rest})

    assert is_told(four, step)
    assert not is_told(
        four, lambda x: replica().all_reduce("sum", [jnp.tile(x[:1], 24)] * 20)
    )


ONCE = {
    "a mean in another form": lambda x: (
        lax.psum(lax.pmean(x, AXIS), AXIS).reshape(-1) / 4
    ),
    "a mean of another form": lambda x: (
        lax.psum(lax.pmean(x, AXIS), AXIS)[None].T.squeeze() / 4
    ),
    "a check": lambda x: jnp.all(
        lax.psum(lax.pmax(x, AXIS), AXIS) == 4 * lax.pmax(x, AXIS)
    ),
    "what was gathered": lambda x: lax.psum(jnp.sin(lax.all_gather(x, AXIS)), AXIS),
    "along another axis": lambda x: lax.psum(lax.all_gather(x, AXIS).sum(1), AXIS),
    "gathered from some": lambda x: lax.psum(
        lax.all_gather(x, AXIS, axis_index_groups=GROUPS).sum(0), AXIS
    ),
}


@each_of("name", ONCE, anew=True)
def test_no_false_alarm_for(four, name):
    assert not is_told(four, ONCE[name])


# Values sent on.

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


@each_of(
    ("step", "varies"),
    [
        (lambda x: lax.ppermute(lax.pmean(x, AXIS), AXIS, RING), False),
        (lambda x: lax.ppermute(lax.pmean(x, AXIS), AXIS, RING[:3]), True),
        (lambda x: lax.ppermute(x, AXIS, RING), True),
        (lambda x: jax.jit(lambda v: lax.ppermute(v, AXIS, RING))(jnp.ones(3)), False),
        (
            # Two groups, then all, of which each has a member's of each group.
            lambda x: lax.psum(
                lax.ppermute(
                    lax.psum(x, AXIS, axis_index_groups=GROUPS), AXIS,
                    [(0, 2), (2, 0), (1, 3), (3, 1)],
                ),
                AXIS, axis_index_groups=[[0, 2], [1, 3]],
            ), False,
        ),
        (
            lambda x: lax.psum(
                lax.ppermute(
                    lax.psum(x, AXIS, axis_index_groups=GROUPS), AXIS, RING
                ),
                AXIS, axis_index_groups=GROUPS,
            ), True,  # a + b in one group, b + a in the other
        ),
        (
            lambda x: lax.ppermute(
                lax.psum(x, AXIS, axis_index_groups=GROUPS), AXIS, RING
            ), True,
        ),
    ],
    anew=True,
)  # fmt: skip
def test_what_all_send_on_is_what_all_hold(four, step, varies):
    out = four.run(lambda x: step(x), (rows(four),))
    assert isinstance(out, js.PerReplica) == varies
    if not varies:
        assert len({np.asarray(s.data).tobytes() for s in out.addressable_shards}) == 1
