"""A checkpoint, saved by four replicas and restored by two."""

import tempfile

import numpy as np

import jaxstrategy as js

devices = js.simulate(4)
state = {"w": np.arange(6.0, dtype=np.float32), "step": 3}
with tempfile.TemporaryDirectory() as folder:
    four = js.MirroredStrategy(devices)
    with js.checkpoint.CheckpointManager(folder, four) as manager:
        manager.save(7, four.mirror(state))
    two = js.MirroredStrategy(devices[:2])
    with js.checkpoint.CheckpointManager(folder, two) as manager:
        restored, number = manager.restore_or_init(two.mirror(state | {"step": 0}))
assert number == 7 and int(restored["step"]) == 3, restored
np.testing.assert_array_equal(restored["w"], state["w"])
