"""A coordinator and the tasks of its cluster over TCP, all in this process."""

import concurrent.futures
import contextlib
import json
import os
import socket
import threading

import jax
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.parameter_servers import __main__ as program
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.backends import _called_tasks
from jaxstrategy.parameter_servers.backends._chosen_backend import chosen_backend
from jaxstrategy.parameter_servers.backends._cluster_session import Hello
from jaxstrategy.parameter_servers.backends._cluster_tasks import ClusterTasks
from jaxstrategy.parameter_servers.backends._served_task import ServedTask
from jaxstrategy.parameter_servers.wire import _listener
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.processes._secret import Secret

SECRET = "a secret of all processes of the job"


def free_address():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{reserved.getsockname()[1]}"


def resolver(cluster):
    spec = js.cluster_resolver.ClusterSpec(cluster)
    return js.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", SECRET)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return {"worker": [free_address(), free_address()], "ps": [free_address()]}


@pytest.fixture
def serve(cluster):
    """Serves a task: `serve("ps", 0)`; or all of them: `serve()`."""
    tasks = []

    def served(job=None, index=0):
        if job is None:
            return [served(job, k) for job in cluster for k in range(len(cluster[job]))]
        task = ServedTask(js.cluster_resolver.ClusterSpec(cluster), job, index)
        tasks.append(task)
        task.start()
        return task

    yield served
    for task in tasks:
        task.close()


@pytest.fixture
def coordinate(cluster, monkeypatch):
    """Makes a coordinator; as another process than before, if it has a new name."""
    with contextlib.ExitStack() as closing:

        def made(name="first", **options):
            monkeypatch.setattr(_called_tasks, "COORDINATOR", name)
            options = {"start_seconds": 10, "patience": 5} | options
            backend = ClusterTasks(resolver(cluster), **options)
            closing.callback(backend.close)
            return backend

        yield made


def made_on(worker, value):
    worker.build(1, value)
    return worker.own(1).item()


def test_a_coordinator_finds_its_tasks(serve, coordinate):
    serve()
    backend = coordinate()
    assert backend.num_workers == 2 and backend.platforms == ("cpu",)
    assert backend.replicas_per_worker == jax.local_device_count()
    (server,) = backend.servers
    server.create(0, np.arange(3.0))
    server.push([ServerOperation("add", (0,), (np.ones(3),))], CallNumber(1))
    np.testing.assert_array_equal(*server.read([Read(0)]), [1.0, 2.0, 3.0])
    for index in range(2):
        worker = backend.start(index, 0)
        assert made_on(worker, lambda index: np.int64(10 + index)) == 10 + index


def test_a_new_coordinator_takes_over(serve, coordinate, capfd):
    serve()
    old = coordinate("old")
    old.servers[0].create(0, np.float32(1))
    worker = old.start(0, 0)
    made_on(worker, lambda index: np.int64(1))
    new = coordinate("new")
    with pytest.raises(LookupError):  # it makes the variables anew
        new.servers[0].read([Read(0)])
    new.servers[0].create(0, np.float32(2))
    assert made_on(new.start(0, 0), lambda index: np.int64(2)) == 2
    with pytest.raises(js.ParameterServerLost, match="Parameter server 0 at 127"):
        old.servers[0].read([Read(0)])
    with pytest.raises(js.WorkerLost, match="Worker 0 at 127.0.0.1"):
        worker.own(1)
    with pytest.raises(js.WorkerLost, match="works for another coordinator"):
        old.start(0, 1)
    assert new.servers[0].read([Read(0)]) == [2]
    assert capfd.readouterr().err.count("ps 0: a new coordinator has come") == 2


def test_two_strategies_of_one_coordinator_do_not_disturb_each_other(serve, coordinate):
    serve()
    backends = coordinate(), coordinate()
    for number, backend in enumerate(backends):
        (server,) = backend.servers
        server.create(number, np.float32(0))
        add = ServerOperation("add", (number,), (np.float32(1),))
        # Both count functions and incarnations from the beginning.
        assert server.push([add], CallNumber(0, worker=0, incarnation=0))
        assert not server.push([add], CallNumber(0, worker=0, incarnation=0))
        server.fence(0, 5)
        worker = backend.start(0, 0)
        worker.build(1, lambda index, number=number: np.int64(number))
    assert worker.own(1) == 1


def test_close_drops_what_the_tasks_held(serve, coordinate):
    tasks = serve()
    backend = coordinate()
    backend.servers[0].create(0, np.float32(1))
    worker = backend.start(0, 0)
    assert [len(task._host._begun) for task in tasks] == [1, 0, 1]
    worker.close()
    backend.close()
    deadline = threading.Event()
    while any(task._host._begun for task in tasks):
        assert not deadline.wait(0.01)
    with pytest.raises(js.ParameterServerLost):
        backend.servers[0].read([Read(0)])


