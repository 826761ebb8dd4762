"""A job of several processes that goes on until one of them does something else."""

import jax.numpy as jnp

import jaxstrategy as js

options = js.experimental.CommunicationOptions(timeout_seconds=20)
strategy = js.MultiWorkerMirroredStrategy(communication_options=options)
RANK = strategy.process_index
x = strategy.per_replica([float(k) for k in range(strategy.num_replicas_in_sync)])


def mean(x):
    return js.get_replica_context().all_reduce("mean", x)


def go_on(steps=100_000):
    for _ in range(steps):
        float(strategy.run(mean, (x,)))


def another_program():
    k = 1.0 + RANK  # compiled in

    def scaled(x):
        return k * x

    strategy.run(scaled, (x,))
    go_on()


def another_exchange():
    strategy.mirror(jnp.zeros(2 + RANK))


def caught_in_process_0():
    try:
        another_exchange()
    except js.ClusterError:
        if RANK == 1:
            raise
    go_on()
