"""Resolvers give what TensorFlow's give, and the rank of this process besides."""

import json
import os
import re

import jax
import pytest

import jaxstrategy.cluster_resolver as cr
from jaxstrategy.cluster.resolvers._cluster_spec import host_and_port
from jaxstrategy.cluster.resolvers._launched import default_resolver
from jaxstrategy.cluster.resolvers._slurm_resolver import (
    expand_hostlist,
    expand_tasks_per_node,
)

BOTH = {
    "ps": ["ps0:2222", "ps1:2222"],
    "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
}


@pytest.fixture(autouse=True)
def no_cluster_around(monkeypatch):
    for name in os.environ:
        if name.startswith(("SLURM_", "JAXSTRATEGY_", "TF_CONFIG", "CUDA_VISIBLE")):
            monkeypatch.delenv(name)
    # What `SlurmClusterResolver` sets by itself is taken back at the end.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def environment(monkeypatch):
    def environment(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return environment


@pytest.fixture
def tf_config(environment):
    def tf_config(config):
        text = config if isinstance(config, str) else json.dumps(config)
        environment(TF_CONFIG=text)

    return tf_config


# ClusterSpec


@pytest.mark.parametrize(
    ("given", "indices"),
    [
        ({"worker": ["a:1", "b:1"]}, [0, 1]),
        ({"worker": ("a:1", "b:1")}, [0, 1]),
        ({"worker": {0: "a:1", 1: "b:1"}}, [0, 1]),
        ({"worker": {"1": "b:1", "0": "a:1"}}, [0, 1]),
        ({"worker": {3: "a:1", 5: "b:1"}}, [3, 5]),
    ],
)
def test_a_spec_takes_lists_dicts_and_specs(given, indices):
    spec = cr.ClusterSpec(given)
    for same in (spec, cr.ClusterSpec(spec), cr.ClusterSpec(spec.as_dict())):
        assert same.jobs == ["worker"]
        assert same.num_tasks("worker") == 2
        assert same.task_indices("worker") == indices
        assert same.task_address("worker", indices[0]) == "a:1"
        assert same.task_address("worker", indices[1]) == "b:1"
        assert same == spec


def test_tasks_with_gaps_stay_a_dict():
    spec = cr.ClusterSpec({"worker": {1: "a:1"}, "ps": ["b:1"], "chief": []})
    assert spec.as_dict() == {"worker": {1: "a:1"}, "ps": ["b:1"], "chief": {}}
    assert spec.job_tasks("worker") == [None, "a:1"]
    assert spec.job_tasks("chief") == []


def test_specs_compare_by_their_tasks():
    spec = cr.ClusterSpec({"worker": ["a:1"]})
    assert spec == {"worker": ["a:1"]} and spec == {"worker": {0: "a:1"}}
    assert spec != {"worker": ["b:1"]} and spec != {"worker": 3} and spec != 3
    assert spec and not cr.ClusterSpec({})


def test_a_spec_prints_as_tensorflow_prints_it():
    spec = cr.ClusterSpec({"worker": {2: "c:1"}, "ps": ["a:1", "b:1"]})
    assert repr(spec) == "ClusterSpec({'ps': ['a:1', 'b:1'], 'worker': {2: 'c:1'}})"


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (["a:1"], TypeError, "`cluster` is ['a:1']. Give a dict from job names"),
        (None, TypeError, "`cluster` is None"),
        ({1: ["a:1"]}, TypeError, "1 is not the name of a job"),
        ({"worker": "a:1"}, TypeError, "tasks of job 'worker' are 'a:1'. Give a list"),
        ({"worker": [1]}, TypeError, "task 0 in job 'worker' is 1. Give a string"),
        ({"worker": [["a:1"]]}, TypeError, "task 0 in job 'worker' is ['a:1']"),
        ({"worker": {"x": "a:1"}}, ValueError, "a task with the index 'x'"),
        ({"worker": {-1: "a:1"}}, ValueError, "a task with the index -1"),
        ({"worker": {1.5: "a:1"}}, ValueError, "a task with the index 1.5"),
        ({"worker": {True: "a:1"}}, ValueError, "a task with the index True"),
        ({"worker": ["a:1", " "]}, ValueError, "task 1 in job 'worker' is empty"),
    ],
)
def test_a_malformed_spec_is_refused(given, error, text):
    with pytest.raises(error, match=re.escape(text)):
        cr.ClusterSpec(given)


