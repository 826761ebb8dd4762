"""`launch --on ray` starts, watches and ends the same processes on a Ray cluster."""

import json
import os
import re
import signal
import textwrap

import pytest
import ray_machines
from helpers.launching import ALONE
from helpers.processes import is_alive
from helpers.threads import until
from ray_machines import DEADLINE

pytestmark = pytest.mark.slow

# Every process has these names.
PRELUDE = """
import json, os, signal, sys, time
rank, count, attempt = (
    int(os.environ["JAXSTRATEGY_" + name])
    for name in ("PROCESS_ID", "NUM_PROCESSES", "ATTEMPT")
)
def write(name, text=None):  # a file that appears as a whole
    with open(f"new{os.getpid()}", "w") as file:
        file.write(str(os.getpid()) if text is None else text)
    os.rename(file.name, name)
def wait():
    time.sleep(600)
"""


def pids_of(launched, *names):
    """The numbers in these files of the processes, once they are there."""
    paths = [launched.path.parent / name for name in names]
    launched.wait_until(lambda: all(path.exists() for path in paths))
    return [int(path.read_text()) for path in paths]


@pytest.fixture
def start(ray, tmp_path):
    launchers = []

    def start(options, script, *arguments, program=ALONE, **variables):
        env = {k: v for k, v in {**ray.env, **variables}.items() if v is not None}
        (tmp_path / "script.py").write_text(PRELUDE + textwrap.dedent(script))
        command = ["-c", program, "--on", "ray", *options.split(), "script.py"]
        command += arguments
        launchers.append(ray_machines.program(tmp_path, command, env))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.close()


def test_each_process_is_told_its_place(start, tmp_path):
    script = """
    import pathlib
    environ, secret = dict(os.environ), os.environ["JAXSTRATEGY_CLUSTER_SECRET"]
    kept = ("JAX", "OWN", "OTHER", "TF_CONFIG")
    place = {k: v for k, v in environ.items() if k.startswith(kept)}
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret.encode() not in path.read_bytes(), path
        except OSError:
            continue
    place |= {"arguments": sys.argv[1:], "folder": os.getcwd()}
    place |= {"input": sys.stdin.read()}
    write(f"place{rank}", json.dumps(place))
    print("to out", rank)
    print("to err", rank, file=sys.stderr)
    """
    options = "-n 3 --devices-per-process 2 --ray-env OWN"
    said = start(options, script, "--x", OWN="1", OTHER="2", TF_CONFIG="{}").finish()
    places = [json.loads((tmp_path / f"place{k}").read_text()) for k in range(3)]
    coordinator = places[0]["JAXSTRATEGY_COORDINATOR"]
    secret = places[0].pop("JAXSTRATEGY_CLUSTER_SECRET")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", coordinator)  # one machine only
    assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in said
    for rank, place in enumerate(places):
        assert place.pop("JAXSTRATEGY_CLUSTER_SECRET", secret) == secret
        place.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # of `make test`
        memory = place.pop("JAXSTRATEGY_MEMORY")
        assert "/jaxstrategy-" in memory and not os.path.exists(memory)
        assert place == {
            "JAXSTRATEGY_COORDINATOR": coordinator,
            "JAXSTRATEGY_PROCESS_ID": str(rank),
            "JAXSTRATEGY_NUM_PROCESSES": "3",
            "JAXSTRATEGY_LOCAL_RANK": str(rank),
            "JAXSTRATEGY_ATTEMPT": "0",
            "JAXSTRATEGY_JOB": f"{coordinator}, attempt 0",
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_PLATFORMS": "cpu",
            "OWN": "1",
            "arguments": ["--x"],
            "folder": str(tmp_path),
            "input": "",
        }
    lines = [f"[{k}] to {stream} {k}" for k in range(3) for stream in ("out", "err")]
    assert sorted(said.splitlines()) == sorted(lines)


def test_one_failure_ends_the_others_and_all_start_again(start):
    script = """
    write(f"pid{attempt}{rank}")
    if (attempt, rank) == (0, 1):
        while not os.path.exists("pid00"):
            time.sleep(0.01)
        print("it breaks")
        sys.exit(5)
    if attempt == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait()
    print("attempt", attempt, "of", count)
    """
    options = "-n 2 --max-restarts 1 --min-processes 1 --grace 0.2"
    launched = start(options, script)
    said = launched.finish()
    assert "[1] it breaks" in said
    assert "rank 0 did not end within 0.2 s and had to be killed" in said
    assert "rank 1 failed with exit code 5" in said
    assert "starting 1 process again: attempt 1" in said
    assert said.splitlines()[-1] == "[0] attempt 1 of 1"
    assert not any(map(is_alive, pids_of(launched, "pid00", "pid01", "pid10")))


