"""`KubernetesClusterResolver`, with the true client on a stand-in for the API."""

import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from helpers.http_answers import served
from helpers.kubernetes_pods import TOKEN, Pods, kubeconfig, pod, service_account
from kubernetes.client import CoreV1Api
from kubernetes.config import incluster_config, kube_config

import jaxstrategy as js
import jaxstrategy.cluster_resolver as cr

LABELS = {"worker": ["job-name=train"]}
OFF = cr.KubernetesExecutableLocation.OFF_CLUSTER
WITHIN = cr.KubernetesExecutableLocation.WITHIN_CLUSTER


@pytest.fixture(autouse=True)
def no_pod_around(monkeypatch):
    for name in os.environ:
        if name.startswith(("KUBERNETES_", "POD_NAME", "HOSTNAME")):
            monkeypatch.delenv(name)


@pytest.fixture
def api(tmp_path, monkeypatch):
    """The API, which the user's kubeconfig names; of two running pods."""
    pods = [pod("train-b", "10.0.0.2"), pod("train-a", "10.0.0.1")]
    with served(Pods(pods)) as api:
        path = str(kubeconfig(tmp_path, api.address))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", path)
        yield api


@pytest.fixture
def within(tmp_path, monkeypatch):
    """The API, over TLS, as a pod with a service account reaches it."""
    token, authority, context = service_account(tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    pods = [pod("train-b", "10.0.0.2"), pod("train-a", "10.0.0.1")]
    with served(Pods(pods), context) as api:
        host, port = api.address.split(":")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
        yield api


def off(labels=LABELS, **more):
    more.setdefault("timeout_seconds", 5)
    return cr.KubernetesClusterResolver(labels, executable_location=OFF, **more)


# The cases of TensorFlow's tests, and what its documentation promises.


def test_the_locations_are_tensorflows():
    assert [(each.name, each.value) for each in cr.KubernetesExecutableLocation] == [
        ("WITHIN_CLUSTER", 0),
        ("OFF_CLUSTER", 1),
    ]


def test_pods_are_tasks_in_the_order_of_their_names(api):
    api.pods = [
        pod("tensorflow-abc123", "10.1.2.3", "tensorflow"),
        pod("tensorflow-def456", "10.1.2.4", "tensorflow"),
        pod("tensorflow-999999", "10.1.2.5", "tensorflow"),
        pod("another", "10.1.2.6"),
    ]
    resolver = off(None)
    assert resolver.cluster_spec() == {
        "worker": ["10.1.2.5:8470", "10.1.2.3:8470", "10.1.2.4:8470"]
    }
    path, query, headers, _ = api.asked[-1]
    assert (path, query) == ("/api/v1/pods", {"labelSelector": "job-name=tensorflow"})
    assert headers["Authorization"].split() == ["Bearer", TOKEN]


def test_a_pod_asks_with_its_service_account(within):
    resolver = cr.KubernetesClusterResolver(LABELS, tf_server_port=np.int64(2222))
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
    assert within.asked[-1][2]["Authorization"].split()[1] == TOKEN


def test_each_selector_is_sorted_by_itself(api):
    api.pods = [
        pod(name, f"10.0.0.{i}", job)
        for i, (name, job) in enumerate(
            [("b", "one"), ("c", "one"), ("a", "two"), ("ps-1", "ps"), ("ps-0", "ps")]
        )
    ]
    labels = {"worker": ["job-name=one", "job-name=two"], "ps": ("job-name=ps",)}
    assert off(labels).cluster_spec() == {
        "worker": ["10.0.0.0:8470", "10.0.0.1:8470", "10.0.0.2:8470"],
        "ps": ["10.0.0.4:8470", "10.0.0.3:8470"],
    }


def test_masters_and_what_is_set(api):
    resolver = off()
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert (resolver.master(), resolver.rpc_layer) == ("", "grpc")
    assert resolver.environment == "" and resolver.num_accelerators() == {}
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
    resolver.task_type, resolver.task_id = "worker", 0
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master(task_id=1, rpc_layer="http") == "http://10.0.0.2:8470"
    resolver.rpc_layer = "test"
    assert resolver.master() == "test://10.0.0.1:8470"
    assert resolver.process() == cr.Process(0, 2, "10.0.0.1:8470")


def test_the_cluster_is_asked_for_anew(api):
    resolver = off()
    assert resolver.cluster_spec().num_tasks("worker") == 2
    api.pods = [pod("train-a", "10.0.0.7")]
    assert resolver.cluster_spec() == {"worker": ["10.0.0.7:8470"]}


@pytest.mark.parametrize("phase", ["Failed", "Pending", "Succeeded", "Unknown"])
def test_a_pod_that_does_not_run_is_named(api, phase):
    api.pods.append(pod("train-c", "10.0.0.3", phase=phase))
    text = f'Pod "train-c" is not running; phase: "{phase}". Give `num_tasks` to wait'
    with pytest.raises(RuntimeError, match=re.escape(text)) as raised:
        off().cluster_spec()
    assert raised.type is js.ClusterError


# Clients of the user's.


def test_a_client_of_ones_own_is_asked(api):
    from kubernetes.client import ApiClient, Configuration

    with ApiClient(Configuration(host=f"http://{api.address}")) as connection:
        resolver = cr.KubernetesClusterResolver(
            LABELS, override_client=CoreV1Api(connection)
        )
        assert resolver.cluster_spec().num_tasks("worker") == 2
        api.forbidden = "/api/v1/pods"
        with pytest.raises(
            js.ClusterError, match="does not let this program list pods"
        ):
            resolver.cluster_spec()


def test_stand_ins_that_were_made_for_tensorflow_serve():
    listed = mock.Mock()
    listed.status.configure_mock(phase="Running", host_ip="10.1.2.3")
    listed.metadata.configure_mock(name="tensorflow-abc123")
    client = mock.MagicMock()
    client.list_pod_for_all_namespaces.side_effect = lambda *args, **kwargs: {
        "job-name=tensorflow": mock.MagicMock(items=[listed])
    }[kwargs["label_selector"]]
    resolver = cr.KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.1.2.3:8470"]}
    assert resolver.master() == ""
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.1.2.3:8470"


def test_a_strict_stand_in_is_asked_for_labels_only():
    class Client:
        def list_pod_for_all_namespaces(self, label_selector):
            status = SimpleNamespace(phase="Running", pod_ip="10.0.0.1")
            metadata = SimpleNamespace(name=label_selector)
            return SimpleNamespace(
                items=[SimpleNamespace(metadata=metadata, status=status)]
            )

    resolver = cr.KubernetesClusterResolver(LABELS, override_client=Client())
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}


