"""Replicas of two processes that run eagerly, and that do not arrive together."""

import json

import jax
import jax.numpy as jnp

import jaxstrategy as js


def replica():
    return js.get_replica_context()


def taken(strategy, seen):
    """A step with a Python `if`, collectives, a variable and a merge call."""
    with strategy.scope():
        total = js.Variable(0.0, aggregation="sum")
    x = strategy.per_replica([1.0, 2.0, 3.0, 4.0])

    def merge(strategy, x):
        seen.append(float(total))
        return strategy.reduce("mean", x)

    def step(x):
        if replica().replica_id_in_sync_group == 3:
            x = x + 10
        seen.append(float(x))
        total.assign_add(x)
        grad = jax.grad(lambda a: replica().all_reduce("mean", a * x))(2.0)
        return replica().all_reduce("sum", x), replica().merge_call(merge, (x,)), grad

    summed, mean, grad = strategy.run(step, (x,))
    own = [float(each) for each in strategy.experimental_local_results(grad)]
    return float(summed), float(mean), own, float(total)


def refused(strategy, step):
    try:
        strategy.run(step)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def main():
    strategy = js.MultiWorkerMirroredStrategy()
    index, seen, found = jax.process_index(), [], {}
    with js.experimental.eager_replicas():
        found["taken"] = taken(strategy, seen)
        with strategy.scope():
            v = js.Variable(1.0, name="v")

        def drifts():
            v.assign(replica().replica_id_in_sync_group / 2)

        found["drifts"] = refused(strategy, drifts)

        def other():
            kind = "sum" if index else "mean"
            return replica().all_reduce(kind, jnp.ones(2))

        found["other"] = refused(strategy, other)

        def ended():
            return replica().all_reduce("sum", 1.0) if index else 0.0

        found["ended"] = refused(strategy, ended)
    print("seen", json.dumps(seen))
    print("found", json.dumps(found))
