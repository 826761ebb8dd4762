"""Servers, and strategies in the surroundings that users have."""

import json

import pytest
from harness import free_address

import jaxstrategy as js

# What every process of these jobs sees in the end: a sum over all replicas.
CHECK = """
import os, sys, jax, numpy as np, jaxstrategy as js
RANK = int(os.environ["RANK"])
def check(strategy, n):
    x = strategy.per_replica(np.arange(float(n)))
    assert strategy.num_replicas_in_sync == n
    assert float(strategy.reduce("sum", x)) == n * (n - 1) / 2
    print("checked", strategy)
"""


def ranked(script, count=2, **env):
    """Scripts and surroundings of ranks without our launcher's variables."""
    clean = "import os\nfor name in list(os.environ):\n"
    clean += "    if name.startswith('JAXSTRATEGY_'): del os.environ[name]\n"
    text = "".join(f"os.environ[{k!r}] = {v!r}\n" for k, v in env.items())
    return {
        rank: f"{clean}os.environ['RANK'] = '{rank}'\n{text}{CHECK}{script}"
        for rank in range(count)
    }


def test_two_servers(job):
    cluster = {"chief": [free_address()], "worker": [free_address()]}
    script = f"""
cluster = {cluster!r}
job = "worker" if RANK else "chief"
server = js.Server(cluster, job_name=job, task_index=0)
again = js.Server(server.server_def)
again.start()
assert server.target == f"grpc://{{cluster[job][0]}}"
assert again.server_def == server.server_def
strategy = js.MultiWorkerMirroredStrategy()
check(strategy, 4)
assert (strategy.process_index, strategy.process_count) == (RANK, 2)
if RANK:
    server.join()
    print("joined")
"""
    scripts = ranked(script)
    env = {"JAX_NUM_CPU_DEVICES": "2"}
    with job(scripts=scripts, env=env, started=False) as running:
        assert running.wait(60) == [0, 0]
        assert "joined" in running.ranks[1].output
        assert "process 1 of 2" in running.ranks[1].output


@pytest.mark.slow
def test_join_is_an_error_when_another_fails(job):
    cluster = {"worker": [free_address(), free_address()]}
    script = f"""
server = js.Server({cluster!r}, task_index=RANK)
if RANK == 0:
    raise ValueError("no data")
server.join()
"""
    with job(scripts=ranked(script), started=False) as running:
        assert running.wait(60) == [1, 76]
        assert "process 0 (host" in running.ranks[1].output
        assert "failed: ValueError: no data" in running.ranks[1].output


@pytest.mark.slow
def test_a_runtime_that_is_there_and_a_strategy_of_this_process_alone(job):
    address = free_address()
    script = f"""
jax.distributed.initialize({address!r}, 2, RANK, coordinator_bind_address={address!r})
strategy = js.MultiWorkerMirroredStrategy()
check(strategy, 4)
local = js.MirroredStrategy()
assert set(local.devices) == set(jax.local_devices())
check(local, 2)
w = strategy.mirror(np.arange(3.0))
assert local.reduce("sum", w).sum() == 6  # what all have, two times
with local.scope():
    v = js.Variable(float(RANK))
assert float(v.value()) == RANK  # and not process 0's
for batch in local.experimental_distribute_dataset(js.batches(np.arange(4.0), 4)):
    assert float(local.reduce("sum", batch, axis=0)) == 6
for i in range(RANK + 1):  # in its own time
    local.run(lambda: js.get_replica_context().all_reduce("sum", 1.0))
try:
    js.MirroredStrategy([d for d in jax.devices() if d.process_index != RANK])
except ValueError as error:
    print("refused:", error)
check(strategy, 4)
"""
    env = {"JAX_NUM_CPU_DEVICES": "2"}
    with job(scripts=ranked(script), env=env, started=False) as running:
        assert running.wait(60) == [0, 0]
        assert all("refused: " in rank.output for rank in running.ranks)


def test_a_cluster_of_one(job):
    config = {"cluster": {"worker": [free_address()]},
              "task": {"type": "worker", "index": 0}}  # fmt: skip
    script = """
strategy = js.MultiWorkerMirroredStrategy()
check(strategy, 2)
assert (strategy.process_index, strategy.process_count) == (0, 1)
server = js.Server.create_local_server()
assert server.server_def.task_index == 0 and server.target.startswith("grpc://local")
server.join()
"""
    scripts = ranked(script, count=1, TF_CONFIG=json.dumps(config))
    env = {"JAX_NUM_CPU_DEVICES": "2"}
    with job(scripts=scripts, count=1, env=env, started=False) as running:
        assert running.wait(60) == [0]


CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


def test_what_servers_and_strategies_need():
    for arguments, text in [
        ((CLUSTER,), "`job_name` is needed, for there are several: chief"),
        ((CLUSTER, "worker"), "`task_index` is needed, for there are several: 0, 1"),
        ((CLUSTER, "cook", 0), "cook"),
        ((CLUSTER, "worker", 2), "2"),
        ((CLUSTER, "chief", 0), "The chief is the coordinator"),
        (({"ps": ["d:1"]}, "ps", 0), "There must be at least one worker"),
    ]:
        with pytest.raises(ValueError, match=text):
            js.Server(*arguments, start=False)
    with pytest.raises(TypeError, match="`cluster_resolver` was 3; a ClusterResolver"):
        js.MultiWorkerMirroredStrategy(3)
