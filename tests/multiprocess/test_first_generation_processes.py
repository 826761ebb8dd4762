"""Programs of TensorFlow 1 in real processes."""

import json

import pytest
from harness import free_address
from workers import PATH

MAIN = "from workers.first_generation import main\nmain()\n"
SECRET = "a secret of enough characters"


def scripts(what, tasks):
    """A script for each process, which knows its task as TensorFlow's users say it."""
    cluster = {}
    for kind, _ in tasks:
        cluster.setdefault(kind, []).append(free_address())
    found = {}
    for rank, (kind, index) in enumerate(tasks):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        own = {
            "TF_CONFIG": json.dumps(config),
            "WHAT": what,
            "JAXSTRATEGY_CLUSTER_SECRET": SECRET,
        }
        found[rank] = (
            "import os\n"
            "for name in list(os.environ):\n"
            "    if name.startswith('JAXSTRATEGY_'): del os.environ[name]\n"
            f"os.environ.update({own!r})\n{MAIN}"
        )
    return found


@pytest.mark.slow
def test_two_processes_mirror_their_variables(job):
    programs = scripts("mirrored", [("worker", 0), ("worker", 1)])
    env = {"PYTHONPATH": PATH, "JAX_NUM_CPU_DEVICES": "2"}
    with job(scripts=programs, env=env, started=False) as running:
        assert running.wait(120) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()


@pytest.mark.slow
def test_two_workers_share_a_parameter_server(job):
    tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
    programs = scripts("asynchronous", tasks)
    env = {"PYTHONPATH": PATH}
    with job(scripts=programs, count=3, env=env, started=False) as running:
        assert running.wait(120, 0, 1) == [0, 0]
    for rank in running.ranks[:2]:
        assert "all is well" in rank.output.splitlines()
