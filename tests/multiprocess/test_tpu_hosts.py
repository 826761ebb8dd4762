"""`TPUStrategy` on two processes: the devices of a replica are those of one."""

import pytest
import workers

MAIN = "from workers.tpu_hosts import main\nmain()\n"


@pytest.mark.slow
def test_two_processes_have_the_replicas_of_a_tpu_between_them(job):
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "4"}
    with job(MAIN, count=2, seconds=60, env=env, started=False) as running:
        assert running.wait(150) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()