def test_other_errors_of_a_stand_in_are_its_own():
    client = mock.Mock()
    client.list_pod_for_all_namespaces.side_effect = KeyError("mine")
    with pytest.raises(KeyError, match="mine"):
        cr.KubernetesClusterResolver(LABELS, override_client=client).cluster_spec()


# Addresses.


def test_pods_have_addresses_of_their_own(api):
    # TensorFlow gives both the address of their node, at which neither can listen.
    api.pods = [
        pod("a", "10.0.0.1", host_ip="192.168.0.9"),
        pod("b", "fd00::7", host_ip="192.168.0.9"),
    ]
    assert off().cluster_spec() == {"worker": ["10.0.0.1:8470", "[fd00::7]:8470"]}


def test_a_pod_without_an_address_is_refused(api):
    api.pods.append(pod("train-c", ip=None))
    with pytest.raises(js.ClusterError, match='Pod "train-c" of job .* no IP address'):
        off().cluster_spec()


def test_a_pod_that_is_being_deleted_does_not_count(api):
    api.pods.append(pod("train-c", "10.0.0.3", deleted="2026-01-01T00:00:00Z"))
    with pytest.raises(
        js.ClusterError, match='"train-c" is not.*: "Running, being del'
    ):
        off().cluster_spec()
    assert off(num_tasks={"worker": 2}).cluster_spec().num_tasks("worker") == 2


