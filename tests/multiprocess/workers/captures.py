"""Two processes that capture different values in one step, and what they are told."""

import gc
import json

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js


def nested(large):
    def step(w):
        return w + large.mean(0)

    return step


def later(large):
    def step(w):
        return w * large.mean(0)

    return step


CHECKED = js.RunOptions(check_finite=True)


def main():
    options = js.experimental.CommunicationOptions(timeout_seconds=20)
    s = js.MultiWorkerMirroredStrategy(communication_options=options)
    own = jax.process_index()
    told, kept = {}, {}

    def attempt(name, step, *more):
        try:
            results = s.run(step, (np.ones(4, np.float32), *more))
        except js.ClusterError as error:
            told[name] = str(error)
        else:
            kept[name] = np.asarray(results).tolist()

    for differs in (True, False):
        value = 1.0 + own * differs
        host = np.full((5000, 4), value, np.float32)
        large = jnp.asarray(host)
        key = jax.random.key(int(value))
        name = "different" if differs else "same"
        with_large = jax.jit(lambda w, large=large: w * large.mean(0))
        steps = {
            "large": lambda w, host=host: w + jnp.matmul(host, w).mean(),
            "on a device": lambda w, large=large: w + large.mean(0),
            "a number": lambda w, value=value: w * value,
            "a key": lambda w, key=key: w + jax.random.normal(key, (4,)),
            "a large one in a jitted function": lambda w, f=with_large: f(w),
            "in a branch": lambda w, large=large: jax.lax.cond(
                w.sum() > 0, lambda: w * large.mean(0), lambda: w
            ),
        }
        for kind, step in steps.items():
            attempt(f"{name}: {kind}", step)
        attempt(f"{name}: in a function made anew", nested(large))
        attempt(f"{name}: as an argument", lambda w, z: w + z.mean(0), large)
        attempt(f"{name}: an integer argument", lambda w, z: w + z, int(value))
        for turn in range(3):
            ok = jnp.full((5000, 4), turn + own * differs * (turn == 2), jnp.float32)
            attempt(f"{name}: later, {turn}", later(ok))
    x = s.per_replica(np.ones(s.num_replicas_in_sync, np.float32))
    assert float(s.reduce("sum", x)) == s.num_replicas_in_sync  # it goes on
    try:
        x = s.per_replica([1.0, -1.0, *[1.0] * (s.num_replicas_in_sync - 2)])
        s.run(lambda x: jnp.log(x), (x,), options=CHECKED)
    except js.NonFiniteError as error:
        told["a NaN"] = [*error.replicas, error.line]
    print("told", json.dumps([told, kept]))


def collect_in_one():
    """Steps on new variables; one process keeps the old ones, the other does not."""
    s = js.MultiWorkerMirroredStrategy()
    alive = []
    for turn in range(6):
        with s.scope():
            weight = js.Variable(jnp.full(3, float(turn)))

        @s.step
        def double(weight=weight):
            weight.assign(weight.read_value() * 2)

        double()
        assert weight.numpy().tolist() == [2.0 * turn] * 3
        if s.process_index == 0:
            alive.append((weight, double))
        else:
            del weight, double
            gc.collect()
