"""What is printed for Slurm and Kubernetes of jobs with parameter servers."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import yaml

from jaxstrategy.launch._kubernetes_roles import role_manifest
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.launch._main import main
from jaxstrategy.launch._slurm_roles import role_script

DEADLINE = 60
NASTY = "$(touch OWNED) 'a\" b\n"

# As Slurm's: runs tasks beside each other, and hands SIGTERM on to them.
SRUN = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
options = []
while sys.argv[1].startswith("-"):
    options.append(sys.argv.pop(1))
of = dict(o.lstrip("-").partition("=")[::2] for o in options)
given = dict(e.split("=") for e in of.get("export", "").split(",") if "=" in e)
tasks = []
for rank in range(int(of["ntasks"])):
    own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{rank % 2}"}
    env = {**os.environ, **given, **own, "OPTIONS": " ".join(options)}
    tasks.append(subprocess.Popen(sys.argv[1:], env=env, stdout=subprocess.PIPE,
                                  text=True, start_new_session=True,
                                  preexec_fn=lambda: signal.pthread_sigmask(
                                      signal.SIG_UNBLOCK, [signal.SIGTERM])))
signal.signal(
    signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks]
)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
for rank, task in enumerate(tasks):
    for line in task.stdout:
        print(f"{rank}: {line}", end="", flush=True)
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

# Notes down what it is told. The script, which is the chief, waits for the others.
PYTHON = """
import json, os, sys, time
folder = os.environ["NOTES"]
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = f"{task['type']}{task['index']}"
starts = sum(each.startswith(name) for each in os.listdir(folder))
with open(f"{folder}/part", "a"): pass
path = f"{folder}/{name}.{starts}"
with open(path + "part", "w") as out:
    json.dump([sys.argv[1:], dict(os.environ)], out)
os.rename(path + "part", path)
end = time.monotonic() + 30
while task["type"] == "chief" and time.monotonic() < end:
    told = [each for each in os.listdir(folder) if not each.endswith("part")]
    if len(told) >= int(os.environ["WAIT"]):
        sys.exit(int(os.environ["CODES"].split(",")[starts]))
    time.sleep(0.02)
if task["type"] == "worker" and not starts:
    sys.exit(3)
time.sleep(600)
"""


@pytest.fixture
def sbatch(tmp_path):
    """Runs a batch script; its exit code, and what its programs were told, by name."""
    commands = tmp_path / "commands"
    commands.mkdir()
    notes = tmp_path / "notes"
    notes.mkdir()
    for name, text in {"srun": SRUN, "python": PYTHON}.items():
        (commands / name).write_text(f"#!{sys.executable} -IS\n{text}")
        (commands / name).chmod(0o755)

    def run(text, codes="0", wait=4):
        env = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": "node0",
            "NOTES": str(notes),
            "CODES": codes,
            "WAIT": str(wait),
        }
        path = tmp_path / "batch"
        path.write_bytes(os.fsencode(text))
        process = subprocess.Popen(
            ["bash", str(path)], env=env, cwd=tmp_path, start_new_session=True
        )
        try:
            code = process.wait(DEADLINE)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                for pid in left(notes):
                    os.kill(pid, signal.SIGKILL)
        assert not (tmp_path / "OWNED").exists()
        until(lambda: not left(notes))
        names = sorted(n for n in os.listdir(notes) if not n.endswith("part"))
        return code, {name: json.loads((notes / name).read_text()) for name in names}

    return run


def left(notes):
    """The processes of a job that there are still."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"NOTES={notes}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def until(claim, seconds=20):
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.01)


def options(*arguments, **others):
    return Options(command=("train.py", *arguments), workers=2, nodes=2, **others)


