"""Programs of TensorFlow 1 in several processes.

What each process finds wrong it raises.
"""

import jax
import numpy as np

import jaxstrategy as js
from jaxstrategy.compat import v1


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