def test_a_server_that_was_started_anew_is_lost(cluster, serve, coordinate):
    *_, server = serve()
    backend = coordinate()
    backend.servers[0].create(0, np.float32(1))
    server.close()
    serve("ps", 0)
    with pytest.raises(js.ParameterServerLost):
        backend.servers[0].read([Read(0)])
    worker = backend.start(0, 0)

    def reads(index):  # with a connection of its own
        return np.int64(index)

    assert made_on(worker, reads) == 0
    with pytest.raises(ConnectionAbortedError, match="was started anew"):
        hello = backend._calls._hello("join")
        _called_tasks.joined(cluster["ps"][0], Secret(SECRET), hello)


class Breaking:
    """Answers of a server whose network breaks before the next ones arrive."""

    def __init__(self, task, kinds):
        ((_, begun),) = task._host._begun.items()
        self._begun, self._answer, self._kinds = begun, begun.responder._answer, kinds
        begun.responder._answer = self

    def __call__(self, request, stream):
        answer = self._answer(request, stream)
        if request.kind in self._kinds:
            self._kinds.remove(request.kind)
            for each in tuple(self._begun.streams):
                each.close()
        return answer


def test_a_server_is_reached_again_when_the_network_broke(serve, coordinate):
    *_, task = serve()
    (server,) = coordinate().servers
    server.create(0, np.float32(1))
    add = ServerOperation("add", (0,), (np.float32(1),))
    Breaking(task, [Kind.READ, Kind.PUSH, Kind.CREATE, Kind.DROP, Kind.VERSIONS])
    assert server.read([Read(0)]) == [1]
    assert not server.push([add], CallNumber(3))  # the first time did count
    assert server.read([Read(0)]) == [2]
    server.create(1, np.float32(5))
    assert server.versions([1]) == server.versions([1])
    server.drop([1])
    with pytest.raises(LookupError):
        server.read([Read(1)])


def test_what_may_have_counted_is_told_and_not_repeated(serve, coordinate):
    *_, task = serve()
    (server,) = coordinate().servers
    server.create(0, np.float32(1))
    Breaking(task, [Kind.PUSH])
    with pytest.raises(js.ParameterServerLost, match="counts is not known"):
        server.push([ServerOperation("add", (0,), (np.float32(1),))])
    assert server.read([Read(0)]) == [2]
    Breaking(task, [Kind.PUSH])
    assert server.push([ServerOperation("set", (0,), (np.float32(9),))])
    assert server.read([Read(0)]) == [9]


def test_threads_connect_again_together(serve, coordinate):
    *_, task = serve()
    (server,) = coordinate().servers
    server.create(0, np.float32(1))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            Breaking(task, [Kind.READ])
            read = list(pool.map(lambda _: server.read([Read(0)])[0], range(16)))
            assert read == [1] * 16


def test_a_server_that_is_gone_is_lost_at_once(serve, coordinate):
    *_, task = serve()
    (server,) = coordinate().servers
    server.create(0, np.float32(1))
    task.close()
    with pytest.raises(js.ParameterServerLost, match="nobody listens at 127.0.0.1"):
        server.read([Read(0)])


def test_a_worker_that_comes_late_is_found(serve, coordinate, capsys, monkeypatch):
    monkeypatch.setattr(_called_tasks, "_SAID_SECONDS", 0.0)
    serve("ps"), serve("worker", 1)
    backend = coordinate()
    found = []
    waiting = threading.Thread(target=lambda: found.append(backend.start(0, 0)))
    waiting.start()
    assert made_on(backend.start(1, 0), lambda index: np.int64(7)) == 7
    deadline = threading.Event()
    while "Worker 0 at" not in (told := capsys.readouterr().err):
        assert not deadline.wait(0.05)
    assert "does not answer, and is waited for" in told
    assert not found
    serve("worker", 0)
    waiting.join(20)
    assert made_on(found[0], lambda index: np.int64(8)) == 8


def test_who_waits_for_a_worker_is_let_go_by_close(serve, coordinate):
    serve("ps"), serve("worker", 1)
    backend = coordinate()
    raised = []

    def start():
        try:
            backend.start(0, 0)
        except js.WorkerLost as error:
            raised.append(str(error))

    waiting = threading.Thread(target=start)
    waiting.start()
    backend.close()
    waiting.join(20)
    assert "nobody waits for it any more" in raised[0]


def test_servers_that_do_not_come_are_named(cluster, coordinate):
    with pytest.raises(js.ClusterError, match=f"server 0 at {cluster['ps'][0]} cannot"):
        coordinate(start_seconds=0.2)


