"""`python -m jaxstrategy.doctor`: what it tells, what it hides, what it finds wrong."""

import json
import os
import subprocess
import sys

import jax
import pytest

import jaxstrategy as js
from jaxstrategy._src import doctor

IMPORT = f"import sys, time; from {doctor.__package__} import doctor; "
CLUSTER = {
    "cluster": {"chief": ["10.0.0.1:1"], "worker": ["10.0.0.2:1", "10.0.0.3:1"]},
    "task": {"type": "worker", "index": 1},
}
SET = {
    "JAXSTRATEGY_CLUSTER_SECRET": "abcdefgh01234567",
    "RAY_AUTH_TOKEN": "abcdefgh01234567",
    "JAX_SOME_API_KEY": "abcdefgh01234567",
    "RAY_ADDRESS": "ray://me:abcdefgh01234567@host:1",
    "WANDB_API_KEY": "abcdefgh01234567",
    "SLURM_JOB_USER": "me",
    "SLURM_NTASKS": "4",
    "TF_CONFIG": json.dumps(CLUSTER),
}


def ran(*options, change="", **variables):
    """The doctor in a process of its own, after some change."""
    program = f"{IMPORT}{change}\nsys.exit(doctor.main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *options],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_devices_add_up_and_settings_are_told_without_secrets():
    code, said = ran("--simulate", "3", **SET)
    assert code == 0, said
    assert f"  jaxstrategy: {js.__version__}\n" in said
    assert jax.__version__ in said and "3 replicas on CPU: the sum is right" in said
    assert "  TF_CONFIG=task worker 1 of chief: 1, worker: 2\n" in said
    assert "  JAXSTRATEGY_CLUSTER_SECRET=(set; not shown)\n" in said
    assert "  RAY_ADDRESS=ray://***@host:1\n" in said and "  SLURM_NTASKS=4\n" in said
    for hidden in ("abcdefgh", "10.0.0", "WANDB", "SLURM_JOB_USER"):
        assert hidden not in said
    assert said.endswith("Problems\n  none\n\n")


# What stands in the way of the process that asks the devices, and what is told of it.
PROBLEMS = {
    "doctor._STARTING = -59.9": ("--seconds 60", "JAX did not come up in 0.1 s."),
    "sys.executable = '/bin/false'": ("", "JAX or a device failed, with exit code 1."),
    "doctor._has_unused_gpu = lambda: True": (
        "", "This host has an NVIDIA GPU, and JAX uses the CPU only",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", PROBLEMS)
def test_problems_make_the_exit_code_1(change):
    options, told = PROBLEMS[change]
    ended, said = ran(*options.split(), change=change, TF_CONFIG="[]")
    assert ended == 1 and told in said.partition("Problems\n")[2]
    assert "  TF_CONFIG=(malformed)\n" in said
    assert "  TF_CONFIG is not JSON with a `cluster` and a `task`" in said


@pytest.mark.slow
def test_a_wrong_sum_and_a_device_that_hangs_are_told():
    begin = f"{IMPORT}total = doctor._total; "
    for change, seconds, told in (
        ("doctor._total = lambda x: 2 * total(x)", 60, "The sum is wrong: 2 repl"),
        ("doctor._total = lambda x: time.sleep(60)", 8, "Timeout ("),
    ):
        done = subprocess.run(
            [sys.executable, "-c", f"{begin}{change}; doctor.look({seconds}, 2)"],
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode and told in done.stderr


def test_options_that_make_no_sense(capsys):
    for options, told in (
        (["--simulate", "0"], "'0' is not a whole number above 0"),
        (["--seconds", "0"], "'0' is not a time above 0 seconds"),
    ):
        with pytest.raises(SystemExit):
            doctor.main(options)
        assert told in capsys.readouterr().err