def test_unknown_jobs_and_tasks_are_refused():
    spec = cr.ClusterSpec({"worker": ["a:1"]})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match=r"No such job in cluster: 'ps'.*worker"):
            ask("ps")
    with pytest.raises(ValueError, match=r"no task 1 in job 'worker'.*\[0\]"):
        spec.task_address("worker", 1)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("node7:2222", ("node7", 2222)),
        ("10.0.0.7:80", ("10.0.0.7", 80)),
        ("a-b.example.com:1", ("a-b.example.com", 1)),
        ("[::1]:65535", ("[::1]", 65535)),
    ],
)
def test_addresses_are_split(address, parts):
    assert host_and_port(address) == parts


@pytest.mark.parametrize(
    "address", ["", "node", "node:", ":1", "node:0", "node:65536", "a:b:1", "::1:2"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="is not an address. Give it as host:port"):
        host_and_port(address)


# The base class, and the rank of a process


class Mine(cr.ClusterResolver):
    def cluster_spec(self):
        return cr.ClusterSpec(BOTH)


def test_a_subclass_needs_the_cluster_only():
    resolver = Mine()
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert (resolver.environment, resolver.rpc_layer) == ("", None)
    assert resolver.master() == ""
    assert resolver.master("worker", 2) == "worker2:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "grpc"
    assert resolver.master() == "grpc://worker1:2222"
    assert resolver.master("ps", 0, "http") == "http://ps0:2222"
    assert resolver.process() == cr.Process(1, 3, "worker0:2222")


def test_a_subclass_without_a_cluster_is_abstract():
    class Nothing(cr.ClusterResolver):
        pass

    with pytest.raises(TypeError, match="cluster_spec"):
        Nothing()  # pyright: ignore[reportAbstractUsage]


def test_cpus_are_no_accelerators():
    assert Mine().num_accelerators() == {}


def test_accelerators_are_counted_by_kind_and_process(monkeypatch):
    class Device:
        def __init__(self, platform, process_index):
            self.platform, self.process_index = platform, process_index

    devices = [Device("gpu", 0), Device("gpu", 1), Device("gpu", 1), Device("cpu", 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "local_devices", lambda: devices[:1])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    assert Mine().num_accelerators() == {"GPU": 1}
    assert Mine().num_accelerators("worker", 1) == {"GPU": 2}
    assert Mine().num_accelerators("worker", 2) == {}


def test_accelerators_of_others_are_not_known_before_they_meet():
    with pytest.raises(RuntimeError, match="worker 1 are not known.*3 processes.*1"):
        Mine().num_accelerators("worker", 1)


def place(cluster, task_type=None, task_id=None):
    return cr.SimpleClusterResolver(
        cluster, task_type=task_type, task_id=task_id
    ).process()


@pytest.mark.parametrize("chief", ["chief", "master"])
def test_the_chief_comes_before_the_workers(chief):
    # TensorFlow's numbers: three workers; the chief is 0, worker 1 is 2.
    cluster = {"worker": ["b:2", "c:3"], "ps": ["d:4"], chief: ["a:1"]}
    assert place(cluster, chief, 0) == cr.Process(0, 3, "a:1")
    assert place(cluster, "worker", 0) == cr.Process(1, 3, "a:1")
    assert place(cluster, "worker", 1) == cr.Process(2, 3, "a:1")


def test_without_a_chief_worker_0_is_first():
    cluster = {"worker": ["b:2", "c:3"], "evaluator": ["e:5"]}
    assert place(cluster, "worker", 1) == cr.Process(1, 2, "b:2")


def test_one_task_is_this_process_and_none_is_alone():
    assert place({"worker": ["a:1"]}) == cr.Process(0, 1, "a:1")
    assert place({}) == cr.Process(0, 1, "")


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        (BOTH, ("ps", 0), "a 'ps', which does not train. Replicas that are kept"),
        (BOTH, ("evaluator", 0), "'evaluator', which does not train. An evaluator is"),
        (BOTH, ("foobar", 0), "a 'foobar', which does not train. Tasks that train"),
        (BOTH, ("worker", 3), "task 3 of 'worker', which ClusterSpec("),
        (BOTH, ("chief", 0), "task 0 of 'chief', which ClusterSpec("),
        (BOTH, ("worker", None), "task_type is 'worker', task_id is None"),
        (BOTH, (None, 0), "task_type is None, task_id is 0"),
        (BOTH, (None, None), "which of its tasks this process is, is not known"),
        ({"workers": ["a:1"]}, ("workers", 0), "has the unknown job 'workers'"),
        ({"chief": ["a:1", "b:1"]}, ("chief", 0), "has 2 chiefs, and there is at most"),
        (
            {"chief": ["a:1"], "master": ["b:1"]},
            ("chief", 0),
            "has 2 chiefs, and there is at most one",
        ),
        ({"worker": {1: "a:1"}}, ("worker", 1), "does not name all tasks of 'worker'"),
        ({"worker": ["a", "b"]}, ("worker", 1), "'a' is not an address"),
    ],
)
def test_a_task_that_cannot_train_is_refused(cluster, task, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        place(cluster, *task)


# SimpleClusterResolver


def test_simple_gives_what_it_was_given():
    resolver = cr.SimpleClusterResolver(
        cr.ClusterSpec(BOTH),
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert resolver.environment == "cloud"
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.master() == "grpc://"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "http"
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.rpc_layer == "http"
    assert resolver.cluster_spec() == BOTH


def test_simple_masters():
    resolver = cr.SimpleClusterResolver(cr.ClusterSpec(BOTH), master="m:1")
    assert resolver.master() == "m:1"
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://worker0:2222"
    assert resolver.master("worker", 2) == "worker2:2222"
    assert resolver.num_accelerators() == {}


def test_simple_refuses_what_is_no_cluster_or_master():
    with pytest.raises(TypeError, match="`cluster` is \\['a:1'\\]"):
        cr.SimpleClusterResolver(["a:1"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`master` is 3. Give an address"):
        cr.SimpleClusterResolver({}, master=3)  # pyright: ignore[reportArgumentType]


# UnionClusterResolver


def union(*clusters, **keywords):
    resolvers = [cr.SimpleClusterResolver(cluster) for cluster in clusters]
    return cr.UnionResolver(*resolvers, **keywords)


@pytest.mark.parametrize(
    ("clusters", "merged"),
    [
        ([BOTH], BOTH),
        ([{"ps": ["a:1"]}, {"worker": ["b:1"]}], {"ps": ["a:1"], "worker": ["b:1"]}),
        (
            [{"worker": ["w4:1", "w5:1"]}, {"worker": ["w0:1", "w1:1"]}],
            {"worker": ["w4:1", "w5:1", "w0:1", "w1:1"]},
        ),
        (
            [{"worker": {5: "w4:1", 9: "w5:1"}}, {"worker": {3: "w0:1", 6: "w1:1"}}],
            {"worker": {3: "w0:1", 5: "w4:1", 6: "w1:1", 9: "w5:1"}},
        ),
        (
            [{"worker": ["w4:1", "w5:1"]}, {"worker": {3: "w0:1", 7: "w2:1"}}],
            {"worker": {0: "w4:1", 1: "w5:1", 3: "w0:1", 7: "w2:1"}},
        ),
        ([{"worker": {1: "a:1", 3: "b:1"}}], {"worker": {1: "a:1", 3: "b:1"}}),
    ],
)
def test_unions_merge_as_tensorflows(clusters, merged):
    assert union(*clusters).cluster_spec() == merged


@pytest.mark.parametrize(
    "clusters",
    [
        [{"worker": {7: "a:1", 9: "b:1"}}, {"worker": {3: "c:1", 7: "d:1"}}],
        [{"worker": ["a:1", "b:1"]}, {"worker": {1: "c:1", 2: "d:1"}}],
    ],
)
def test_two_addresses_for_one_task_are_refused(clusters):
    with pytest.raises(KeyError, match=r"address to the tasks \[\d\] of job 'worker'"):
        union(*clusters).cluster_spec()


def test_a_union_speaks_for_the_first_resolver():
    first = cr.SimpleClusterResolver(
        BOTH,
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    second = cr.SimpleClusterResolver({"worker": ["worker3:2222"]}, task_type="worker")
    resolver = cr.UnionClusterResolver(first, second)
    assert (resolver.task_type, resolver.task_id) == ("ps", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("cloud", "grpc")
    assert resolver.num_accelerators() == {"GPU": 8}
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 3, "http"
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)
    assert resolver.rpc_layer == "http"
    assert resolver.process() == cr.Process(3, 4, "worker0:2222")


def test_union_masters():
    resolver = union({"ps": ["ps0:1"]}, {"worker": ["w0:1", "w1:1"]})
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "w1:1"
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://w1:1"


def test_a_union_of_nothing_or_of_something_else_is_refused():
    with pytest.raises(ValueError, match="At least one ClusterResolver is required"):
        cr.UnionResolver()
    with pytest.raises(TypeError, match="must be resolvers, got {}"):
        cr.UnionResolver({})  # pyright: ignore[reportArgumentType]


# TFConfigClusterResolver

PS0 = {"cluster": BOTH, "task": {"type": "ps", "index": 0}}


def test_tf_config_is_read(tf_config):
    tf_config(PS0)
    resolver = cr.TFConfigClusterResolver()
    assert resolver.cluster_spec() == BOTH
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.rpc_layer, resolver.environment) == (None, "")
    assert resolver.master() == "ps0:2222"
    assert resolver.master("worker", 1) == "worker1:2222"


def test_tf_config_has_a_protocol_and_a_session_master(tf_config):
    tf_config({**PS0, "rpc_layer": "grpc"})
    assert cr.TFConfigClusterResolver().rpc_layer == "grpc"
    assert cr.TFConfigClusterResolver().master() == "grpc://ps0:2222"
    tf_config({**PS0, "session_master": "sessionmaster:2222"})
    assert cr.TFConfigClusterResolver().master() == "sessionmaster:2222"


def test_arguments_come_before_tf_config(tf_config):
    tf_config(
        {"cluster": BOTH, "rpc_layer": "grpc", "task": {"type": "ps", "index": 1}}
    )
    resolver = cr.TFConfigClusterResolver("ps", 0, environment="cloud")
    assert resolver.environment == "cloud"
    assert resolver.master() == "grpc://ps0:2222"
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "test"
    assert resolver.master() == "test://worker1:2222"
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.process() == cr.Process(1, 3, "worker0:2222")


def test_tasks_of_other_types_are_cast(tf_config):
    tf_config({"cluster": {"123456": ["a:1"]}, "task": {"type": 123456, "index": "1"}})
    resolver = cr.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("123456", 1)


@pytest.mark.parametrize("config", ["", "{}", '{"cluster": {}}', '{"cluster": null}'])
def test_an_empty_tf_config_is_a_process_alone(tf_config, config):
    tf_config(config)
    resolver = cr.TFConfigClusterResolver()
    assert resolver.cluster_spec() == {} and resolver.master() == ""
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.process() == cr.Process(0, 1, "")


def test_one_task_needs_no_name(tf_config):
    tf_config({"cluster": {"worker": ["worker0:2222"]}})
    resolver = cr.TFConfigClusterResolver()
    assert resolver.master() == ""
    assert resolver.process() == cr.Process(0, 1, "worker0:2222")


def test_tf_config_is_read_anew(tf_config):
    resolver = cr.TFConfigClusterResolver()
    tf_config(PS0)
    assert resolver.task_type == "ps"
    tf_config({**PS0, "task": {"type": "worker", "index": 2}})
    assert resolver.process() == cr.Process(2, 3, "worker0:2222")


def test_accelerators_are_those_of_tf_configs_task(tf_config, monkeypatch):
    tf_config({**PS0, "task": {"type": "worker", "index": 1}})

    class Device:
        platform, process_index = "gpu", 2

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    resolver = cr.TFConfigClusterResolver()
    assert resolver.num_accelerators() == {}  # the CPUs of this process
    assert resolver.num_accelerators(task_id=2) == {"GPU": 1}
    assert resolver.num_accelerators("worker") == {}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{'cluster'", "TF_CONFIG is not JSON (Expecting property name"),
        ("{'cluster'", "{'cluster' It looks like {"),
        ("[1]", "TF_CONFIG is [1], which is no object"),
        ("null", "TF_CONFIG is null, which is no object"),
        ({"cluster": ["a:1"]}, '"cluster" of TF_CONFIG is ["a:1"]. It looks like'),
        ({"cluster": {"worker": "a:1"}}, '"cluster" of TF_CONFIG is wrong. The tasks'),
        ({"cluster": {"worker": [1]}}, "The address of task 0 in job 'worker' is 1"),
        ({"cluster": {"worker": {"x": "a:1"}}}, "a task with the index 'x'"),
        ({"cluster": BOTH, "task": "worker"}, '"task" of TF_CONFIG is "worker"'),
        ({"cluster": BOTH, "task": {"type": ["ps"]}}, '"type" of TF_CONFIG\'s task'),
        (
            {"cluster": BOTH, "task": {"type": "worker", "index": "one"}},
            "The index of TF_CONFIG's task is 'one'; it is a whole number",
        ),
        (
            {"cluster": BOTH, "task": {"type": "worker", "index": -1}},
            "The index of TF_CONFIG's task is -1",
        ),
        (
            {"cluster": BOTH, "task": {"type": "worker", "index": 1.5}},
            "The index of TF_CONFIG's task is 1.5",
        ),
        (
            {"cluster": BOTH, "task": {"type": "worker", "index": 7}},
            "task 7 of 'worker', which ClusterSpec({",
        ),
        (
            {"cluster": BOTH, "task": {"type": "worker", "index": 7}},
            'TF_CONFIG is {"cluster": {"ps"',
        ),
        ({"cluster": BOTH}, "task_type is None, task_id is None. Give both"),
        (PS0, "This process is a 'ps', which does not train"),
        ({"rpc_layer": 3}, '"rpc_layer" of TF_CONFIG is 3; it is a string'),
        ({"session_master": 3}, '"session_master" of TF_CONFIG is 3; it is a string'),
    ],
)
def test_every_malformed_tf_config_is_quoted(tf_config, config, text):
    tf_config(config)
    with pytest.raises(ValueError, match=re.escape(text)):
        cr.TFConfigClusterResolver().process()


def test_a_master_needs_a_task(tf_config):
    tf_config({"cluster": BOTH})
    with pytest.raises(ValueError, match='TF_CONFIG has no "task". It looks like'):
        cr.TFConfigClusterResolver().master()


# SlurmClusterResolver


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1,3]", ["n1", "n3"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        (
            "n[1-2],m5,o[3-4,6,7-9]",
            ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"],
        ),
        (
            "n[0001-0003],m5,o[009-011]",
            ["n0001", "n0002", "n0003", "m5", "o009", "o010", "o011"],
        ),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("r[1-2]n[3,4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
        ("t02n13,t02n41", ["t02n13", "t02n41"]),
    ],
)
def test_host_lists_expand(short, hosts):
    assert expand_hostlist(short) == hosts


@pytest.mark.parametrize("short", ["", "n[1", "n1]", "a,,b", "n[1],", "a b"])
def test_what_is_no_host_list_is_refused(short):
    with pytest.raises(ValueError, match="is not a list of hosts of Slurm's"):
        expand_hostlist(short)


@pytest.mark.parametrize("short", ["n[a-b]", "n[1-]", "n[]", "n[1,,2]"])
def test_what_is_no_range_is_refused(short):
    with pytest.raises(ValueError, match="is no range of numbers"):
        expand_hostlist(short)


@pytest.mark.parametrize(
    ("short", "tasks"),
    [
        ("2", [2]),
        ("2,1,3", [2, 1, 3]),
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
        ("13(x10)", [13] * 10),
    ],
)
def test_tasks_per_node_expand(short, tasks):
    assert expand_tasks_per_node(short) == tasks


@pytest.mark.parametrize("short", ["", "x", "2(3)", "2,", "2(x)"])
def test_what_tells_no_tasks_is_refused(short):
    with pytest.raises(ValueError, match="does not tell the tasks of each node"):
        expand_tasks_per_node(short)


@pytest.fixture
def slurm(environment):
    def slurm(rank=0, tasks=3, per_node="1(x3)", nodes="t02n13,t02n41,t02n43", **more):
        environment(
            SLURM_PROCID=str(rank),
            SLURM_STEP_NUM_TASKS=str(tasks),
            SLURM_STEP_TASKS_PER_NODE=per_node,
            SLURM_STEP_NODELIST=nodes,
            **more,
        )

    return slurm


def test_slurm_is_read_from_the_environment(slurm):
    slurm(CUDA_VISIBLE_DEVICES="0")
    resolver = cr.SlurmClusterResolver()
    workers = ["t02n13:8888", "t02n41:8888", "t02n43:8888"]
    assert resolver.cluster_spec() == {"worker": workers}
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("tasks_per_node", [1, [1, 1, 1], None])
def test_slurm_deals_tasks_out_to_jobs(slurm, tasks_per_node):
    slurm()
    resolver = cr.SlurmClusterResolver(
        {"worker": 2, "ps": 1},
        port_base=8888,
        tasks_per_node=tasks_per_node,
        gpus_per_node=1,
        gpus_per_task=1,
        auto_set_gpu=False,
    )
    assert resolver.cluster_spec() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n41:8888", "t02n43:8888"],
    }
    assert resolver.get_task_info() == ("ps", 0)
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://t02n43:8888"
    resolver.rpc_layer = "ab"
    assert resolver.master("ps", 0) == "ab://t02n13:8888"
    assert resolver.master("ps", 0, rpc_layer="test") == "test://t02n13:8888"


