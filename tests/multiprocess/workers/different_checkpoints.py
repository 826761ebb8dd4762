"""Processes that save or restore different things, and what they are told."""

import json
import pathlib
import sys

import jax
import numpy as np

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager


def train_step(w):
    return w + js.get_replica_context().all_reduce("sum", w)


def main():
    folder = pathlib.Path(sys.path[0]) / "different"
    options = js.experimental.CommunicationOptions(timeout_seconds=20)
    strategy = js.MultiWorkerMirroredStrategy(communication_options=options)
    own = jax.process_index()
    w = strategy.mirror(np.zeros((2, 3), np.float32))
    step = strategy.run(train_step)
    manager = CheckpointManager(folder / "saved", strategy)
    elsewhere = CheckpointManager(folder / f"saved{own}")
    manager.save(1, {"w": w})
    manager.wait()
    cases = {
        "save and step": lambda: step(w) if own else manager.save(2, {"w": w}),
        "save another step": lambda: manager.save(2 + own, {"w": w}),
        "save another folder": lambda: elsewhere.save(2, {"w": w}),
        "save and restore": lambda: (
            manager.restore({"w": w}) if own else manager.save(2, {"w": w})
        ),
        "save other leaves": lambda: manager.save(
            2, {"w": w, **({"v": w} if own else {"u": w, "t": 1})}
        ),
    }
    told = {}
    for name, do in cases.items():
        try:
            do()
        except js.ClusterError as error:
            told[name] = str(error)
    found = sorted(str(each.relative_to(folder)) for each in folder.glob("*/*"))
    print("told", json.dumps([told, found]))
