"""Workers and parameter servers as processes of this host."""

import io
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
from harness import until
from helpers.processes import is_alive, stop
from helpers.threads import Started

import jaxstrategy as js
from jaxstrategy.parameter_servers._operations import Read, ServerOperation
from jaxstrategy.parameter_servers.backends import _child_roles
from jaxstrategy.parameter_servers.backends._child_devices import divided
from jaxstrategy.parameter_servers.backends._child_environment import of_child
from jaxstrategy.parameter_servers.backends._local_processes import LocalProcesses

PATIENCE = 1.5


def made_on(worker, value):
    """What a function makes on a worker that is given its index."""
    worker.build(1, value)
    return worker.own(1).item()


def pid_of(worker):
    return made_on(worker, lambda index: np.int64(os.getpid()))


def started(*numbers, **options):
    return LocalProcesses(*numbers, patience=PATIENCE, **options)


@pytest.fixture(scope="module")
def shared():
    """Two workers and one server, which no test harms."""
    backend = started(2, 1, devices_per_worker=2)
    yield backend, [backend.start(worker, 0) for worker in range(2)]
    backend.close()


def test_workers_are_processes_that_know_their_index(shared):
    _, workers = shared
    pids = [pid_of(worker) for worker in workers]
    assert len({os.getpid(), *pids}) == 3
    assert [made_on(w, lambda index: np.int64(10 + index)) for w in workers] == [10, 11]


def test_workers_import_what_their_parent_can(shared):
    _, (worker, _) = shared

    def value(index):
        import harness  # of the folder of the tests

        return np.int64(len(harness.VERSIONS))

    assert made_on(worker, value) == 4


def test_workers_simulate_devices_and_share_the_cores(shared):
    backend, (worker, _) = shared

    def value(index):
        import jax

        return np.asarray(jax.device_count())

    assert made_on(worker, value) == backend.replicas_per_worker == 2
    assert backend.num_workers == 2 and backend.platforms == ("cpu",)
    threads = made_on(worker, lambda index: np.int64(os.environ["PJRT_NPROC"]))
    assert threads == max(2, len(os.sched_getaffinity(0)) // 2)


def test_what_a_worker_prints_comes_behind_its_name(shared, capsys):
    _, (_, worker) = shared
    made_on(worker, lambda index: print("hello") or np.int64(0))
    printed = []
    until(lambda: printed.append(capsys.readouterr().err) or "hello" in printed[-1])
    assert printed[-1] == "[worker 1] hello\n"


def test_output_goes_to_streams_without_descriptors(shared, monkeypatch):
    _, (worker, _) = shared
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as in notebooks
    made_on(worker, lambda index: print("there") or np.int64(0))
    until(lambda: "[worker 0] there\n" in sys.stderr.getvalue())
    monkeypatch.setattr(sys, "stderr", None)  # as under `pythonw`
    made_on(worker, lambda index: print("nowhere") or np.int64(0))


def test_a_worker_that_computes_for_long_is_not_lost(shared):
    _, (worker, _) = shared
    seconds = 2 * PATIENCE
    # A clock that the worker waits for, and not the test.
    assert made_on(worker, lambda index: time.sleep(seconds) or np.int64(8)) == 8


def test_servers_keep_variables_that_workers_share(shared):
    backend, _ = shared
    (server,) = backend.servers
    server.create(10, np.arange(4.0))
    server.push([ServerOperation("add", (10,), (np.ones(4),))])
    np.testing.assert_array_equal(*server.read([Read(10)]), [1.0, 2.0, 3.0, 4.0])
    server.drop([10])


def test_errors_come_with_the_lines_of_the_worker(shared):
    _, (worker, _) = shared

    def broken(index):
        raise KeyError("which key")

    with pytest.raises(KeyError, match="which key") as raised:
        worker.build(5, broken)
    assert "in broken" in "\n".join(raised.value.__notes__)


def test_a_killed_worker_comes_back_and_the_others_do_not_notice(capsys):
    backend = started(2, 1)
    try:
        first, other = (backend.start(worker, 0) for worker in range(2))
        pid, others = pid_of(first), pid_of(other)
        made_on(first, lambda index: print("the last words") or np.int64(0))
        backend.kill(0)
        with pytest.raises(js.WorkerLost, match="Worker 0 is lost") as lost:
            first.own(1)
        assert "the last words" in str(lost.value)
        assert "it ended with signal SIGKILL" in str(lost.value)
        assert pid_of(other) == others
        again = backend.start(0, 1)
        assert pid_of(again) not in (pid, others)
        with pytest.raises(js.WorkerLost):  # one life does not go on in the next
            first.own(1)
        with pytest.raises(js.WorkerLost, match="ended with exit code 7"):
            other.build(1, lambda index: os._exit(7))
    finally:
        backend.close()


@pytest.mark.slow
def test_a_stopped_worker_is_lost_and_ended():
    backend = started(1, 1)
    try:
        worker = backend.start(0, 0)
        stop(pid := pid_of(worker))
        with pytest.raises(js.WorkerLost, match="no sign of life for 1.5 s"):
            worker.own(1)
        assert pid_of(backend.start(0, 1)) != pid
        assert not is_alive(pid)
    finally:
        backend.close()


def kill(pid):
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "end, why",
    [
        (kill, "signal SIGKILL"),
        pytest.param(stop, "no sign of life", marks=pytest.mark.slow),
    ],
)
def test_a_lost_server_is_an_error(end, why):
    backend = started(1, 2)
    try:
        lost, living = backend.servers
        for server in backend.servers:
            server.create(0, np.float32(3))
        end(pids_of(backend)["parameter server 0"])
        with pytest.raises(js.ParameterServerLost, match="Parameter server 0") as error:
            lost.read([Read(0)])
        assert why in str(error.value)
        with pytest.raises(js.ParameterServerLost, match=why):
            lost.read([Read(0)])
        assert living.read([Read(0)]) == [3]
    finally:
        backend.close()


