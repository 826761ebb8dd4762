"""Workers and parameter servers on a Ray cluster, and what becomes of lost ones."""

import os
import re
import signal
import textwrap
from pathlib import Path

import pytest
import ray_machines
from helpers.processes import with_variable
from helpers.threads import until
from ray_machines import DEADLINE

pytestmark = pytest.mark.slow

PRELUDE = """
import os, sys, time
import jaxstrategy as js

def until(claim):
    end = time.monotonic() + 100
    while not claim():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.02)

def counting(backend):
    strategy = js.ParameterServerStrategy(backend=backend)
    with strategy.scope():
        total = js.Variable(0.0, name="total")
    coordinator = js.coordinator.ClusterCoordinator(strategy)
    @coordinator.function
    def add(x):
        total.assign_add(x)
        return js.coordinator.experimental_get_current_worker_index()
    return strategy, total, coordinator, add
"""


@pytest.fixture
def start(ray, tmp_path):
    scripts = []

    def start(text):
        path = tmp_path / "script.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        command = ["-u", "-W", "error", str(path)]
        env = {**ray.env, "JAX_PLATFORMS": "cpu"}
        scripts.append(ray_machines.program(tmp_path, command, env))
        return scripts[-1]

    yield start
    for script in scripts:
        script.close()


def tasks(env):
    """The processes of workers and servers on this Ray, with their environments."""
    found = with_variable(f"RAY_AUTH_TOKEN={env['RAY_AUTH_TOKEN']}")
    return {
        pid: dict(each.partition("=")[::2] for each in variables.split("\0"))
        for pid, variables in found.items()
        if b"jaxstrategy.parameter_servers" in command_of(pid)
    }


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_killed_worker_is_started_again_and_nothing_counts_twice(ray, start):
    script = start("""
    js.simulate(2)
    backend = js.coordinator.RayProcesses(2, 2, 2, cpus_per_server=0.5)
    assert backend.replicas_per_worker == 2 and backend.platforms == ("cpu",)
    given_up = backend.start(1, 0)  # it is stopped, say: the next one needs its room
    backend.start(1, 1)
    try:
        given_up.own(0)
    except js.WorkerLost as error:
        assert "(it ended with signal SIGKILL)" in str(error), error
    else:
        raise AssertionError("it lives")
    strategy, total, coordinator, add = counting(backend)
    results = [coordinator.schedule(add, (1.0,)) for _ in range(300)]
    until(lambda: any(r.fetch() == 0 for r in results[:150]))
    backend.kill(0)
    more = [coordinator.schedule(add, (1.0,)) for _ in range(300)]
    coordinator.join()
    assert float(total.value()) == 600, total.value()
    print("counted", flush=True)
    def has_new():
        value = coordinator.schedule(add, (0.0,))
        coordinator.join()
        return value.fetch() == 0
    until(has_new)
    print("started again", flush=True)
    sys.stdin.read()
    strategy.close()
    backend.kill(1)  # asks an actor, if there is one
    import ray
    assert not ray.is_initialized(), "another Ray was started"
    """)
    script.wait_for("counted")
    found = tasks(ray.env)
    assert len(found) in (3, 4), found  # the new one may not be there yet
    (secret,) = {each["JAXSTRATEGY_CLUSTER_SECRET"] for each in found.values()}
    assert re.fullmatch("[0-9a-f]{64}", secret)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret.encode() not in path.read_bytes(), path
        except OSError:
            continue
    said = script.finish()
    assert "started again" in said and secret not in said
    until(lambda: not tasks(ray.env), DEADLINE)


def test_a_server_that_is_killed_is_lost_with_its_last_words(ray, start):
    script = start("""
    import ray
    ray.init(log_to_driver=False)
    backend = js.coordinator.RayProcesses(1, 1)
    strategy, total, coordinator, add = counting(backend)
    coordinator.schedule(add, (1.0,))
    coordinator.join()
    print("ready", flush=True)
    try:
        while True:
            coordinator.schedule(add, (1.0,))
            coordinator.join()
    except js.errors.ParameterServerLost as error:
        print(error, flush=True)  # as the worker found it, or this process
    try:
        total.value()
    except js.errors.ParameterServerLost as error:
        print(error, flush=True)
    strategy.close()
    assert ray.is_initialized(), "that is not ours"
    """)
    script.wait_for("ready")
    server = [
        pid for pid, env in tasks(ray.env).items() if '"type": "ps"' in env["TF_CONFIG"]
    ]
    os.kill(*server, signal.SIGKILL)
    said = script.finish()
    assert "Parameter server 0 at 127.0.0.1:" in said
    assert "(it ended with signal SIGKILL)" in said


def test_a_worker_of_a_lost_machine_comes_back_on_another(ray, start):
    # Only the first machine has room for the server, and then for one worker more.
    with ray.another_machine("--num-cpus=2") as machine:
        script = start("""
        import warnings
        # It says so, if one is scheduled in the time without any.
        warnings.filterwarnings("ignore", "All 1 workers are lost", RuntimeWarning)
        backend = js.coordinator.RayProcesses(1, 1, cpus_per_server=3)
        strategy, total, coordinator, add = counting(backend)
        for _ in range(10):
            coordinator.schedule(add, (1.0,))
        coordinator.join()
        print("ready", flush=True)
        until(lambda: "is lost" in str(coordinator.workers))
        for _ in range(10):
            coordinator.schedule(add, (1.0,))
        coordinator.join()
        print("total", float(total.value()), flush=True)
        """)
        script.wait_for("ready")
        machine.kill()
        said = script.finish()
    assert "total 20.0" in said
