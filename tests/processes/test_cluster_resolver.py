"""Resolvers give what TensorFlow's give, and the rank of this process besides."""

import json
import os

import jax
import numpy as np
import pytest

import jaxstrategy as js
import jaxstrategy.cluster_resolver as cr

BOTH = {
    "ps": ["ps0:2222", "ps1:2222"],
    "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
}
AROUND = ("SLURM_", "JAXSTRATEGY_", "TF_CONFIG", "CUDA_VISIBLE", "SM_", "OMPI_")


@pytest.fixture(autouse=True)
def no_cluster_around(monkeypatch):
    for name in os.environ:
        if name.startswith(AROUND):
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


def refused(call, text, error=ValueError, *given, **more):
    """The call raises the error, and its text contains this one."""
    with pytest.raises(error) as caught:
        call(*given, **more)
    assert text in str(caught.value), (text, str(caught.value))


def test_specs():
    for given, indices in [
        ({"worker": ["a:1", "b:1"]}, [0, 1]),
        ({"worker": ("a:1", "b:1")}, [0, 1]),
        ({"worker": {"1": "b:1", "0": "a:1"}}, [0, 1]),
        ({"worker": {3: "a:1", 5: "b:1"}}, [3, 5]),
    ]:
        spec = cr.ClusterSpec(given)
        for same in (spec, cr.ClusterSpec(spec), cr.ClusterSpec(spec.as_dict())):
            assert same.jobs == ["worker"] and same.num_tasks("worker") == 2
            assert same.task_indices("worker") == indices
            assert same.task_address("worker", indices[0]) == "a:1"
            assert same.task_address("worker", indices[1]) == "b:1"
            assert same == spec
    spec = cr.ClusterSpec({"worker": {1: "a:1"}, "ps": ["b:1"], "chief": []})
    assert spec.as_dict() == {"worker": {1: "a:1"}, "ps": ["b:1"], "chief": {}}
    assert spec.job_tasks("worker") == [None, "a:1"] and spec.job_tasks("chief") == []
    spec = cr.ClusterSpec({"worker": ["a:1"]})
    assert spec == {"worker": ["a:1"]} and spec == {"worker": {0: "a:1"}}
    assert spec != {"worker": ["b:1"]} and spec != {"worker": 3} and spec != 3
    assert spec and not cr.ClusterSpec({})
    spec = cr.ClusterSpec({"worker": {2: "c:1"}, "ps": ["a:1", "b:1"]})
    assert repr(spec) == "ClusterSpec({'ps': ['a:1', 'b:1'], 'worker': {2: 'c:1'}})"
    for given, error, text in [
        (["a:1"], TypeError, "`cluster` is ['a:1']. Give a dict from job names"),
        ({1: ["a:1"]}, TypeError, "1 is not the name of a job"),
        ({"worker": "a:1"}, TypeError, "tasks of job 'worker' are 'a:1'. Give a list"),
        ({"worker": [1]}, TypeError, "task 0 in job 'worker' is 1. Give a string"),
        ({"worker": {"x": "a:1"}}, ValueError, "a task with the index 'x'"),
        ({"worker": {-1: "a:1"}}, ValueError, "a task with the index -1"),
        ({"worker": {1.5: "a:1"}}, ValueError, "a task with the index 1.5"),
        ({"worker": {True: "a:1"}}, ValueError, "a task with the index True"),
        ({"worker": ["a:1", " "]}, ValueError, "task 1 in job 'worker' is empty"),
    ]:
        refused(cr.ClusterSpec, text, error, given)
    spec = cr.ClusterSpec({"worker": ["a:1"]})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match=r"No such job in cluster: 'ps'.*worker"):
            ask("ps")
    with pytest.raises(ValueError, match=r"no task 1 in job 'worker'.*\[0\]"):
        spec.task_address("worker", 1)


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
    refused(type("Nothing", (cr.ClusterResolver,), {}), "cluster_spec", TypeError)


