"""Command lines of jobs with parameter servers, and what each process is told."""

import json
import os

import pytest

from jaxstrategy.launch import _job_tasks
from jaxstrategy.launch._job_tasks import JobTask
from jaxstrategy.launch._launch_options import parse
from jaxstrategy.processes._secret import Secret

SECRET = Secret("a secret of all processes of the job")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def options(script, *given):
    return parse(["--workers", "2", *given, script, "--epochs", "3"])


def test_the_script_is_the_chief(script):
    made = options(script, "--parameter-servers", "2", "--evaluator")
    roles = _job_tasks.job_tasks(made)
    assert [role.name for role in roles] == [
        "chief", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator",
    ]  # fmt: skip
    for role in roles:
        arguments = role.command(made)[1:]
        runs_script = role.job in ("chief", "evaluator")
        expected = (
            [script, "--epochs", "3"] if runs_script else list(_job_tasks.PROGRAM)
        )
        assert arguments == expected


def test_each_role_is_told_the_cluster_and_its_place(script):
    roles = _job_tasks.job_tasks(options(script, "--evaluator"))
    addresses = _job_tasks.placed(roles, [f"h:{2000 + k}" for k in range(5)])
    assert json.loads(_job_tasks.tf_config(addresses, JobTask("worker", 1))) == {
        "cluster": {
            "chief": ["h:2000"],
            "worker": ["h:2001", "h:2002"],
            "ps": ["h:2003"],
            "evaluator": ["h:2004"],
        },
        "task": {"type": "worker", "index": 1},
    }


def test_what_is_of_another_job_is_not_handed_on(script):
    given = {"JAXSTRATEGY_PROCESS_ID": "1", "HOME": "/h", "PYTHONPATH": "/mine"}
    made = _job_tasks.environment(options(script), JobTask("worker", 0), given, SECRET)
    assert made["HOME"] == "/h" and "JAXSTRATEGY_PROCESS_ID" not in made
    assert made | SECRET.variables() == made
    assert made["PYTHONPATH"] == f"{os.path.dirname(script)}{os.pathsep}/mine"


@pytest.mark.parametrize(
    "role, devices, gpus",
    [
        (JobTask("chief", 0), "3", None),  # it traces for as many devices
        (JobTask("worker", 1), "3", None),
        (JobTask("ps", 0), "1", None),
    ],
)
def test_simulated_devices_are_those_of_workers(script, role, devices, gpus):
    made = _job_tasks.of_devices(
        options(script, "--devices-per-process", "3"), role, {}
    )
    assert made["JAX_NUM_CPU_DEVICES"] == devices and made["JAX_PLATFORMS"] == "cpu"


def test_gpus_are_those_of_workers(script):
    made = options(script, "--gpus-per-process", "2")
    of = lambda role: _job_tasks.of_devices(made, role, {})  # noqa: E731
    assert of(JobTask("worker", 1)) == {
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }
    assert of(JobTask("ps", 0))["JAX_PLATFORMS"] == "cpu"
    chief = of(JobTask("chief", 0))
    assert (chief["JAX_PLATFORMS"], chief["JAX_NUM_CPU_DEVICES"]) == ("cpu", "2")


def test_workers_share_the_cores(script):
    cores = _job_tasks._cores()
    made = options(script)
    of = lambda role: _job_tasks.of_devices(made, role, {})  # noqa: E731
    assert of(JobTask("worker", 0))["PJRT_NPROC"] == str(max(1, cores // 2))
    assert of(JobTask("ps", 0))["PJRT_NPROC"] == "1"
    assert "PJRT_NPROC" not in of(JobTask("chief", 0))


@pytest.mark.parametrize(
    "given, text",
    [
        (["--parameter-servers", "1"], "belong to a job with --workers"),
        (["--evaluator"], "belong to a job with --workers"),
        (["--workers", "2", "-n", "2"], "give one of them"),
        (["--workers", "0"], "'0' is not a whole number above 0"),
        (["--workers", "2", "--nodes", "2", "--node-rank", "0"], "of one machine"),
        (["--workers", "2", "--coordinator", "a:1"], "the script is the chief"),
        (["--workers", "2", "--on", "ray"], "backend='ray'"),
        (
            ["--workers", "2", "--gpus-per-process", "1", "--devices-per-process", "1"],
            "give one of them",
        ),
    ],
)
def test_contradictions_are_told(script, given, text, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([*given, script])
    assert ended.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())
