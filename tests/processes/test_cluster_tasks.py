"""A coordinator and the tasks of its cluster over TCP, all in this process."""

import concurrent.futures
import contextlib
import json
import runpy
import threading
import time

import jax
import numpy as np
import pytest
from helpers.sockets import Proxy, free_address
from helpers.threads import until

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    ClusterTasks,
    checked_cluster,
    is_for_servers,
)
from jaxstrategy.cluster_resolver import ClusterSpec

SECRET = "a secret of all processes of the job"


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", SECRET)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return {"worker": [free_address(), free_address()], "ps": [free_address()]}


@pytest.fixture
def serve(cluster):
    """Serves a task: `serve("ps", 0)`; or all of them: `serve()`."""
    with contextlib.ExitStack() as closing:

        def served(job=None, index=0):
            if job is None:
                return [served(j, k) for j in cluster for k in range(len(cluster[j]))]
            server = js.Server(cluster, job, index)
            closing.callback(server._task.close)
            return server

        yield served


@pytest.fixture
def coordinate(cluster):
    """A strategy on the cluster, or on one that is told otherwise."""
    with contextlib.ExitStack() as closing:

        def made(spec=None, **options):
            resolver = js.cluster_resolver.SimpleClusterResolver(
                spec or cluster, task_type="chief", task_id=0
            )
            backend = ClusterTasks(resolver, **{"start_seconds": 10} | options)
            strategy = js.ParameterServerStrategy(backend=backend)
            closing.callback(strategy.close)
            return strategy

        yield made


def variable(strategy, value=0.0):
    with strategy.scope():
        return js.Variable(np.float32(value))


def counted(strategy, times):
    """Adds one so often, and gives what a new variable is then."""
    total = variable(strategy)
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:

        @coordinator.function
        def add():
            total.assign_add(1.0)

        for _ in range(times):
            coordinator.schedule(add)
        coordinator.join()
        return float(total.read_value())


def test_a_coordinator_finds_its_tasks(serve, coordinate):
    serve()
    strategy = coordinate()
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    total = variable(strategy)
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        assert len(coordinator.workers) == 2
        own = coordinator.create_per_worker_dataset(
            lambda context: iter([np.float32(10 + context.input_pipeline_id)] * 8)
        )

        @coordinator.function
        def add(iterator):
            total.assign_add(next(iterator))

        rows = iter(own)
        for _ in range(8):
            coordinator.schedule(add, args=(rows,))
        coordinator.join()
        assert 80 <= float(total.read_value()) <= 88


def test_a_server_that_was_started_anew_is_lost(serve, coordinate):
    *_, server = serve()
    v = variable(coordinate(), 1.0)
    server._task.close()
    with pytest.raises(
        js.errors.ParameterServerLost, match="Parameter server 0 at 127.0.0.1"
    ):
        v.read_value()
    serve("ps", 0)
    with pytest.raises(js.errors.ParameterServerLost):
        v.read_value()
    assert float(variable(coordinate(), 2.0).read_value()) == 2.0


def test_each_function_counts_once_though_connections_to_a_server_break(
    cluster, serve, coordinate
):
    serve()
    with contextlib.closing(Proxy(cluster["ps"][0])) as proxy:
        strategy = coordinate({**cluster, "ps": [proxy.address]})
        total = variable(strategy)
        with js.coordinator.ClusterCoordinator(strategy) as coordinator:

            @coordinator.function
            def add():
                total.assign_add(1.0)

            for count in range(1, 9):
                for _ in range(20):
                    coordinator.schedule(add)
                time.sleep(0.002 * count)
                proxy.hang_up(-count)
                coordinator.join()
                assert float(total.read_value()) == 20 * count
        with concurrent.futures.ThreadPoolExecutor(8) as pool:  # together
            proxy.hang_up(-1)
            read = list(pool.map(lambda _: float(total.read_value()), range(16)))
        assert read == [160] * 16


def test_a_worker_that_comes_late_works(serve, coordinate):
    serve("ps"), serve("worker", 1)
    strategy = coordinate()
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        assert coordinator.fetch(coordinator.schedule(jax.jit(lambda: 7))) == 7
        assert [state.starts for state in coordinator.workers] == [0, 1]
        serve("worker", 0)
        until(lambda: [state.starts for state in coordinator.workers] == [1, 1])


def test_who_waits_for_a_worker_is_let_go_by_close(serve, coordinate):
    serve("ps"), serve("worker", 1)
    strategy = coordinate()
    begun = time.monotonic()
    assert counted(strategy, 3) == 3
    strategy.close()
    assert time.monotonic() - begun < 60