def pids_of(backend):
    """The processes of a backend that there are now, by their names."""
    return {
        child.name: child.pid
        for child in backend._close.__self__._living
        if child.end is None
    }


@pytest.mark.slow
def test_a_worker_starts_without_a_lost_server():
    backend = started(1, 2)
    try:
        backend.start(0, 0)
        os.kill(pids_of(backend)["parameter server 0"], signal.SIGKILL)
        backend.kill(0)
        worker = backend.start(0, 1)
        assert made_on(worker, lambda index: np.int64(6)) == 6
        backend.servers[1].create(0, np.float32(3))
    finally:
        backend.close()


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why(monkeypatch, capsys):
    monkeypatch.setattr(_child_roles, "WORKER", "no_such_role")
    backend = started(1, 1)
    try:
        for incarnation in range(2):
            with pytest.raises(js.WorkerLost, match="did not start") as lost:
                backend.start(0, incarnation)
            assert "AttributeError" in str(lost.value)
            assert "no_such_role" in str(lost.value)
        # Nobody starts it anew for ever.
        assert "worker 0" not in pids_of(backend)
    finally:
        backend.close()


def test_close_ends_all_processes_and_threads():
    threads = Started()
    backend = started(1, 1)
    worker = backend.start(0, 0)
    pids = [pid_of(worker), *pids_of(backend).values()]
    backend.close()
    backend.close()
    assert not any(map(is_alive, pids))
    until(lambda: not threads())
    with pytest.raises(js.WorkerLost, match="all processes were ended"):
        backend.start(0, 1)
    with pytest.raises(js.WorkerLost):
        worker.own(1)
    with pytest.raises(js.ParameterServerLost):
        backend.servers[0].versions([0])


@pytest.mark.slow
def test_close_ends_what_is_busy_or_stopped_and_what_they_started():
    backend = started(2, 1)
    busy, stopped = (backend.start(worker, 0) for worker in range(2))

    def grandchild(index):
        import subprocess

        return np.int64(subprocess.Popen(["sleep", "600"]).pid)

    pids = [made_on(busy, grandchild), *pids_of(backend).values()]
    stop(pid_of(stopped))
    calling = threading.Thread(target=lose, args=(busy,))
    calling.start()
    backend.close()
    calling.join(20)
    assert not calling.is_alive()
    until(lambda: not any(map(is_alive, pids)))


def lose(worker):
    with pytest.raises(js.WorkerLost):
        worker.build(2, lambda index: time.sleep(600))


def test_a_forgotten_backend_ends_its_processes():
    backend = started(1, 1)
    pids = list(pids_of(backend).values())
    assert len(pids) == 2
    del backend
    until(lambda: not any(map(is_alive, pids)))


SCRIPT = """
import os, sys, time
import numpy as np
from jaxstrategy.parameter_servers.backends._local_processes import LocalProcesses

backend = LocalProcesses(2, 1)  # at the top level: no `if __name__ == "__main__"`
def pids():
    return [child.pid for child in backend._close.__self__._living]
def own(index):
    return np.int64(offset + index)
offset = 40
"""
STARTED = "workers = [backend.start(k, 0) for k in range(2)]\n"
TOLD = "print('pids', *pids(), flush=True)\n"


def told_pids(running):
    running.wait_for("pids")
    lines = running.ranks[0].output.splitlines()
    line = next(line for line in lines if line.startswith("pids"))
    return [int(word) for word in line.split()[1:]]