def test_workers_that_do_not_come_are_named(cluster, serve, coordinate):
    serve("ps")
    with pytest.raises(js.ClusterError, match="None of the workers at 127.0.0.1"):
        coordinate(start_seconds=0.2)


def test_a_job_without_a_secret_does_not_start(cluster, coordinate, monkeypatch):
    monkeypatch.delenv("JAXSTRATEGY_CLUSTER_SECRET")
    with pytest.raises(js.ClusterError, match="the job needs a secret"):
        coordinate()
    task = ServedTask(js.cluster_resolver.ClusterSpec(cluster), "worker", 0)
    with pytest.raises(js.ClusterError, match="Set JAXSTRATEGY_CLUSTER_SECRET to the"):
        task.start()


def test_another_secret_is_an_error_at_once(serve, coordinate, monkeypatch):
    serve()
    monkeypatch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "that of another job, surely")
    with pytest.raises(js.ClusterError, match="has another JAXSTRATEGY_CLUSTER_SECRET"):
        coordinate()


@pytest.mark.parametrize(
    "frame",
    [
        WireFrame(Kind.DROP, [0]),
        WireFrame(Kind.SESSION, {"wants": "begin"}),
        WireFrame(Kind.SESSION, [1, 2]),
        WireFrame(Kind.SESSION, {"coordinator": "x", "wants": "y", "strategy": 3}),
        WireFrame(200),
    ],
)
def test_who_does_not_say_hello_is_hung_up_on(cluster, serve, coordinate, frame):
    serve()
    backend = coordinate()
    backend.servers[0].create(0, np.float32(1))
    stream = _listener.dialled(cluster["ps"][0], Secret(SECRET))
    stream.send(frame)
    with pytest.raises((EOFError, OSError)):
        stream.receive()
    stream.close()
    assert backend.servers[0].read([Read(0)]) == [1]


def test_an_address_in_use_is_an_error(cluster, serve):
    serve("ps", 0)
    with pytest.raises(js.ClusterError, match="ps 0 cannot listen at its address"):
        serve("ps", 0)


def test_hellos_are_what_was_sent():
    hello = Hello("begin", "c", "s", "life", 3, ("a:1", "b:2"))
    frame = hello.frame()
    assert (
        Hello.of(WireFrame(frame.kind, json.loads(json.dumps(frame.fields)))) == hello
    )
    assert Hello.of(WireFrame(Kind.PING)) is None


@pytest.mark.parametrize("job, index", [("ps", 0), ("worker", 1)])
def test_a_server_is_the_task_of_its_role(cluster, serve, coordinate, job, index):
    server = js.Server(cluster, job_name=job, task_index=index)
    for each in {("ps", 0), ("worker", 0), ("worker", 1)} - {(job, index)}:
        serve(*each)
    joining = threading.Thread(target=server.join)
    joining.start()
    backend = coordinate()
    backend.servers[0].create(0, np.float32(4))
    assert backend.servers[0].read([Read(0)]) == [4]
    worker = backend.start(1, 0)
    assert made_on(worker, lambda index: np.int64(index)) == 1
    assert server.target == f"grpc://{cluster[job][index]}"
    assert joining.is_alive()
    backend.close()
    server._task.close()
    joining.join(20)
    assert not joining.is_alive()


@pytest.mark.parametrize(
    "job, message",
    [
        ("chief", "The chief is the coordinator"),
        ("evaluator", "An evaluator is a cluster of its own"),
    ],
)
def test_who_serves_nobody_makes_no_server(cluster, job, message):
    cluster[job] = [free_address()]
    with pytest.raises(ValueError, match=message):
        js.Server(cluster, job_name=job, task_index=0)


def test_the_program_says_what_is_wrong(cluster, monkeypatch, capsys):
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    monkeypatch.delenv("JAXSTRATEGY_CLUSTER_SECRET")
    assert program.main() == 2
    assert "the job needs a secret" in capsys.readouterr().err
    for config, message in (
        ({"cluster": {"worker": [free_address()]}, "task": task}, "no `ps`"),
        ({"cluster": {}}, "no `ps`"),
        ({"cluster": {**cluster, "foo": ["a:1"]}, "task": task}, "Disallowed task"),
    ):
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert program.main() == 2
        assert message in capsys.readouterr().err


def test_tf_config_is_found(cluster, serve, monkeypatch):
    serve()
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    backend = chosen_backend(None, None, None, None)
    assert backend.num_workers == 2 and len(backend.servers) == 1
    backend.close()
    with pytest.raises(ValueError, match="There is a cluster.*`workers` was given too"):
        chosen_backend(None, 3, None, None)


def test_without_a_cluster_numbers_are_needed(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="Cluster spec must be non-empty"):
        chosen_backend(None, None, None, None)
    assert "TF_CONFIG" not in os.environ
