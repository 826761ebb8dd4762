"""Processes that resolvers tell who they are train together."""

import pytest
import workers


def started(what):
    return f"from workers.resolved import {what}\n{what}()\n"


@pytest.mark.slow
def test_hosts_of_sagemaker_train_together(job):
    env = {"PYTHONPATH": workers.PATH, "SM_HOSTS": '["127.0.0.2", "127.0.0.1"]'}
    script = started("from_sagemaker")
    with job(script, count=2, seconds=60, env=env, started=False) as running:
        assert running.wait(120) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()
