"""A training loop whose state is divided is preempted and goes on elsewhere."""

import contextlib
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxstrategy as js

STEPS, ROWS = 6, 8
ADAM = optax.adam(0.1)


def sharded(count, shard="state"):
    chosen = js.StateSharding(shard, min_bytes=0)
    return js.MirroredStrategy(jax.devices()[:count], sharding=chosen)


def rows():
    draw = np.random.default_rng(0).normal(size=(STEPS * ROWS, 9)).astype(np.float32)
    return {"x": draw[:, :8], "y": draw[:, 8]}


def first_state():
    params = {"w": jnp.ones(8), "b": jnp.zeros(())}
    return {"params": params, "opt": ADAM.init(params)}


def loss(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def train_step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    value, grads = js.get_replica_context().all_reduce("mean", (value, grads))
    updates, opt = ADAM.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt}, value


def expected():
    """Parameters after all steps, on one device with whole batches."""
    state, data = first_state(), rows()

    @jax.jit
    def step(state, batch):
        grads = jax.grad(loss)(state["params"], batch)
        updates, opt = ADAM.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    for number in range(STEPS):
        part = slice(number * ROWS, (number + 1) * ROWS)
        state = step(state, {name: each[part] for name, each in data.items()})
    return state["params"]


class Preempted(Exception):
    pass


def end():
    raise Preempted


def trained(strategy, folder, notice=None):
    """A training loop over all rows; given `notice`, the machine is wanted after 2."""
    source = js.batches(rows(), ROWS)
    dataset = strategy.experimental_distribute_dataset(source)
    config = js.experimental.TerminationConfig(
        notice.is_set if notice else lambda: False, exit_fn=end
    )
    loop = js.training.training_loop(
        dataset, lambda: strategy.init(first_state), steps=STEPS, checkpoint=folder,
        every=100, in_sync_every=2, progress=False, strategy=strategy,
        termination_config=config,
    )  # fmt: skip
    losses = []
    with contextlib.suppress(Preempted), loop:
        for done, batch in loop:
            if notice and done >= 2:
                notice.set()
                time.sleep(1)  # it is asked for in a thread
            loop.state, value = strategy.run(train_step, (loop.state, batch))
            losses.append(float(value))
    return loop, losses


@pytest.mark.slow
def test_a_preempted_loop_saves_parts_that_other_strategies_go_on_with(tmp_path):
    first, losses = trained(sharded(4), tmp_path, threading.Event())
    assert first.step == len(losses) < STEPS
    assert isinstance(first.state["opt"][0].mu["w"], js.Sharded)
    for strategy in [sharded(2), js.MirroredStrategy(jax.devices()[:4])]:
        folder = shutil.copytree(tmp_path, f"{tmp_path} on {len(strategy.devices)}")
        second, more = trained(strategy, folder)
        assert second.step == STEPS and len(losses) + len(more) == STEPS
        is_divided = isinstance(second.state["opt"][0].mu["w"], js.Sharded)
        assert is_divided is (len(strategy.devices) == 2)
        for name, wanted in expected().items():
            found = js.to_host(second.state["params"][name])
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