def test_pods_of_one_namespace_can_be_chosen(api):
    api.pods.append(pod("train-a", "10.0.0.3", namespace="mine"))
    assert off().cluster_spec().num_tasks("worker") == 3
    resolver = off(namespace="mine")
    assert resolver.cluster_spec() == {"worker": ["10.0.0.3:8470"]}
    assert api.asked[-1][0] == "/api/v1/namespaces/mine/pods"


# Which pod this is.


@pytest.mark.parametrize("variable", ["HOSTNAME", "POD_NAME"])
def test_a_pod_finds_itself_by_its_name(within, monkeypatch, variable):
    monkeypatch.setenv("HOSTNAME", "node7")
    monkeypatch.setenv(variable, "train-b")
    within.pods.append(pod("train-ps-0", "10.0.0.3", "ps"))
    labels = {"ps": ["job-name=ps"], **LABELS}
    resolver = cr.KubernetesClusterResolver(labels)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://10.0.0.2:8470"
    asked = len(within.asked)
    assert resolver.process() == cr.Process(1, 2, "10.0.0.1:8470")
    assert len(within.asked) == asked + 2  # one listing: two could differ
    monkeypatch.setenv(variable, "train-ps-0")
    resolver = cr.KubernetesClusterResolver(labels)
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    with pytest.raises(ValueError, match="'ps', which does not train"):
        resolver.process()


def test_a_process_stays_the_task_as_which_it_joined(within, monkeypatch):
    monkeypatch.setenv("HOSTNAME", "train-b")
    resolver = cr.KubernetesClusterResolver(LABELS)
    assert resolver.process().index == 1
    within.pods = within.pods[:1]  # the first has ended
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    resolver.task_id = 0
    assert resolver.task_id == 0
    assert resolver.cluster_spec() == {"worker": ["10.0.0.2:8470"]}


@pytest.mark.parametrize(
    ("name", "hostname"),
    [
        ("train-1-x7k2p", "train-1"),  # of an indexed job
        ("n" * 62 + "-suffix", "n" * 62),  # longer than hostnames are
    ],
)
def test_a_pod_finds_itself_by_its_hostname(within, monkeypatch, name, hostname):
    more = {} if len(name) > 63 else {"hostname": hostname}
    within.pods = [pod("a", "10.0.0.1"), pod(name, "10.0.0.2", **more)]
    monkeypatch.setenv("HOSTNAME", hostname)
    resolver = cr.KubernetesClusterResolver(LABELS)
    assert resolver.process() == cr.Process(1, 2, "10.0.0.1:8470")


def test_what_is_set_comes_before_the_pods_name(within, monkeypatch):
    monkeypatch.setenv("HOSTNAME", "train-b")
    resolver = cr.KubernetesClusterResolver(LABELS)
    resolver.task_id = 0
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    resolver.task_id = None
    resolver.task_type = "ps"  # of which the pod's name says no index
    assert (resolver.task_type, resolver.task_id) == ("ps", None)


@pytest.mark.parametrize("own", ["laptop", "twice", ""])
def test_a_pod_that_is_not_found_is_told_what_to_set(within, monkeypatch, own):
    within.pods = [pod("twice", namespace="a"), pod("twice", namespace="b")]
    monkeypatch.setenv("HOSTNAME", own)
    resolver = cr.KubernetesClusterResolver(LABELS)
    assert (resolver.task_type, resolver.task_id) == (None, None)
    text = f"POD_NAME and HOSTNAME name none of the pods, or several: '{own}'. Set `ta"
    with pytest.raises(ValueError, match=re.escape(text)):
        resolver.process()


def test_a_lone_pod_is_not_taken_for_this_process(api):
    # The others may not have been there when it was asked.
    api.pods = [pod("train-a")]
    with pytest.raises(
        ValueError, match="not known: .* It runs outside of the cluster"
    ):
        off().process()


@pytest.mark.parametrize("task_id", [-1, "x", True])
def test_what_is_no_task_id_is_refused(api, task_id):
    resolver = off()
    resolver.task_type, resolver.task_id = "worker", task_id
    for ask in (resolver.process, resolver.master):
        with pytest.raises(
            ValueError, match="`task_id` was .*; the index of this proc"
        ):
            ask()


