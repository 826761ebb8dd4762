"""Resolvers of clouds, with the true clients on stand-ins for their APIs."""

import functools
import os
import re
import sys
from types import SimpleNamespace
from unittest import mock

import google.auth.credentials
import googleapiclient.discovery
import numpy as np
import pytest
from helpers import gce_group, kubernetes_pods
from helpers.gce_group import Group, Metadata, account_file, redirected
from helpers.http_answers import served
from helpers.kubernetes_pods import Pods, kubeconfig, pod, service_account
from kubernetes.client import ApiClient, Configuration, CoreV1Api
from kubernetes.config import incluster_config, kube_config

import jaxstrategy as js
import jaxstrategy.cluster_resolver as cr

LABELS = {"worker": ["job-name=train"]}


@pytest.fixture(autouse=True)
def no_cloud_around(monkeypatch):
    for name in os.environ:
        if name.startswith(("KUBERNETES_", "POD_NAME", "HOSTNAME", "GOOGLE_", "GCE_")):
            monkeypatch.delenv(name)


def told(call, text, error=js.ClusterError):
    """The call raises the error, and the pattern is found in its text."""
    with pytest.raises(error, match=text) as caught:
        call()
    assert caught.type is error


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
    location = cr.KubernetesExecutableLocation.OFF_CLUSTER
    more = {"timeout_seconds": 5, "executable_location": location} | more
    return cr.KubernetesClusterResolver(labels, **more)


def test_pods_are_tasks_in_the_order_of_their_names(api):
    api.pods = [
        pod("tensorflow-abc123", "10.1.2.3", "tensorflow"),
        pod("tensorflow-def456", "fd00::7", "tensorflow", host_ip="192.168.0.9"),
        pod("tensorflow-999999", "10.1.2.5", "tensorflow", host_ip="192.168.0.9"),
        pod("another", "10.1.2.6"),
    ]
    resolver = off(None)  # not the addresses of their nodes, as TensorFlow
    workers = ["10.1.2.5:8470", "10.1.2.3:8470", "[fd00::7]:8470"]
    assert resolver.cluster_spec() == {"worker": workers}
    path, query, headers, _ = api.asked[-1]
    assert (path, query) == ("/api/v1/pods", {"labelSelector": "job-name=tensorflow"})
    assert headers["Authorization"].split() == ["Bearer", kubernetes_pods.TOKEN]
    api.pods = [pod("train-a", "10.0.0.7", "tensorflow")]
    assert resolver.cluster_spec() == {"worker": ["10.0.0.7:8470"]}  # asked anew
    jobs = [("b", "one"), ("c", "one"), ("a", "two"), ("ps-1", "ps"), ("ps-0", "ps")]
    api.pods = [pod(name, f"10.0.0.{i}", job) for i, (name, job) in enumerate(jobs)]
    labels = {"worker": ["job-name=one", "job-name=two"], "ps": ("job-name=ps",)}
    assert off(labels).cluster_spec() == {
        "worker": ["10.0.0.0:8470", "10.0.0.1:8470", "10.0.0.2:8470"],
        "ps": ["10.0.0.4:8470", "10.0.0.3:8470"],
    }


def test_masters_and_what_is_set_of_pods(api):
    before = Configuration.get_default_copy().host
    resolver = off()
    assert Configuration.get_default_copy().host == before  # of other clients
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert (resolver.master(), resolver.rpc_layer) == ("", "grpc")
    assert resolver.environment == "" and resolver.num_accelerators() == {}
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master(task_id=1, rpc_layer="http") == "http://10.0.0.2:8470"
    assert resolver.process() == cr.Process(0, 2, "10.0.0.1:8470")
    told(lambda: resolver.master("ps", 0), "No such job in cluster: 'ps'", ValueError)
    told(lambda: resolver.master("worker", 2), "no task 2 in job", ValueError)
    for task_id, text in [
        (2, "task 2 of 'worker', which ClusterSpec"),
        *((wrong, "`task_id` was .*; the index of this proc") for wrong in (-1, "x")),
    ]:
        resolver.task_id = task_id
        told(resolver.process, text, ValueError)
    other = off({"trainer": ["job-name=train"]})
    other.task_type, other.task_id = "trainer", 0
    told(other.process, "unknown job 'trainer'", ValueError)


