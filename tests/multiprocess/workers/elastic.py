"""Trains on the handwritten digits with 24 replicas, on as many processes as there are.

Arguments: a folder for checkpoints, and faults as JSON. By attempt, they are who fails,
before which step, and how: "kill", with how many milliseconds later, while the step may
run, or "machine", with its launcher; "stop", which leaves it there; and "save",
"snapshot" or "restore", in the middle of which it is killed. With "slow" processes
steps take long.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import numpy as np

import jaxstrategy as js
from workers import digits

STEPS = 30
EVERY, MEMORY_EVERY = 10, 3
ALONE_SECONDS = 4.0  # of a step of a process alone, which has 12 until it is done


def main(folder, faults):
    attempt = int(os.environ["JAXSTRATEGY_ATTEMPT"])
    strategy = js.MultiWorkerMirroredStrategy(
        num_replicas=24,
        communication_options=js.experimental.CommunicationOptions(
            deterministic=True, timeout_seconds=20
        ),
    )
    count, rank = jax.process_count(), jax.process_index()
    own = {}  # by step
    for who, before, how, *later in faults.get(str(attempt), ()):
        if who == rank:
            own[before] = how, *later
    step, _ = digits.programs(strategy)
    batches = js.batches(digits.digits(), 240, shuffle=3)
    dataset = strategy.experimental_distribute_dataset(batches)
    manager = js.checkpoint.CheckpointManager(
        folder, strategy, memory_every=MEMORY_EVERY
    )
    loop = js.training.training_loop(
        dataset,
        lambda: strategy.init(digits.create),
        steps=STEPS,
        checkpoint=manager,
        every=EVERY,
        progress=False,
        strategy=strategy,
    )
    if "restore" in own.get(0, ()):
        fail(own.pop(0)[0], folder)
    with loop:
        for done, batch in loop:
            if done in own:
                fail(*own.pop(done), folder)
            loop.state, loss = step(loop.state, batch)
            if rank == 0:
                print(f"attempt {attempt} of {count}: {done} {float(loss)!r}")
            if count == faults.get("slow", 1 if faults else 0):
                time.sleep(ALONE_SECONDS)
    if rank == 0:
        state = js.to_host(loop.state)
        parts = b"".join(np.asarray(state[name]).tobytes() for name in sorted(state))
        print("parameters", hashlib.sha256(parts).hexdigest())


def fail(how, *rest):
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    *later, folder = rest

    def is_time():
        if how == "save":
            return any(pathlib.Path(folder).glob("*tmp*"))
        if how == "snapshot":
            memory = pathlib.Path(os.environ["JAXSTRATEGY_MEMORY"])
            return any(memory.glob("*/*/*-writing")) or (
                {*memory.glob("*/*-*")} - {p.parent for p in memory.glob("*/*/whole")}
            )
        return True

    def kill():
        time.sleep(sum(later) / 1000)
        while not is_time():
            pass
        os.kill(os.getppid() if how == "machine" else os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
