"""The collectives of compiled steps of sharded state, counted in XLA's own text."""

import collections
import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

FOLDER = Path(__file__).parents[2] / "benchmarks"
N, UNITS = 8, 16
KERNEL = UNITS * UNITS * 4  # bytes
RNG = np.random.default_rng(0)


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_compiled")


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


def lowered(strategy, step, *args):
    return jax.jit(lambda *args: strategy.run(step, args)).lower(*args)


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


def test_only_whole_results_are_gathered_if_the_optimizers_state_is_divided(reader):
    optimizer = optax.adamw(0.1)
    own, params = strategy("optimizer"), kernels()
    state = own.mirror((params, optimizer.init(params)))
    x = own.per_replica(np.ones((N, 2, UNITS), np.float32))
    compiled = lowered(own, step_of(optimizer), state, x).compile()
    found = [c for c in reader.collectives(compiled.as_text()) if c.group > 1]
    assert sorted((each.kind, each.whole) for each in found) == [
        ("all-gather", KERNEL),
        ("all-gather", KERNEL),
        ("reduce-scatter", KERNEL),
        ("reduce-scatter", KERNEL),
    ]


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
    reader, shard, model, params, optimizer
):
    own, step = strategy(shard), step_of(optimizer, model)
    state = own.mirror((params, optimizer.init(params)))
    x = own.per_replica(np.ones((N, 2, UNITS), np.float32))
    told = collections.Counter()
    for each in own.explain(step, (state, x), compiled=False).collectives:
        whole = each.least_times * each.nbytes * each.parts
        told[each.kind.replace("_", "-")] += whole
    found = collections.Counter()
    for each in reader.collectives(lowered(own, step, state, x).compile().as_text()):
        if each.group > 1:
            found[each.kind] += each.times * each.whole
    assert told == found