@pytest.mark.parametrize(
    ("gpus_per_node", "gpus_per_task", "own"), [(2, 1, "1"), (4, 2, "2,3")]
)
def test_slurm_shares_out_ports_and_gpus(slurm, gpus_per_node, gpus_per_task, own):
    slurm(rank=1, tasks=5, per_node="2(x2),1", CUDA_VISIBLE_DEVICES="")
    resolver = cr.SlurmClusterResolver(
        {"ps": 1, "worker": 4},
        gpus_per_node=gpus_per_node,
        gpus_per_task=gpus_per_task,
    )
    assert resolver.cluster_spec() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
    }
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert resolver.num_accelerators() == {"GPU": gpus_per_task}


def test_slurm_gives_the_rank(slurm):
    slurm(rank=3, tasks=4, per_node="2(x2)", nodes="a[1-2]")
    resolver = cr.SlurmClusterResolver({"chief": 1, "worker": 3}, port_base=2000)
    assert resolver.process() == cr.Process(3, 4, "a1:2000")
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)


def test_slurm_shares_out_the_gpus_that_are_visible(slurm):
    slurm(
        rank=3, tasks=4, per_node="2(x2)", nodes="a,b", CUDA_VISIBLE_DEVICES="4,5,6,7"
    )
    resolver = cr.SlurmClusterResolver()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert resolver.num_accelerators() == {"GPU": 2}


