"""Variables that are divided over the devices of several processes.

What each process finds wrong it raises; the folder is that of the test.
"""

import pathlib
import sys

import numpy as np

import jaxstrategy as js
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


def main():
    folder = pathlib.Path(sys.path[0])
    strategy = js.MultiWorkerMirroredStrategy(sharding=EVERYTHING)
    with strategy.scope():
        both = variables()
    w = trained(strategy, both)
    assert isinstance(w, js.Sharded)
    with CheckpointManager(folder / "saved", strategy) as manager:
        manager.save(3, {"w": w})
    with CheckpointManager(folder / "one", strategy) as manager:
        manager.restore({"w": w})
    parts_are(w.value(), WHOLE)
    print("all is well", flush=True)
