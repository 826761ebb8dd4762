"""Replicas of several processes that take steps by themselves, and then synchronize."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxstrategy as js

START = np.float32([0.5, -1.0, 2.0])
STEPS, EVERY, RATE = 6, 2, 0.1


def rows(n):
    """Of each step and replica its own, `[step, replica, row, 3]`."""
    draw = np.random.default_rng(0)
    return draw.normal(size=(STEPS, n, 4, 3)).astype(np.float32)


def gradient(w, x):
    return jax.grad(lambda w: jnp.mean((x @ w - x.sum(-1)) ** 2))(w)


def batches(strategy):
    def global_batch(each):
        return each.reshape(-1, 3)

    source = list(map(global_batch, rows(strategy.num_replicas_in_sync)))
    return strategy.experimental_distribute_dataset(source)


def averaged(strategy):
    """The parameters after each round of `local_steps`."""

    def step(w, x):
        grad = js.get_replica_context().all_reduce("mean", gradient(w, x))
        return w - RATE * grad, grad[0]

    local, w, found = strategy.local_steps(step), START, []
    for group in js.experimental.grouped(batches(strategy), EVERY):
        w, _ = local(w, group)
        found.append(np.asarray(w).tolist())
    strategy.assert_in_sync(w)
    return found


def outer(strategy, folder):
    """Those in the state of the optimizer; saved and restored within a round."""
    tx = js.optax.outer(optax.sgd(RATE, momentum=0.9), every=EVERY)

    def init():
        state = strategy.mirror(START), tx.init(strategy.mirror(START))
        return js.optax.own_copies(state, strategy=strategy)

    @strategy.run
    def step(both, x):
        w, state = both
        updates, state = tx.update(gradient(w, x), state, w)
        return optax.apply_updates(w, updates), state

    both, found = init(), []
    manager = js.checkpoint.CheckpointManager(folder, strategy)
    for number, x in enumerate(batches(strategy), 1):
        both = step(both, x)
        if number == 3:  # in the middle of the second round
            manager.save(number, both)
            manager.wait()
            both = manager.restore(init())
        if number % EVERY == 0:
            found.append(np.asarray(both[1].params).tolist())
    manager.close()
    return found


def main():
    folder = pathlib.Path(sys.path[0]) / "checkpoints"
    strategy = js.MultiWorkerMirroredStrategy()
    found = {"averaged": averaged(strategy), "outer": outer(strategy, folder)}
    print("found", json.dumps(found))
