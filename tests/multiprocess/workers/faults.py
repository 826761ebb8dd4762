"""A training in which something goes wrong on one of the processes."""

import os
import signal
import sys
import time

import jax
import numpy as np

import jaxstrategy as js


def main(case, who, timeout_seconds=4):
    options = js.experimental.CommunicationOptions(timeout_seconds=timeout_seconds)
    strategy = js.MultiWorkerMirroredStrategy(communication_options=options)
    is_me = jax.process_index() == who

    @strategy.run
    def train_step(w, x):
        mean = js.get_replica_context().all_reduce("mean", x)
        return 0.9 * w + mean

    def pipeline(context):
        for i in range(100_000):
            if case == "reader" and is_me and i == 30:
                os.kill(os.getpid(), signal.SIGKILL)
            yield np.full((2, 3), i, np.float32)

    w = strategy.mirror(np.zeros((2, 3), np.float32))
    batches = strategy.distribute_datasets_from_function(lambda c: lambda: pipeline(c))
    for i, batch in enumerate(batches):
        if is_me and i == 40:
            match case:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
        w = train_step(w, batch)
        if i % 10 == 0:
            float(w[0, 0])
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