def test_clients_of_ones_own_are_asked(api):
    with ApiClient(Configuration(host=f"http://{api.address}")) as connection:
        resolver = off(override_client=CoreV1Api(connection))
        assert resolver.cluster_spec().num_tasks("worker") == 2
        api.forbidden = "/api/v1/pods"
        told(resolver.cluster_spec, "does not let this program list pods")

    # As in TensorFlow's tests.
    listed = mock.Mock()
    listed.status.configure_mock(phase="Running", host_ip="10.1.2.3")
    listed.metadata.configure_mock(name="tensorflow-abc123")
    client = mock.MagicMock()
    client.list_pod_for_all_namespaces.return_value.items = [listed]
    resolver = cr.KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.1.2.3:8470"]}
    client.list_pod_for_all_namespaces.side_effect = KeyError("mine")
    told(resolver.cluster_spec, "mine", KeyError)


def test_a_pod_finds_itself_by_its_name(within, monkeypatch):
    # It asks with its service account.
    resolver = cr.KubernetesClusterResolver(LABELS, tf_server_port=np.int64(2222))
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
    account = within.asked[-1][2]["Authorization"].split()[1]
    assert account == kubernetes_pods.TOKEN
    within.pods.append(pod("train-ps-0", "10.0.0.3", "ps"))
    labels = {"ps": ["job-name=ps"], **LABELS}
    for variable in "HOSTNAME", "POD_NAME":
        monkeypatch.setenv(variable, "train-b")
        resolver = cr.KubernetesClusterResolver(labels)
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert resolver.master() == "grpc://10.0.0.2:8470"
        asked = len(within.asked)
        assert resolver.process() == cr.Process(1, 2, "10.0.0.1:8470")
        assert len(within.asked) == asked + 2  # one listing: two could differ
        monkeypatch.setenv(variable, "train-ps-0")
        resolver = cr.KubernetesClusterResolver(labels)
        assert (resolver.task_type, resolver.task_id) == ("ps", 0)
        told(resolver.process, "'ps', which does not train", ValueError)
    monkeypatch.delenv("POD_NAME")
    for name, hostname in [
        ("train-1-x7k2p", "train-1"),  # of an indexed job
        ("n" * 62 + "-suffix", "n" * 62),  # longer than hostnames are
    ]:
        more = {} if len(name) > 63 else {"hostname": hostname}
        within.pods = [pod("a", "10.0.0.1"), pod(name, "10.0.0.2", **more)]
        monkeypatch.setenv("HOSTNAME", hostname)
        resolver = cr.KubernetesClusterResolver(LABELS)
        assert resolver.process() == cr.Process(1, 2, "10.0.0.1:8470")


def test_a_pod_that_is_not_found_is_told_what_to_set(within, api, monkeypatch):
    within.pods = [pod("twice", namespace="a"), pod("twice", namespace="b")]
    for own in "laptop", "twice", "":
        monkeypatch.setenv("HOSTNAME", own)
        resolver = cr.KubernetesClusterResolver(LABELS)
        assert (resolver.task_type, resolver.task_id) == (None, None)
        text = f"POD_NAME and HOSTNAME name none .*, or several: '{own}'. Set `ta"
        told(resolver.process, text, ValueError)
    api.pods = [pod("train-a")]  # others may not have been there when it was asked
    told(off().process, "not known: .* It runs outside of the cluster", ValueError)


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


def test_pods_that_are_not_as_they_should_be_are_told(api):
    two, running = api.pods, {"num_tasks": {"worker": 2}}
    for phase in "Failed", "Pending", "Succeeded", "Unknown":
        api.pods = [*two, pod("train-c", "10.0.0.3", phase=phase)]
        text = f'Pod "train-c" is not running; phase: "{phase}". Give `num_tasks` to'
        told(off().cluster_spec, text)
    api.pods = [*two, pod("train-c", ip=None)]
    told(off().cluster_spec, 'Pod "train-c" of job .* no IP address')
    api.pods = [*two, pod("train-c", "10.0.0.3", deleted="2026-01-01T00:00:00Z")]
    told(off().cluster_spec, '"train-c" is not.*: "Running, being del')
    assert off(**running).cluster_spec().num_tasks("worker") == 2
    api.pods = [*two, pod("train-c", phase="Pending"), pod("train-d", ip=None)]
    text = (
        "2 of 3 pods of job 'worker' run, of those with the labels ['job-name=train']. "
        "Others: train-c (Pending), train-d (no IP). That was so for 0.2 s, which is "
        "`timeout_seconds`."
    )
    asked = len(api.asked)
    three = off(num_tasks={"worker": 3}, timeout_seconds=0.2)
    told(three.cluster_spec, re.escape(text))
    assert len(api.asked) > asked + 1
    api.pods = two
    one = off(num_tasks={"worker": 1})
    told(one.cluster_spec, "2 pods of job 'worker' run, and .* has 1: ")
    none = off({**LABELS, "ps": ["job-name=ps"]})
    told(none.cluster_spec, "no pods for job 'ps', with the labels")
    twice = off({**LABELS, "ps": ["job-name=train"]})
    told(twice.cluster_spec, '"train-[ab]" would be 2 tasks: it has')