def test_slurm_takes_its_word_for_the_place_on_the_node(slurm):
    # Cyclic distribution: rank 1 is the first task of the second node.
    slurm(1, 4, "2(x2)", "a,b", SLURM_LOCALID="0", SLURM_GPUS_ON_NODE="2")
    cr.SlurmClusterResolver().cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_gpus_that_slurm_has_bound_are_left_alone(slurm):
    slurm(rank=1, tasks=4, per_node="4", nodes="a", CUDA_VISIBLE_DEVICES="0")
    resolver = cr.SlurmClusterResolver()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert resolver.num_accelerators() == {"GPU": 1}


def test_gpus_are_counted_where_slurm_does_not(slurm, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU 0: A\necho GPU 1: A\n")
    tool.chmod(0o755)
    slurm(rank=1, tasks=2, per_node="2", nodes="a", PATH=str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    resolver = cr.SlurmClusterResolver()
    resolver.cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_the_whole_job_is_read_where_there_is_no_step(environment):
    environment(
        SLURM_PROCID="1",
        SLURM_NTASKS="2",
        SLURM_TASKS_PER_NODE="1(x2)",
        SLURM_JOB_NODELIST="a[1-2]",
    )
    assert cr.SlurmClusterResolver().process() == cr.Process(1, 2, "a1:8888")


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"jobs": {"worker": 2}}, RuntimeError, "2 tasks in all, but Slurm started 3"),
        ({"jobs": {"worker": 4}}, RuntimeError, "4 tasks in all, but Slurm started 3"),
        (
            {"gpus_per_node": 1, "gpus_per_task": 2},
            RuntimeError,
            "1 tasks with 2 GPUs each want more than the 1 GPUs of a node",
        ),
        ({"tasks_per_node": [2, 1]}, RuntimeError, "3 tasks do not fit on 3 nodes"),
        ({"tasks_per_node": [1, 1, 0]}, RuntimeError, "with [1, 1, 0] tasks each"),
    ],
)
def test_slurm_jobs_that_do_not_fit_are_refused(slurm, arguments, error, text):
    slurm()
    with pytest.raises(error, match=re.escape(text)):
        cr.SlurmClusterResolver(**arguments)


