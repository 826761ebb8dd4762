"""Where a whole number is wanted, NumPy's will do, and True and False will not."""

import jax
import numpy as np
import pytest
from helpers.cases import each

import jaxstrategy as js


def saved(step, folder):
    with js.checkpoint.CheckpointManager(folder) as manager:
        manager.save(step, {"w": np.ones(2)})


WANTED = {
    "donate_argnums": lambda n, _: js.RunOptions(donate_argnums=n),
    "bytes_per_pack": lambda n, _: js.experimental.CommunicationOptions(n),
    "experimental_per_replica_buffer_size": lambda n, _: js.InputOptions(
        experimental_per_replica_buffer_size=n
    ),
    "batch_size": lambda n, _: js.batches(np.ones(3), n),
    "k": lambda n, _: js.experimental.grouped([np.ones(3)], n),
    "dense_shape": lambda n, _: js.IndexedSlices(np.ones((1, 2)), [0], (n, 2)),
    "replicas": lambda n, _: js.profiling.Topology(1e9, 1e-6, replicas=n),
    "every": lambda n, _: js.profiling.MetricLogger(print, every=n),
    "step": saved,
}


def test_a_bool_is_no_whole_number(tmp_path):
    for name, use in each(WANTED):
        with pytest.raises((TypeError, ValueError), match=f"`{name}` (was|is) .*True"):
            use(True, tmp_path)


def test_numpys_integers_are_whole_numbers(tmp_path):
    for _, use in each(WANTED):
        use(np.int64(1), tmp_path)


def test_axes_may_be_numpys(two):
    x = two.per_replica([np.ones((2, 3)), np.zeros((2, 3))])
    for axis in (0, np.int64(0), np.array(0)):
        assert two.reduce("sum", x, axis=axis).tolist() == [2.0] * 3

    def joined(x):
        return js.get_replica_context().all_gather(x, np.int64(1))

    assert two.run(joined, (x,)).shape == (2, 6)
    assert len(js.simulate(np.int64(8))) == len(jax.devices())
