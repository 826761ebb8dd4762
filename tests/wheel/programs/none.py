"""With nothing but JAX: the core runs, the rest names the extra that it needs."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np

import jaxstrategy as js

others = ["flax", "optax", "orbax", "keras", "grain", "tensorboardX", "pytest"]
assert not any(map(importlib.util.find_spec, others)), "the environment is not empty"
assert "site-packages" in js.__file__, js.__file__

strategy = js.MirroredStrategy(js.simulate(4))


@strategy.run
def step(w, x):
    return w + js.get_replica_context().all_reduce("sum", js.masked_sum(x))


w = strategy.mirror(0.0)
for batch in strategy.experimental_distribute_dataset(js.batches(np.arange(10.0), 8)):
    w = step(w, batch)
assert float(w) == 45.0, w

with strategy.scope():
    count = js.Variable(0, aggregation="sum")
strategy.run(lambda: count.assign_add(1))
assert int(count.value()) == 4, count
print(strategy.explain(step, (w, batch)))


def needs(extra, function):
    try:
        function()
    except js.errors.MissingExtraError as error:
        assert f"jaxstrategy[{extra}]" in str(error), error
        return
    raise AssertionError(f"{extra} was not missed")


manager = js.checkpoint.CheckpointManager
pods = js.cluster_resolver.KubernetesClusterResolver
needs("flax", lambda: js.flax.linen.BatchNorm)
needs("flax", lambda: js.flax.nnx.BatchNorm)
needs("flax", lambda: js.optax.all_reduce_gradients())
needs("checkpoint", lambda: manager("saved", strategy).save(0, {"w": w}))
needs("kubernetes", lambda: pods().cluster_spec())


def ended(*arguments):
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


doctor = ended("jaxstrategy.doctor", "--simulate", "2")
assert doctor.returncode == 0, doctor.stdout + doctor.stderr
assert "2 replicas on CPU: the sum is right" in doctor.stdout, doctor.stdout
check = ended("jaxstrategy.launch", "-n", "2", "--check")
assert check.returncode == 0, check.stdout + check.stderr
for arguments, extra in [
    (("jaxstrategy.demo",), "demo"),
    (("jaxstrategy.compat.port", __file__), "port"),
    (("jaxstrategy.launch", "--on", "ray", __file__), "ray"),
]:
    missed = ended(*arguments)
    assert missed.returncode and f"jaxstrategy[{extra}]" in missed.stderr, missed
assert not [path for path in Path().iterdir() if path.name in ("saved", "logs")]
