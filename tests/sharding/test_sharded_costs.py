"""What sharded state costs: collectives and memory, as XLA tells of both."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.divided import assert_alike, bytes_of, drawn, sharded, whole
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js
from jaxstrategy._src.tracing.explanation.compiled_program import HloModule

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


def whole_bytes(each):
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
        found[each.kind] += each.least_times * whole_bytes(each)
    assert told == found


# The memory of steps over layers, and where they gather them, as XLA tells of both.

DEPTH, WIDTH = 8, 128
OPTIMIZER = optax.adamw(1e-3)


def start():
    layers = {
        "up": drawn(DEPTH, WIDTH, 2 * WIDTH) / 16,
        "down": drawn(DEPTH, 2 * WIDTH, WIDTH, seed=1) / 16,
    }
    return layers, jax.jit(OPTIMIZER.init)(layers)


def training(remat):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    body = jax.checkpoint(layer) if remat else layer

    def step(state, x):
        layers, memory = state
        loss = lambda layers: (lax.scan(body, x, layers)[0] ** 2).mean()  # noqa: E731
        grads = replica().all_reduce("mean", jax.grad(loss)(layers))
        updates, memory = OPTIMIZER.update(grads, memory, layers)
        return optax.apply_updates(layers, updates), memory

    return step


def trained(strategy, remat):
    """The state after two donated steps, and what is told of the program."""
    step, state = training(remat), strategy.mirror(start())
    x = strategy.per_replica(
        list(drawn(strategy.num_replicas_in_sync, 4, WIDTH, seed=2))
    )
    options = js.RunOptions(donate_argnums=0)
    for _ in range(2):
        state = strategy.run(step, (state, x), options=options)
    found = strategy.explain(step, (state, x), options=options)
    return jax.tree.map(np.asarray, state), found.memory, found.compiled_collectives


@pytest.mark.slow
def test_layers_are_gathered_one_by_one_with_remat():
    state, memory, exchanged = trained(sharded(), True)
    want, other, _ = trained(whole(), True)
    assert_alike(state, want)
    assert memory.peak <= 0.25 * other.peak
    assert memory.temporary <= 0.25 * other.temporary
    per_layer = {(each.kind, each.times) for each in exchanged}
    assert per_layer == {
        ("all_gather", DEPTH),
        ("reduce_scatter", DEPTH),
    }


@pytest.mark.slow
def test_what_is_gathered_is_not_kept_without_remat():
    state, memory, _ = trained(sharded(), False)
    want, other, _ = trained(whole(), False)
    assert_alike(state, want)
    assert memory.temporary <= 0.4 * other.temporary
    assert memory.peak <= 0.25 * other.peak


# Layers in a Python loop: how often the compiled step gathers each weight.

COUNT = 3


def layer(x, w):
    return jnp.tanh(x @ w)


def step_with(layer):
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = layer(h, w)
            return (h**2).mean()

        grads = replica().all_reduce("mean", jax.grad(loss)(weights))
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    return step


@pytest.fixture
def four_divided():
    sharding = js.StateSharding("state", min_bytes=0)
    return js.MirroredStrategy(jax.devices()[:4], sharding=sharding)


def lowered(strategy, layer):
    weights = strategy.mirror([np.eye(UNITS, dtype=np.float32)] * COUNT)
    x = strategy.per_replica(np.ones((4, 2, UNITS), np.float32))
    step = step_with(layer)
    return jax.jit(lambda *args: strategy.run(step, args)).lower(weights, x)


def barriers_last():
    """Whether XLA keeps what stands around a barrier apart until the end."""

    def twice(x):
        return jnp.sin(x) + jnp.sin(lax.optimization_barrier(x))

    compiled = jax.jit(twice).lower(np.ones(8, np.float32)).compile().as_text()
    return len(re.findall(r"\bsine\(", compiled)) == 2


# XLA takes the two gathers of one weight for the same, unless a barrier keeps them
# apart: the weight would then stay whole from the forward pass to the backward one.
@each_of(("layer", "times"), [(jax.checkpoint(layer), 2), (layer, 1)])
def test_a_layer_that_is_computed_again_gathers_its_weight_again(
    four_divided, layer, times
):
    program = lowered(four_divided, layer)
    text = program.as_text()
    behind = re.findall(r"(%\S+?)(?::\d+)? = stablehlo.optimization_barrier", text)
    gathered = re.findall(r"stablehlo.all_gather\"\((%\w+)(?:#\d+)?\)", text)
    assert len(gathered) == COUNT * times
    assert sum(name in behind for name in gathered) == COUNT * (times - 1)
    compiled = HloModule(program.compile().as_text())
    found = compiled.collectives(four_divided._replicas, __file__)
    gathers = [4 * each.nbytes for each in found if each.kind == "all_gather"]
    # That of JAX 0.10 for processors drops barriers before it joins what is equal.
    kept = times if barriers_last() else 1
    assert gathers == [KERNEL] * COUNT * kept


# Optimizers of Optax, unchanged, under `StateSharding`.

OPTIMIZERS = {
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
    "clipped adamw": optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.01)
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "muon": optax.contrib.muon(1e-2),
}


PARAMS = kernels()


def optimized(optimizer, strategy):
    """The parameters and the optimizer's memory after three steps."""
    step, state = step_of(optimizer), (PARAMS, jax.jit(optimizer.init)(PARAMS))
    for x in drawn(3, 4, 2, UNITS, seed=3):
        state = strategy.run(step, (state, strategy.per_replica(list(x))))
    return state


@pytest.mark.slow
@each_of("name", ["MultiSteps", "clipped adamw", "adafactor", "muon"])
def test_parameters_and_memory_are_those_of_whole_state(name):
    params, memory = optimized(OPTIMIZERS[name], sharded(4))
    want = optimized(OPTIMIZERS[name], whole(4))
    assert_alike((params, memory), want, 5e-6)
    assert isinstance(params["a"], js.Sharded)
    # All that has the size of a parameter is kept in parts; so are, here, the rows and
    # columns of a factored one.
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(memory))
    numbers = sum(leaf.nbytes for leaf in jax.tree.leaves(memory) if leaf.size < 4)
    assert bytes_of(memory) <= (total - numbers) / 4 + numbers


@pytest.mark.slow
def test_the_optimizers_memory_alone_is_divided(name="apply_if_finite"):
    params, memory = optimized(OPTIMIZERS[name], sharded(4, "optimizer"))
    want = optimized(OPTIMIZERS[name], whole(4))
    assert_alike((params, memory), want, 5e-6)
    assert isinstance(params["a"], js.Mirrored)
    large = [leaf for leaf in jax.tree.leaves(memory) if leaf.size >= UNITS]
    assert large and all(isinstance(leaf, js.Sharded) for leaf in large)