def test_a_batch_script_runs_the_script_and_those_that_it_calls(sbatch):
    text = role_script(options(NASTY, devices_per_process=2, evaluator=True))
    code, told = sbatch(text, wait=7)
    assert code == 0
    # Both workers ended once, and were started again.
    assert list(told) == [
        "chief0.0", "evaluator0.0", "ps0.0",
        "worker0.0", "worker0.1", "worker1.0", "worker1.1",
    ]  # fmt: skip
    cluster = {
        "chief": ["node0:20007"],
        "worker": ["node0:20008", "node1:20009"],
        "ps": ["node0:20010"],
        "evaluator": ["node0:20011"],
    }
    secrets = set()
    for name, (arguments, environment) in told.items():
        config = json.loads(environment["TF_CONFIG"])
        assert config["cluster"] == cluster
        is_script = name.startswith(("chief", "evaluator"))
        served = ["-m", "jaxstrategy.parameter_servers"]
        assert arguments == (["train.py", NASTY] if is_script else served)
        devices = "1" if name.startswith("ps") else "2"
        assert environment["JAX_NUM_CPU_DEVICES"] == devices
        secrets.add(environment["JAXSTRATEGY_CLUSTER_SECRET"])
    assert len(secrets) == 1 and len(secrets.pop()) == 64


def test_gpus_of_a_batch_script_are_those_of_workers(sbatch):
    text = role_script(options(gpus_per_process=2))
    assert "#SBATCH --gpus=4\n" in text
    _, told = sbatch(text)
    assert "--gpus-per-task=2" in told["worker0.0"][1]["OPTIONS"]
    for name in ("ps0.0", "chief0.0"):
        assert "gpus" not in told[name][1]["OPTIONS"]
        assert told[name][1]["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize(
    "codes, restarts, code, starts",
    [("5,0", 1, 0, 2), ("5,6", 1, 6, 2), ("78,0", 1, 78, 1), ("5,0", 0, 5, 1)],
)
def test_a_batch_script_starts_its_script_again(sbatch, codes, restarts, code, starts):
    ended, told = sbatch(role_script(options(max_restarts=restarts)), codes)
    assert ended == code
    assert sum(name.startswith("chief") for name in told) == starts


def jobs(manifest):
    found = yaml.safe_load(manifest)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"] for job in found}


def container(job):
    (found,) = job["template"]["spec"]["containers"]
    return found


def test_a_manifest_has_a_job_of_pods_for_each_role():
    text = role_manifest(
        options(parameter_servers=3, evaluator=True, gpus_per_process=2)
    )
    found = jobs(text)
    counts = {name: job["completions"] for name, job in found.items()}
    assert counts == {"chief": 1, "worker": 2, "ps": 3, "evaluator": 1}
    for name, job in found.items():
        assert job["parallelism"] == counts[name]
        command = container(job)["command"]
        if name in ("chief", "evaluator"):
            assert command == ["python", "train.py"]
        else:
            assert command == ["python", "-m", "jaxstrategy.parameter_servers"]
        limits = container(job).get("resources", {}).get("limits", {})
        assert limits == ({"nvidia.com/gpu": 2} if name == "worker" else {})
        restart = job["template"]["spec"]["restartPolicy"]
        assert restart == ("Never" if name == "chief" else "OnFailure")
    policy = yaml.safe_load(text)["spec"]["successPolicy"]
    assert policy == {"operator": "All", "targetReplicatedJobs": ["chief"]}


def test_pods_are_told_the_cluster_and_their_place():
    for name, job in jobs(role_manifest(options())).items():
        variables = {each["name"]: each for each in container(job)["env"]}
        assert "secretKeyRef" in str(variables["JAXSTRATEGY_CLUSTER_SECRET"])
        names = list(variables)
        # Kubernetes puts in what is defined before.
        assert names.index("INDEX") < names.index("TF_CONFIG")
        text = variables["TF_CONFIG"]["value"]
        assert text.count("$") == text.count("$(INDEX)") == 1
        assert json.loads(text.replace("$(INDEX)", "1")) == {
            "cluster": {
                "chief": ["train-chief-0-0.train:2222"],
                "worker": [f"train-worker-0-{k}.train:2222" for k in range(2)],
                "ps": ["train-ps-0-0.train:2222"],
            },
            "task": {"type": name, "index": 1},
        }


@pytest.mark.parametrize("kind", ["slurm", "k8s"])
def test_the_launcher_prints_them(kind, capfdbinary):
    arguments = ["--workers", "2", "--nodes", "2", "--print", kind, "train.py"]
    assert main(arguments) == 0
    assert b"jaxstrategy.parameter_servers" in capfdbinary.readouterr().out
