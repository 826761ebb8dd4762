"""Copies and updates on the devices of several processes."""

import pytest
import workers

MAIN = "from workers.placed_copies import main\nmain()\n"


@pytest.mark.slow
def test_values_are_copied_and_variables_changed_on_all_processes(job):
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "2"}
    with job(MAIN, count=2, seconds=60, env=env, started=False) as running:
        assert running.wait(150) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()
