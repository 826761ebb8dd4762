"""Layers in a Python loop: how often the compiled step gathers each weight."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js
from jaxstrategy._src.tracing.explanation.compiled_program import compiled_collectives

UNITS, LAYERS = 16, 3
KERNEL = UNITS * UNITS * 4  # bytes


def layer(x, w):
    return jnp.tanh(x @ w)


def step_of(layer):
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
def strategy():
    sharding = js.StateSharding("state", min_bytes=0)
    return js.MirroredStrategy(jax.devices()[:4], sharding=sharding)


def lowered(strategy, layer):
    weights = strategy.mirror([np.eye(UNITS, dtype=np.float32)] * LAYERS)
    x = strategy.per_replica(np.ones((4, 2, UNITS), np.float32))
    step = step_of(layer)
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
    strategy, layer, times
):
    program = lowered(strategy, layer)
    text = program.as_text()
    behind = re.findall(r"(%\S+?)(?::\d+)? = stablehlo.optimization_barrier", text)
    gathered = re.findall(r"stablehlo.all_gather\"\((%\w+)(?:#\d+)?\)", text)
    assert len(gathered) == LAYERS * times
    assert sum(name in behind for name in gathered) == LAYERS * (times - 1)
    compiled = program.compile().as_text()
    found = compiled_collectives(compiled, strategy._replicas, __file__)
    gathers = [4 * each.nbytes for each in found if each.kind == "all_gather"]
    # That of JAX 0.10 for processors drops barriers before it joins what is equal.
    kept = times if barriers_last() else 1
    assert gathers == [KERNEL] * LAYERS * kept
