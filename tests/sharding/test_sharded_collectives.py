"""The collectives of compiled steps of sharded state, counted in XLA's own text."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

N, UNITS = 8, 16
KERNEL = UNITS * UNITS * 4  # bytes
RNG = np.random.default_rng(0)


def strategy(shard):
    sharding = js.StateSharding(shard, min_bytes=KERNEL) if shard else None
    return js.MirroredStrategy(js.simulate(8), sharding=sharding)


def kernels(names="ab"):
    return {n: RNG.normal(size=(UNITS, UNITS)).astype(np.float32) for n in names}


def in_turn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x


def in_a_loop(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    return x @ params["head"]


def step_of(optimizer, model=in_turn):
    def step(state, x):
        params, slots = state

        def loss(params):
            return (model(params, x) ** 2).mean()

        grads = replica().all_reduce("mean", jax.grad(loss)(params))
        updates, slots = optimizer.update(grads, slots, params)
        return optax.apply_updates(params, updates), slots

    return step


def whole(each):
    """The bytes of the whole array that a collective of the program is of."""
    return each.nbytes * (N if each.kind == "all_gather" else 1)


def test_a_whole_result_made_of_parts_is_the_same_bit_by_bit():
    # A chain that ends in a sum of a whole array and one that was divided.
    optimizer = optax.sgd(0.1)
    params, step = kernels(), step_of(optimizer)
    numbers = np.linspace(-1, 1, N * 2 * UNITS, dtype="f4").reshape(N, 2, UNITS)
    results = []
    for shard in (None, "optimizer"):
        own = strategy(shard)
        x = own.per_replica(numbers)
        state = own.mirror((params, optimizer.init(params)))
        for _ in range(3):
            state = own.run(step, (state, x))
        results.append(jax.device_get(state))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_only_whole_results_are_gathered_if_the_optimizers_state_is_divided():
    optimizer = optax.adamw(0.1)
    own, params = strategy("optimizer"), kernels()
    state = own.mirror((params, optimizer.init(params)))
    x = own.per_replica(np.ones((N, 2, UNITS), np.float32))
    found = own.explain(step_of(optimizer), (state, x)).compiled_collectives
    wanted = [("all_gather", KERNEL)] * 2 + [("reduce_scatter", KERNEL)] * 2
    assert sorted((each.kind, whole(each)) for each in found) == wanted


LAYERS = {
    "layers": RNG.normal(size=(3, UNITS, UNITS)).astype(np.float32),
    "head": RNG.normal(size=(UNITS, UNITS)).astype(np.float32),
}
FACTORS = optax.adafactor(0.1, min_dim_size_to_factor=8)
MANY = optax.MultiSteps(optax.adam(0.1), 2)
CLIP = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1))


COUNTED = [
    ("optimizer", in_turn, kernels(), CLIP),
    ("state", in_a_loop, LAYERS, CLIP),
    ("state", in_turn, kernels("a"), MANY),
    ("state", in_turn, kernels("a"), FACTORS),
]


@pytest.mark.slow
@each_of("shard, model, params, optimizer", COUNTED)
def test_explain_tells_the_bytes_of_the_compiled_program(
    shard, model, params, optimizer
):
    own, step = strategy(shard), step_of(optimizer, model)
    state = own.mirror((params, optimizer.init(params)))
    x = own.per_replica(np.ones((N, 2, UNITS), np.float32))
    explained = own.explain(step, (state, x))
    told, found = collections.Counter(), collections.Counter()
    for each in explained.collectives:
        told[each.kind] += each.least_times * each.nbytes * each.parts
    for each in explained.compiled_collectives:
        found[each.kind] += each.least_times * whole(each)
    assert told == found
