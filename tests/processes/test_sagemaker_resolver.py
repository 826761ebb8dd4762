"""`SageMakerClusterResolver` reads SageMaker's environment as TensorFlow's does."""

import json
import os
import re

import numpy as np
import pytest

import jaxstrategy as js
import jaxstrategy.cluster_resolver as cr
from jaxstrategy.cluster.resolvers._launched import default_resolver

TWO = {"worker": ["algo-1:2223", "algo-2:2223"]}


@pytest.fixture(autouse=True)
def no_cluster_around(monkeypatch):
    for name in os.environ:
        if name.startswith(("SM_", "OMPI_", "JAXSTRATEGY_", "TF_CONFIG")):
            monkeypatch.delenv(name)


@pytest.fixture
def sagemaker(monkeypatch):
    def sagemaker(hosts, own):
        text = hosts if isinstance(hosts, str) else json.dumps(hosts)
        monkeypatch.setenv("SM_HOSTS", text)
        monkeypatch.setenv("SM_CURRENT_HOST", own)

    return sagemaker


# The cases of TensorFlow's tests.


def test_hosts_are_workers(sagemaker):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    resolver = cr.SageMakerClusterResolver()
    assert resolver.cluster_spec() == TWO
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master("worker", 0) == "algo-1:2223"
    assert resolver.master(task_id=0) == "algo-1:2223"
    assert resolver.master() == "algo-2:2223"
    assert resolver.rpc_layer is None and resolver.environment == ""
    assert resolver.process() == cr.Process(1, 2, "algo-1:2223")
    assert resolver.num_accelerators() == {}


def test_hosts_are_ordered_as_text(sagemaker):
    sagemaker(["algo-10", "algo-2", "algo-1"], "algo-2")
    resolver = cr.SageMakerClusterResolver(port=80)
    assert resolver.cluster_spec() == {
        "worker": ["algo-1:80", "algo-10:80", "algo-2:80"]
    }
    assert resolver.task_id == 2


def test_what_is_given_comes_first(sagemaker):
    sagemaker(["algo-1", "algo-2"], "algo-1")
    resolver = cr.SageMakerClusterResolver(
        np.int64(81), "worker", "1", "grpc", environment="mine"
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://algo-2:81"
    assert resolver.environment == "mine"
    resolver.task_id, resolver.rpc_layer = 0, "test"
    assert resolver.master() == "test://algo-1:81"
    assert resolver.master(rpc_layer="http") == "http://algo-1:81"


@pytest.mark.parametrize(("hosts", "own"), [("", ""), ("[]", ""), (["algo-1"], "")])
def test_a_host_without_a_name_is_alone(sagemaker, hosts, own):
    sagemaker(hosts, own)
    resolver = cr.SageMakerClusterResolver()
    assert not resolver.cluster_spec() and resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.process() == cr.Process(0, 1, "")


def test_one_host_has_no_master(sagemaker):
    sagemaker(["algo-1"], "algo-1")
    resolver = cr.SageMakerClusterResolver()
    assert resolver.master() == "" and resolver.task_id == 0
    assert resolver.process() == cr.Process(0, 1, "algo-1:2223")


def test_the_environment_is_read_anew(sagemaker):
    resolver = cr.SageMakerClusterResolver()
    sagemaker(["algo-1", "algo-2"], "algo-2")
    assert resolver.task_id == 1
    sagemaker(["algo-2"], "algo-2")
    assert resolver.task_id == 0


# Errors.


@pytest.mark.parametrize("missing", ["SM_HOSTS", "SM_CURRENT_HOST"])
def test_without_sagemaker_the_variables_are_named(sagemaker, monkeypatch, missing):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    monkeypatch.delenv(missing)
    resolver = cr.SageMakerClusterResolver()
    for ask in (resolver.cluster_spec, resolver.process, resolver.master):
        with pytest.raises(
            ValueError, match=f"^{missing} is not set, so this is no tr"
        ):
            ask()


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ("[algo-1]", "SM_HOSTS is not JSON"),
        ('"algo-1"', 'SM_HOSTS is "algo-1", which is no list of names. It looks like'),
        ('["algo-1", 2]', 'SM_HOSTS is ["algo-1", 2], which is no list of names'),
        ('["algo-1", " "]', "which is no list of names"),
    ],
)
def test_malformed_hosts_are_quoted(sagemaker, hosts, text):
    sagemaker(hosts, "algo-1")
    with pytest.raises(ValueError, match=re.escape(text)):
        cr.SageMakerClusterResolver().cluster_spec()


@pytest.mark.parametrize("own", ["", "algo-3"])
def test_a_stranger_among_several_hosts_is_refused(sagemaker, own):
    # TensorFlow takes the cluster for empty, and the host trains alone.
    sagemaker(["algo-1", "algo-2"], own)
    text = (
        f"SM_CURRENT_HOST is '{own}', which is none of the hosts ['algo-1', 'algo-2']"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        cr.SageMakerClusterResolver().process()


@pytest.mark.parametrize("port", [0, 65536, "x", None, True, 2.5])
def test_what_is_no_port_is_refused(port):
    with pytest.raises(ValueError, match=r"`port` was .*; a port was wanted"):
        cr.SageMakerClusterResolver(port=port)


@pytest.mark.parametrize("task_id", [-1, "x", 1.5, True])
def test_what_is_no_task_id_is_refused(sagemaker, task_id):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    resolver = cr.SageMakerClusterResolver(task_id=task_id)
    with pytest.raises(
        ValueError, match=r"`task_id` was .*; the index of this process"
    ):
        resolver.process()


def test_tasks_that_are_not_there_are_refused(sagemaker):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    resolver = cr.SageMakerClusterResolver(task_id=2)
    with pytest.raises(ValueError, match="task 2 of 'worker', which ClusterSpec"):
        resolver.process()
    with pytest.raises(ValueError, match="no task 2 in job 'worker'"):
        resolver.master()
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
        resolver.master("ps", 0)


# Without a resolver.


def test_several_hosts_are_found_without_a_resolver(sagemaker):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    found = default_resolver()
    assert isinstance(found, cr.SageMakerClusterResolver)
    assert found.process() == cr.Process(1, 2, "algo-1:2223")


def test_tf_config_and_launchers_come_before_sagemaker(sagemaker, monkeypatch):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    for name, value in (("COORDINATOR", "a:1"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAXSTRATEGY_{name}", value)
    monkeypatch.setenv("JAXSTRATEGY_NUM_PROCESSES", "1")
    assert isinstance(default_resolver(), cr.LaunchedClusterResolver)
    monkeypatch.setenv("TF_CONFIG", "{}")  # tells of nothing
    assert isinstance(default_resolver(), cr.LaunchedClusterResolver)
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    assert isinstance(default_resolver(), cr.TFConfigClusterResolver)


def test_one_host_and_mpi_are_left_to_jax(sagemaker, monkeypatch):
    assert default_resolver() is None
    sagemaker(["algo-1"], "algo-1")
    assert default_resolver() is None
    with pytest.warns(RuntimeWarning, match="This process trains alone"):
        assert js.MultiWorkerMirroredStrategy().process_count == 1
    sagemaker(["algo-1", "algo-2"], "algo-1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "16")
    assert default_resolver() is None