def test_accelerators_are_counted_by_kind_and_process(monkeypatch, tf_config):
    assert Mine().num_accelerators() == {}  # CPUs are none
    with pytest.raises(RuntimeError, match="worker 1 are not known.*3 processes.*1"):
        Mine().num_accelerators("worker", 1)

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
    tf_config({"cluster": BOTH, "task": {"type": "worker", "index": 2}})
    resolver = cr.TFConfigClusterResolver()
    assert resolver.num_accelerators() == {"GPU": 1}  # of this process
    assert resolver.num_accelerators(task_id=1) == {
        "GPU": 2
    }  # else what TF_CONFIG says
    assert resolver.num_accelerators("worker") == {}


def place(cluster, task_type=None, task_id=None):
    return cr.SimpleClusterResolver(
        cluster, task_type=task_type, task_id=task_id
    ).process()


def test_ranks_are_tensorflows():
    for chief in "chief", "master":
        cluster = {"worker": ["b:2", "c:3"], "ps": ["d:4"], chief: ["a:1"]}
        assert place(cluster, chief, 0) == cr.Process(0, 3, "a:1")
        assert place(cluster, "worker", 0) == cr.Process(1, 3, "a:1")
        assert place(cluster, "worker", 1) == cr.Process(2, 3, "a:1")
    cluster = {"worker": ["b:2", "c:3"], "evaluator": ["e:5"]}
    assert place(cluster, "worker", 1) == cr.Process(1, 2, "b:2")
    assert place({"worker": ["a:1"]}) == cr.Process(0, 1, "a:1")
    assert place({}) == cr.Process(0, 1, "")
    for good in "10.0.0.7:80", "a-b.example.com:1", "[::1]:65535":
        assert place({"worker": [good]}).coordinator == good


def test_a_task_that_cannot_train_is_refused():
    for cluster, task, text in [
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
        ({"chief": ["a:1"], "master": ["b:1"]}, ("chief", 0), "has 2 chiefs, and"),
        ({"worker": {1: "a:1"}}, ("worker", 1), "does not name all tasks of 'worker'"),
    ]:
        refused(place, text, ValueError, cluster, *task)
    for bad in ["node", "node:", ":1", "node:0", "node:65536", "a:b:1", "::1:2"]:
        text = f"{bad!r} is not an address. Give it as host:port"
        refused(place, text, ValueError, {"worker": [bad, "b:1"]}, "worker", 1)


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
    assert resolver.environment == "cloud" and resolver.cluster_spec() == BOTH
    assert resolver.num_accelerators() == {"GPU": 8}
    assert resolver.master() == "grpc://"
    resolver = cr.SimpleClusterResolver(cr.ClusterSpec(BOTH), master="m:1")
    assert resolver.master() == "m:1" and resolver.num_accelerators() == {}
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://worker0:2222"
    refused(
        lambda: cr.SimpleClusterResolver(["a:1"]), "`cluster` is ['a:1']", TypeError
    )
    wrong = {"master": 3}
    refused(lambda: cr.SimpleClusterResolver({}, **wrong), "`master` is 3.", TypeError)


def union(*clusters, **keywords):
    resolvers = [cr.SimpleClusterResolver(cluster) for cluster in clusters]
    return cr.UnionResolver(*resolvers, **keywords)


def test_unions_merge_as_tensorflows():
    for clusters, merged in [
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
    ]:
        assert union(*clusters).cluster_spec() == merged
    for clusters in [
        [{"worker": {7: "a:1", 9: "b:1"}}, {"worker": {3: "c:1", 7: "d:1"}}],
        [{"worker": ["a:1", "b:1"]}, {"worker": {1: "c:1", 2: "d:1"}}],
    ]:
        with pytest.raises(KeyError, match=r"to the tasks \[\d\] of job 'worker'"):
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
    assert resolver.process() == cr.Process(3, 4, "worker0:2222")
    resolver = union({"ps": ["ps0:1"]}, {"worker": ["w0:1", "w1:1"]})
    assert resolver.master() == ""
    assert resolver.master("worker", 1, rpc_layer="grpc") == "grpc://w1:1"
    refused(cr.UnionResolver, "At least one ClusterResolver is required")
    refused(lambda: cr.UnionResolver({}), "must be resolvers, got {}", TypeError)


