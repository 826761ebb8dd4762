"""Workers and parameter servers as processes of this host."""

import io
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import until
from helpers.processes import children, is_alive, stop

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.backends.local_processes import divided
from jaxstrategy.coordinator import ClusterCoordinator, LocalProcesses

PATIENCE = 1.5
index = js.coordinator.experimental_get_current_worker_index


def started(*numbers, **options):
    backend = LocalProcesses(*numbers, patience=PATIENCE, **options)
    return ClusterCoordinator(js.ParameterServerStrategy(backend=backend))


def on_workers(coordinator, fn):
    """What a function of Python returns on each worker."""

    def read():
        return (np.asarray(fn()) for _ in itertools.count())

    iterator = iter(coordinator.create_per_worker_dataset(lambda: read))
    step = coordinator.function(lambda it: (index(), next(it)))
    found = {}

    def all_have():
        values = [coordinator.schedule(step, (iterator,)) for _ in coordinator.workers]
        found.update((int(k), value) for k, value in coordinator.fetch(values))
        return len(found) == len(coordinator.workers)

    until(all_have, 60)
    coordinator.join(60)
    return [found[k] for k in sorted(found)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Two workers and one server, which no test harms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSTRATEGY_CLUSTER_SECRET", "x" * 20)
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        compiled = str(tmp_path_factory.mktemp("compiled"))
        patch.setenv("JAX_COMPILATION_CACHE_DIR", compiled)
        coordinator = started(2, 1, devices_per_worker=2)
    yield coordinator
    coordinator.strategy.close()


def test_workers_are_processes_of_their_own(shared):
    here, rank_promotion = os.getpid(), jax.config.jax_numpy_rank_promotion

    def seen():
        import harness  # of the folder of the tests

        if os.getpid() != here:
            assert not {"TF_CONFIG", "JAXSTRATEGY_CLUSTER_SECRET"} & set(os.environ)
            assert "device_count" not in os.environ.get("XLA_FLAGS", "")
        assert jax.config.jax_numpy_rank_promotion == rank_promotion
        threads = int(os.environ.get("PJRT_NPROC", 0))
        cache = jax.config.jax_compilation_cache_dir or ""
        folder = int(cache[-1]) if "worker-" in cache else -1
        versions = len(harness.VERSIONS)
        return [os.getpid(), jax.device_count(), threads, versions, folder]

    values = on_workers(shared, seen)
    pids = [children()[f"worker {k}"] for k in range(2)]
    threads = max(2, len(os.sched_getaffinity(0)) // 2)
    # Folders of their own: no worker reads what another is writing.
    assert [v.tolist() for v in values] == [
        [pid, 2, threads, 4, k] for k, pid in enumerate(pids)
    ]


def test_what_a_worker_prints_comes_behind_its_name(shared, capsys, monkeypatch):
    def said(word):
        on_workers(shared, lambda: print(word) or 0)

    said("hello")
    printed = []
    until(lambda: printed.append(capsys.readouterr().err) or "[worker" in printed[-1])
    assert set("".join(printed).splitlines()) <= {
        "[worker 0] hello",
        "[worker 1] hello",
    }
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # as in notebooks
    said("there")
    until(lambda: "[worker 0] there\n" in sys.stderr.getvalue())
    monkeypatch.setattr(sys, "stderr", None)  # as under `pythonw`
    said("nowhere")


# How a process is lost, and what is said of it.
ENDS = pytest.mark.parametrize(
    "end, why",
    [
        (lambda pid: os.kill(pid, signal.SIGKILL), "signal SIGKILL"),
        pytest.param(stop, "no sign of life", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped"],
)


@ENDS
@pytest.mark.filterwarnings("ignore:All . workers are lost:RuntimeWarning")
def test_a_lost_worker_is_started_again_and_functions_count_once(end, why):
    coordinator = started(2, 1)
    try:
        with coordinator.strategy.scope():
            total = js.Variable(0.0)

        @coordinator.function
        def add(x):
            """Takes some milliseconds, so that there is time to be lost in."""
            matrix = jnp.full((200, 200), 1e-3) + x
            for _ in range(8):
                matrix = jnp.tanh(matrix @ matrix)
            total.assign_add(1 + 0 * matrix[0, 0])
            return x

        on_workers(coordinator, lambda: print("the last words") or 0)
        first, other = children()["worker 0"], children()["worker 1"]
        values = [coordinator.schedule(add, (float(i),)) for i in range(40)]
        values[5].fetch()
        end(first)
        until(lambda: coordinator.workers[0].starts == 2, 60)
        coordinator.join(timeout=120)
        assert coordinator.fetch(values) == list(range(40)) and total.numpy() == 40
        assert children()["worker 0"] != first and children()["worker 1"] == other
        error = coordinator.workers[0].error
        assert "the last words" in error and why in error
    finally:
        coordinator.strategy.close()


@ENDS
def test_a_lost_server_is_an_error(end, why):
    backend = LocalProcesses(1, 2, patience=PATIENCE)
    strategy = js.ParameterServerStrategy(backend=backend)
    try:
        with strategy.scope():
            lost, living = js.Variable(1.0), js.Variable(2.0)
        end(children()["parameter server 0"])
        for _ in range(2):
            with pytest.raises(js.errors.ParameterServerLost, match=f"(?s)r 0.*{why}"):
                lost.value()
        assert living.value() == 2.0
    finally:
        strategy.close()


def test_close_ends_what_is_busy_or_stopped_and_what_they_started():
    coordinator = started(2, 1)
    here = os.getpid()

    def sleeping():
        return 0 if os.getpid() == here else subprocess.Popen(["sleep", "600"]).pid

    pids = [*children().values(), *map(int, on_workers(coordinator, sleeping))]
    stop(children()["worker 1"])

    @coordinator.function
    def step(iterator):
        return next(iterator)

    def read():
        while True:
            yield np.float32(1)
            time.sleep(0 if os.getpid() == here else 600)

    busy = coordinator.create_per_worker_dataset(lambda: read)
    for _ in range(3):
        coordinator.schedule(step, (iter(busy),))
    coordinator.close()
    coordinator.strategy.close()
    coordinator.strategy.close()
    until(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match="closed"):
        coordinator.schedule(step, (iter(busy),))


def test_a_forgotten_strategy_ends_its_processes():
    backend = LocalProcesses(1, 1)
    pids = [children()[name] for name in ("worker 0", "parameter server 0")]
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert "jaxlib" not in maps[1]  # a second, and 80 MB, that few servers need
    del backend
    until(lambda: not any(map(is_alive, pids)))


SCRIPT = """
import itertools, os, time
import numpy as np
import jaxstrategy as js

# At the top level: no `if __name__ == "__main__"`.
strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1)
coordinator = js.coordinator.ClusterCoordinator(strategy)

def read():
    for number in itertools.count():
        print("reads", flush=True)
        yield np.float32(number)
        time.sleep(600)

@coordinator.function
def step(iterator):
    return next(iterator)

iterator = iter(coordinator.create_per_worker_dataset(lambda: read))
values = [coordinator.schedule(step, (iterator,)) for _ in range(2)]
"""


BUSY = pytest.param("busy, stopped and forked", marks=pytest.mark.slow)


@pytest.mark.parametrize("when", ["at the start", BUSY])
def test_nothing_outlives_a_killed_coordinator(job, when):
    script = SCRIPT if "busy" in when else SCRIPT.partition("coordinator =")[0]
    script += "forked = os.fork()\nif not forked: time.sleep(600)\n"
    script += "print('fork', forked, flush=True)\ntime.sleep(600)\n"
    with job(script, count=1, started=False) as running:
        running.wait_for("fork ")
        if "busy" in when:
            running.wait_for("] reads")
        pids = children(running.ranks[0].process.pid)
        assert sorted(pids) == ["parameter server 0", "worker 0", "worker 1"]
        stop(pids["worker 1"])
        running.signal(0, signal.SIGKILL)
        until(lambda: not any(map(is_alive, pids.values())))
        fork = int(running.ranks[0].output.split("fork ")[1].split()[0])
        assert is_alive(fork)
        os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_ctrl_c_reaches_the_script_and_not_its_children(job):
    script = f"""{SCRIPT}
try:
    print("waits", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("made", coordinator.schedule(coordinator.function(lambda: 3.0)).fetch())
"""
    with job(script.replace("time.sleep(600)", "", 1), count=1, started=False) as ran:
        ran.wait_for("waits")
        time.sleep(0.5)  # in a callback of the collector Python would drop it
        ran.signal(0, signal.SIGINT)
        assert ran.wait(60) == [0]
        assert "made 3.0" in ran.ranks[0].output


def test_gpus_are_divided_among_workers_and_counts_are_positive():
    for gpus, workers, count, each, names, sharing in [
        ("01234567", 2, None, 4, [("0", "1", "2", "3"), ("4", "5", "6", "7")], 1),
        ("01234567", 3, None, 2, [("0", "1"), ("2", "3"), ("4", "5")], 1),
        ("4567", 2, 1, 1, [("4",), ("5",)], 1),
        ("01", 3, None, 1, [("0",), ("1",), ("0",)], 2),
    ]:
        assert divided(gpus, workers, count) == (each, tuple(names), sharing)
    with pytest.raises(ValueError, match="need 4 GPUs, and there are 3"):
        divided("012", 2, 2)
    for name in ("workers", "parameter_servers", "devices_per_worker"):
        given = {"workers": 1, "parameter_servers": 1, name: 0}
        with pytest.raises(ValueError, match=f"`{name}` was 0"):
            LocalProcesses(**given)
