"""Command lines of jobs with parameter servers, and what each process is told."""

import contextlib
import json
import os
import sys

import pytest
from helpers.launching import ALONE, Launched, command

NOTE = """
import json, os, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
path = os.path.join(os.environ["NOTES"], task["type"] + str(task["index"]))
with open(path + "new", "w") as out:
    json.dump([sys.argv[1:], dict(os.environ)], out)
os.rename(path + "new", path)
"""
SCRIPT = f"""{NOTE}
if task["type"] == "chief":
    def left():
        names = os.listdir(os.environ["NOTES"])
        return int(os.environ["COUNT"]) - sum(not n.endswith("new") for n in names)
    while left():
        time.sleep(0.01)
"""


@pytest.fixture
def told(tmp_path):
    """Runs a job whose workers and servers note down what they are told, by name."""
    (tmp_path / "train.py").write_text(SCRIPT)
    # Beside the script, whose modules workers can import: in the place of the true one.
    served = tmp_path / "jaxstrategy" / "parameter_servers"
    served.mkdir(parents=True)
    (served.parent / "__init__.py").touch()
    (served / "__init__.py").touch()
    (served / "__main__.py").write_text(f"{NOTE}\ntime.sleep(600)")

    def run(options, count, **variables):
        notes = tmp_path / f"notes{len(os.listdir(tmp_path))}"
        notes.mkdir()
        given = [sys.executable, "-c", ALONE, "--workers", "2", *options.split()]
        env = {**os.environ, **variables, "NOTES": str(notes), "COUNT": str(count)}
        script = [str(tmp_path / "train.py"), "--epochs", "3"]
        launched = Launched(tmp_path, [*given, *script], env=env)
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(launched.stop)
            launched.finish(0)
        return {each.name: json.loads(each.read_text()) for each in notes.iterdir()}

    return run


def test_each_process_is_told_the_cluster_and_its_place(told, tmp_path):
    options = "--parameter-servers 2 --evaluator --devices-per-process 3"
    found = told(options, 6, JAXSTRATEGY_PROCESS_ID="1", PYTHONPATH="/mine", OWN="1")
    assert sorted(found) == ["chief0", "evaluator0", "ps0", "ps1", "worker0", "worker1"]
    clusters, secrets = set(), set()
    for name, (arguments, env) in found.items():
        runs_script = name in ("chief0", "evaluator0")
        assert arguments == (["--epochs", "3"] if runs_script else [])
        config = json.loads(env["TF_CONFIG"])
        assert f"{config['task']['type']}{config['task']['index']}" == name
        clusters.add(json.dumps(config["cluster"]))
        secrets.add(env["JAXSTRATEGY_CLUSTER_SECRET"])
        # What is of another job is not handed on.
        assert "JAXSTRATEGY_PROCESS_ID" not in env and env["OWN"] == "1"
        assert env["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/mine"
        # Simulated devices are those of workers; the chief traces for as many.
        assert env["JAX_NUM_CPU_DEVICES"] == ("1" if name.startswith("ps") else "3")
        assert env["JAX_PLATFORMS"] == "cpu"
    assert len(clusters) == len(secrets) == 1 and len(secrets.pop()) == 64
    cluster = json.loads(clusters.pop())
    counts = {job: len(set(addresses)) for job, addresses in cluster.items()}
    assert counts == {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}


def test_gpus_and_cores_are_shared_out(told):
    found = told("--gpus-per-process 2", 4, CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="")
    gpus = {name: env["CUDA_VISIBLE_DEVICES"] for name, (_, env) in found.items()}
    assert gpus == {"worker0": "0,1", "worker1": "2,3", "ps0": "", "chief0": ""}
    platforms = {name: env["JAX_PLATFORMS"] for name, (_, env) in found.items()}
    assert platforms == {"worker0": "", "worker1": "", "ps0": "cpu", "chief0": "cpu"}
    assert found["chief0"][1]["JAX_NUM_CPU_DEVICES"] == "2"
    found = told("", 4)
    cores = {name: env.get("PJRT_NPROC") for name, (_, env) in found.items()}
    each = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert cores == {"worker0": each, "worker1": each, "ps0": "1", "chief0": None}


def test_contradictions_are_told(tmp_path):
    (tmp_path / "train.py").touch()
    for given, text in [
        ("--parameter-servers 1", "belong to a job with --workers"),
        ("--evaluator", "belong to a job with --workers"),
        ("--workers 2 -n 2", "give one of them"),
        ("--workers 0", "'0' is not a whole number above 0"),
        ("--workers 2 --nodes 2 --node-rank 0", "of one machine"),
        ("--workers 2 --coordinator a:1", "the script is the chief"),
        ("--workers 2 --on ray", "backend='ray'"),
        ("--workers 2 --gpus-per-process 1 --devices-per-process 1", "give one of"),
    ]:
        done = command(*given.split(), str(tmp_path / "train.py"))
        assert done.code == 2 and text in " ".join(done.err.split()), given
