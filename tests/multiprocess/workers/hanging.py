"""A training of which one process stops somewhere; the others must not wait for ever.

Arguments: where.
"""

import itertools
import pathlib
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
        if CASE == "slow reader" and RANK == 1 and number < 4:
            time.sleep(2)
        yield np.full((2, 3), number, np.float32)


def asleep_before_a_new_step(w, batch):
    # After the first steps, which are compared one by one, only its program is.
    for _ in range(40):
        w = train_step(w, batch)
    float(w[0, 0])
    if RANK == 1:
        time.sleep(600)
    evaluate(w, batch)


def asleep_before_a_known_step(w, batch):
    float(train_step(w, batch)[0, 0])
    if RANK == 1:
        time.sleep(600)
    train_step(w, batch)


def train(w, dataset, steps=100_000):
    for number, batch in enumerate(dataset):
        if CASE == "skip" and RANK == 1 and number == 5:
            continue
        w = train_step(w, batch)
        print("step", number, flush=True)
        if number == steps:
            return w
    return w


def saves(w):
    """One process saves something else, or does something else."""
    manager = CheckpointManager(FOLDER)
    manager.save(1, {"w": w})
    manager.wait()
    match CASE:
        case "save one-sided":
            if RANK == 0:
                manager.save(2, {"w": w})
            time.sleep(600)
        case "save and step":
            train_step(w, w) if RANK else manager.save(2, {"w": w})
        case "save another step":
            manager.save(2 + RANK, {"w": w})
        case "save another folder":
            CheckpointManager(f"{FOLDER}{RANK}").save(2, {"w": w})
        case "save other leaves":
            manager.save(2, {"w": w, **({"v": w} if RANK else {"u": w, "t": 1})})
        case "save and restore":
            manager.restore({"w": w}) if RANK else manager.save(2, {"w": w})
        case "restore one-sided":
            if RANK == 1:
                manager.restore({"w": w})
            time.sleep(600)


def main(case):
    global CASE
    CASE = case
    w = strategy.mirror(np.zeros((2, 3), np.float32))
    dataset = strategy.distribute_datasets_from_function(lambda c: lambda: rows(c))
    match case.split()[0]:
        case "asleep":
            batch = next(iter(dataset))
            (
                asleep_before_a_known_step
                if "known" in case
                else asleep_before_a_new_step
            )(w, batch)
        case "save" | "restore":
            saves(w)
        case _:
            train(w, dataset, 8 if case == "slow reader" else 100_000)