def test_tasks_that_do_not_come_are_named(cluster, serve, coordinate):
    with pytest.raises(js.ClusterError, match=f"server 0 at {cluster['ps'][0]} cannot"):
        coordinate(start_seconds=0.2)
    serve("ps")
    with pytest.raises(js.ClusterError, match="None of the workers at 127.0.0.1"):
        coordinate(start_seconds=0.2)


def test_a_server_joins_until_its_task_is_over(cluster, serve, coordinate):
    server, *_ = serve()
    joining = threading.Thread(target=server.join)
    joining.start()
    assert server.target == f"grpc://{cluster['worker'][0]}"
    assert counted(coordinate(), 2) == 2 and joining.is_alive()
    server._task.close()
    joining.join(20)
    assert not joining.is_alive()


def test_who_cannot_serve_makes_no_server(cluster, serve):
    serve("ps", 0)
    with pytest.raises(js.ClusterError, match="ps 0 cannot listen at its address"):
        serve("ps", 0)
    for job, message in [
        ("chief", "The chief is the coordinator"),
        ("evaluator", "An evaluator is a cluster of its own"),
    ]:
        with pytest.raises(ValueError, match=message):
            js.Server({**cluster, job: [free_address()]}, job, 0)


def test_the_program_says_what_is_wrong(cluster, monkeypatch, capsys):
    def said(config):
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with pytest.raises(SystemExit) as end:
            runpy.run_module("jaxstrategy.parameter_servers", run_name="__main__")
        assert end.value.code == 2
        return capsys.readouterr().err

    task = {"type": "worker", "index": 0}
    assert "no `ps`" in said({"cluster": {"worker": [free_address()]}, "task": task})
    assert "no `ps`" in said({"cluster": {}})
    other = {"cluster": {**cluster, "foo": ["a:1"]}, "task": task}
    assert "Disallowed task" in said(other)
    monkeypatch.delenv("JAXSTRATEGY_CLUSTER_SECRET")
    assert "the job needs a secret" in said({"cluster": cluster, "task": task})


def test_tf_config_is_found(cluster, serve, monkeypatch):
    with pytest.raises(ValueError, match="Cluster spec must be non-empty"):
        js.ParameterServerStrategy()
    with pytest.raises(TypeError, match=r"`cluster_resolver` was .* was wanted"):
        js.ParameterServerStrategy({"worker": ["a:1"]})
    serve()
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    strategy = js.ParameterServerStrategy()
    assert counted(strategy, 2) == 2
    strategy.close()
    with pytest.raises(ValueError, match="There is a cluster.*`workers` was given too"):
        js.ParameterServerStrategy(workers=3)


def tasks(**counts):
    return ClusterSpec(
        {job: [f"{job}{k}:2222" for k in range(n)] for job, n in counts.items()}
    )


def test_clusters_that_can_train():
    for spec, task_type, message in [
        (tasks(), None, "Cluster spec must be non-empty"),
        (tasks(worker=1, ps=1, foo=1), None, "Disallowed task type found in"),
        (tasks(worker=1, ps=1), "foobar", "Unrecognized task_type: 'foobar'.* worker,"),
        (tasks(chief=2), None, "at most one 'chief' job"),
        (tasks(worker=1, ps=1, evaluator=2), None, "at most one 'evaluator' job"),
        (tasks(chief=1), None, "There must be at least one ps"),
        (tasks(chief=1, worker=2), None, "needs to have `ps` jobs"),
        (tasks(ps=1, chief=1, evaluator=1), None, "must be at least one worker"),
        (tasks(ps=1, worker=0), None, "must be at least one worker"),
        (ClusterSpec({"ps": ["a:1"], "worker": {1: "b:1"}}), None, r"tasks \[1\] of"),
        (ClusterSpec({"ps": ["a:1"], "worker": ["b"]}), None, "'b' is not an address"),
    ]:
        with pytest.raises(ValueError, match=message):
            checked_cluster(spec, task_type)
    spec = tasks(chief=1, worker=2, ps=2, evaluator=1)
    for task_type in (None, "chief", "worker", "ps", "evaluator"):
        assert checked_cluster(spec, task_type) == (
            ["worker0:2222", "worker1:2222"],
            ["ps0:2222", "ps1:2222"],
        )
    checked_cluster(tasks(worker=1, ps=1), "chief")  # which need not be in it
    assert is_for_servers(tasks(worker=1, ps=1))
    assert not is_for_servers(tasks(worker=1))
    assert not is_for_servers(tasks(worker=1, ps=0))