def test_an_api_of_kubernetes_that_refuses_or_fails_is_told(api, tmp_path, monkeypatch):
    api.failures = [503, 429]  # busy: it is asked again
    assert off().cluster_spec().num_tasks("worker") == 2 and len(api.asked) == 3
    for status, text in [
        (401, "list pods: 401 .* token was not taken: "),
        (403, "list pods: 403 .*a ClusterRole with"),
        (400, "does not let .* list pods: 400 Bad Request"),
    ]:
        api.failures = [status]
        told(off().cluster_spec, text)
    api.failures = [403]
    text = "a Role with .* in the namespace 'mine'"
    told(off(namespace="mine").cluster_spec, text)
    api.failures = [503] * 100
    text = rf"API of Kubernetes at http://{api.address} did not answer: .*503"
    told(off(timeout_seconds=0.2).cluster_spec, text)
    api.failures, api.silent = [], True
    text = "did not answer: .*That was so for 0.2 s"
    told(off(timeout_seconds=0.2).cluster_spec, text)
    with served(Pods([])) as nobody:
        path = str(kubeconfig(tmp_path, nobody.address))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", path)
    text = f"at http://{nobody.address} did not answer"
    told(off(timeout_seconds=0).cluster_spec, text)


def test_a_certificate_of_somebody_else_is_refused(within, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    authority = str(service_account(other)[1])
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", authority)
    resolver = cr.KubernetesClusterResolver(LABELS, timeout_seconds=0)
    told(resolver.cluster_spec, "did not answer: .*SSL")
    assert within.asked == []


def test_what_cannot_be_asked_of_kubernetes_is_refused(monkeypatch, tmp_path):
    text = "does not run in a pod .* give `executabl"
    told(lambda: cr.KubernetesClusterResolver(LABELS), text)
    path = tmp_path / "config"
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    for content in (None, "", "a: [", "users: []"):
        if content is not None:
            path.write_text(content)
        told(off, "(?s)kubeconfig cannot be used: .*kubectl get")
    listing = mock.Mock(spec=["list_pod_for_all_namespaces"])
    labels = "job_to_label_mapping"
    for error, text, arguments in [
        (ValueError, "`executable_location` was 1; Kub", {"executable_location": 1}),
        (ValueError, "`tf_server_port` was 0; a port was", {"tf_server_port": 0}),
        (TypeError, r"mapping` was \['a'\]; a dict", {labels: ["a"]}),
        (TypeError, "a list was wan", {labels: {"worker": "job-name=a"}}),
        (TypeError, r"job 'worker' were \[\]", {labels: {"worker": []}}),
        (TypeError, "job 'worker' were", {labels: {"worker": [3]}}),
        (TypeError, "`num_tasks` was 2; the number of", {"num_tasks": 2}),
        (ValueError, "has the job 'ps', of which", {"num_tasks": {"ps": 2}}),
        (ValueError, "job 'worker' was 0; a whole", {"num_tasks": {"worker": 0}}),
        (ValueError, "job 'worker' was True; a whole", {"num_tasks": {"worker": True}}),
        (ValueError, "`timeout_seconds` was -1; a number", {"timeout_seconds": -1}),
        (TypeError, "was 3, which has no method `list_pod", {"override_client": 3}),
        (
            TypeError,
            "no method `list_namespaced_pod`",
            {"override_client": listing, "namespace": "mine"},
        ),
    ]:
        arguments = {"override_client": mock.Mock(), **arguments}
        told(functools.partial(cr.KubernetesClusterResolver, **arguments), text, error)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    cr.KubernetesClusterResolver(override_client=mock.Mock())  # which needs none
    text = r"install 'jaxstrategy\[kubernetes\]'"
    told(cr.KubernetesClusterResolver, text, js.errors.MissingExtraError)


THREE = {"vm-1": "10.0.0.9", "vm-2": "10.0.0.10", "vm-3": "10.0.0.3"}
SPEC = {"worker": ["10.0.0.10:8470", "10.0.0.3:8470", "10.0.0.9:8470"]}


@pytest.fixture
def group(monkeypatch):
    """The group, at a server that Google's client takes for Google."""
    with served(Group(dict(THREE))) as group:
        build = redirected(googleapiclient.discovery.build, group.address)
        monkeypatch.setattr(googleapiclient.discovery, "build", build)
        yield group


def resolver_of(*, name="group", port=8470, **more):
    more.setdefault("credentials", google.auth.credentials.AnonymousCredentials())
    more.setdefault("timeout_seconds", 5)
    return cr.GCEClusterResolver("project", "us-east1-d", name, port, **more)


def stand_in(instances):
    """A service without a server, as TensorFlow's tests have one."""

    def request(answer):
        return SimpleNamespace(execute=lambda: answer)

    def found(project, zone, instance):
        ip = instances[instance]
        return request({"networkInterfaces": [{"networkIP": ip}]})

    listed = {"items": [{"instance": f"https://gce/{name}"} for name in instances]}
    groups = SimpleNamespace(
        listInstances=lambda **_: request(listed), listInstances_next=lambda **_: None
    )
    return SimpleNamespace(
        instanceGroups=lambda: groups, instances=lambda: SimpleNamespace(get=found)
    )


def test_instances_are_tasks_in_the_order_of_their_addresses(group):
    resolver = resolver_of(port=np.int64(8470))
    assert resolver.cluster_spec() == SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "")
    assert resolver.num_accelerators() == {}
    first, second = (
        asked for asked in group.asked if asked[0].endswith("listInstances")
    )
    assert first[1]["orderBy"] == "name" and second[1]["pageToken"] == "2"
    assert resolver.process() == cr.Process(0, 3, "10.0.0.10:8470")
    group.instances = {"vm-7": "10.0.0.7"}
    assert resolver.cluster_spec() == {"worker": ["10.0.0.7:8470"]}