def test_what_is_no_slurm_task_is_refused(slurm, environment):
    with pytest.raises(ValueError, match="SLURM_PROCID is not set, so this is no task"):
        cr.SlurmClusterResolver()
    slurm(rank="x")
    with pytest.raises(ValueError, match="SLURM_PROCID is 'x'; it is a whole number"):
        cr.SlurmClusterResolver()
    slurm(rank=3)
    with pytest.raises(ValueError, match="SLURM_PROCID is 3, of 3 tasks"):
        cr.SlurmClusterResolver()


# The launcher's environment, and which resolver is the default


@pytest.fixture
def launched(environment):
    def launched(coordinator="a:2222", index="1", count="3", **more):
        environment(
            JAXSTRATEGY_COORDINATOR=coordinator,
            JAXSTRATEGY_PROCESS_ID=index,
            JAXSTRATEGY_NUM_PROCESSES=count,
            **more,
        )

    return launched


def test_the_launchers_environment_is_read(launched):
    launched(JAXSTRATEGY_LOCAL_RANK="2", JAXSTRATEGY_ATTEMPT="4")
    resolver = cr.LaunchedClusterResolver()
    assert resolver.process() == cr.Process(1, 3, "a:2222")
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.local_rank, resolver.attempt) == (2, 4)
    assert resolver.cluster_spec() == {
        "worker": ["a:2222", "process-1:0", "process-2:0"]
    }


