"""The one table of collectives agrees with JAX, and all that read it do with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxstrategy as js
from jaxstrategy.tracing.replication._collective_table import COLLECTIVES, Effect

AXIS = "replica"
N = 4

# `pbroadcast` has no lowering on CPUs, `ragged_all_to_all` none that is a collective.
USES = {
    "psum": lambda x: lax.psum(x, AXIS),
    "pmean": lambda x: lax.pmean(x, AXIS),
    "pmax": lambda x: lax.pmax(x, AXIS),
    "pmin": lambda x: lax.pmin(x, AXIS),
    "all_gather": lambda x: lax.all_gather(x, AXIS),
    "ppermute": lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % N) for i in range(N)]),
    "pshuffle": lambda x: lax.pshuffle(x, AXIS, [1, 2, 3, 0]),
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 0),
    "pswapaxes": lambda x: lax.pswapaxes(x, AXIS, 0),
    "psum_scatter": lambda x: lax.psum_scatter(x, AXIS),
}


def of_function(name):
    (row,) = [row for row in COLLECTIVES.values() if name in row.functions]
    return row


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(jax.devices()[:N])


def local(strategy, function):
    spec = PartitionSpec(AXIS)
    return jax.shard_map(
        lambda x: function(x[0])[None],
        mesh=strategy.mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )


@pytest.mark.parametrize("name", USES)
def test_a_row_has_the_name_that_jax_gives_and_what_it_becomes(four, name):
    row = of_function(name)
    function = local(four, USES[name])
    x = jnp.arange(N * N, dtype=jnp.float32).reshape(N, N)
    jaxpr = jax.make_jaxpr(function)(x).eqns[0].params["jaxpr"]
    found = [e for e in jaxpr.eqns if {"axes", "axis_name"} & set(e.params)]
    assert [eqn.primitive.name for eqn in found] == [row.name]
    assert f"stablehlo.{row.lowered}" in jax.jit(function).lower(x).as_text()


@pytest.mark.parametrize("name", USES)
def test_an_effect_is_what_happens(four, name):
    effect = of_function(name).effect
    x = np.arange(N * N, dtype=np.float32).reshape(N, N) ** 2
    results = np.asarray(jax.jit(local(four, USES[name]))(x))
    is_same = bool((results == results[0]).all())
    assert is_same is (effect in (Effect.SUM, Effect.EXTREME, Effect.GATHER))
    if effect is Effect.SUM:
        scale = N if name == "pmean" else 1
        np.testing.assert_allclose(results[0] * scale, x.sum(0))
    if effect is Effect.SUM_SCATTER:
        np.testing.assert_allclose(results, x.sum(0))
    if effect is Effect.GATHER:
        np.testing.assert_allclose(results[0], x)
    if effect is Effect.PERMUTE:
        assert sorted(map(tuple, results)) == sorted(map(tuple, x))
    if effect is Effect.SCATTER:
        np.testing.assert_allclose(results, x.T)


@pytest.mark.parametrize("row", COLLECTIVES.values(), ids=lambda row: row.name)
def test_a_topology_has_a_formula_for_each(row):
    topology = js.Topology(bandwidth=1e9, latency=1e-5, replicas=N)
    assert topology.fastest(row.kind, 1 << 20) > 0


@pytest.mark.parametrize("name", USES)
def test_what_a_step_returns_is_called_mirrored_where_the_effect_says_so(four, name):
    effect = of_function(name).effect
    x = four.per_replica([np.arange(N, dtype=np.float32) + i for i in range(N)])
    found = four.run(USES[name], (x,))
    is_mirrored = not isinstance(found, js.PerReplica)
    assert is_mirrored is (effect in (Effect.SUM, Effect.EXTREME, Effect.GATHER))


@pytest.mark.parametrize("name", USES)
def test_messages_call_a_collective_as_the_user_does(four, name):
    def step(x):
        return lax.cond(x[0] > 1, USES[name], USES[name], x)

    x = four.per_replica([np.full(N, float(i), np.float32) for i in range(N)])
    with pytest.raises(js.DivergentCollectiveError, match=f"`{name}`"):
        four.run(step, (x,))


@pytest.mark.parametrize("name", USES)
def test_explanations_tell_the_kind(four, name):
    row = of_function(name)
    x = js.PerReplica(jax.ShapeDtypeStruct((N, N), np.float32))
    (found,) = four.explain(USES[name], (x,), compiled=False).collectives
    assert (found.operation, found.kind) == (row.name, row.kind)
