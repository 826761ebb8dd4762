"""A training in which process 1 comes 40 ms late to each step."""

import time

import numpy as np

import jaxstrategy as js
from jaxstrategy._src.processes import job


def until_all_have_told():
    """Return when process 0 has heard from each process of its last step."""
    processes, end = job.current(), time.monotonic() + 20
    last = processes.watchdog.status()["step"]
    while True:
        told = [s.status["arrivals"][-1:] for s in processes.store.states() if s.status]
        if len(told) == processes.count and all(
            rows and rows[0][0] == last for rows in told
        ):
            return
        assert time.monotonic() < end, told
        time.sleep(0.05)


def main():
    options = js.experimental.CommunicationOptions(timeout_seconds=6)
    strategy = js.MultiWorkerMirroredStrategy(communication_options=options)

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
    until_all_have_told()
    if strategy.process_index == 0:
        print(js.experimental.stragglers())
        print(profile.report())


if __name__ == "__main__":
    main()
