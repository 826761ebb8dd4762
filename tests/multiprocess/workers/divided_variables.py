"""Variables that are divided over the devices of several processes."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js
from jaxstrategy._src.replicas import mesh
from jaxstrategy.checkpoint import CheckpointManager
from workers.sharded import EVERYTHING, parts_are

WHOLE = np.arange(32.0, dtype=np.float32).reshape(8, 4)
ROWS = np.linspace(-1, 1, 8 * 8, dtype=np.float32).reshape(8, 8)


def variables():
    return [
        js.Variable(WHOLE / 32, name="w"),
        js.Variable(np.zeros_like(WHOLE), name="m"),
    ]


def trained(strategy, variables, steps=3):
    """The same steps for any strategy: momentum, by variables."""
    w, m = variables
    size = 8 // strategy.num_replicas_in_sync
    x = strategy.experimental_distribute_values_from_function(
        lambda context: ROWS[context.replica_id_in_sync_group * size :][:size]
    )

    def step(x):
        grad = js.grad(lambda: ((x @ w.value()) ** 2).mean(), w)()
        m.assign(0.9 * m + js.get_replica_context().all_reduce("mean", grad))
        w.assign_sub(0.1 * m.value())

    for _ in range(steps):
        strategy.run(step, (x,))
    return w


def starts(own):
    """Starts that differ between processes, of which the first one's counts."""
    number = np.full((8, 4), 1.0 + own, np.float32)
    found = js.Variable(WHOLE + own), js.Variable(jnp.asarray(WHOLE) + own)
    for variable in found:
        parts_are(variable.value(), WHOLE)
    key = jax.random.key(3)
    wanted = np.asarray(jax.random.normal(key, (8, 4)))
    for limit in (mesh._AT_ONCE_BYTES, 8):
        mesh._AT_ONCE_BYTES = limit
        parts_are(js.Variable(lambda: number * 2).value(), np.full((8, 4), 2.0))
        other = js.Variable(lambda: jnp.full((8, 4), 1.0 + own)).value()
        parts_are(other, np.ones((8, 4)))
        drawn = js.Variable(lambda: jax.random.normal(key, (8, 4)))
        np.testing.assert_allclose(drawn.numpy(), wanted, rtol=1e-6)
        copied = js.Variable(lambda first=drawn: first * 2)
        np.testing.assert_allclose(copied.numpy(), 2 * wanted, rtol=1e-6)
        assert isinstance(drawn, js.Sharded) and isinstance(copied, js.Sharded)


def changed(strategy):
    with strategy.scope():
        variable, wanted = js.Variable(WHOLE), WHOLE + 1
    parts_are(variable.assign(wanted), wanted)
    parts_are(variable.assign_add(jnp.asarray(WHOLE)), wanted := wanted + WHOLE)
    variable[1:3].assign(0.0)
    variable.scatter_add(js.IndexedSlices(np.ones((2, 4), "float32"), [0, 0]))
    wanted[1:3] = 0
    wanted[0] += 2
    parts_are(variable.value(), wanted)
    np.testing.assert_array_equal(variable.numpy(), wanted)
    np.testing.assert_array_equal(np.asarray(variable), wanted)
    np.testing.assert_array_equal(js.to_host(variable), wanted)
    strategy.assert_in_sync({"v": variable})
    strategy.extended.update(variable, lambda v, x: v.assign(x), args=(WHOLE,))
    parts_are(variable.value(), WHOLE)
    # Without the others: of what this process has, by the number of the replica.
    first = 2 * jax.process_index()
    assert repr(variable) == (
        "Variable 'Variable' float32[8,4] divided along dimension 0, {\n"
        + ",\n".join(
            f"  {i}: {np.array2string(WHOLE[2 * i : 2 * i + 2], separator=', ')}"
            for i in (first, first + 1)
        )
        + "\n}"
    )


def main():
    folder = pathlib.Path(sys.path[0])
    strategy = js.MultiWorkerMirroredStrategy(sharding=EVERYTHING)
    with strategy.scope():
        starts(jax.process_index())
        both = variables()
    changed(strategy)
    w = trained(strategy, both)
    assert isinstance(w, js.Sharded)
    with CheckpointManager(folder / "saved", strategy) as manager:
        manager.save(3, {"w": w})
    with CheckpointManager(folder / "one", strategy) as manager:
        manager.restore({"w": w})
    parts_are(w.value(), WHOLE)
