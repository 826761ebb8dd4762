"""`GCEClusterResolver`, with Google's client on a stand-in for its API."""

import os
import re
import sys
from types import SimpleNamespace

import google.auth.credentials
import googleapiclient.discovery
import numpy as np
import pytest
from helpers.gce_group import TOKEN, Group, Metadata, account_file, redirected
from helpers.http_answers import served

import jaxstrategy as js
import jaxstrategy.cluster_resolver as cr

THREE = {"vm-1": "10.0.0.9", "vm-2": "10.0.0.10", "vm-3": "10.0.0.3"}
SPEC = {"worker": ["10.0.0.10:8470", "10.0.0.3:8470", "10.0.0.9:8470"]}


@pytest.fixture(autouse=True)
def no_google_around(monkeypatch):
    for name in os.environ:
        if name.startswith(("GOOGLE_", "GCE_")):
            monkeypatch.delenv(name)


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
        instanceGroups=lambda: groups,
        instances=lambda: SimpleNamespace(get=found),
    )


# The cases of TensorFlow's tests.


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


def test_masters_and_what_is_set():
    service = stand_in({"a": "10.1.2.3", "b": "10.2.3.4", "c": "10.3.4.5"})
    resolver = resolver_of(task_type="testworker", task_id=0, service=service)
    assert resolver.master() == "grpc://10.1.2.3:8470"
    assert resolver.master("testworker", 2, "test") == "test://10.3.4.5:8470"
    assert resolver.master(task_id=1) == "grpc://10.2.3.4:8470"
    resolver.task_id, resolver.rpc_layer = 1, "test"
    assert (resolver.task_id, resolver.rpc_layer) == (1, "test")
    assert resolver.master() == "test://10.2.3.4:8470"
    text = "You cannot reset the task_type of the GCEClusterResolver after it has been "
    with pytest.raises(RuntimeError, match=text):
        resolver.task_type = "foobar"
    assert resolver.task_type == "testworker"


def test_an_empty_type_and_index_0_are_given():
    service = stand_in({"a": "10.1.2.3", "b": "10.2.3.4"})
    resolver = resolver_of(task_type="", task_id=1, service=service)
    assert resolver.master(task_type="", task_id=0) == "grpc://10.1.2.3:8470"


def test_groups_are_joined():
    workers, more, servers = (
        resolver_of(task_type=kind, port=port, service=stand_in(instances))
        for kind, port, instances in [
            ("worker", 8470, {"a": "10.1.2.3", "b": "10.2.3.4"}),
            ("worker", 8470, {"c": "10.4.5.6"}),
            ("ps", 2222, {"d": "10.100.1.2", "e": "10.100.2.3"}),
        ]
    )
    union = cr.UnionResolver(workers, more, servers)
    assert union.cluster_spec() == {
        "worker": ["10.1.2.3:8470", "10.2.3.4:8470", "10.4.5.6:8470"],
        "ps": ["10.100.1.2:2222", "10.100.2.3:2222"],
    }
    assert (union.task_type, union.task_id) == ("worker", 0)


def test_the_cluster_is_asked_for_anew(group):
    resolver = resolver_of()
    assert resolver.cluster_spec() == SPEC
    group.instances = {"vm-7": "10.0.0.7"}
    assert resolver.cluster_spec() == {"worker": ["10.0.0.7:8470"]}


# Credentials.


@pytest.mark.parametrize("credentials", ["default", None])
def test_default_credentials_are_googles(group, monkeypatch, tmp_path, credentials):
    path = account_file(tmp_path, group.address)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    assert resolver_of(credentials=credentials).cluster_spec() == SPEC
    assert group.asked[0][0] == "/token"
    for _, _, headers, _ in group.asked[1:]:
        assert headers["Authorization"] == f"Bearer {TOKEN}"


