"""Random steps make the same numbers wherever replicas lie, and as NumPy makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import cored
from helpers.random_steps import RandomStep
from helpers.replicas import replica

import jaxstrategy as js

# A whole step is small; without this none of it would be divided.
ALL = {
    "whole": None,
    "state": js.StateSharding("state", min_bytes=0),
    "optimizer": js.StateSharding("optimizer", min_bytes=0),
}


def shared(devices, each):
    return {"devices": devices, "replicas_per_device": each}


def several(devices, cores):
    return {"devices": devices, "logical_axes": {"core": cores}}


LAYOUTS = {
    "8": {"devices": 8},
    "1 by 8": shared(1, 8),
    "2 by 4": shared(2, 4),
    "8 of 1": several(8, 1),
    "4 of 2": several(8, 2),
}
# Each layout, and each way to keep state, with some seed; the first three have found
# mistakes.
CASES = [
    (1, "2 by 4", "state"),
    (0, "4 of 2", "state"),
    (3, "8", "optimizer"),
    (1, "1 by 8", "optimizer"),
    (3, "4 of 2", "whole"),
    (2, "8 of 1", "state"),
]


def strategy_of(layout, kept):
    options = dict(LAYOUTS[layout])
    devices = jax.devices()[: options.pop("devices")]
    return js.MirroredStrategy(devices, sharding=ALL[kept], **options)


@pytest.mark.slow
@each_of(("seed", "layout", "kept"), CASES)
def test_random_steps_are_those_of_a_loop_in_numpy(seed, layout, kept):
    strategy = strategy_of(layout, kept)
    step = RandomStep(seed, strategy.num_replicas_in_sync)
    found, traces = step.under(strategy, calls=2, donate=seed % 2 == 1)
    assert traces == 1
    wanted = step.in_numpy(calls=2)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def number():
    return replica().replica_id_in_sync_group


def drawn():
    return jax.random.uniform(replica().fold_in(jax.random.key(0)))


NUMBERED = {
    "scan": lambda w: jax.lax.scan(lambda c, _: (c + number(), None), w, length=2)[0],
    "cond": lambda w: jax.lax.cond(w.sum() > 0, lambda w: w + number(), jnp.sin, w),
    "jit": lambda w: jax.jit(lambda w: w + number())(w),
    "keys": lambda w: jax.lax.map(lambda x: x + drawn(), w),
}


@pytest.mark.slow
@each_of("cores", [1, 2])
def test_a_replica_of_several_devices_knows_its_number_in_loops(cores):
    strategy = cored(8 // cores, cores, sharding=ALL["state"])
    kernel = strategy.init(lambda: jnp.ones(8))

    def step(kernel):
        found = {way: function(kernel) for way, function in NUMBERED.items()}
        return replica().all_reduce("sum", found)

    n = 8 // cores
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(n)]
    wanted = {
        "scan": n + n * (n - 1),
        "cond": n + n * (n - 1) / 2,
        "jit": n + n * (n - 1) / 2,
        "keys": n + sum(float(jax.random.uniform(key)) for key in keys),
    }
    for way, found in strategy.run(step, (kernel,)).items():
        np.testing.assert_allclose(found, np.full(8, wanted[way]), rtol=1e-5)


def test_replicas_of_several_devices_solve_systems():
    strategy = cored(4, 2, sharding=ALL["state"])
    kernel = strategy.init(lambda: 9 * jnp.eye(8))
    x = RandomStep(0, 4).drawn(4, 8, 8)

    @strategy.step
    def step(kernel, x):
        return replica().all_reduce("mean", jnp.linalg.solve(kernel + x, x))

    found = step(kernel, strategy.per_replica(list(x)))
    wanted = np.mean([np.linalg.solve(9 * np.eye(8) + each, each) for each in x], 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
