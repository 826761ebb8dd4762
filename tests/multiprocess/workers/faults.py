"""A training in which something goes wrong on one of the processes."""

import os
import signal
import time

import jax
import numpy as np

import jaxstrategy as js


def main():
    options = js.experimental.CommunicationOptions(timeout_seconds=4)
    strategy = js.MultiWorkerMirroredStrategy(communication_options=options)

    @strategy.run
    def train_step(w, x):
        mean = js.get_replica_context().all_reduce("mean", x)
        return 0.9 * w + mean

    def pipeline(context):
        for i in range(100_000):
            yield np.full((2, 3), i, np.float32)

    w = strategy.mirror(np.zeros((2, 3), np.float32))
    batches = strategy.distribute_datasets_from_function(lambda c: lambda: pipeline(c))
    for i, batch in enumerate(batches):
        if jax.process_index() == 1 and i == 40:
            os.kill(os.getpid(), signal.SIGSTOP)
        w = train_step(w, batch)
        if i % 10 == 0:
            float(w[0, 0])
        time.sleep(0.002)


if __name__ == "__main__":
    main()