PS0 = {"cluster": BOTH, "task": {"type": "ps", "index": 0}}


def test_tf_config_is_read_anew_and_arguments_come_before_it(tf_config):
    tf_config(PS0)
    resolver = cr.TFConfigClusterResolver()
    assert resolver.cluster_spec() == BOTH
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.rpc_layer, resolver.environment) == (None, "")
    assert resolver.master() == "ps0:2222"
    assert resolver.master("worker", 1) == "worker1:2222"
    tf_config({**PS0, "rpc_layer": "grpc"})
    assert resolver.rpc_layer == "grpc" and resolver.master() == "grpc://ps0:2222"
    tf_config({**PS0, "session_master": "sessionmaster:2222"})
    assert resolver.master() == "sessionmaster:2222"
    tf_config({**PS0, "task": {"type": "worker", "index": 2}})
    assert resolver.process() == cr.Process(2, 3, "worker0:2222")
    tf_config({"cluster": {"123456": ["a:1"]}, "task": {"type": 123456, "index": "1"}})
    assert (resolver.task_type, resolver.task_id) == ("123456", 1)
    tf_config({"cluster": {"worker": ["worker0:2222"]}})  # one task needs no name
    assert resolver.master() == ""
    assert resolver.process() == cr.Process(0, 1, "worker0:2222")
    for config in "", "{}", '{"cluster": {}}', '{"cluster": null}':
        tf_config(config)
        assert resolver.cluster_spec() == {} and resolver.master() == ""
        assert (resolver.task_type, resolver.task_id) == (None, None)
        assert resolver.process() == cr.Process(0, 1, "")
    tf_config(
        {"cluster": BOTH, "rpc_layer": "grpc", "task": {"type": "ps", "index": 1}}
    )
    resolver = cr.TFConfigClusterResolver("ps", 0, environment="cloud")
    assert resolver.environment == "cloud"
    assert resolver.master() == "grpc://ps0:2222"
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)


def test_every_malformed_tf_config_is_quoted(tf_config):
    def task(**task):
        return {"cluster": BOTH, "task": {"type": "worker", **task}}

    for config, text in [
        ("{'cluster'", "TF_CONFIG is not JSON (Expecting property name"),
        ("{'cluster'", "{'cluster' It looks like {"),
        ("[1]", "TF_CONFIG is [1], which is no object"),
        ("null", "TF_CONFIG is null, which is no object"),
        ({"cluster": ["a:1"]}, '"cluster" of TF_CONFIG is ["a:1"]. It looks like'),
        ({"cluster": {"worker": "a:1"}}, '"cluster" of TF_CONFIG is wrong. The tasks'),
        ({"cluster": BOTH, "task": "worker"}, '"task" of TF_CONFIG is "worker"'),
        (task(type=["ps"]), '"type" of TF_CONFIG\'s task'),
        (
            task(index="one"),
            "The index of TF_CONFIG's task is 'one'; it is a whole num",
        ),
        (task(index=-1), "The index of TF_CONFIG's task is -1"),
        (task(index=1.5), "The index of TF_CONFIG's task is 1.5"),
        (task(index=7), "task 7 of 'worker', which ClusterSpec({"),
        (task(index=7), 'TF_CONFIG is {"cluster": {"ps"'),
        ({"cluster": BOTH}, "task_type is None, task_id is None. Give both"),
        (PS0, "This process is a 'ps', which does not train"),
        ({"rpc_layer": 3}, '"rpc_layer" of TF_CONFIG is 3; it is a string'),
        ({"session_master": 3}, '"session_master" of TF_CONFIG is 3; it is a string'),
    ]:
        tf_config(config)
        refused(cr.TFConfigClusterResolver().process, text)
    tf_config({"cluster": BOTH})
    text = 'TF_CONFIG has no "task". It looks like'
    refused(cr.TFConfigClusterResolver().master, text)


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


