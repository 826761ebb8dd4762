"""Eager replicas of several processes meet, and those that do not are told."""

import json
import re

import pytest
import workers


@pytest.mark.slow
def test_replicas_of_two_processes_run_eagerly(job):
    script = "from workers.eager import main\nmain()"
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "2"}
    with job(script, env=env, seconds=60, started=False) as running:
        assert running.wait(120) == [0, 0]
        outputs = [rank.output for rank in running.ranks]
    own = [[1.0, 2.0], [3.0, 14.0]]
    for output, mine in zip(outputs, own, strict=True):
        seen = json.loads(re.search(r"^seen (.*)$", output, re.M)[1])
        assert seen == [*mine, 20.0]
        found = json.loads(re.search(r"^found (.*)$", output, re.M)[1])
        assert found["taken"] == [20.0, 5.0, mine, 20.0]
        kind, text = found["drifts"]
        assert kind == "NotMirroredVariableError"
        assert "replica 3: " in text and "of another process" in text
        kind, text = found["other"]
        assert kind == "ClusterError"
        assert "all_reduce('mean') of float32[2] in `other`" in text
        assert "all_reduce('sum') of float32[2] in `other`" in text
        kind, text = found["ended"]
        assert kind == "ClusterError"
        assert "the end of the step in `ended`" in text
        assert "all_reduce('sum') of float32[] in `ended`" in text
