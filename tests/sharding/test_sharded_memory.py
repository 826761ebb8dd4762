"""The memory of steps over layers, and where they gather them, as XLA tells of both."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.divided import assert_alike, drawn, sharded, whole
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

FOLDER = Path(__file__).parents[2] / "benchmarks"
LAYERS, WIDTH = 8, 128
OPTIMIZER = optax.adamw(1e-3)


@pytest.fixture
def reader(monkeypatch):
    """What reads the programs that calls have left behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("_compiled")


def start():
    layers = {
        "up": drawn(LAYERS, WIDTH, 2 * WIDTH) / 16,
        "down": drawn(LAYERS, 2 * WIDTH, WIDTH, seed=1) / 16,
    }
    return layers, jax.jit(OPTIMIZER.init)(layers)


def training(name, remat):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    body = jax.checkpoint(layer) if remat else layer

    def step(state, x):
        layers, memory = state
        loss = lambda layers: (lax.scan(body, x, layers)[0] ** 2).mean()  # noqa: E731
        grads = replica().all_reduce("mean", jax.grad(loss)(layers))
        updates, memory = OPTIMIZER.update(grads, memory, layers)
        return optax.apply_updates(layers, updates), memory

    step.__name__ = name
    return step


def trained(strategy, name, remat, reader):
    """The state after two donated steps, and the program that made it."""
    step, state = training(name, remat), strategy.mirror(start())
    x = strategy.per_replica(
        list(drawn(strategy.num_replicas_in_sync, 4, WIDTH, seed=2))
    )
    for _ in range(2):
        options = js.RunOptions(donate_argnums=0)
        state = strategy.run(step, (state, x), options=options)
    return jax.tree.map(np.asarray, state), reader.compiled(name)


def per_layer(program):
    """The gathers and scatters of one layer, by kind, with how often they are done."""
    kinds = {"all-gather", "reduce-scatter"}
    return {(c.kind, c.times) for c in program.collectives if c.kind in kinds}


@pytest.mark.slow
def test_layers_are_gathered_one_by_one_with_remat(reader):
    state, program = trained(sharded(), "divided_layers", True, reader)
    want, other = trained(whole(), "whole_layers", True, reader)
    assert_alike(state, want)
    assert program.peak <= 0.25 * other.peak
    assert program.temporary <= 0.25 * other.temporary
    assert per_layer(program) == {("all-gather", LAYERS), ("reduce-scatter", LAYERS)}


@pytest.mark.slow
def test_what_is_gathered_is_not_kept_without_remat(reader):
    state, program = trained(sharded(), "divided_plain", False, reader)
    want, other = trained(whole(), "whole_plain", False, reader)
    assert_alike(state, want)
    assert program.temporary <= 0.4 * other.temporary
    assert program.peak <= 0.25 * other.peak
