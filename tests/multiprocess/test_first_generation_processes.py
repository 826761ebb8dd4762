"""Programs of TensorFlow 1 in real processes."""

import json

import pytest
from harness import free_address
from workers import PATH

TASKS = [("worker", 0), ("worker", 1), ("ps", 0)]


@pytest.mark.slow
def test_two_workers_share_a_parameter_server(job):
    cluster = {}
    for kind, _ in TASKS:
        cluster.setdefault(kind, []).append(free_address())
    programs = {}
    for rank, (kind, index) in enumerate(TASKS):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        own = {
            "TF_CONFIG": json.dumps(config),
            "JAXSTRATEGY_CLUSTER_SECRET": "a secret of enough characters",
        }
        programs[rank] = (
            "import os\n"
            "for name in list(os.environ):\n"
            "    if name.startswith('JAXSTRATEGY_'): del os.environ[name]\n"
            f"os.environ.update({own!r})\n"
            "from workers.first_generation import main\nmain()\n"
        )
    env = {"PYTHONPATH": PATH}
    with job(scripts=programs, count=3, env=env, started=False) as running:
        assert running.wait(120, 0, 1) == [0, 0]
    for rank in running.ranks[:2]:
        assert "all is well" in rank.output.splitlines()
