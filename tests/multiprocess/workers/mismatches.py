"""Processes that do different things, and what each of them is told."""

import json

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js


def total(x):
    return js.get_replica_context().all_reduce("sum", x)


def mean(x):
    return js.get_replica_context().all_reduce("mean", x)


def main():
    options = js.experimental.CommunicationOptions(timeout_seconds=20)
    s = js.MultiWorkerMirroredStrategy(communication_options=options)
    n, own = s.num_replicas_in_sync, jax.process_index()
    with s.scope():
        v = js.Variable(np.zeros(2, np.float32))
        c = js.Variable(0.0, synchronization="on_read", aggregation="sum", name="seen")
    x = s.per_replica(np.arange(n, dtype=np.float32))
    large = s.per_replica(np.zeros((n, 2 + own), np.float32))
    cases = {
        "shapes": lambda: s.run(total, (large,)),
        "functions": lambda: s.run(mean if own else total, (x,)),
        "numbers": lambda: s.run(lambda a, b: a * b, (x, 1.0 + own)),
        "arrays": lambda: s.run(lambda a, b: a * b, (x, np.float32([own]))),
        "how many": lambda: s.run(lambda a: a, ([x] * (1 + own),)),
        "mirrored": lambda: s.mirror(np.zeros(3 + own)),
        "a step and a value": lambda: s.run(total, (x,)) if own else s.mirror(2.0),
        "to_host": lambda: js.to_host(x if own else large),
        "reading": lambda: js.to_host(x) if own else c.value(),
        "assigning": lambda: c.assign(1.0) if own else v.assign(jnp.ones(2)),
    }
    factor = 2.0 + own  # compiled in

    def scaled(x):
        return factor * x

    def captured():
        s.run(scaled, (x,))
        s.run(total, (x,))

    cases["captured"] = captured
    told = {}
    for name, act in cases.items():
        try:
            act()
        except js.ClusterError as error:
            told[name] = str(error)
    assert float(s.run(total, (x,))) == n * (n - 1) / 2  # it goes on
    print("told", json.dumps(told))