def test_rank_on_the_host_and_attempt_may_be_left_out(launched):
    launched()
    resolver = cr.LaunchedClusterResolver()
    assert (resolver.local_rank, resolver.attempt) == (0, 0)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"coordinator": ""}, "JAXSTRATEGY_COORDINATOR must be set in the environment"),
        (
            {"index": "", "count": ""},
            "JAXSTRATEGY_PROCESS_ID and JAXSTRATEGY_NUM_PROCESSES must be set",
        ),
        ({"coordinator": "a"}, "JAXSTRATEGY_COORDINATOR is wrong: 'a' is not an addr"),
        ({"index": "x"}, "JAXSTRATEGY_PROCESS_ID is 'x'; it is a whole number"),
        ({"count": "-1"}, "JAXSTRATEGY_NUM_PROCESSES is '-1'; it is a whole number"),
        (
            {"index": "3"},
            "JAXSTRATEGY_PROCESS_ID is 3 and JAXSTRATEGY_NUM_PROCESSES is",
        ),
    ],
)
def test_a_wrong_environment_is_refused(launched, variables, text):
    launched(**variables)
    with pytest.raises(ValueError, match=re.escape(text)):
        default_resolver()


def test_tf_config_comes_before_the_launcher(tf_config, launched):
    assert default_resolver() is None
    launched()
    assert isinstance(default_resolver(), cr.LaunchedClusterResolver)
    tf_config(PS0)
    assert isinstance(default_resolver(), cr.TFConfigClusterResolver)
    tf_config(" ")
    assert isinstance(default_resolver(), cr.LaunchedClusterResolver)
