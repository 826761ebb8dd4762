"""Arguments: a folder; the step before which to be preempted, or -1; seconds a step."""

import os
import signal
import sys
import time

import jax
import numpy as np

import jaxstrategy as js


def main():
    folder, when, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    strategy = js.MultiWorkerMirroredStrategy(sharding=js.StateSharding(min_bytes=0))
    is_last = strategy.process_index == strategy.process_count - 1
    attempt = os.environ.get("JAXSTRATEGY_ATTEMPT", "0")
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(64, 4)).astype(np.float32)
    data = js.batches((rows, rows.sum(1)), 12, shuffle=0, epochs=None)
    dataset = strategy.experimental_distribute_dataset(data)

    @strategy.run
    def step(w, x, y):
        loss, grad = jax.value_and_grad(lambda w: js.masked_mean((x @ w - y) ** 2))(w)
        loss, grad = js.get_replica_context().all_reduce("mean", (loss, grad))
        return w - 0.05 * grad, loss

    loop = js.training.training_loop(
        dataset,
        lambda: strategy.mirror(np.zeros(4, np.float32)),
        steps=60,
        checkpoint=folder,
        every=1000,
        strategy=strategy,
        in_sync_every=20,
    )
    with loop:
        print(f"begins at {loop.step}", flush=True)
        for done, (x, y) in loop:
            if done == when and is_last and attempt == "0":
                os.kill(os.getpid(), signal.SIGTERM)
            loop.state, loss = step(loop.state, x, y)
            time.sleep(pause)
    assert isinstance(loop.state, js.Sharded)
    told = " ".join(float(number).hex() for number in js.to_host(loop.state))
    print(f"ended at {loop.step} with {told}", flush=True)


if __name__ == "__main__":
    main()
