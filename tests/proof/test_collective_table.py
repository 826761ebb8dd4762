"""Each collective of JAX: what the proof and `explain` say of it is what happens."""

import jax
import numpy as np
import pytest
from jax import lax

import jaxstrategy as js

AXIS = "replica"
N = 4
X = np.arange(N * N, dtype=np.float32).reshape(N, N) ** 2
RING = [(i, (i + 1) % N) for i in range(N)]

# Of each JAX's primitive, what it is to a `Topology`, and what NumPy says. `pbroadcast`
# has no lowering on CPUs, `ragged_all_to_all` none that is a collective.
USES = {
    "psum": (lambda x: lax.psum(x, AXIS), "psum", "all_reduce", X.sum(0)),
    "pmean": (lambda x: lax.pmean(x, AXIS), "psum", "all_reduce", X.mean(0)),
    "pmax": (lambda x: lax.pmax(x, AXIS), "pmax", "all_reduce", X.max(0)),
    "pmin": (lambda x: lax.pmin(x, AXIS), "pmin", "all_reduce", X.min(0)),
    "all_gather": (lambda x: lax.all_gather(x, AXIS), "all_gather", "all_gather", X),
    "ppermute": (
        lambda x: lax.ppermute(x, AXIS, RING), "ppermute", "permute", np.roll(X, 1, 0)),
    "pshuffle": (
        lambda x: lax.pshuffle(x, AXIS, [1, 2, 3, 0]), "ppermute", "permute",
        X[[1, 2, 3, 0]]),
    "all_to_all": (
        lambda x: lax.all_to_all(x, AXIS, 0, 0), "all_to_all", "all_to_all", X.T),
    "pswapaxes": (
        lambda x: lax.pswapaxes(x, AXIS, 0), "all_to_all", "all_to_all", X.T),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, AXIS), "reduce_scatter", "reduce_scatter",
        X.sum(0)),
}  # fmt: skip
SAME = {"psum", "pmean", "pmax", "pmin", "all_gather"}


def test_results_are_numpys_and_mirrored_where_all_replicas_get_the_same(four):
    x = four.per_replica(list(X))
    found = four.run(lambda x: {name: use(x) for name, (use, *_) in USES.items()}, (x,))
    for name, (*_, wanted) in USES.items():
        is_mirrored = not isinstance(found[name], js.PerReplica)
        assert is_mirrored is (name in SAME), name
        value = found[name] if is_mirrored else found[name].stacked
        np.testing.assert_allclose(value, wanted, err_msg=name)


def test_explanations_tell_what_each_is(four):
    x = js.PerReplica(jax.ShapeDtypeStruct((N, N), np.float32))
    topology = js.profiling.Topology(bandwidth=1e9, latency=1e-5, replicas=N)
    for name, (use, primitive, kind, _) in USES.items():
        (found,) = four.explain(use, (x,), compiled=False).collectives
        assert (found.operation, found.kind) == (primitive, kind), name
        assert topology.fastest(found.kind, 1 << 20) > 0


def test_messages_call_a_collective_as_the_user_does(four):
    x = four.per_replica([np.full(N, float(i), np.float32) for i in range(N)])
    for name, (use, *_) in USES.items():

        def step(x, use=use):
            return lax.cond(x[0] > 1, use, use, x)

        with pytest.raises(js.errors.DivergentCollectiveError, match=f"`{name}`"):
            four.run(step, (x,))