def test_masters_and_what_is_set_of_instances():
    service = stand_in({"a": "10.1.2.3", "b": "10.2.3.4", "c": "10.3.4.5"})
    resolver = resolver_of(task_type="testworker", task_id=0, service=service)
    assert resolver.master() == "grpc://10.1.2.3:8470"
    assert resolver.master("testworker", 2, "test") == "test://10.3.4.5:8470"
    assert resolver.master(task_id=1) == "grpc://10.2.3.4:8470"
    text = "You cannot reset the task_type of the GCEClusterResolver after it has been "
    with pytest.raises(RuntimeError, match=text):
        resolver.task_type = "foobar"
    assert resolver.task_type == "testworker"
    resolver = resolver_of(task_type="", task_id=1, service=service)
    assert resolver.master(task_type="", task_id=0) == "grpc://10.1.2.3:8470"


def test_credentials_are_googles_or_those_given(group, monkeypatch, tmp_path):
    path = account_file(tmp_path, group.address)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    for credentials in "default", None:
        group.asked.clear()
        assert resolver_of(credentials=credentials).cluster_spec() == SPEC
        assert group.asked[0][0] == "/token"
        for _, _, headers, _ in group.asked[1:]:
            assert headers["Authorization"] == f"Bearer {gce_group.TOKEN}"
    resolver = resolver_of(credentials="default")
    group.failures = [400]
    told(resolver.cluster_spec, "does not tell of instance group .*login`")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    text = "no credentials .*none.json.*gcloud auth"
    told(lambda: resolver_of(credentials="default"), text)
    text = "`credentials` was 'mine'; credentials of `goog"
    told(lambda: resolver_of(credentials="mine"), text, TypeError)


def test_an_instance_finds_itself_by_its_metadata_server(group, monkeypatch):
    with served(Metadata("10.0.0.3")) as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.address)
        resolver = resolver_of(task_id=None)
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert resolver.master() == "grpc://10.0.0.3:8470"
        asked = len(group.asked)
        assert resolver.process() == cr.Process(1, 3, "10.0.0.10:8470")
        assert len(group.asked) == asked + 5  # one listing: two could differ
        assert metadata.asked[0][2]["Metadata-Flavor"] == "Google"
        metadata.ip = "10.9.9.9"
        assert resolver.task_id == 1  # as it joined
        resolver = resolver_of(task_id=None)
        assert resolver.task_id is None and resolver.master() == ""
        text = "task_id is None. This host is none of instance group 'group' in zone"
        told(resolver.process, text, ValueError)
    told(resolver.process, "server does not answer. Give `task_id`.", ValueError)


def test_instances_that_do_not_run_yet_are_waited_for(group):
    del group.instances["vm-2"]
    answer = group.answer

    def one_more(method, path, *request):
        if len(group.asked) > 4:
            group.instances["vm-2"] = "10.0.0.10"
        return answer(method, path, *request)

    group.answer = one_more
    assert resolver_of(num_tasks=np.int64(3), timeout_seconds=20).cluster_spec() == SPEC
    assert len(group.asked) > 5


