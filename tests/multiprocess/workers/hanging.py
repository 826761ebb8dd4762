"""A training of which one process stops somewhere, for which the others wait."""

import itertools
import os
import pathlib
import signal
import sys
import time

import numpy as np

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

options = js.experimental.CommunicationOptions(timeout_seconds=4)
strategy = js.MultiWorkerMirroredStrategy(communication_options=options)
RANK = strategy.process_index
FOLDER = pathlib.Path(sys.path[0]) / "saved"


@strategy.run
def train_step(w, x):
    return w + js.get_replica_context().all_reduce("mean", x)


@strategy.run
def evaluate(w, x):
    return w - js.get_replica_context().all_reduce("sum", x)


def rows(context):
    """Each process reads its own."""
    for number in itertools.count():
        if CASE == "reader" and RANK == 1 and number == 6:
            time.sleep(600)
        if CASE == "dying reader" and RANK == 1 and number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "stopped" and RANK == 1 and number == 40:
            os.kill(os.getpid(), signal.SIGSTOP)
        yield np.full((2, 3), number, np.float32)


def asleep_before_a_new_step(w, batch):
    # After the first steps, which are compared one by one, only its program is.
    for _ in range(40):
        w = train_step(w, batch)
    float(w[0, 0])
    if RANK == 1:
        time.sleep(600)
    evaluate(w, batch)


def train(w, dataset):
    for number, batch in enumerate(dataset):
        if CASE == "skip" and RANK == 1 and number == 5:
            continue
        w = train_step(w, batch)
        print("step", number, flush=True)


def saves(w):
    """One process saves, and the other one does not."""
    manager = CheckpointManager(FOLDER)
    manager.save(1, {"w": w})
    manager.wait()
    if RANK == 0:
        manager.save(2, {"w": w})
    time.sleep(600)


def main(case):
    global CASE
    CASE = case
    w = strategy.mirror(np.zeros((2, 3), np.float32))
    dataset = strategy.distribute_datasets_from_function(lambda c: lambda: rows(c))
    match case.split()[0]:
        case "asleep":
            asleep_before_a_new_step(w, next(iter(dataset)))
        case "save":
            saves(w)
        case _:
            train(w, dataset)


if __name__ == "__main__":
    main(sys.argv[1])
