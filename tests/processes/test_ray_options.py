"""What `--on ray` takes, and what is refused before Ray is asked."""

import subprocess
import sys
import types
from unittest import mock

from helpers.launching import command


def test_what_cannot_be_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "train.py").touch()
    (tmp_path / "code").mkdir()
    for given, said in [
        ("--ray-cpus 2 train.py", "--ray-cpus needs --on ray"),
        ("--ray-resource a=1 train.py", "--ray-resource needs --on ray"),
        ("--ray-working-dir code train.py", "--ray-working-dir needs --on ray"),
        ("--ray-env HOME train.py", "--ray-env needs --on ray"),
        ("--on slurm train.py", "invalid choice: 'slurm'"),
        ("--on ray --ray-cpus x train.py", "'x' is not a number from 0 on"),
        ("--on ray --ray-wait -1 train.py", "'-1' is not a time in seconds"),
        ("--on ray --ray-resource TPU train.py", "'TPU' is not NAME=K, such as TPU=4"),
        ("--on ray --ray-resource =4 train.py", "'=4' is not NAME=K"),
        ("--on ray --ray-placement near train.py", "invalid choice: 'near'"),
        ("--on ray --ray-env NOWHERE train.py", "--ray-env NOWHERE: there is no such"),
        ("--on ray --ray-cpus 0 train.py", "--ray-cpus 0 needs GPUs or"),
        ("--on ray --ray-working-dir no train.py", "'no' is no folder"),
        ("--on ray --ray-working-dir code train.py", "'code/train.py' is no file"),
        ("--on ray --ray-working-dir code /x.py", "in a copy of 'code'; give the path"),
        ("--on ray no.py", "'no.py' is no file"),
        ("--on ray", "the script is missing"),
        ("--on ray --nodes 2 train.py", "leave out --nodes, --node-rank and"),
        ("--on ray --node-rank 0 train.py", "leave out --nodes, --node-rank and"),
        ("--on ray --coordinator a:1 train.py", "leave out --nodes, --node-rank and"),
        ("--on ray --print k8s train.py", "--print and --on ray are two ways"),
        ("--on ray --ray-address ray://a:1 train.py", "an address for Ray's client"),
    ]:
        done = command(*given.split())
        assert done.code == 2 and said in " ".join(done.err.split()), (given, done)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    done = command("--on", "ray", "train.py")
    assert done.code == 2 and "'ray://head:10001' is an address" in done.err


def test_ray_gets_what_was_given_and_its_absence_is_the_cause(tmp_path, monkeypatch):
    """A Ray at which nobody answers, which takes half a minute to find out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # GPUs of this machine do not count, and they are enough without CPUs.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (tmp_path / "train.py").touch()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "inner.py").touch()
    options = "--on ray --ray-cpus 0 --gpus-per-process 4 --ray-address a:1"
    for kind in ConnectionError, RuntimeError, LookupError:
        ray = types.ModuleType("ray")
        ray.is_initialized = lambda: False
        ray.exceptions = types.SimpleNamespace(RayError=LookupError)
        ray.init = mock.Mock(side_effect=kind("No route.\nAnd more."))
        monkeypatch.setitem(sys.modules, "ray", ray)
        for more in "train.py", "--ray-working-dir code inner.py --ray-cpus 3":
            done = command(*options.split(), *more.split())
            assert done.code == 1 and done.err == (
                "jaxstrategy.launch: error: Ray at a:1 does not answer: No route. Is "
                "the address that of its head, and has a Ray that asks for a token "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as well?\n"
            )
        assert ray.init.call_args.kwargs["address"] == "a:1"
        assert ray.init.call_args.kwargs["runtime_env"] == {"working_dir": "code"}
    # One that was imported before takes no new token, so that none is started.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    done = command("--on", "ray", "train.py")
    assert done.code == 1 and "Connect first, by `ray.init()`, which" in done.err


def test_without_ray_the_extra_is_named(tmp_path):
    (tmp_path / "train.py").touch()
    code = (
        "import runpy, sys; sys.modules['ray'] = None\n"
        "runpy.run_module('jaxstrategy.launch', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--on", "ray", "--ray-address", "a:1", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "jaxstrategy.launch: error: Ray is not installed, on which the processes "
        'should run. Install the extra: pip install "jaxstrategy[ray]"\n'
    )