def test_instances_that_are_not_as_they_should_be_are_told(group):
    service = stand_in(THREE)  # which needs no time
    more = resolver_of(num_tasks=4, timeout_seconds=0.2, service=service)
    text = "3 of 4 instances of instance group 'group' in .* run. That was so for 0.2 s"
    told(more.cluster_spec, text)
    text = "3 instances of .* and `num_tasks` is 2"
    told(resolver_of(num_tasks=2).cluster_spec, text)
    group.instances["vm-2"] = None
    told(resolver_of().cluster_spec, "'vm-2' of .* has no internal IPv4 address")
    group.instances = {}
    text = (
        "No instance of instance group 'group' in zone 'us-east1-d' of project "
        "'project' runs. Start some; give `num_tasks` to wait for them."
    )
    told(resolver_of().cluster_spec, re.escape(text))


@pytest.mark.slow
def test_an_api_of_google_that_refuses_or_fails_is_told(group, monkeypatch):
    group.failures = [503, 429]  # busy: it is asked again
    assert resolver_of().cluster_spec() == SPEC
    answer, limits = group.answer, [1]

    def limited(*request):  # so it is where too much was asked
        if limits:
            limits.pop()
            reason = {"reason": "rateLimitExceeded", "message": "rateLimitExceeded"}
            return 403, {"error": {"errors": [reason], "message": "rateLimitExceeded"}}
        return answer(*request)

    group.answer = limited
    assert resolver_of().cluster_spec() == SPEC and not limits
    for status, advice in [
        (400, "See the names of project, zone and group"),
        (401, "Give `credentials`, or let the default ones be found"),
        (403, 'The account needs the role "Compute Viewer", and an instance the scope'),
    ]:
        group.failures = [status]
        told(resolver_of().cluster_spec, f"does not tell of .*{advice}")
    text = "tell of instance group 'other' in .*404.*See the names of project"
    told(resolver_of(name="other").cluster_spec, text)
    text = "Not all of instance group .* in time"
    told(resolver_of(timeout_seconds=0).cluster_spec, text)
    group.failures = [503] * 100
    text = "Compute Engine did not answer: .*503.*That was so for 0.2 s, which is `time"
    told(resolver_of(timeout_seconds=0.2).cluster_spec, text)
    group.failures, group.silent = [], True
    text = "did not answer: .*That was so for 0.1 s"
    told(resolver_of(timeout_seconds=0.1).cluster_spec, text)
    with served(Group({})) as other:
        pass
    build = redirected(googleapiclient.discovery.build, other.address)
    monkeypatch.setattr(googleapiclient.discovery, "build", build)
    told(resolver_of(timeout_seconds=0).cluster_spec, "did not answer: .*refused")
    service = stand_in({"a": "10.0.0.1"})
    service.instances = lambda: {}["mine"]
    told(resolver_of(service=service).cluster_spec, "mine", KeyError)


def test_what_cannot_be_asked_of_google_is_refused(monkeypatch):
    given = {"project": "p", "zone": "z", "instance_group": "g", "port": 8470}
    for arguments, error, text in [
        ({"project": ""}, ValueError, "`project` was ''; the name of a project of"),
        ({"zone": None}, ValueError, "`zone` was None; the name of a zone"),
        ({"instance_group": 3}, ValueError, "`instance_group` was 3; the name of a"),
        ({"port": None}, ValueError, "`port` was None; a port was wanted"),
        ({"port": 70000}, ValueError, "`port` was 70000; a port was wanted"),
        ({"task_id": "x"}, ValueError, "`task_id` was 'x'; the index of this process"),
        ({"num_tasks": 0}, ValueError, "`num_tasks` was 0; a whole number from 1 on"),
        ({"timeout_seconds": "x"}, ValueError, "`timeout_seconds` was 'x'; a number"),
        ({"service": 3}, TypeError, "`service` was 3, which has no method `instanceGr"),
    ]:
        arguments = {"service": stand_in({}), **given, **arguments}
        told(functools.partial(cr.GCEClusterResolver, **arguments), text, error)
    with pytest.raises(TypeError, match="port"):
        cr.GCEClusterResolver("project", "zone", "group")
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    assert resolver_of(service=stand_in({"a": "10.0.0.1"})).task_id == 0
    text = r"install 'jaxstrategy\[gce\]'"
    told(resolver_of, text, js.errors.MissingExtraError)
