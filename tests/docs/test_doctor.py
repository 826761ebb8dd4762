"""`python -m jaxstrategy.doctor`: what it tells, what it hides, what it finds wrong."""

import importlib.metadata
import json
import platform
import subprocess
import sys

import jax
import pytest

import jaxstrategy as js
from jaxstrategy.doctor import _device_answers, _doctor, _installed_packages, _settings
from jaxstrategy.doctor._device_answers import DeviceAnswers


@pytest.fixture
def two_devices(monkeypatch):
    """Devices that answer at once."""
    well = DeviceAnswers(("2 x cpu (cpu)",), "2 replicas on CPU: the sum is right")
    monkeypatch.setattr(_doctor, "asked", lambda seconds, simulated: well)


def test_the_devices_there_are_add_up_what_they_are_given():
    command = [sys.executable, "-m", "jaxstrategy.doctor", "--simulate", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = json.loads(done.stdout)
    assert done.returncode == 0, said
    assert said["devices"] == ["3 x cpu (cpu)"] and not said["problems"]
    assert said["collective"] == "3 replicas on CPU: the sum is right"
    assert said["versions"]["jax"] == jax.__version__
    assert said["versions"]["python"] == platform.python_version()


def test_it_prints_what_it_found(two_devices, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one")
    assert _doctor.main([]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line[:1].isalpha()]
    assert titles == [
        "Versions",
        "Not installed",
        "Environment",
        "Devices",
        "Collective",
        "Problems",
    ]
    assert "XLA_FLAGS" in printed and "--xla_one" in printed
    assert printed.endswith("Problems\n  none\n")


def test_secrets_are_not_shown():
    shown = _settings.settings(
        {
            "JAXSTRATEGY_CLUSTER_SECRET": "abcdefgh01234567",
            "RAY_AUTH_TOKEN": "abcdefgh01234567",
            "JAX_SOME_API_KEY": "abcdefgh01234567",
            "RAY_ADDRESS": "ray://me:abcdefgh01234567@host:1",
            "WANDB_API_KEY": "abcdefgh01234567",
            "SLURM_JOB_USER": "me",
            "SLURM_NTASKS": "4",
        }
    )
    assert "abcdefgh" not in str(shown)
    assert shown == {
        "JAXSTRATEGY_CLUSTER_SECRET": _settings.HIDDEN,
        "RAY_AUTH_TOKEN": _settings.HIDDEN,
        "JAX_SOME_API_KEY": _settings.HIDDEN,
        "RAY_ADDRESS": "ray://***@host:1",
        "SLURM_NTASKS": "4",
    }


def test_a_cluster_is_told_without_its_addresses():
    config = {
        "cluster": {"chief": ["10.0.0.1:1"], "worker": ["10.0.0.2:1", "10.0.0.3:1"]},
        "task": {"type": "worker", "index": 1},
    }
    environment = {"TF_CONFIG": json.dumps(config)}
    told = "task worker 1 of chief: 1, worker: 2"
    assert _settings.settings(environment) == {"TF_CONFIG": told}
    assert not _settings.problems(environment)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cluster": {"a": 1}}', "3"])
def test_a_malformed_cluster_is_a_problem(text):
    assert _settings.settings({"TF_CONFIG": text}) == {"TF_CONFIG": "(malformed)"}
    (problem,) = _settings.problems({"TF_CONFIG": text})
    assert problem.startswith("TF_CONFIG is not JSON with a `cluster` and a `task`")


def test_versions_are_those_of_what_users_install():
    versions = _installed_packages.versions()
    assert versions["jaxstrategy"] == js.__version__
    assert {"flax", "optax", "grain", "orbax-checkpoint"} <= set(versions)
    assert not {"pytest", "ruff", "sphinx", "twine", "hypothesis"} & set(versions)


def test_what_is_missing_is_told(two_devices, monkeypatch, capsys):
    def version(name):
        if name == "grain":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.12.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _installed_packages.versions()["grain"] is None
    _doctor.main([])
    assert "Not installed\n  grain\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "jax_version, jaxlib_version, told",
    [
        ("0.12.0.1", "0.12.0", None),
        ("0.10.2", "0.10.2", None),
        ("0.9.2", "0.9.2", "JAX 0.9.2 is older than 0.10, the oldest"),
        ("0.12.0", "0.11.1", "jax 0.12.0 and jaxlib 0.11.1 differ. Install both"),
    ],
)
def test_versions_that_do_not_fit(jax_version, jaxlib_version, told):
    found = {"jax": jax_version, "jaxlib": jaxlib_version}
    problems = _installed_packages.problems(found)
    assert [told in problem for problem in problems] == ([True] if told else [])


def test_a_wrong_sum_is_a_problem(monkeypatch):
    def doubled(x):
        return js.get_replica_context().all_reduce("sum", 2 * x)

    monkeypatch.setattr(_device_answers, "_total", doubled)
    answers = _device_answers.look(8)
    assert answers.collective is None
    told = "The sum is wrong: 8 replicas on CPU added 1 to 8 and got 72, not 36."
    assert answers.problem == told


def test_an_error_of_a_device_is_told_with_its_words(monkeypatch):
    def broken(x):
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(_device_answers, "_total", broken)
    answers = _device_answers.look(8)
    assert answers.problem == "JAX or a device failed."
    assert "RuntimeError: the driver is too old" in answers.output


def instead(tmp_path, monkeypatch, script):
    """A program that runs where the devices would be asked."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    "script, told",
    [
        ("echo no driver >&2; exit 134", "JAX ended with exit code 134."),
        ("echo 'Timeout (0:00:05)!' >&2; exit 1", "The devices gave no answer in 5 s."),
    ],
)
def test_a_process_that_ends_is_told(tmp_path, monkeypatch, script, told):
    instead(tmp_path, monkeypatch, script)
    answers = _device_answers.asked(5.0, None)
    assert answers.problem == told and answers.output in (
        "no driver",
        "Timeout (0:00:05)!",
    )


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    instead(tmp_path, monkeypatch, "exec sleep 600")
    monkeypatch.setattr(_device_answers, "_STARTING", 0.0)
    answers = _device_answers.asked(0.2, None)
    assert answers.problem == "JAX did not come up in 0.2 s."


def test_problems_make_the_exit_code_1(monkeypatch, capsys):
    failed = DeviceAnswers(problem="JAX or a device failed.", output="RuntimeError: x")
    monkeypatch.setattr(_doctor, "asked", lambda seconds, simulated: failed)
    assert _doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "Problems\n  JAX or a device failed." in printed
    assert printed.endswith("What JAX said\n  RuntimeError: x\n")


@pytest.mark.parametrize("platforms, is_told", [("", True), ("cpu", False)])
def test_a_gpu_that_jax_does_not_use(two_devices, monkeypatch, platforms, is_told):
    monkeypatch.setattr(_doctor.shutil, "which", lambda name: name)
    monkeypatch.setattr(_doctor.Path, "exists", lambda path: True)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    problems = _doctor.found(1.0, None).problems
    assert (
        any("NVIDIA GPU, and JAX uses the CPU only" in p for p in problems) == is_told
    )
    assert not _doctor.found(1.0, 4).problems  # they were not asked


@pytest.mark.parametrize(
    "option, told",
    [
        (["--simulate", "0"], "'0' is not a whole number above 0"),
        (["--seconds", "0"], "'0' is not a time above 0 seconds"),
    ],
)
def test_options_that_make_no_sense(option, told, capsys):
    with pytest.raises(SystemExit):
        _doctor.main(option)
    assert told in capsys.readouterr().err