@pytest.mark.parametrize("who", ["launcher", "actor"])
def test_nothing_is_left_when_one_is_killed(who, start):
    script = """
    child = os.fork()
    write(f"child{rank}" if child == 0 else f"pid{rank}")
    if child and rank == 1:
        write("actor", str(os.getppid()))
    wait()
    """
    launched = start("-n 2 --grace 0.2", script)
    pids = pids_of(launched, "pid0", "pid1", "child0", "child1")
    (actor,) = pids_of(launched, "actor")
    if who == "launcher":
        launched.process.kill()
        launched.finish(-signal.SIGKILL)
    else:
        os.kill(actor, signal.SIGKILL)
        said = launched.finish(137)
        assert (
            "[1] jaxstrategy.launch: this process was lost: The actor is dead" in said
        )
        assert "rank 1 failed with signal SIGKILL" in said
    until(lambda: not any(map(is_alive, [*pids, actor])), DEADLINE)


def test_a_folder_may_be_copied(start, tmp_path):
    script = """
    from module import word
    assert os.getcwd() != sys.argv[1]
    print(word)
    """
    (tmp_path / "module.py").write_text("word = 'copied'")
    said = start("--ray-working-dir .", script, str(tmp_path)).finish()
    assert said.splitlines() == ["[0] copied"]


def test_without_room_it_says_what_there_is(start):
    options = "-n 2 --ray-cpus 3 --ray-wait 0.5 --ray-placement STRICT_PACK"
    assert start(options, "").finish(1) == (
        "jaxstrategy.launch: error: Ray has no room for 2 processes with 3 CPU each "
        "(STRICT_PACK). The cluster has 4 CPU in all, on 1 machine; what others use of "
        "that is not free. Ask for less, or wait longer.\n"
    )


def attempts(said):
    """The number of each attempt, and of how many processes it is."""
    return re.findall(r"attempt (\d+) of (\d)", said)


def test_a_lost_machine_is_waited_for_and_done_without(ray, start, tmp_path):
    script = """
    print(f"attempt {attempt} of {count}", flush=True)
    place = os.environ["JAXSTRATEGY_LOCAL_RANK"], os.environ["JAXSTRATEGY_COORDINATOR"]
    if attempt == 0:  # each is the first of its machine
        assert place[0] == "0" and not place[1].startswith("127.0.0.1:"), place
    write(f"memory{attempt}{rank}", os.environ["JAXSTRATEGY_MEMORY"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))
    write(f"pid{attempt}{rank}")
    if not os.path.exists("over"):
        wait()
    """
    options = "-n 1:2 --ray-placement STRICT_SPREAD --grace 0.2 --max-restarts 2"
    options += " --wait-for-replacement 4 --grow-every 3"
    with ray.another_machine() as machine:
        launched = start(options, script, JAXSTRATEGY_MEMORY="/of/another/job")
        pids_of(launched, "pid00", "pid01")
        machine.kill()
        waits = "waiting for room on Ray for 2 processes"
        launched.wait_for(waits)
    # No other comes in time, nor until the job is asked to grow.
    pids_of(launched, "pid10", "pid20")
    with ray.another_machine():
        until(lambda: attempts(launched.output)[-1][1] == "2", DEADLINE)
        number, _ = attempts(launched.output)[-1]
        pids = pids_of(launched, f"pid{number}0", f"pid{number}1")
        (tmp_path / "over").touch()
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        said = launched.finish()
    first, *alone, grown, again = dict(attempts(said)).values()
    assert (first, grown, again) == ("2", "2", "2") and {*alone} == {"1"}, said
    assert "this process was lost: " in said and "node was terminated" in said
    fewer = said.count("there is no room for 2 processes, starting one fewer")
    assert fewer == len(alone) >= 2, said
    folders = {path.name: path.read_text() for path in tmp_path.glob("memory*")}
    assert folders["memory00"] != folders["memory01"], folders
    assert (
        folders["memory10"]
        == folders["memory20"]
        in (folders["memory00"], folders["memory01"])
    )
    until(lambda: not any(map(os.path.exists, folders.values())), DEADLINE)


def test_a_machine_that_goes_before_anything_is_started_there_is_done_without(start):
    """Ray says in another way that actors of it cannot be, than of those that were."""
    gone = """
from jaxstrategy._src.launch.ray import RayMachines
memory_of, asked = RayMachines._memory_of, []
def of_another(machines, machine):
    asked.append(machine)
    return memory_of(machines, machine if asked[1:] else 56 * "0")
RayMachines._memory_of = of_another
runpy"""
    program = ALONE.replace("\nrunpy", gone)
    said = start("-n 2", "print(count)", program=program).finish()
    assert sorted(said.splitlines()) == ["[0] 2", "[1] 2"]


def test_without_an_address_a_ray_is_started_and_ended(start):
    script = """
    write("actor", str(os.getppid()))
    write("pid")
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64, "it is open to strangers"
    """
    none = dict.fromkeys(("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"))
    launched = start("-n 2", script, **none)
    launched.finish()
    pids = pids_of(launched, "pid", "actor")
    until(lambda: not any(map(is_alive, pids)), DEADLINE)
    assert "This machine has no room for 1 process with 1 CPU, 1 nowhere each: Ray" in (
        start("--ray-resource nowhere=1", "", **none).finish(1)
    )
