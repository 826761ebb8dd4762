"""A training in which process 1 comes 40 ms late to each step."""

import time

import numpy as np

import jaxstrategy as js


def main():
    strategy = js.MultiWorkerMirroredStrategy()

    @strategy.run
    def train_step(w, x):
        return w + js.get_replica_context().all_reduce("mean", x)

    x = strategy.per_replica(np.ones((strategy.num_replicas_in_sync, 2), np.float32))
    w = strategy.mirror(np.zeros(2, np.float32))
    with strategy.profile(train_step, every=20) as profile:
        for _ in range(60):
            if strategy.process_index == 1:
                time.sleep(0.04)
            w = profile(w, x)
            float(w[0])
    time.sleep(2.5)  # until all have told of their steps
    if strategy.process_index == 0:
        print(js.experimental.stragglers())
        print(profile.report())


if __name__ == "__main__":
    main()