def test_unknown_tasks_and_jobs_are_refused(api):
    resolver = off()
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
        resolver.master("ps", 0)
    with pytest.raises(ValueError, match="no task 2 in job 'worker'"):
        resolver.master("worker", 2)
    resolver.task_type, resolver.task_id = "worker", 2
    with pytest.raises(ValueError, match="task 2 of 'worker', which ClusterSpec"):
        resolver.process()
    other = off({"trainer": ["job-name=train"]})
    other.task_type, other.task_id = "trainer", 0
    with pytest.raises(ValueError, match="unknown job 'trainer'"):
        other.process()


# How many there will be.


def test_pods_that_are_not_there_yet_are_waited_for(api):
    api.pods = [
        pod("train-a", "10.0.0.1"),
        pod("train-b", ip=None),
        pod("train-c", phase="Pending"),
        pod("train-old", phase="Failed"),
    ]
    steps = [api.pods, [*api.pods[:1], pod("train-b", "10.0.0.2"), *api.pods[2:]]]
    whole = [*steps[1][:2], pod("train-c", "10.0.0.3"), api.pods[3]]
    answer = api.answer

    def one_more(*request):
        api.pods = steps.pop(0) if steps else whole
        return answer(*request)

    api.answer = one_more
    spec = off(num_tasks={"worker": np.int64(3)}, timeout_seconds=20).cluster_spec()
    assert spec == {"worker": [f"10.0.0.{i}:8470" for i in (1, 2, 3)]}
    assert len(api.asked) == 3


def test_pods_that_do_not_come_are_told(api):
    api.pods += [pod("train-c", phase="Pending"), pod("train-d", ip=None)]
    text = (
        "2 of 3 pods of job 'worker' run, of those with the labels ['job-name=train']. "
        "Others: train-c (Pending), train-d (no IP). That was so for 0.2 s, which is "
        "`timeout_seconds`."
    )
    with pytest.raises(js.ClusterError, match=re.escape(text)):
        off(num_tasks={"worker": 3}, timeout_seconds=0.2).cluster_spec()
    assert len(api.asked) > 1


def test_more_pods_than_there_will_be_are_refused(api):
    with pytest.raises(
        js.ClusterError, match="2 pods of job 'worker' run, and .* has 1: "
    ):
        off(num_tasks={"worker": 1}).cluster_spec()


def test_a_job_without_pods_is_refused(api):
    labels = {**LABELS, "ps": ["job-name=ps"]}
    with pytest.raises(js.ClusterError, match="no pods for job 'ps', with the labels"):
        off(labels).cluster_spec()


def test_a_pod_is_one_task_only(api):
    labels = {**LABELS, "ps": ["job-name=train"]}
    with pytest.raises(js.ClusterError, match='"train-[ab]" would be 2 tasks: it has'):
        off(labels).cluster_spec()


# The API.


def test_an_api_that_is_busy_is_asked_again(api):
    api.failures = [503, 429]
    assert off().cluster_spec().num_tasks("worker") == 2
    assert len(api.asked) == 3


def test_an_api_that_stays_busy_is_told(api):
    api.failures = [503] * 100
    text = rf"API of Kubernetes at http://{api.address} did not answer: .*503"
    with pytest.raises(js.ClusterError, match=text):
        off(timeout_seconds=0.2).cluster_spec()


def test_an_api_that_says_nothing_has_a_deadline(api):
    api.silent = True
    with pytest.raises(
        js.ClusterError, match="did not answer: .*That was so for 0.2 s"
    ):
        off(timeout_seconds=0.2).cluster_spec()


def test_an_api_that_nobody_serves_is_told(tmp_path, monkeypatch):
    with served(Pods([])) as api:
        path = str(kubeconfig(tmp_path, api.address))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", path)
    with pytest.raises(
        js.ClusterError, match=f"at http://{api.address} did not answer"
    ):
        off(timeout_seconds=0).cluster_spec()


