"""Variables of which each device of several processes keeps a part."""

import jax
import numpy as np
import pytest
import workers
from workers.divided_variables import WHOLE, trained, variables

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

MAIN = "from workers.divided_variables import main\nmain()\n"


@pytest.mark.slow
def test_variables_are_made_changed_trained_and_saved_as_in_one_process(job, tmp_path):
    plain = js.MirroredStrategy(jax.devices()[:4])
    with plain.scope():
        both = variables()
    with CheckpointManager(tmp_path / "one", plain) as manager:
        manager.save(1, {"w": plain.mirror(WHOLE)})
    wanted = trained(plain, both).numpy()
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "2"}
    with job(MAIN, count=2, seconds=60, env=env, started=False) as running:
        assert running.wait(150) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()
    with CheckpointManager(tmp_path / "saved", plain) as manager:
        manager.restore({"w": both[1]})
    np.testing.assert_allclose(both[1].numpy(), wanted, rtol=1e-5, atol=1e-6)
