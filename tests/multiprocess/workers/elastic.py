"""Trains on the handwritten digits with 24 replicas, on as many processes as there are.

Arguments: a folder for checkpoints, and "disturbed" for one whose processes are killed.
"""

import hashlib
import os
import sys
import time

import jax
import numpy as np

import jaxstrategy as js
from workers import digits

STEPS = 30
# By attempt: who is killed before which step.
KILLED = {0: (0, 8), 1: (2, 14)}


def main(folder, is_disturbed):
    strategy = js.MultiWorkerMirroredStrategy(
        num_replicas=24,
        communication_options=js.experimental.CommunicationOptions(
            deterministic=True, timeout_seconds=60
        ),
    )
    step, _ = digits.programs(strategy)
    batches = js.batches(digits.digits(), 240, shuffle=3)
    dataset = strategy.experimental_distribute_dataset(batches)
    manager = js.checkpoint.CheckpointManager(folder, strategy, memory_every=3)
    attempt, count = int(os.environ["JAXSTRATEGY_ATTEMPT"]), jax.process_count()
    rank, at = KILLED.get(attempt, (-1, 0)) if is_disturbed else (-1, 0)
    loop = js.training.training_loop(
        dataset,
        lambda: strategy.init(digits.create),
        steps=STEPS,
        checkpoint=manager,
        every=20,
        progress=False,
        strategy=strategy,
    )
    with loop:
        for done, batch in loop:
            if jax.process_index() == rank and done == at:
                manager.wait()
                os.kill(os.getpid(), 9)
            loop.state, loss = step(loop.state, batch)
            if jax.process_index() == 0:
                print(f"attempt {attempt} of {count}: {done} {float(loss)!r}")
            if is_disturbed and count == 2:
                time.sleep(1)  # so that it is not done before it grows
    if jax.process_index() == 0:
        state = js.to_host(loop.state)
        parts = b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))
        print("parameters", hashlib.sha256(parts).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], "disturbed" in sys.argv)
