"""Programs of TensorFlow 1 in several processes.

What each process finds wrong it raises.
"""

import json
import os
import time

import jax
import numpy as np

import jaxstrategy as js
from jaxstrategy.compat import v1


def process():
    """The kind and number of this process."""
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    return task["type"], task["index"]


def mirrored():
    """Two processes of two replicas each that train the same variable."""
    s = v1.experimental.MultiWorkerMirroredStrategy()
    index = jax.process_index()
    extended = s.extended
    assert s.num_replicas_in_sync == 4
    assert extended.should_checkpoint is extended.should_save_summary is (index == 0)
    assert extended.experimental_between_graph and extended.experimental_should_init
    with s.scope() as scope:
        assert scope is s and v1.get_strategy() is s
        w = js.Variable(0.0)
        on_read = js.Variable(0.0, synchronization="on_read", aggregation="sum")

    def apply(strategy, g):
        assert strategy is s
        g = strategy.extended.reduce_to("sum", g, w)
        strategy.extended.update(w, lambda w, g: w.assign_sub(0.05 * g), args=(g,))

    def step(x):
        g = jax.grad(lambda w: (w * x - 1.0) ** 2)(w.value())
        context = v1.get_replica_context()
        context.merge_call(apply, args=(g,))
        on_read.assign_add(1.0 + context.replica_id_in_sync_group)

    for expected in (0.4, 0.64, 0.784):
        extended.call_for_each_replica(step, args=(1.0,))
        np.testing.assert_allclose(float(extended.read_var(w)), expected, rtol=1e-5)
    assert float(extended.read_var(on_read)) == 3 * 10
    assert len(s.unwrap(w)) == 2  # those of this process
    place = extended.non_slot_devices([w])
    assert len(place) == 4
    extended.update_non_slot(place, lambda a: w.assign(a), args=(np.float32(7),))
    assert [float(x) for x in s.unwrap(w)] == [7, 7]
    copied = extended.broadcast_to(np.float32(2), w)
    assert float(copied) == 2 and len(copied.sharding.device_set) == 4
    mine = s.experimental_local_results(s.reduce("sum", 1.0))
    assert [float(x) for x in mine] == [4, 4]


def server():
    """A parameter server, which ends with the job."""
    kind, index = process()
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    v1.Server(cluster, job_name=kind, task_index=index).join()


def asynchronous():
    """Two workers that each run the whole program, without waiting for each other."""
    s = v1.experimental.ParameterServerStrategy()
    _, index = process()
    extended = s.extended
    is_chief = index == 0
    assert extended.should_checkpoint is extended.should_save_summary is is_chief
    assert extended.experimental_should_init is is_chief
    assert extended.experimental_between_graph
    with s.scope():
        assert v1.get_strategy() is s
        b = js.Variable(1.0 if is_chief else 99.0, name="b", aggregation="sum")
        a = js.Variable(0.0, name="a")
    read = extended.read_var
    assert isinstance(read(a), jax.Array) and float(read(a)) == 0
    assert extended.non_slot_devices([b, a]) is a

    def step(x):
        def merge_fn(strategy, x):
            assert strategy is s
            x = strategy.extended.reduce_to("sum", x, b)
            strategy.extended.update(b, lambda b, x: b.assign_add(x), args=(x,))

        v1.get_replica_context().merge_call(merge_fn, args=(x,))

    for _ in range(3):
        extended.call_for_each_replica(step, args=(2.0,))
    until(lambda: float(read(b)) == 1 + 2 * 3 * 2)
    place = extended.non_slot_devices([b, a])
    extended.update_non_slot(place, lambda: a.assign_add(1.0))
    until(lambda: float(read(a)) == 2)
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        return [np.zeros(1, "float32")]

    next(iter(s.distribute_datasets_from_function(dataset_fn)))
    assert seen == [(2, index)]


def until(claim):
    """Waits until what another process does has been done."""
    end = time.monotonic() + 60
    while not claim():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.02)


def main():
    """The part that this process has."""
    if process()[0] == "ps":
        server()
    asynchronous()
    print("all is well", flush=True)