def test_a_token_that_is_not_taken_is_told(api):
    api.failures = [401]
    with pytest.raises(
        js.ClusterError, match="list pods: 401 .* token was not taken: "
    ):
        off().cluster_spec()


def test_a_missing_right_is_named(api):
    api.failures = [403] * 2
    with pytest.raises(js.ClusterError, match="list pods: 403 .*a ClusterRole with"):
        off().cluster_spec()
    with pytest.raises(js.ClusterError, match="a Role with .* in the namespace 'mine'"):
        off(namespace="mine").cluster_spec()
    assert len(api.asked) == 2


def test_other_refusals_are_quoted(api):
    api.failures = [400]
    with pytest.raises(
        js.ClusterError, match="does not let .* list pods: 400 Bad Request"
    ):
        off().cluster_spec()


def test_a_certificate_of_somebody_else_is_refused(within, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    authority = str(service_account(other)[1])
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", authority)
    resolver = cr.KubernetesClusterResolver(LABELS, timeout_seconds=0)
    with pytest.raises(js.ClusterError, match="did not answer: .*SSL"):
        resolver.cluster_spec()
    assert within.asked == []


# What is given.


def test_a_program_outside_of_a_pod_is_told(monkeypatch, tmp_path):
    with pytest.raises(
        js.ClusterError, match="does not run in a pod .* give `executabl"
    ):
        cr.KubernetesClusterResolver(LABELS)
    path = tmp_path / "config"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    for content in (None, "", "a: [", "users: []"):
        if content is not None:
            path.write_text(content)
        with pytest.raises(
            js.ClusterError, match="(?s)kubeconfig cannot be used: .*kubectl get"
        ):
            off()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"executable_location": None},
            ValueError,
            "`executable_location` was None; Kub",
        ),
        ({"executable_location": 1}, ValueError, "`executable_location` was 1"),
        (
            {"tf_server_port": 0},
            ValueError,
            "`tf_server_port` was 0; a port was wanted",
        ),
        ({"tf_server_port": None}, ValueError, "`tf_server_port` was None; a port"),
        ({"job_to_label_mapping": ["a"]}, TypeError, "mapping` was ['a']; a dict from"),
        (
            {"job_to_label_mapping": {"worker": "job-name=a"}},
            TypeError,
            "a list was wan",
        ),
        ({"job_to_label_mapping": {"worker": []}}, TypeError, "job 'worker' were []"),
        ({"job_to_label_mapping": {"worker": [3]}}, TypeError, "job 'worker' were [3]"),
        ({"num_tasks": 2}, TypeError, "`num_tasks` was 2; the number of pods of each"),
        ({"num_tasks": {"ps": 2}}, ValueError, "has the job 'ps', of which"),
        (
            {"num_tasks": {"worker": 0}},
            ValueError,
            "job 'worker' was 0; a whole number",
        ),
        ({"num_tasks": {"worker": True}}, ValueError, "job 'worker' was True; a whole"),
        ({"timeout_seconds": -1}, ValueError, "`timeout_seconds` was -1; a number"),
        ({"timeout_seconds": None}, ValueError, "`timeout_seconds` was None"),
        (
            {"override_client": 3},
            TypeError,
            "was 3, which has no method `list_pod_for_al",
        ),
        (
            {"override_client": mock.Mock(spec=["list_pod_for_all_namespaces"])}
            | {"namespace": "mine"},
            TypeError,
            "which has no method `list_namespaced_pod`",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    arguments = {"override_client": mock.Mock(), **arguments}
    with pytest.raises(error, match=re.escape(text)):
        cr.KubernetesClusterResolver(**arguments)


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    cr.KubernetesClusterResolver(override_client=mock.Mock())  # which needs none
    with pytest.raises(
        js.MissingExtraError, match=r"install 'jaxstrategy\[kubernetes\]'"
    ):
        cr.KubernetesClusterResolver()


def test_other_clients_of_the_program_stay_as_they_are(api):
    from kubernetes.client import Configuration

    before = Configuration.get_default_copy().host
    off().cluster_spec()
    assert Configuration.get_default_copy().host == before
