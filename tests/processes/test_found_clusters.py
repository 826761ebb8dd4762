"""What tells of a cluster and cannot be followed is an error, never a lone training."""

import os
import subprocess
import sys

import pytest

import jaxstrategy as js

# Variables that tell of several processes, the one that is named, and the mend.
HALF = [
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID must"),
    ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID must be"),
    ({"JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES must be"),
    ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT and RANK must be set"),
    ({"RANK": "0"}, "MASTER_ADDR and MASTER_PORT and WORLD_SIZE must be set, too."),
    ({"MASTER_ADDR": "a"}, "MASTER_PORT and WORLD_SIZE and RANK must be set, too."),
    ({"MASTER_PORT": "1"}, "Start the processes with `torchrun`, or set MASTER_ADDR"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, 'initialize(cluster_detection_method="mpi4py")'),
    (
        # MPI has several processes on each host of SageMaker.
        {"OMPI_COMM_WORLD_SIZE": "4", "SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a"},
        "install `mpi4py`",
    ),
    ({"OMPI_COMM_WORLD_RANK": "1"}, "install `mpi4py`"),
    ({"PMI_RANK": "1"}, "install `mpi4py`"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "install `mpi4py`"),
    (
        {"SLURM_NTASKS": "2"},
        "Start the program in tasks of a job step, with `srun`; or",
    ),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "1"}, "with `srun`"),
    ({"SLURM_NPROCS": "2"}, "with `srun`"),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "1"}, "with `srun`"),
    ({"SLURM_STEP_NUM_NODES": "2"}, "with `srun`"),
    ({"SLURM_NNODES": "2"}, "with `srun`"),
    ({"SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"}, "with `srun`"),
    ({"SLURM_NTASKS": "many"}, "with `srun`"),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "install `jax[tpu]`"),
    ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, "install `jax[tpu]`"),
    ({"TPU_WORKER_ID": "1"}, "install `jax[tpu]`"),
    ({"MEGASCALE_SLICE_ID": "1"}, "install `jax[tpu]`"),
    ({"MEGASCALE_NUM_SLICES": "2"}, "install `jax[tpu]`"),
    ({"MEGASCALE_COORDINATOR_ADDRESS": "a"}, "install `jax[tpu]`"),
    ({"JOB_COMPLETION_INDEX": "0"}, "Install `kubernetes`, with which JAX asks"),
]
# These are half a cluster too, of resolvers that are found by default.
HALF_RESOLVED = [
    ({"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'}, "TF_CONFIG is {"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "TF_CONFIG is {"),
    ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
    ({"JAXSTRATEGY_PROCESS_ID": "0"}, "JAXSTRATEGY_COORDINATOR and"),
    ({"SM_HOSTS": '["a", "b"]'}, "SM_CURRENT_HOST is not set"),
    ({"SM_CURRENT_HOST": "a"}, "SM_HOSTS is not set"),
]
# One process that is told to be the only one, and no warning is needed.
TOLD = [
    {"JAX_NUM_PROCESSES": "1"},
    {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a:1"},
    {"WORLD_SIZE": "1"},
    {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NNODES": "1"},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
    {"JAXSTRATEGY_COORDINATOR": "a:1", "JAXSTRATEGY_PROCESS_ID": "0",
     "JAXSTRATEGY_NUM_PROCESSES": "1"},
]  # fmt: skip
# Variables that tell of no other process, though there might be some.
SILENT = [
    {},
    {"TF_CONFIG": "{}"},
    {"JAX_COORDINATOR_ADDRESS": " ", "RANK": ""},
    {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "interactive"},
    {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"},
]
SPEAKING = ("JAX_", "JAXSTRATEGY_", "SLURM_", "OMPI_", "PMI_", "TPU_", "MEGASCALE_")
OTHERS = (
    "WORLD_SIZE",
    "RANK",
    "MASTER_",
    "TF_CONFIG",
    "KUBERNETES_",
    "JOB_COMP",
    "SM_",
)


@pytest.fixture
def alone(monkeypatch):
    """Makes the strategy where these variables, and no others, might tell of others."""

    def made(variables, strategy=js.MultiWorkerMirroredStrategy):
        with monkeypatch.context() as patch:
            for name in os.environ:
                if name.startswith((*SPEAKING, *OTHERS)):
                    patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            return strategy()

    return made


def check_error(error, variables, text):
    assert any(f"{name} is {value!r} in" in error for name, value in variables.items())
    assert "this is one process of several" in error and text in error
    assert "For a process alone, use `MirroredStrategy`" in error


@pytest.mark.slow
def test_what_tells_of_others_and_cannot_be_followed_is_an_error():
    # JAX has no devices yet: it looks for a cluster, and finds none.
    script = """
import os, warnings
warnings.simplefilter("error")
from processes import test_found_clusters as tests
import jaxstrategy as js
for variables, text in tests.HALF:
    os.environ.update(variables)
    try:
        made = js.MultiWorkerMirroredStrategy()
    except js.ClusterError as error:
        tests.check_error(str(error), variables, text)
    else:
        raise AssertionError((variables, made))
    for name in variables:
        del os.environ[name]
os.environ.update(RANK="2", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="x")
for name, wrong in ("MASTER_PORT", "is 'x'; it is a"), ("RANK", "process_id < num_pro"):
    try:
        js.MultiWorkerMirroredStrategy()
    except js.ClusterError as error:
        assert wrong in str(error), error
    else:
        raise AssertionError(name)
    os.environ["MASTER_PORT"] = "1"
print("all is well")
"""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith((*SPEAKING, *OTHERS))
    }
    paths = [os.path.dirname(os.path.dirname(f)) for f in (js.__file__, __file__)]
    env |= {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True
    )
    assert done.stdout == "all is well\n", done.stderr


def test_what_tells_of_others_is_an_error_after_devices_were_started(alone):
    for variables, text in HALF:
        with pytest.raises(js.ClusterError) as caught:
            alone(variables)
        check_error(str(caught.value), variables, text)
    whole = [
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7",
         "SLURM_STEP_NODELIST": "a,b", "SLURM_LOCALID": "0"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"},
    ]  # fmt: skip
    for variables in whole:
        for strategy in js.MultiWorkerMirroredStrategy, js.TPUStrategy:
            late = "JAX has started its devices already. Make the strategy before"
            with pytest.raises(js.ClusterError, match=late):
                alone(variables, strategy)


def test_half_a_cluster_of_a_resolver_is_an_error(alone):
    for variables, text in HALF_RESOLVED:
        with pytest.raises(ValueError) as caught:
            alone(variables)
        assert text in str(caught.value)


def test_a_process_is_alone_where_nothing_tells_of_others_and_is_warned(alone):
    for variables in TOLD:
        assert alone(variables).process_count == 1, variables
    for variables in SILENT:
        with pytest.warns(RuntimeWarning, match="This process trains alone: ") as given:
            assert alone(variables).process_count == 1, variables
        assert len(given) == 1 and given[0].filename == __file__
    assert alone({}, js.TPUStrategy).num_replicas_in_sync == 8