@pytest.mark.slow
def test_a_script_needs_no_main_guard_and_no_end(job):
    """What it defines travels by value; children do not run it again."""
    script = f"""{SCRIPT}{STARTED}{TOLD}
workers[1].build(1, own)
print("made", workers[1].own(1))
"""
    with job(script, count=1, started=False) as running:
        pids = told_pids(running)
        assert running.wait(60) == [0]
        assert "made 41" in running.ranks[0].output
        assert len(pids) == 3 and not any(map(is_alive, pids))


FAULTS = {
    "at the start": TOLD + "time.sleep(600)",
    "idle": STARTED + TOLD + "time.sleep(600)",
    "in a call": STARTED
    + "import threading\n"
    + "def sleep(index):\n    print('sleeps'); time.sleep(600)\n"
    + "for each in workers:\n"
    + "    threading.Thread(target=each.build, args=(1, sleep)).start()\n"
    + TOLD,
    "with a stopped worker": STARTED
    + "import signal\nos.kill(pids()[1], signal.SIGSTOP)\n"
    + TOLD
    + "time.sleep(600)",
    "with processes that it has forked": STARTED
    + "forked = os.fork()\nif not forked: time.sleep(600)\n"
    + TOLD
    + "print('fork', forked, flush=True)\ntime.sleep(600)",
}


@pytest.mark.parametrize(
    "when",
    [k if k == "idle" else pytest.param(k, marks=pytest.mark.slow) for k in FAULTS],
)
def test_nothing_outlives_a_killed_coordinator(job, when):
    with job(SCRIPT + FAULTS[when], count=1, started=False) as running:
        pids = told_pids(running)
        if when == "in a call":
            running.wait_for("[worker 1] sleeps")
        if "forked" in when:
            running.wait_for("fork ")
        running.signal(0, signal.SIGKILL)
        until(lambda: not any(map(is_alive, pids)))
        if "forked" in when:
            fork = int(running.ranks[0].output.split("fork ")[1].split()[0])
            assert is_alive(fork)
            os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_children_end_when_their_guard_was_ended_before(job):
    script = f"""{SCRIPT}{STARTED}{TOLD}
print("guard", backend._close.__self__._guard.pid, flush=True)
time.sleep(600)
"""
    with job(script, count=1, started=False) as running:
        pids = told_pids(running)
        running.wait_for("guard ")
        guard = int(running.ranks[0].output.split("guard ")[1].split()[0])
        os.kill(guard, signal.SIGKILL)
        running.signal(0, signal.SIGKILL)
        until(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_ctrl_c_reaches_the_script_and_not_its_children(job):
    script = f"""{SCRIPT}{STARTED}
try:
    {TOLD}
    time.sleep(600)
except KeyboardInterrupt:
    workers[0].build(1, own)
    print("made", workers[0].own(1))
"""
    with job(script, count=1, started=False) as running:
        told_pids(running)
        running.signal(0, signal.SIGINT)
        assert running.wait(60) == [0]
        assert "made 40" in running.ranks[0].output


def test_the_environment_of_children():
    given = {
        "PATH": "/bin",
        "TF_CONFIG": "{}",
        "JAXSTRATEGY_CLUSTER_SECRET": "x" * 20,
        "JAXSTRATEGY_PROCESS_ID": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_x=1",
    }
    made = of_child(given, cpu_devices=4, threads=2)
    assert made["PATH"] == "/bin" and made["XLA_FLAGS"] == "--xla_cpu_x=1"
    assert not [name for name in made if name.startswith(("TF_", "JAXSTRATEGY_"))]
    assert made["JAX_NUM_CPU_DEVICES"] == made["PJRT_NPROC"] == "4"
    assert made["OMP_NUM_THREADS"] == "2" and made["JAX_PLATFORMS"] == "cpu"
    assert made["JAX_NUMPY_RANK_PROMOTION"] == jax.config.jax_numpy_rank_promotion


@pytest.mark.parametrize(
    "gpus, workers, count, each, names, sharing",
    [
        ("01234567", 2, None, 4, [("0", "1", "2", "3"), ("4", "5", "6", "7")], 1),
        ("01234567", 3, None, 2, [("0", "1"), ("2", "3"), ("4", "5")], 1),
        ("4567", 2, 1, 1, [("4",), ("5",)], 1),
        ("01", 3, None, 1, [("0",), ("1",), ("0",)], 2),
    ],
)
def test_gpus_are_divided_among_workers(gpus, workers, count, each, names, sharing):
    assert divided(gpus, workers, count) == (each, tuple(names), sharing)


def test_more_gpus_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="need 4 GPUs, and there are 3"):
        divided("012", 2, 2)


@pytest.mark.parametrize("name", ["workers", "parameter_servers", "devices_per_worker"])
def test_counts_are_positive(name):
    given = {"workers": 1, "parameter_servers": 1, name: 0}
    with pytest.raises(ValueError, match=f"`{name}` was 0"):
        LocalProcesses(**given)
