"""What each process does that learns its place in the cluster from a resolver."""

import json
import os

import numpy as np

import jaxstrategy as js

NAMES = ("COORDINATOR", "PROCESS_ID", "NUM_PROCESSES")


def has_service_account():
    """Puts the files of a pod's service account where the client looks for them."""
    from kubernetes.config import incluster_config

    incluster_config.SERVICE_TOKEN_FILENAME = os.environ["TOKEN"]
    incluster_config.SERVICE_CERT_FILENAME = os.environ["CERTIFICATE"]


def from_kubernetes():
    """In two pods, each of which knows its own name and asks the API for the others."""
    has_service_account()
    rank, port = taken_from_launcher()
    os.environ["HOSTNAME"] = f"train-{rank}"
    resolver = js.cluster_resolver.KubernetesClusterResolver(
        {"worker": ["job-name=train"]}, port, num_tasks={"worker": 2}
    )
    check(js.MultiWorkerMirroredStrategy(resolver), rank)


def from_tf_config():
    """In pods that may ask Kubernetes nothing, as they have no service account."""
    rank, port = taken_from_launcher()
    try:
        js.MultiWorkerMirroredStrategy()
    except js.ClusterError as error:
        print(error, flush=True)
    tasks = [f"127.0.0.1:{port}", "127.0.0.2:1"]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})
    check(js.MultiWorkerMirroredStrategy(), rank)


def from_torchrun():
    """With the variables of torchrun, whose agent listens at the port itself."""
    rank, port = taken_from_launcher()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port - 1))
    os.environ.update(WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    check(js.MultiWorkerMirroredStrategy(), rank)


def from_jax():
    """With all three variables of JAX, of which JAX itself reads the address only."""
    rank, port = taken_from_launcher()
    os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    os.environ.update(JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(rank))
    check(js.MultiWorkerMirroredStrategy(), rank)


def taken_from_launcher():
    """The rank of this process and a free port, which the harness tells."""
    address, rank, _ = (os.environ.pop(f"JAXSTRATEGY_{name}") for name in NAMES)
    return int(rank), int(address.rpartition(":")[2])


def check(strategy, rank):
    """The processes take one step together, and each is the one it should be."""
    assert (strategy.process_index, strategy.process_count) == (rank, 2)
    assert strategy.cluster_resolver.task_id == rank

    @strategy.run
    def total(x):
        return js.get_replica_context().all_reduce("sum", x)

    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(10**context.replica_id_in_sync_group)
    )
    assert float(total(values)) == 11.0
    print("all is well", flush=True)