def test_slurms_short_forms_expand(slurm):
    for short, hosts in [
        ("n[1,3]", "n1 n3"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("n[0001-0003],m5,o[009-011]", "n0001 n0002 n0003 m5 o009 o010 o011"),
        ("r[1-2]n[3,4]-ib", "r1n3-ib r1n4-ib r2n3-ib r2n4-ib"),
    ]:
        nodes = hosts.split()
        slurm(0, len(nodes), f"1(x{len(nodes)})", short)
        found = cr.SlurmClusterResolver().cluster_spec().job_tasks("worker")
        assert found == [f"{node}:8888" for node in nodes]
    for short, tasks in [("2,1,3", [2, 1, 3]), ("3(x2),2,11", [3, 3, 2, 11])]:
        slurm(0, sum(tasks), short, f"n[1-{len(tasks)}]")
        found = cr.SlurmClusterResolver().cluster_spec().job_tasks("worker")
        nodes = [
            f"n{node}" for node, count in enumerate(tasks, 1) for _ in range(count)
        ]
        assert [address.split(":")[0] for address in found] == nodes
    for nodes, text in [
        *((short, "is not a list of hosts of Slurm's") for short in
          ["n[1", "n1]", "a,,b", "n[1],", "a b"]),
        *((short, "is no range of numbers") for short in ["n[a-b]", "n[1-]", "n[]"]),
    ]:  # fmt: skip
        slurm(nodes=nodes)
        refused(cr.SlurmClusterResolver, text)
    for per_node in "x", "2(3)", "2,", "2(x)":
        slurm(per_node=per_node)
        refused(cr.SlurmClusterResolver, "does not tell the tasks of each node")


def test_slurm_deals_tasks_out_to_jobs(slurm):
    slurm(CUDA_VISIBLE_DEVICES="0")
    for tasks_per_node in 1, [1, 1, 1], None:
        resolver = cr.SlurmClusterResolver(
            {"worker": 2, "ps": 1},
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
    assert resolver.master("worker", 1) == "grpc://t02n43:8888"
    slurm(rank=3, tasks=4, per_node="2(x2)", nodes="a[1-2]")
    resolver = cr.SlurmClusterResolver({"chief": 1, "worker": 3}, port_base=2000)
    assert resolver.process() == cr.Process(3, 4, "a1:2000")
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)


def test_slurm_shares_out_ports_and_gpus(slurm, environment, tmp_path, monkeypatch):
    def own(count, **options):
        resolver = cr.SlurmClusterResolver(**options)
        spec = resolver.cluster_spec()
        assert resolver.num_accelerators() == {"GPU": count}
        return os.environ["CUDA_VISIBLE_DEVICES"], spec

    jobs = {"ps": 1, "worker": 4}
    for per_node, per_task, gpus in (2, 1, "1"), (4, 2, "2,3"):
        slurm(rank=1, tasks=5, per_node="2(x2),1", CUDA_VISIBLE_DEVICES="")
        found = own(per_task, jobs=jobs, gpus_per_node=per_node, gpus_per_task=per_task)
        workers = ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"]
        assert found == (gpus, {"ps": ["t02n13:8888"], "worker": workers})
    # Those that are visible are shared, but not if Slurm has bound the tasks.
    slurm(3, 4, "2(x2)", "a,b", CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert own(2)[0] == "6,7"
    slurm(1, 4, "4", "a", CUDA_VISIBLE_DEVICES="0")
    assert own(1)[0] == "0"
    # Where Slurm does not count them, NVIDIA's tool does.
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU 0: A\necho GPU 1: A\n")
    tool.chmod(0o755)
    slurm(rank=1, tasks=2, per_node="2", nodes="a", PATH=str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert own(1)[0] == "1"
    # Cyclic distribution: rank 1 is the first task of the second node.
    environment(CUDA_VISIBLE_DEVICES="")
    slurm(1, 4, "2(x2)", "a,b", SLURM_LOCALID="0", SLURM_GPUS_ON_NODE="2")
    assert own(1)[0] == "0"


def test_the_whole_job_is_read_where_there_is_no_step(environment):
    environment(SLURM_PROCID="1", SLURM_NTASKS="2", SLURM_TASKS_PER_NODE="1(x2)")
    environment(SLURM_JOB_NODELIST="a[1-2]")
    assert cr.SlurmClusterResolver().process() == cr.Process(1, 2, "a1:8888")


def test_slurm_jobs_that_do_not_fit_are_refused(slurm):
    refused(cr.SlurmClusterResolver, "SLURM_PROCID is not set, so this is no task")
    slurm()
    for arguments, text in [
        ({"jobs": {"worker": 2}}, "2 tasks in all, but Slurm started 3"),
        ({"jobs": {"worker": 4}}, "4 tasks in all, but Slurm started 3"),
        ({"gpus_per_node": 1, "gpus_per_task": 2}, "1 tasks with 2 GPUs each want mor"),
        ({"tasks_per_node": [2, 1]}, "3 tasks do not fit on 3 nodes"),
        ({"tasks_per_node": [1, 1, 0]}, "with [1, 1, 0] tasks each"),
    ]:
        refused(cr.SlurmClusterResolver, text, RuntimeError, **arguments)
    slurm(rank="x")
    refused(cr.SlurmClusterResolver, "SLURM_PROCID is 'x'; it is a whole number")
    slurm(rank=3)
    refused(cr.SlurmClusterResolver, "SLURM_PROCID is 3, of 3 tasks")


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
    launched()
    resolver = cr.LaunchedClusterResolver()
    assert (resolver.local_rank, resolver.attempt) == (0, 0)
    launched(JAXSTRATEGY_LOCAL_RANK="2", JAXSTRATEGY_ATTEMPT="4")
    assert resolver.process() == cr.Process(1, 3, "a:2222")
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.local_rank, resolver.attempt) == (2, 4)
    workers = ["a:2222", "process-1:0", "process-2:0"]
    assert resolver.cluster_spec() == {"worker": workers}
    for wrong, text in [
        ({"coordinator": ""}, "JAXSTRATEGY_COORDINATOR must be set in the environment"),
        ({"index": "", "count": ""}, "JAXSTRATEGY_PROCESS_ID and JAXSTRATEGY_NUM_PROC"),
        ({"coordinator": "a"}, "JAXSTRATEGY_COORDINATOR is wrong: 'a' is not an addr"),
        ({"index": "x"}, "JAXSTRATEGY_PROCESS_ID is 'x'; it is a whole number"),
        ({"count": "-1"}, "JAXSTRATEGY_NUM_PROCESSES is '-1'; it is a whole number"),
        ({"index": "3"}, "JAXSTRATEGY_PROCESS_ID is 3 and JAXSTRATEGY_NUM_PROCESSES"),
    ]:
        launched(**wrong)
        refused(js.MultiWorkerMirroredStrategy, text)


@pytest.fixture
def sagemaker(environment):
    def sagemaker(hosts, own):
        text = hosts if isinstance(hosts, str) else json.dumps(hosts)
        environment(SM_HOSTS=text, SM_CURRENT_HOST=own)

    return sagemaker


def test_hosts_of_sagemaker_are_workers_unless_something_else_is_given(sagemaker):
    sagemaker(["algo-1", "algo-2"], "algo-2")
    resolver = cr.SageMakerClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["algo-1:2223", "algo-2:2223"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master("worker", 0) == "algo-1:2223"
    assert resolver.master(task_id=0) == "algo-1:2223"
    assert resolver.master() == "algo-2:2223"
    assert resolver.rpc_layer is None and resolver.environment == ""
    assert resolver.process() == cr.Process(1, 2, "algo-1:2223")
    assert resolver.num_accelerators() == {}
    sagemaker(["algo-10", "algo-2", "algo-1"], "algo-2")  # ordered as text, read anew
    hosts = ["algo-1:2223", "algo-10:2223", "algo-2:2223"]
    assert resolver.cluster_spec() == {"worker": hosts} and resolver.task_id == 2
    sagemaker(["algo-1"], "algo-1")
    assert resolver.master() == "" and resolver.task_id == 0
    assert resolver.process() == cr.Process(0, 1, "algo-1:2223")
    for hosts in "", "[]", ["algo-1"]:
        sagemaker(hosts, "")
        assert not resolver.cluster_spec() and resolver.master() == ""
        assert (resolver.task_type, resolver.task_id) == (None, None)
        assert resolver.process() == cr.Process(0, 1, "")
    sagemaker(["algo-1", "algo-2"], "algo-1")
    resolver = cr.SageMakerClusterResolver(
        np.int64(81), "worker", "1", "grpc", environment="mine"
    )
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.master() == "grpc://algo-2:81"
    assert resolver.environment == "mine"


def test_what_sagemaker_cannot_mean_is_refused(sagemaker, monkeypatch):
    resolver = cr.SageMakerClusterResolver()
    for hosts, own, text in [
        ("[algo-1]", "algo-1", "SM_HOSTS is not JSON"),
        ('"algo-1"', "algo-1", 'SM_HOSTS is "algo-1", which is no list of names. It'),
        ('["a", 2]', "algo-1", 'SM_HOSTS is ["a", 2], which is no list of names'),
        ('["algo-1", " "]', "algo-1", "which is no list of names"),
        # TensorFlow takes the cluster for empty, and the host trains alone.
        (
            ["a", "b"],
            "",
            "SM_CURRENT_HOST is '', which is none of the hosts ['a', 'b']",
        ),
        (["a", "b"], "c", "SM_CURRENT_HOST is 'c', which is none of the hosts"),
    ]:
        sagemaker(hosts, own)
        refused(resolver.process, text)
    sagemaker(["algo-1", "algo-2"], "algo-2")
    refused(
        lambda: cr.SageMakerClusterResolver(task_id=2).process(),
        "task 2 of 'worker', which ClusterSpec",
    )
    refused(lambda: resolver.master("ps", 0), "No such job in cluster: 'ps'")
    for task_id in -1, "x", 1.5, True:
        wrong = cr.SageMakerClusterResolver(task_id=task_id)
        with pytest.raises(ValueError, match="`task_id` was .*; the index of this pro"):
            wrong.process()
    for port in 0, 65536, "x", None, True, 2.5:
        with pytest.raises(ValueError, match=r"`port` was .*; a port was wanted"):
            cr.SageMakerClusterResolver(port=port)
    for missing in "SM_CURRENT_HOST", "SM_HOSTS":
        monkeypatch.delenv(missing)
        for ask in (resolver.cluster_spec, resolver.process, resolver.master):
            with pytest.raises(ValueError, match=f"^{missing} is not set, so this is"):
                ask()


def found():
    return type(js.MultiWorkerMirroredStrategy().cluster_resolver)


def test_tf_config_comes_first_then_the_launcher_then_sagemaker(
    tf_config, launched, sagemaker, environment
):
    with pytest.warns(RuntimeWarning, match="This process trains alone"):
        assert found() is cr.TFConfigClusterResolver  # an empty one
    sagemaker(["algo-1", "algo-2"], "algo-2")
    launched("a:1", "0", "1")
    assert found() is cr.LaunchedClusterResolver
    tf_config(" ")
    assert found() is cr.LaunchedClusterResolver
    tf_config("{}")  # tells of nothing
    assert found() is cr.LaunchedClusterResolver
    tf_config({"cluster": {"worker": ["a:1"]}})
    assert found() is cr.TFConfigClusterResolver