def test_without_credentials_it_is_told_where_to_get_some(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(
        js.ClusterError, match="no credentials .*none.json.*gcloud auth"
    ):
        resolver_of(credentials="default")


def test_other_credentials_are_refused():
    with pytest.raises(
        TypeError, match="`credentials` was 'mine'; credentials of `goog"
    ):
        resolver_of(credentials="mine")


def test_tokens_that_are_refused_are_told(group, monkeypatch, tmp_path):
    path = account_file(tmp_path, group.address)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    resolver = resolver_of(credentials="default")
    group.failures = [400]
    with pytest.raises(
        js.ClusterError, match="does not tell of instance group .*login`"
    ):
        resolver.cluster_spec()


# Which instance this is.


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
        with pytest.raises(ValueError, match=re.escape(text)):
            resolver.process()
    with pytest.raises(ValueError, match="server does not answer. Give `task_id`."):
        resolver.process()


def test_unknown_tasks_are_refused(group):
    resolver = resolver_of(task_id=3)
    with pytest.raises(ValueError, match="task 3 of 'worker', which ClusterSpec"):
        resolver.process()
    with pytest.raises(ValueError, match="no task 3 in job 'worker'"):
        resolver.master()
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
        resolver.master("ps", 0)
    with pytest.raises(ValueError, match="unknown job 'trainer'"):
        resolver_of(task_type="trainer").process()
    with pytest.raises(ValueError, match="'ps', which does not train"):
        resolver_of(task_type="ps").process()
    resolver.task_id = -1
    with pytest.raises(ValueError, match="`task_id` was -1; the index of this process"):
        resolver.process()


# How many there will be.


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


def test_instances_that_do_not_come_are_told():
    service = stand_in(THREE)
    text = "3 of 4 instances of instance group 'group' in .* run. That was so for 0.2 s"
    with pytest.raises(js.ClusterError, match=text):
        resolver_of(num_tasks=4, timeout_seconds=0.2, service=service).cluster_spec()
    with pytest.raises(js.ClusterError, match="3 instances of .* and `num_tasks` is 2"):
        resolver_of(num_tasks=2, service=service).cluster_spec()


def test_a_group_of_which_none_runs_is_refused(group):
    group.instances = {}
    text = (
        "No instance of instance group 'group' in zone 'us-east1-d' of project "
        "'project' runs. Start some; give `num_tasks` to wait for them."
    )
    with pytest.raises(js.ClusterError, match=re.escape(text)):
        resolver_of().cluster_spec()


def test_an_instance_without_an_address_is_named(group):
    group.instances["vm-2"] = None
    with pytest.raises(
        js.ClusterError, match="'vm-2' of .* has no internal IPv4 address"
    ):
        resolver_of().cluster_spec()


# The API.


def test_an_api_that_is_busy_is_asked_again(group):
    group.failures = [503, 429]
    assert resolver_of().cluster_spec() == SPEC


def test_a_limit_of_requests_is_waited_out(group):
    answer, limits = group.answer, [1]

    def limited(*request):
        if limits.pop():
            limits.append(0)
            reason = {"reason": "rateLimitExceeded", "message": "rateLimitExceeded"}
            return 403, {"error": {"errors": [reason], "message": "rateLimitExceeded"}}
        limits.append(0)
        return answer(*request)

    group.answer = limited
    assert resolver_of().cluster_spec() == SPEC


def test_an_api_that_stays_busy_is_told(group):
    group.failures = [503] * 100
    text = "Compute Engine did not answer: .*503.*That was so for 0.2 s, which is `time"
    with pytest.raises(js.ClusterError, match=text):
        resolver_of(timeout_seconds=0.2).cluster_spec()


def test_an_api_that_says_nothing_has_a_deadline(group):
    group.silent = True
    with pytest.raises(
        js.ClusterError, match="did not answer: .*That was so for 0.1 s"
    ):
        resolver_of(timeout_seconds=0.1).cluster_spec()


def test_a_group_that_is_told_too_slowly_is_told(group):
    with pytest.raises(js.ClusterError, match="Not all of instance group .* in time"):
        resolver_of(timeout_seconds=0).cluster_spec()


def test_an_api_that_nobody_serves_is_told(group, monkeypatch):
    with served(Group({})) as other:
        pass
    build = redirected(googleapiclient.discovery.build, other.address)
    monkeypatch.setattr(googleapiclient.discovery, "build", build)
    with pytest.raises(js.ClusterError, match="did not answer: .*refused"):
        resolver_of(timeout_seconds=0).cluster_spec()


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (400, "See the names of project, zone and group"),
        (401, "Give `credentials`, or let the default ones be found"),
        (403, 'The account needs the role "Compute Viewer", and an instance the scope'),
    ],
)
def test_a_refusal_says_what_to_do(group, status, advice):
    group.failures = [status]
    with pytest.raises(js.ClusterError, match=f"does not tell of .*{advice}"):
        resolver_of().cluster_spec()


def test_a_group_that_is_not_there_is_told(group):
    text = "tell of instance group 'other' in .*404.*See the names of project"
    with pytest.raises(js.ClusterError, match=text):
        resolver_of(name="other").cluster_spec()


def test_other_errors_of_a_stand_in_are_its_own():
    service = stand_in({"a": "10.0.0.1"})
    service.instances = lambda: {}["mine"]
    with pytest.raises(KeyError, match="mine"):
        resolver_of(service=service).cluster_spec()


# What is given.


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"project": ""}, ValueError, "`project` was ''; the name of a project of"),
        ({"zone": None}, ValueError, "`zone` was None; the name of a zone"),
        ({"instance_group": 3}, ValueError, "`instance_group` was 3; the name of a"),
        ({"port": None}, ValueError, "`port` was None; a port was wanted"),
        ({"port": 70000}, ValueError, "`port` was 70000; a port was wanted"),
        ({"task_id": "x"}, ValueError, "`task_id` was 'x'; the index of this process"),
        ({"num_tasks": 0}, ValueError, "`num_tasks` was 0; a whole number from 1 on"),
        ({"timeout_seconds": "x"}, ValueError, "`timeout_seconds` was 'x'; a number"),
        ({"service": 3}, TypeError, "`service` was 3, which has no method `instanceGr"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, text):
    given = {"project": "p", "zone": "z", "instance_group": "g", "port": 8470}
    with pytest.raises(error, match=re.escape(text)):
        cr.GCEClusterResolver(**{"service": stand_in({}), **given, **arguments})


def test_a_port_must_be_given():
    with pytest.raises(TypeError, match="port"):
        cr.GCEClusterResolver("project", "zone", "group")


def test_without_the_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "googleapiclient", None)
    assert resolver_of(service=stand_in({"a": "10.0.0.1"})).task_id == 0
    with pytest.raises(js.MissingExtraError, match=r"install 'jaxstrategy\[gce\]'"):
        resolver_of()
